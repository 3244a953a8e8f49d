"""Texts with their summaries: readers of any table, and splits.

A reader returns a `datasets.Dataset` with the columns `text` and `summary`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, Features, Value, load_dataset

from aft_vision.fastformer.data.files import Record, missing_columns
from aft_vision.fastformer.data.splits import FRACTIONS, check_fractions
from aft_vision.fastformer.data.table import (
    check_text,
    dataset_records,
    draw_complete,
    join_texts,
    name_columns,
    read_records,
)


def read_summaries(
    path: str | Path,
    text: str | Sequence[str] = 'text',
    summary: str = 'summary',
    split: str | None = None,
    split_column: str = 'split',
    **options: Any,
) -> Dataset:
    """Read texts with summaries from a CSV, TSV, JSON lines, JSON list or parquet file.

    Args:
        path: As `table.read_records` takes it.
        text: The column of the text, or several, joined by a space.
        summary: The column of the summary.
        split: Only rows with this in `split_column`; None for all rows.
        options: As `collect_summaries` takes them.

    Raises:
        ValueError: the file is damaged or has another layout, which names line and column, or no row of the split.
    """
    columns = name_columns(text)
    records = read_records(path, [*columns, summary, *([] if split is None else [split_column])])
    if split is not None:
        records = _rows_of_split(records, split_column, split, path)
    return collect_summaries(records, columns, summary, **options)


def read_hub_summaries(
    name: str,
    text: str | Sequence[str] = 'text',
    summary: str = 'summary',
    config: str | None = None,
    split: str = 'train',
    load_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Read texts with summaries from the Hugging Face hub, or from any other source of `datasets.load_dataset`.

    Args:
        name: Such as `abisee/cnn_dailymail`, or a folder with a copy of it.
        text, summary, options: As `read_summaries` takes them.
        config, split: Which split of the data set.
        load_options: More for `datasets.load_dataset`, such as `revision`.

    Raises:
        ValueError: it lacks a column, or a row has no text.
    """
    dataset = load_dataset(name, config, split=split, **(load_options or {}))
    columns = name_columns(text)
    return collect_summaries(dataset_records(dataset, [*columns, summary]), columns, summary, **options)


def collect_summaries(
    records: Iterable[Record],
    text: Sequence[str],
    summary: str,
    drop_incomplete: bool = False,
    skip_lines: int = 0,
    **options: Any,
) -> Dataset:
    """Make a data set of records; only the two columns, and the sample, are kept in memory.

    Args:
        text: Columns whose texts are joined by a space; empty ones are skipped.
        summary: The column of the summary.
        drop_incomplete: Leave out rows whose text or summary is absent, null, NaN or blank; else they are errors.
        skip_lines: Leading lines to remove from each text, such as a headline; blank lines do not count.
        options: `sample` and `seed`, as `table.draw_complete` takes them.

    Raises:
        ValueError: as `table.draw_complete`, or a text is no text or blank.
    """

    def as_row(location: str, values: Mapping[str, Any]) -> tuple[str, str] | None:
        content = _without_lines(join_texts(location, values, text), skip_lines)
        pair = content, check_text(location, summary, values[summary])
        blank = [name for name, part in zip(('text', 'summary'), pair, strict=True) if not part.strip()]
        if blank and not drop_incomplete:
            raise ValueError(
                f'{location}: expected a {blank[0]}, got a blank one; drop_incomplete leaves such rows out'
            )
        return None if blank else pair

    rows = draw_complete(records, [*text, summary], as_row, drop_incomplete, **options)
    texts, summaries = zip(*rows, strict=True)
    features = Features(text=Value('string'), summary=Value('string'))
    return Dataset.from_dict({'text': texts, 'summary': summaries}, features=features)


def split_summaries(dataset: Dataset, seed: int = 0, fractions: Mapping[str, float] = FRACTIONS) -> DatasetDict:
    """Divide a data set at random, each split in the order of the file.

    Rows with the same text or the same summary, up to spaces, go to one split: no test text is one of training. The
    splits are then as near to their shares as such groups of rows allow.

    Args:
        fractions: Share of each split; they add up to 1.

    Raises:
        ValueError: a split would have no row, or the fractions are not two or more above 0 that add up to 1.
    """
    check_fractions(fractions)
    order = np.random.default_rng(seed).permutation(len(dataset))
    group = pd.factorize(_equal_rows(dataset)[order])[0]
    # Ends of the groups after sorting the rows by group.
    ends = np.append(0, np.bincount(group).cumsum())
    wanted = [round(share * len(dataset)) for share in np.cumsum(list(fractions.values()))[:-1]]
    bounds = [int(ends[np.abs(ends - bound).argmin()]) for bound in wanted]
    splits = np.split(order[np.argsort(group, kind='stable')], bounds)
    if min(map(len, splits)) < 1:
        raise ValueError(
            f'expected rows for each of {dict(fractions)}, got {len(dataset)} in all, {len(ends) - 1} groups of '
            'equal text or summary'
        )
    return DatasetDict({name: dataset.select(np.sort(split)) for name, split in zip(fractions, splits, strict=True)})


def _equal_rows(dataset: Dataset) -> np.ndarray:
    """Return a group number for each row; rows with the same text or summary, also indirectly, share one."""
    columns = [[' '.join(value.split()) for value in dataset[name]] for name in ('text', 'summary')]
    numbers = before = pd.Series(range(len(dataset)))
    while True:
        for column in columns:
            numbers = numbers.groupby(column).transform('min')
        if numbers.equals(before):
            return numbers.to_numpy()
        before = numbers


def _rows_of_split(records: Iterable[Record], column: str, split: str, path: str | Path) -> Iterator[Record]:
    is_found = False
    for record in records:
        if column not in record.values:
            raise missing_columns(record.location, [column], list(record.values))
        if record.values[column] == split:
            is_found = True
            yield record
    if not is_found:
        raise ValueError(f'expected rows with {column} = {split!r} in {path}, got none')


def _without_lines(text: str, count: int) -> str:
    for _ in range(count):
        text = ''.join(text.lstrip().splitlines(keepends=True)[1:])
    return text.lstrip() if count else text
