import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from aft_vision.fastformer.data import split_dataset


def make_dataset(*counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(0).shuffle(labels)
    features = Features(text=Value('string'), label=ClassLabel(names=[f'c{i}' for i in range(len(counts))]))
    return Dataset.from_dict(dict(text=[str(i) for i in range(len(labels))], label=labels), features=features)


def class_counts(part):
    return np.bincount(part['label'], minlength=part.features['label'].num_classes).tolist()


def test_parts_are_80_10_10_with_the_shares_of_the_classes_and_cover_every_row_once():
    dataset = make_dataset(600, 300, 100)
    parts = split_dataset(dataset, seed=3)
    assert {name: len(part) for name, part in parts.items()} == dict(train=800, validation=100, test=100)
    assert class_counts(parts['train']) == [480, 240, 80]
    assert class_counts(parts['validation']) == class_counts(parts['test']) == [60, 30, 10]
    assert sorted(int(text) for part in parts.values() for text in part['text']) == list(range(1000))
    assert all(part.features == dataset.features for part in parts.values())


def test_rows_with_the_same_text_go_to_one_part():
    dataset = make_dataset(600, 300, 100)
    texts = [f' {number // 2}\n' if number < 200 else str(number) for number in range(1000)]
    twice = dataset.remove_columns('text').add_column('text', texts)
    parts, drawn = split_dataset(twice), split_dataset(dataset)
    found = {name: {text.strip() for text in part['text']} for name, part in parts.items()}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 900
    assert sum(map(len, parts.values())) == 1000
    # Other rows are in the parts that they are drawn for.
    single = {name: {text for text in part['text'] if int(text) >= 200} for name, part in drawn.items()}
    assert {name: {text for text in part['text'] if int(text) >= 200} for name, part in parts.items()} == single
    assert 60 < len(parts['test']) < 100


def test_a_part_without_a_text_of_its_own_is_an_error():
    same = make_dataset(60, 40).remove_columns('text').add_column('text', ['a'] * 100)
    with pytest.raises(ValueError, match=r"text of its own for the split 'validation', got only those of an earlier"):
        split_dataset(same)


def test_parts_follow_the_seed():
    dataset = make_dataset(60, 40)
    first, same, other = (split_dataset(dataset, seed)['test']['text'][:] for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize('rare', [2, 3, 5, 9])
def test_small_classes_are_divided(rare):
    parts = split_dataset(make_dataset(100, rare, 50, rare))
    assert np.sum([class_counts(part) for part in parts.values()], axis=0).tolist() == [100, rare, 50, rare]


def test_a_class_of_one_member_is_an_error_that_says_which():
    dataset = make_dataset(60, 1, 40, 1)
    with pytest.raises(ValueError, match=r"two rows or more, got 102 rows, of which 2 are alone .*: c1, c3; .*'train'"):
        split_dataset(dataset)
    parts = split_dataset(dataset, rare_to_first=True)
    assert [class_counts(parts['train'])[i] for i in (1, 3)] == [1, 1]
    assert len(parts['train']) == 82


@pytest.mark.parametrize('fractions', [{'train': 0.8, 'test': 0.1}, {'train': 1.0}, {'train': 1.2, 'test': -0.2}])
def test_fractions_that_do_not_add_up_are_rejected(fractions):
    with pytest.raises(ValueError, match='fractions above 0 that add up to 1'):
        split_dataset(make_dataset(60, 40), fractions=fractions)


@pytest.mark.parametrize('rare_to_first', [True, False])
def test_labels_that_all_occur_once_are_no_classes(rare_to_first):
    with pytest.raises(ValueError, match='got 120 rows with 120 labels, each once'):
        split_dataset(make_dataset(*[1] * 120), rare_to_first=rare_to_first)


@pytest.mark.parametrize(
    ('counts', 'share', 'message'),
    [
        ((60, 60), 0.001, r"split 'test' to hold out at least one row, got 0.001 of 120 rows"),
        ((4, 4, 4), 0.1, r"split 'test' and for those before it, got 1 of 12: .* number of classes = 3$"),
        # A label column of titles, of which one occurs twice.
        ((*[1] * 118, 2), 0.1, r"split 'test' .* got 12 of 2: "),
        ((3, 3), 0.9, r"split 'test' .* got 5 of 6: .* number of classes = 2$"),
    ],
)
def test_parts_smaller_than_the_number_of_classes_are_rejected(counts, share, message):
    with pytest.raises(ValueError, match=message):
        split_dataset(make_dataset(*counts), fractions={'train': 1 - share, 'test': share}, rare_to_first=True)
