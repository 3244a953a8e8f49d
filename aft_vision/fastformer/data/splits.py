"""Stratified splits of a labelled data set."""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict
from sklearn.model_selection import train_test_split

_logger = logging.getLogger(__name__)

FRACTIONS = MappingProxyType({'train': 0.8, 'validation': 0.1, 'test': 0.1})


def split_dataset(
    dataset: Dataset, seed: int = 0, fractions: Mapping[str, float] = FRACTIONS, rare_to_first: bool = False
) -> DatasetDict:
    """Divide a data set at random into splits with the same shares of the classes.

    Rows with the same text, up to spaces, go to the earliest split that one of them is drawn for: no test text is one
    of training. Splits without such rows have exactly their shares.

    Args:
        dataset: With a ClassLabel column `label`, and a column `text` if texts are to stay together.
        fractions: Share of each split; they add up to 1.
        rare_to_first: Put the rows of classes with a single member into the first split; else they are an error.

    Raises:
        ValueError: a class has one member, or all have, a split would be empty, smaller than the number of classes or
            without a text of its own, or the fractions do not add up to 1.
    """
    check_fractions(fractions)
    labels = np.asarray(dataset['label'])
    first, *others = fractions
    is_rare = np.bincount(labels)[labels] == 1
    if is_rare.all():
        raise ValueError(
            f'expected a label that two rows or more have, got {len(labels)} rows with {len(labels)} labels, each '
            'once, so they are no classes'
        )
    if is_rare.any() and not rare_to_first:
        names = [dataset.features['label'].int2str(int(label)) for label in labels[is_rare]]
        raise ValueError(
            f'expected two rows or more of each class, to divide them, got one of: {", ".join(names)}; '
            f'rare_to_first=True puts those into {first!r}'
        )
    rest, rare = np.flatnonzero(~is_rare), np.flatnonzero(is_rare)
    splits: dict[str, np.ndarray] = {}
    for name in reversed(others):
        count, strata = round(fractions[name] * len(labels)), _strata(labels[rest])
        if count < 1:
            raise ValueError(
                f'expected the share of the split {name!r} to hold out at least one row, got {fractions[name]} of '
                f'{len(labels)} rows'
            )
        left, least = max(len(rest) - count, 0), len(np.unique(strata))
        if min(count, left) < least:
            once = f'; the {len(rare)} other rows have labels that occur once' if len(rare) else ''
            raise ValueError(
                f'expected the split {name!r} to hold out and to leave {least} rows or more, one for each class, '
                f'got {count} and {left} of {len(rest)}{once}'
            )
        rest, splits[name] = train_test_split(rest, test_size=count, stratify=strata, random_state=seed)
    splits[first] = np.concatenate([rest, rare])
    place = np.empty(len(labels), int)
    for number, name in enumerate(fractions):
        place[splits[name]] = number
    if 'text' in dataset.column_names:
        place = _earliest(place, dataset['text'])
    for number, name in enumerate(fractions):
        if not (place == number).any():
            raise ValueError(
                f'expected a text of its own for the split {name!r}, got only those of an earlier split too'
            )
    return DatasetDict({name: dataset.select(np.flatnonzero(place == n)) for n, name in enumerate(fractions)})


def _earliest(place: np.ndarray, texts: Iterable[str]) -> np.ndarray:
    """Return for each row the least place of all rows with the same text."""
    group, _ = pd.factorize(np.array([' '.join(text.split()) for text in texts], dtype=object))
    least = np.full(group.max() + 1, place.max())
    np.minimum.at(least, group, place)
    return least[group]


def report_shared(splits: Mapping[str, Dataset], split: str) -> None:
    """Log how many texts of a split are also in the split `train`, up to spaces."""
    train = {' '.join(text.split()) for text in splits['train']['text']}
    shared = sum(' '.join(text.split()) in train for text in splits[split]['text'])
    if shared:
        _logger.warning('%d of the %d %s texts are training texts too', shared, splits[split].num_rows, split)


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Raise a ValueError unless these are shares of two splits or more that add up to 1."""
    if len(fractions) < 2 or min(fractions.values()) <= 0 or abs(sum(fractions.values()) - 1) > 1e-6:
        raise ValueError(f'expected two or more fractions above 0 that add up to 1, got {dict(fractions)}')


def _strata(labels: np.ndarray) -> np.ndarray:
    """Return the labels, with classes that have one member left merged into the largest class."""
    counts = np.bincount(labels)
    return np.where(counts[labels] == 1, counts.argmax(), labels)
