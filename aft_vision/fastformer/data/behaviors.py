"""Requests, each a user's earlier behaviours and the response to an ad: readers, splits, batches.

A row of a data set is a request: `label` (0 or 1), `ad`, `behaviors`, `behavior_types`, `user` and `impression`. Texts
and types are numbers of a `BehaviorTable`, because a text occurs in thousands of rows.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, LargeList, Value
from sklearn.model_selection import GroupShuffleSplit
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from aft_vision.fastformer.data.batches import number_distinct, pad_rows, pad_tokens, token_ids
from aft_vision.fastformer.data.files import Record, missing_columns, read_json
from aft_vision.fastformer.data.splits import FRACTIONS, check_fractions, split_dataset
from aft_vision.fastformer.data.table import check_text

KEYS = ('label', 'ad', 'behaviors')
BEHAVIOR_KEYS = ('type', 'text')
LABELS = ('no', 'yes')
DIVISIONS = ('random', 'last', 'user')
FEATURES = Features(
    label=ClassLabel(names=list(LABELS)),
    ad=Value('int32'),
    # All behaviours of all requests of MIND are more than 2^31.
    behaviors=LargeList(Value('int32')),
    behavior_types=LargeList(Value('int32')),
    user=Value('string'),
    impression=Value('int64'),
)


class Behavior(NamedTuple):
    """Behaviour of a user: its type, such as `search`, and its text."""

    type: str
    text: str


class Request(NamedTuple):
    """An ad shown to a user.

    Args:
        behaviors: Earlier behaviours of the user, the oldest first.
        user: Name of the user, for splits without common users; '' if unknown.
        impression: A number shared by consecutive requests whose ads were shown together; -1 for none.
    """

    label: int
    ad: str
    behaviors: Sequence[Behavior]
    user: str = ''
    impression: int = -1


class BehaviorTable:
    """The distinct texts and types of one data set or several, numbered as they come."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._types: dict[str, int] = {}
        self._behaviors: dict[Behavior, tuple[int, int]] = {}

    @property
    def texts(self) -> list[str]:
        """Return the texts by number."""
        return list(self._texts)

    @property
    def types(self) -> list[str]:
        """Return the types of behaviours by number."""
        return list(self._types)

    def collect(self, requests: Iterable[Request], max_behaviors: int | None = None) -> Dataset:
        """Build a data set of requests.

        Args:
            max_behaviors: Number of last behaviours to keep per request, at least 1; None for all.

        Raises:
            ValueError: there are no requests, or max_behaviors is below 1.
        """
        if max_behaviors is not None and max_behaviors < 1:
            raise ValueError(f'max_behaviors must be at least 1, or None, got {max_behaviors}')
        import pyarrow as pa

        labels, ads, texts, types = (array('i') for _ in range(4))
        ends, impressions = array('q', [0]), array('q')
        users: list[str] = []
        before: Sequence[Behavior] | None = None
        numbers: list[tuple[int, int]] = []
        for label, ad, behaviors, user, impression in requests:
            labels.append(label)
            ads.append(self._texts.setdefault(ad, len(self._texts)))
            # The ads of an impression have the same behaviours.
            if behaviors is not before:
                kept = behaviors if max_behaviors is None else behaviors[-max_behaviors:]
                numbers = [self._behaviors.get(behavior) or self._number(behavior) for behavior in kept]
                before = behaviors
            texts.extend(text for text, _ in numbers)
            types.extend(number for _, number in numbers)
            ends.append(len(texts))
            users.append(user)
            impressions.append(impression)
        if not users:
            raise ValueError('expected requests with an ad and a label, got none')
        # Use Arrow's arrays: `Dataset.from_dict` checks every number in Python.
        offsets, behavior_texts, behavior_types = (pa.array(np.asarray(part)) for part in (ends, texts, types))
        lists = [pa.LargeListArray.from_arrays(offsets, part) for part in (behavior_texts, behavior_types)]
        columns = [np.asarray(labels, np.int64), np.asarray(ads), *lists, users, np.asarray(impressions)]
        return Dataset(pa.table(dict(zip(FEATURES, columns, strict=True)), schema=FEATURES.arrow_schema))

    def _number(self, behavior: Behavior) -> tuple[int, int]:
        numbers = (
            self._texts.setdefault(behavior.text, len(self._texts)),
            self._types.setdefault(behavior.type, len(self._types)),
        )
        self._behaviors[behavior] = numbers
        return numbers


def read_behaviors(path: str | Path, table: BehaviorTable, max_behaviors: int | None = None) -> Dataset:
    """Read requests from JSON lines, or a JSON list: `{"label": 0, "ad": "...", "behaviors": [...]}`.

    A behaviour is `{"type": "...", "text": "..."}`, the oldest first; the list may be empty. A key `user`, a text or a
    whole number, may name the user. Other keys are ignored.

    Args:
        path: May end in .gz, .xz, .bz2 or .zip.
        table: Table to which texts and types are added.
        max_behaviors: Number of last behaviours to keep per request; None for all.

    Raises:
        ValueError: the file is damaged or of another layout; names line and key.
    """
    return table.collect(map(_as_request, read_json(path)), max_behaviors)


def split_behaviors(
    dataset: Dataset, division: str = 'random', seed: int = 0, fractions: Mapping[str, float] = FRACTIONS
) -> DatasetDict:
    """Divide requests into splits.

    Args:
        division: `random`: rows at random, each split with the same share of labels. `last`: the first rows are the
            first split and the last rows the last, which leaks nothing of the future where rows are in the order of
            time; an impression is in one split. `user`: users at random, of whom every row is in the same split.
        seed: Seed of the random division.
        fractions: Share of each split, of rows or of users; they add up to 1.

    Raises:
        ValueError: no such division, rows without a user, too few users, a split has rows of only one label, or the
            fractions do not add up to 1.
    """
    check_fractions(fractions)
    if division == 'random':
        splits = split_dataset(dataset, seed, fractions)
    elif division == 'last':
        ends = _split_ends(dataset, fractions)
        rows = map(range, [0, *ends[:-1]], ends)
        splits = DatasetDict({name: dataset.select(split) for name, split in zip(fractions, rows, strict=True)})
    elif division == 'user':
        splits = _split_users(dataset, seed, fractions)
    else:
        raise ValueError(f'expected a division of {", ".join(DIVISIONS)}, got {division!r}')
    for name, split in splits.items():
        check_labels(name, split)
    return splits


def check_labels(name: str, split: Dataset) -> None:
    """Raise a ValueError unless a split has requests of both labels, without which there is no AUC."""
    positive = sum(split['label'])
    if not 0 < positive < len(split):
        raise ValueError(
            f'expected requests of both labels in the split {name!r}, got {positive} of {len(split)} with the label 1'
        )


class BehaviorCollator:
    """A collator for `FastformerForConversion`, with every text of a batch once and behaviours padded at the end.

    Args:
        table: Texts and types of the data sets.
        tokenizer: Tokenizer of the model.
        types: Behaviour types of the model, `config.behavior_types`.
        max_length: Maximal tokens of a text.

    Raises:
        ValueError: the table has a type that the model does not know.
    """

    def __init__(
        self, table: BehaviorTable, tokenizer: PreTrainedTokenizerBase, types: Sequence[str], max_length: int
    ) -> None:
        unknown = set(table.types) - set(types)
        if unknown:
            raise ValueError(
                f'expected behaviours of the types {", ".join(types)}, got {", ".join(sorted(unknown))} too'
            )
        self.tokens = token_ids(table.texts, tokenizer, max_length)
        self.types = [list(types).index(name) for name in table.types]
        self.pad_token_id = tokenizer.pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Pad requests to a batch.

        Returns:
            labels (B,), ad (B,), behaviors (B, M), behavior_types (B, M), input_ids (U, N) and attention_mask (U, N):
            the numbers of ads and behaviours are rows of input_ids, and -1 is padding.
        """
        types = [[self.types[type_number] for type_number in row['behavior_types']] for row in rows]
        # At least one position, so that every parameter has a gradient in every process.
        behaviors = pad_rows([row['behaviors'] for row in rows], -1, 1)
        texts, text_rows = number_distinct(np.insert(behaviors, 0, [row['ad'] for row in rows], axis=1))
        # The labels come first: transformers' Trainer takes the size of the batch from the first tensor.
        return {
            'labels': torch.tensor([float(row['label']) for row in rows]),
            'ad': text_rows[:, 0],
            'behaviors': text_rows[:, 1:],
            'behavior_types': torch.from_numpy(pad_rows(types, 0, 1)),
            **pad_tokens([self.tokens[number] for number in texts], self.pad_token_id),
        }


def _as_request(record: Record) -> Request:
    location, values = record
    if not values.keys() >= set(KEYS):
        raise missing_columns(location, KEYS, list(values))
    label = values['label']
    if isinstance(label, bool) or label not in (0, 1):
        raise ValueError(f"{location}, column 'label': expected 0 or 1, got {label!r:.80}")
    user = values.get('user', '')
    if isinstance(user, bool) or not isinstance(user, (str, int)):
        raise ValueError(f"{location}, column 'user': expected a text or a whole number, got {user!r:.80}")
    if not isinstance(values['behaviors'], list):
        raise ValueError(f"{location}, column 'behaviors': expected a list, got {values['behaviors']!r:.80}")
    return Request(
        int(label),
        check_text(location, 'ad', values['ad']),
        list(_as_behaviors(location, values['behaviors'])),
        str(user),
    )


def _as_behaviors(location: str, values: Sequence[Any]) -> Iterator[Behavior]:
    for number, value in enumerate(values):
        column = f'behaviors[{number}]'
        if not isinstance(value, dict) or not value.keys() >= set(BEHAVIOR_KEYS):
            raise ValueError(
                f'{location}, column {column!r}: expected an object with the keys {", ".join(BEHAVIOR_KEYS)}, '
                f'got {value!r:.80}'
            )
        yield Behavior(*(check_text(location, f'{column}.{key}', value[key]) for key in BEHAVIOR_KEYS))


def _split_ends(dataset: Dataset, fractions: Mapping[str, float]) -> list[int]:
    """Return the ends of splits with these shares of the rows, at the end of an impression."""
    impressions = np.asarray(dataset['impression'])
    is_within = np.append((impressions[1:] == impressions[:-1]) & (impressions[1:] >= 0), False)
    ends = []
    for share in np.cumsum(list(fractions.values())):
        end = round(share * len(dataset))
        while end > 0 and is_within[end - 1]:
            end += 1
        ends.append(end)
    return ends


def _split_users(dataset: Dataset, seed: int, fractions: Mapping[str, float]) -> DatasetDict:
    users = np.asarray(dataset['user'])
    if (users == '').any():
        raise ValueError("expected a user in every row for splits that have none in common, got rows without a 'user'")
    first, *others = fractions
    rest = np.arange(len(users))
    splits: dict[str, np.ndarray] = {}
    left = sum(fractions.values())
    for name in reversed(others):
        divide = GroupShuffleSplit(1, test_size=fractions[name] / left, random_state=seed)
        try:
            kept, taken = next(divide.split(rest, groups=users[rest]))
        except ValueError as error:
            raise ValueError(f'expected users for each of {dict(fractions)}, got {len(set(users))} in all') from error
        rest, splits[name], left = rest[kept], rest[taken], left - fractions[name]
    splits[first] = rest
    return DatasetDict({name: dataset.select(splits[name]) for name in fractions})
