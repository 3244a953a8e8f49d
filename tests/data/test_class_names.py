from timm.data import ImageNetInfo

from aft_vision.data.class_names import in_words, match_classes

TENCH, CRANE_BIRD, CRANE = 'n01440764', 'n02012849', 'n03126707'


def test_accents_of_either_form_are_the_same_name():
    assert match_classes(['cafe\u0301', 'tea'], ['tea', 'caf\u00e9', 'cafe']) == [1, 0, None]


def test_synsets_and_their_words_are_the_same_classes():
    for words in ('tench', 'tench, Tinca tinca'):
        assert match_classes(['dog', TENCH], [words, 'dog', 'cat']) == [1, 0, None]
    assert match_classes(['tench, Tinca tinca'], [TENCH, 'n01443537']) == [0, None]


def test_words_of_two_classes_are_told_apart_by_their_place():
    assert match_classes([CRANE_BIRD, TENCH, CRANE], ['crane', 'tench', 'crane']) == [0, 1, 2]
    assert match_classes([CRANE_BIRD, TENCH, CRANE], ['tench', 'crane']) == [1, None]


def test_the_names_of_all_classes_are_those_of_their_synsets():
    info = ImageNetInfo()
    assert match_classes(info.label_names(), info.label_descriptions()) == list(range(1000))
    first = [words.partition(',')[0] for words in info.label_descriptions()]
    assert match_classes(first, info.label_names()) == list(range(1000))


def test_the_words_of_an_export_are_found_by_their_synsets_also_where_only_capitals_tell_them_apart():
    synsets = ImageNetInfo().label_names()
    cardigan_dog, cardigan = 'n02113186', 'n02963159'
    wanted = [cardigan, TENCH, CRANE, cardigan_dog]
    assert match_classes(in_words(synsets), wanted) == [synsets.index(each) for each in wanted]


def test_the_words_of_classes_outside_imagenet_1k_are_found_by_their_synsets():
    # organism, benthos, carpenter, which is none of the 1000 classes.
    wanted = ['n00004475', 'n00005787', TENCH, 'n09899289', CRANE]
    words = in_words(wanted)
    assert [word.partition(' (')[0] for word in words[:3]] == ['organism', 'benthos', 'tench']
    assert match_classes(words, wanted) == list(range(5))
    assert match_classes(words, wanted[::-1]) == list(range(5))[::-1]


def test_words_of_a_class_are_the_same_class_in_every_form_of_writing():
    for trained in ('great white shark, white shark, man-eater, man-eating shark, Carcharodon carcharias', 'n01484850'):
        for wanted in ('great white shark', 'great_white_shark', 'Great white shark', 'great white shark (n01484850)'):
            assert match_classes([trained, 'dog'], [wanted]) == [0]
        assert match_classes([trained, 'dog'], ['shark']) == [None]


def test_a_class_of_exactly_the_wanted_name_is_preferred():
    assert match_classes(['maillot, tank suit', 'maillot'], ['maillot']) == [1]
    assert match_classes(['maillot, tank suit', 'dog'], ['maillot']) == [0]


def test_a_synset_within_another_name_is_no_synset():
    assert match_classes(['n01440764'], ['xn01440764', 'n014407645', 'n01440764_1']) == [None] * 3


def test_no_two_classes_are_the_same_trained_one():
    assert match_classes(['crane', 'bus'], [CRANE_BIRD, CRANE]) == [0, None]
    assert match_classes(['bus', 'crane'], [CRANE_BIRD, TENCH, CRANE]) == [None] * 3
    assert match_classes(['tench', 'goldfish'], ['n01440764', 'tench', 'goldfish']) == [None, 0, 1]
