"""Texts with their summaries: readers of CNN/DailyMail, of PubMed and of any table, splits, tokens.

A reader returns a `datasets.Dataset` with the columns `text` and `summary`. `transformers.DataCollatorForSeq2Seq` makes
batches of what `tokenize_summaries` returns.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from transformers import PreTrainedTokenizerBase

from aft_vision.fastformer.data.batches import AnyDataset, token_ids
from aft_vision.fastformer.data.files import Record, missing_columns
from aft_vision.fastformer.data.splits import FRACTIONS, check_fractions
from aft_vision.fastformer.data.table import (
    check_text,
    complete_records,
    dataset_records,
    draw_rows,
    read_records,
    report_incomplete,
    tally,
)

CNN_DAILYMAIL = dict(name='abisee/cnn_dailymail', config='3.0.0', text='article', summary='highlights')
PUBMED = dict(name='ccdv/pubmed-summarization', config='document', text='article', summary='abstract')
# Names of other splits that an error gives at most.
SHOWN_SPLITS = 5


def read_summaries(
    path: str | Path,
    text: str | Sequence[str] = 'text',
    summary: str = 'summary',
    split: str | None = None,
    split_column: str = 'split',
    quoted: bool | None = None,
    **options: Any,
) -> Dataset:
    """Read texts with summaries from a CSV, TSV, JSON lines, JSON list or parquet file.

    Args:
        path: As `table.read_table` takes it.
        text: The column of the text, or several, joined by a space.
        summary: The column of the summary.
        split: Only rows with this in `split_column`; None for all rows.
        quoted: As `table.read_table` takes it.
        options: `sample`, `seed`, `drop_incomplete` and `skip_lines`, as `collect_summaries` takes them.

    Raises:
        ValueError: the file is damaged or has another layout, which names line and column, or no row of the split.
    """
    columns = [text] if isinstance(text, str) else list(text)
    needed = [*columns, summary] if split is None else [*columns, summary, split_column]
    records = read_records(path, needed, quoted)
    if split is not None:
        records = _of_split(records, split_column, split, path)
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
    """Read texts with summaries from the Hugging Face hub, or from what else `datasets.load_dataset` takes.

    Args:
        name: Such as `abisee/cnn_dailymail`, or a folder with a copy of it.
        text, summary, options: As `read_summaries` takes them.
        config, split: Which split of the data set.
        load_options: More for `datasets.load_dataset`, such as `revision`.

    Raises:
        ValueError: it lacks a column, or a row has no text.
    """
    dataset = load_dataset(name, config, split=split, **(load_options or {}))
    columns = [text] if isinstance(text, str) else list(text)
    return collect_summaries(dataset_records(dataset, [*columns, summary]), columns, summary, **options)


def read_cnn_dailymail(path: str | Path | None = None, split: str | None = None, **options: Any) -> Dataset:
    """Read CNN/DailyMail: articles with their highlights, one a line.

    Args:
        path: A file with the columns `article` and `highlights`; None for `abisee/cnn_dailymail` 3.0.0 on the hub.
        split: `train`, `validation` or `test`; None for all rows of a file, and for `train` on the hub.
        options: As the reader of files, or that of the hub, takes them.
    """
    return _read_published(CNN_DAILYMAIL, path, split, options)


def read_pubmed(path: str | Path | None = None, split: str | None = None, **options: Any) -> Dataset:
    """Read PubMed: articles with their abstracts, one sentence a line.

    Some articles are empty: `drop_incomplete=True` leaves them out.

    Args:
        path: A file with the columns `article` and `abstract`; None for `ccdv/pubmed-summarization`, configuration
            `document`, on the hub.
        split, options: As `read_cnn_dailymail` takes them.
    """
    return _read_published(PUBMED, path, split, options)


def collect_summaries(
    records: Iterable[Record],
    text: Sequence[str],
    summary: str,
    sample: int | None = None,
    seed: int = 0,
    drop_incomplete: bool = False,
    skip_lines: int = 0,
) -> Dataset:
    """Make a data set of records; only the two columns, and the sample, are kept in memory.

    Args:
        text: Columns whose texts are joined by a space; empty ones are skipped.
        summary: The column of the summary.
        sample: Number of rows to draw at random, in the order of the file; None, or more rows than exist, for all.
        seed: Seed of that draw.
        drop_incomplete: Leave out rows whose text or summary is absent, null, NaN or blank; else they are errors.
        skip_lines: Leading lines to remove from each text, such as a headline; blank lines do not count.

    Raises:
        ValueError: a column is missing, with drop_incomplete in every row, a text is no text or blank, there is no row,
            or skip_lines is below 0.
    """
    if skip_lines < 0:
        raise ValueError(f'skip_lines must be at least 0, got {skip_lines}')
    counts: Counter[str] = Counter()
    complete = _pairs(tally(records, counts, 'read'), text, summary, drop_incomplete, skip_lines)
    rows = draw_rows(tally(complete, counts, 'complete'), sample, seed)
    report_incomplete(counts)
    if not rows:
        raise ValueError(f'expected rows with a text ({", ".join(text)}) and a summary ({summary}), got none')
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


def tokenize_summaries(
    dataset: AnyDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    max_summary_length: int | None = None,
) -> AnyDataset:
    """Replace `text` by `input_ids`, and `summary` by `labels` with an end token; other columns stay.

    A decoder reads the labels after its start token, by its `prepare_decoder_input_ids_from_labels` or transformers'
    collator. A text without tokens becomes one unknown token.

    Args:
        max_length: Length to which texts are truncated, in tokens; None for no limit.
        max_summary_length: The same for summaries, including the end token.

    Raises:
        ValueError: max_summary_length is below 2, or the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError('expected a tokenizer with an end token (eos_token), got one without')
    if max_summary_length is not None and max_summary_length < 2:
        raise ValueError(f'max_summary_length must be at least 2, got {max_summary_length}')

    end: int = tokenizer.eos_token_id
    most: int | None = None if max_summary_length is None else max_summary_length - 1

    def closed(target: list[int]) -> list[int]:
        # Some tokenizers add the end token themselves.
        return target if target[-1:] == [end] else [*target[:most], end]

    def tokenize(batch: Mapping[str, list[str]]) -> dict[str, Any]:
        cut = max_summary_length is not None
        targets: Any = tokenizer(batch['summary'], truncation=cut, max_length=max_summary_length)['input_ids']
        inputs = token_ids(batch['text'], tokenizer, max_length)
        return {'input_ids': inputs, 'labels': [closed(target) for target in targets]}

    return dataset.map(tokenize, batched=True, remove_columns=['text', 'summary'], desc='tokens')


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


def _read_published(
    published: Mapping[str, str], path: str | Path | None, split: str | None, options: Mapping[str, Any]
) -> Dataset:
    columns: dict[str, Any] = {name: published[name] for name in ('text', 'summary')}
    if path is not None:
        return read_summaries(path, split=split, **columns, **options)
    return read_hub_summaries(
        published['name'], config=published['config'], split=split or 'train', **columns, **options
    )


def _of_split(records: Iterable[Record], column: str, split: str, path: str | Path) -> Iterator[Record]:
    others: set[str] = set()
    is_found = False
    for record in records:
        if column not in record.values:
            raise missing_columns(record.place, [column], list(record.values))
        value = record.values[column]
        if value == split:
            is_found = True
            yield record
        elif len(others) <= SHOWN_SPLITS:
            others.add(f'{value!s:.40}')
    if not is_found:
        names = sorted(others)
        named = ', '.join(names[:SHOWN_SPLITS]) + (' and others' if len(names) > SHOWN_SPLITS else '')
        raise ValueError(f'expected rows with {column} = {split!r} in {path}, got {named or "none"}')


def _pairs(
    records: Iterable[Record], text: Sequence[str], summary: str, drop_incomplete: bool, skip_lines: int
) -> Iterator[tuple[str, str]]:
    for place, values in complete_records(records, [*text, summary], drop_incomplete):
        content = ' '.join(filter(None, (check_text(place, column, values[column]) for column in text)))
        pair = _without_lines(content, skip_lines), check_text(place, summary, values[summary])
        blank = [name for name, part in zip(('text', 'summary'), pair, strict=True) if not part.strip()]
        if not blank:
            yield pair
        elif not drop_incomplete:
            raise ValueError(f'{place}: expected a {blank[0]}, got a blank one; drop_incomplete leaves such rows out')


def _without_lines(text: str, count: int) -> str:
    for _ in range(count):
        text = ''.join(text.lstrip().splitlines(keepends=True)[1:])
    return text.lstrip() if count else text
