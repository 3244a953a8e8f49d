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
    for location, values in read_news_rows(news):
        if not values['news_id']:
            raise ValueError(f"{location}, column 'news_id': expected a name, got ''")
        ids.append(values['news_id'])
        texts.append(' '.join(filter(None, (values[column] for column in text))))
    return News(ids, texts)


def read_mind_behaviors(
    path: str | Path, rows: Mapping[str, int], max_behaviors: int = 50, drop_missing: bool = False
) -> Behaviors:
    """Read the impressions of MIND; its test split has no labels.

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
    ids: list[str] = []
    users: list[str] = []
    # Arrays, without an object for each news.
    history, candidates, history_sizes, candidate_sizes = array('i'), array('i'), array('q'), array('q')
    seconds, labels = array('q'), array('b')
    is_labelled: bool | None = None
    for record in read_delimited(path, '\t', BEHAVIOR_COLUMNS, quoted=False):
        location, values = record
        clicked = _find_rows(location, 'history', values['history'].split(), rows, drop_missing)[-max_behaviors:]
        history.extend(clicked)
        history_sizes.append(len(clicked))
        parts = values['impressions'].split()
        if is_labelled is None:
            is_labelled = '-' in ''.join(parts[:1])
        names, flags = _parse_candidates(location, parts, is_labelled, rows)
        if is_labelled:
            labels.extend(flag for name, flag in zip(names, flags, strict=True) if not drop_missing or name in rows)
        shown = _find_rows(location, 'impressions', names, rows, drop_missing)
        candidates.extend(shown)
        candidate_sizes.append(len(shown))
        ids.append(values['impression_id'])
        users.append(sys.intern(values['user_id']))
        seconds.append(_read_time(record))
    if not ids:
        raise ValueError(f'expected impressions in {path}, got none')
    return Behaviors(
        ids,
        Ragged.from_sizes(history, history_sizes),
        Ragged.from_sizes(candidates, candidate_sizes),
        np.array(labels, dtype=np.int8) if is_labelled else None,
        users,
        np.array(seconds),
    )


def _find_rows(
    location: str, column: str, names: Sequence[str], rows: Mapping[str, int], drop_missing: bool
) -> list[int]:
    if drop_missing:
        return [rows[name] for name in names if name in rows]
    try:
        return [rows[name] for name in names]
    except KeyError as error:
        raise ValueError(
            f'{location}, column {column!r}: expected one of {len(rows)} news, got {error.args[0]!r}; drop_missing '
            'leaves such out'
        ) from error


def _parse_candidates(
    location: str, parts: Sequence[str], is_labelled: bool, rows: Mapping[str, int]
) -> tuple[list[str], list[int]]:
    """Parse `N1-0 N2-1`, or `N1 N2`, to names and clicks."""
    if not parts:
        raise ValueError(f"{location}, column 'impressions': expected candidates, got none")
    names, flags = [], []
    for part in parts:
        name, _, label = part.rpartition('-')
        has_label = bool(name) and label in CLICKS
        if is_labelled and not has_label:
            raise ValueError(f"{location}, column 'impressions': expected N1-0 or N1-1, got {part!r:.80}")
        # `drop_missing` would take a label for a part of a name that is none of the news.
        if has_label and not is_labelled and part not in rows:
            raise ValueError(
                f"{location}, column 'impressions': expected N1 without a label, as the file begins, got {part!r:.80}"
            )
        names.append(name if is_labelled else part)
        flags.append(CLICKS.get(label, 0))
    return names, flags


def _read_time(record: Record) -> int:
    """Parse a time to seconds since 1970, in the time zone of the file."""
    try:
        time = datetime.strptime(record.values['time'], TIME)
    except ValueError as error:
        raise ValueError(
            f"{record.location}, column 'time': expected such as 11/13/2019 8:36:57 AM, got "
            f'{record.values["time"]!r:.80}'
        ) from error
    return int(time.replace(tzinfo=UTC).timestamp())
