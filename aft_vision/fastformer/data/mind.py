"""MIND: news with their texts, and impressions with history, candidates and clicks."""

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np

from aft_vision.fastformer.data.files import Record, read_delimited
from aft_vision.fastformer.data.impressions import Behaviors, Ragged
from aft_vision.fastformer.data.news import read_news_rows

BEHAVIOR_COLUMNS = ('impression_id', 'user_id', 'time', 'history', 'impressions')
NEWS_TEXTS = ('title', 'abstract', 'category', 'subcategory')
TIME = '%m/%d/%Y %I:%M:%S %p'
CLICKS = {'0': 0, '1': 1}


@dataclass(frozen=True)
class News:
    """The news and the texts that the models read.

    Attributes:
        ids: Names of the news.
        texts: Text of each.
    """

    ids: list[str]
    texts: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Return the row of each news item by name."""
        return {name: row for row, name in enumerate(self.ids)}


def read_mind_news(news: str | Path | Sequence[str | Path], text: Sequence[str] = ('title',)) -> News:
    """Read the news of MIND.

    Args:
        news: A `news.tsv` as published (8 columns, no header), a folder with one, or several of either; a news that
            is in several counts once.
        text: Columns to join by a space: `title`, `abstract`, `category`, `subcategory`; empty ones are skipped.

    Raises:
        ValueError: a file is damaged or of another layout; names line and column.
    """
    if not text or not set(text) <= set(NEWS_TEXTS):
        raise ValueError(f'expected columns of {", ".join(NEWS_TEXTS)}, got {", ".join(text) or "none"}')
    ids, texts = [], []
    for place, values in read_news_rows(news):
        if not values['news_id']:
            raise ValueError(f"{place}, column 'news_id': expected a name, got ''")
        ids.append(values['news_id'])
        texts.append(' '.join(filter(None, (values[column] for column in text))))
    return News(ids, texts)


def read_mind_behaviors(
    path: str | Path, rows: Mapping[str, int], max_behaviors: int = 50, drop_missing: bool = False
) -> Behaviors:
    """Read the impressions of MIND; those of its test split have no labels.

    Args:
        path: A `behaviors.tsv` as published (5 columns, no header), or a folder with one.
        rows: The row of each news by its name: `News.rows`.
        max_behaviors: Number of last clicks of a history to keep, at least 1.
        drop_missing: Leave out clicks and candidates that are none of the news, as in an excerpt of MIND, before
            anything is counted; else they are errors.

    Raises:
        ValueError: the file is damaged or of another layout, only some candidates have labels, or one is none of the
            news; names line and column. Or max_behaviors is below 1.
    """
    if max_behaviors < 1:
        raise ValueError(f'max_behaviors must be at least 1, got {max_behaviors}')
    path = Path(path)
    path = path / 'behaviors.tsv' if path.is_dir() else path
    found = _Collected(rows, drop_missing)
    for record in read_delimited(path, '\t', BEHAVIOR_COLUMNS, quoted=False):
        history = found.lookup(record, 'history', record.values['history'].split())
        shown = found.read_candidates(record)
        kept = history[-max_behaviors:]
        found.ids.append(record.values['impression_id'])
        found.users.append(sys.intern(record.values['user_id']))
        found.seconds.append(_read_time(record))
        found.history.extend(kept)
        found.history_sizes.append(len(kept))
        found.candidates.extend(shown)
        found.candidate_sizes.append(len(shown))
    if not found.ids:
        raise ValueError(f'expected impressions in {path}, got none')
    return Behaviors(
        found.ids,
        Ragged.from_sizes(found.history, found.history_sizes),
        Ragged.from_sizes(found.candidates, found.candidate_sizes),
        np.array(found.labels, dtype=np.int8) if found.is_labelled else None,
        found.users,
        np.array(found.seconds),
    )


def _read_time(record: Record) -> int:
    """Parse a time to seconds since 1970, in the time zone of the file."""
    try:
        time = datetime.strptime(record.values['time'], TIME)
    except ValueError as error:
        raise ValueError(
            f"{record.place}, column 'time': expected such as 11/13/2019 8:36:57 AM, got {record.values['time']!r:.80}"
        ) from error
    return int(time.replace(tzinfo=UTC).timestamp())


class _Collected:
    """Arrays of the rows read so far, without an object for each news."""

    def __init__(self, rows: Mapping[str, int], drop_missing: bool) -> None:
        self.rows, self.drop_missing = rows, drop_missing
        self.ids: list[str] = []
        self.users: list[str] = []
        self.seconds = array('q')
        self.history, self.history_sizes = array('i'), array('q')
        self.candidates, self.candidate_sizes = array('i'), array('q')
        self.labels = array('b')
        self.is_labelled: bool | None = None

    def lookup(self, record: Record, column: str, names: Sequence[str]) -> list[int]:
        """Return the rows of news by name."""
        if self.drop_missing:
            return [self.rows[name] for name in names if name in self.rows]
        try:
            return [self.rows[name] for name in names]
        except KeyError as error:
            raise ValueError(
                f'{record.place}, column {column!r}: expected one of {len(self.rows)} news, got {error.args[0]!r}; '
                'drop_missing leaves such out'
            ) from error

    def read_candidates(self, record: Record) -> list[int]:
        """Parse the rows of `N1-0 N2-1`, or of `N1 N2`, and record the labels."""
        parts = record.values['impressions'].split()
        if not parts:
            raise ValueError(f"{record.place}, column 'impressions': expected candidates, got none")
        if self.is_labelled is None:
            self.is_labelled = '-' in parts[0]
        if not self.is_labelled:
            self._check_unlabelled(record, parts)
            return self.lookup(record, 'impressions', parts)
        pairs = [part.rpartition('-') for part in parts]
        for (name, _, label), part in zip(pairs, parts, strict=True):
            if label not in CLICKS or not name:
                raise ValueError(f"{record.place}, column 'impressions': expected N1-0 or N1-1, got {part!r:.80}")
        if self.drop_missing:
            pairs = [pair for pair in pairs if pair[0] in self.rows]
        self.labels.extend(CLICKS[label] for _, _, label in pairs)
        return self.lookup(record, 'impressions', [name for name, _, _ in pairs])

    def _check_unlabelled(self, record: Record, parts: Sequence[str]) -> None:
        # `drop_missing` would take a label for a part of a name that is none of the news.
        for part in parts:
            name, _, label = part.rpartition('-')
            if name and label in CLICKS and part not in self.rows:
                raise ValueError(
                    f"{record.place}, column 'impressions': expected N1 without a label, as the file begins, "
                    f'got {part!r:.80}'
                )
