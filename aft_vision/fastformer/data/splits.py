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
    counts = np.bincount(labels)
    is_rare = counts[labels] == 1
    if is_rare.all():
        raise ValueError(
            f'expected rows that share a label, got {len(labels)} rows with {len(labels)} labels, each once, so they '
            'are no classes; take another column for the labels'
        )
    if is_rare.any() and not rare_to_first:
        names = dataset.features['label'].int2str(np.flatnonzero(counts == 1))
        raise ValueError(
            f'expected classes of two rows or more, got {len(labels)} rows, of which {len(names)} are alone in theirs: '
            f'{", ".join(names):.200}; rare_to_first=True puts such rows into {next(iter(fractions))!r}'
        )
    split_of_row, rest = np.zeros(len(labels), int), np.flatnonzero(~is_rare)
    for number, name in reversed([*enumerate(fractions)][1:]):
        count = round(fractions[name] * len(labels))
        if not count:
            raise ValueError(
                f'expected the split {name!r} to hold out at least one row, got {fractions[name]:g} of {len(labels)} '
                'rows; give it a larger share, or more rows'
            )
        try:
            rest, drawn = train_test_split(rest, test_size=count, stratify=_strata(labels[rest]), random_state=seed)
        except ValueError as error:
            raise ValueError(
                f'expected rows of every class for the split {name!r} and for those before it, got {count} of '
                f'{len(rest)}: {error}'
            ) from error
        split_of_row[drawn] = number
    if 'text' in dataset.column_names:
        split_of_row = _first_split_of_text(split_of_row, dataset['text'])
    parts = {name: np.flatnonzero(split_of_row == number) for number, name in enumerate(fractions)}
    for name, rows in parts.items():
        if not len(rows):
            raise ValueError(
                f'expected a text of its own for the split {name!r}, got only those of an earlier split too'
            )
    return DatasetDict({name: dataset.select(rows) for name, rows in parts.items()})


def _first_split_of_text(split_of_row: np.ndarray, texts: Iterable[str]) -> np.ndarray:
    """Return for each row the first split of all rows with the same text."""
    group = np.array([' '.join(text.split()) for text in texts], dtype=object)
    return pd.Series(split_of_row).groupby(group).transform('min').to_numpy()


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
