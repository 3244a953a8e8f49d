from timm.data import ImageNetInfo

from aft_vision.data.class_names import match_classes

TENCH, CRANE_BIRD, CRANE = 'n01440764', 'n02012849', 'n03126707'


def test_accents_of_either_form_are_the_same_name():
    assert match_classes(['cafe\u0301', 'tea'], ['tea', 'caf\u00e9', 'cafe']) == [1, 0, None]


def test_synsets_and_their_words_are_the_same_classes():
    assert match_classes(['dog', TENCH], ['tench', 'tench, Tinca tinca', 'dog', 'cat']) == [1, 1, 0, None]
    assert match_classes(['tench, Tinca tinca'], [TENCH, 'n01443537']) == [0, None]


def test_words_of_two_classes_are_told_apart_by_their_place():
    assert match_classes([CRANE_BIRD, TENCH, CRANE], ['crane', 'tench', 'crane']) == [0, 1, 2]
    assert match_classes([CRANE_BIRD, TENCH, CRANE], ['tench', 'crane']) == [1, None]


def test_the_names_of_all_classes_are_those_of_their_synsets():
    info = ImageNetInfo()
    assert match_classes(info.label_names(), info.label_descriptions()) == list(range(1000))
    first = [words.partition(',')[0] for words in info.label_descriptions()]
    assert match_classes(first, info.label_names()) == list(range(1000))
