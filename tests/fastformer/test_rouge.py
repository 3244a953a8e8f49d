import warnings

import pytest

from aft_vision.fastformer.rouge import ROUGES, lead, rouge, rouge_of_each

pytestmark = pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')

FIRST, SECOND = 'the cat sat on a mat', 'all dogs ran over my hill'


def test_equal_texts_score_one_and_texts_without_a_common_word_zero():
    assert rouge([FIRST], [FIRST]) == dict.fromkeys(ROUGES, 1.0)
    assert rouge([FIRST], [SECOND]) == dict.fromkeys(ROUGES, 0.0)
    assert rouge([''], [SECOND]) == dict.fromkeys(ROUGES, 0.0)


def test_swapped_sentences_halve_rouge_l_and_leave_rouge_lsum():
    scores = rouge([f'{FIRST}\n{SECOND}'], [f'{SECOND}\n{FIRST}'])
    assert (scores['rouge1'], scores['rougeL'], scores['rougeLsum']) == (1.0, 0.5, 1.0)
    # 10 of the 11 pairs of neighbours are within a sentence.
    assert scores['rouge2'] == pytest.approx(10 / 11)


def test_values_follow_the_counts_of_words_pairs_and_the_longest_common_part():
    # Of 6 predicted and 4 expected words 3 agree, none of the pairs, and 2 stand in the same order.
    scores = rouge(['b a x c d y'], ['a b z c'])
    assert scores['rouge1'] == pytest.approx(2 * 3 / (6 + 4))
    assert scores['rouge2'] == 0
    assert scores['rougeL'] == pytest.approx(2 * 2 / (6 + 4))


def test_words_are_compared_by_their_stems_in_lower_case():
    assert rouge(['Running dogs!'], ['runs dog']) == dict.fromkeys(ROUGES, 1.0)


def test_the_figures_are_means_over_the_pairs():
    rows = rouge_of_each([FIRST, FIRST], [FIRST, SECOND])
    assert [row['rouge1'] for row in rows] == [1.0, 0.0]
    assert rouge([FIRST, FIRST], [FIRST, SECOND])['rougeL'] == 0.5


def test_sentences_of_one_line_are_found():
    first, second = 'The cat sat on the mat.', 'All dogs ran over a hill.'
    scores = rouge([f'{first} {second}'], [f'{second} {first}'])
    assert scores['rougeLsum'] == 1.0
    assert scores['rougeL'] == 0.5


@pytest.mark.parametrize(('predictions', 'references'), [([], []), (['a'], []), (['a'], ['a', 'b'])])
def test_other_numbers_of_texts_are_an_error(predictions, references):
    with pytest.raises(ValueError, match='as many predictions as references, at least one'):
        rouge(predictions, references)


def test_references_of_letters_that_rouge_does_not_count_give_a_warning():
    others = ['Кот сидел на ковре.', '猫坐在垫子上']
    with pytest.warns(UserWarning, match=r"2 of 3 references have other letters only, such as 'Кот сидел на ковре\.'"):
        assert rouge([*others, FIRST], [*others, FIRST])['rouge1'] == pytest.approx(1 / 3)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        rouge([others[0], '42', 'Öl und Ähren', FIRST], [FIRST, '42', 'ein Öl', ''])


def test_lead_takes_the_first_sentences_and_line_ends_end_them():
    text = 'A title\n\nOne is here. Two is here! Three is here. Four is here.'
    assert lead(text) == 'A title\nOne is here.\nTwo is here!'
    assert lead(text, 1) == 'A title'
    assert lead(text, 9).count('\n') == 4
    assert lead('') == ''
