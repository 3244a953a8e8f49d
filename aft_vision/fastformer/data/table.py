"""Rows of any table as a labelled `datasets.Dataset`: columns `text`, a string, and `label`, a ClassLabel."""

import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from datasets import ClassLabel, Dataset, Features, Value, load_dataset

from aft_vision.fastformer.data.files import (
    OPENERS,
    Record,
    missing_columns,
    read_delimited,
    read_json,
    read_parquet,
)

DELIMITED = ('.csv', '.tsv')
TABLES = (*DELIMITED, '.json', '.jsonl', '.ndjson', '.parquet')
# Names of the classes in order, or a name for each value of the label column.
LabelNames = Sequence[str] | Mapping[Any, str]
Row = TypeVar('Row')

_logger = logging.getLogger(__name__)


def read_table(
    path: str | Path,
    text: str | Sequence[str] = 'text',
    label: str = 'label',
    label_names: LabelNames | None = None,
    **options: Any,
) -> Dataset:
    """Read labelled texts from a CSV, TSV, JSON lines, JSON list or parquet file.

    Args:
        path: As `read_records` takes it.
        text: The column of the text, or several, joined by a space.
        label: The column of the class: words or numbers. In a CSV or TSV, whose missing numbers are texts, a label that
            reads `nan` is missing, unless a name means it.
        label_names: The classes in their order, or the name for each value; None for the values found, in order.
        options: `sample`, `seed` and `drop_incomplete`, as `draw_complete` takes them.

    Raises:
        ValueError: the file is damaged, has another layout, or a label is none of the names; names line and column.
    """
    columns = name_columns(text)
    records = read_records(path, [*columns, label])
    if _format_of(Path(path)) in DELIMITED:
        records = mark_nan(records, label, _name_by_value(label_names) or {})
    return collect(records, columns, label, label_names, **options)


def name_columns(text: str | Sequence[str]) -> list[str]:
    """Return the names of one column or several."""
    return [text] if isinstance(text, str) else list(text)


def read_records(path: str | Path, columns: Sequence[str]) -> Iterator[Record]:
    """Stream the rows of a table.

    Args:
        path: The suffix determines the format: .csv, .tsv, .json, .jsonl, .ndjson or .parquet; all except the last may
            be compressed as .gz, .xz, .bz2 or .zip. CSV and TSV start with the column names; quotes surround fields of
            a CSV, and are characters in a TSV.
        columns: Columns to read from a parquet file, and that the first line of a CSV or TSV must name; other files
            are read completely.

    Raises:
        ValueError: the path has another suffix, or the file is damaged or has no rows.
    """
    suffix, row = _format_of(Path(path)), None
    if suffix not in TABLES:
        raise ValueError(f'expected a file that ends in {", ".join(TABLES)}, got {path}')
    if suffix in DELIMITED:
        records = read_delimited(path, '\t' if suffix == '.tsv' else ',', quoted=suffix == '.csv', needed=columns)
    else:
        records = read_parquet(path, columns) if suffix == '.parquet' else read_json(path)
    for row in records:
        yield row
    if row is None:
        raise ValueError(f'expected rows in {path}, got none')


def _format_of(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (*OPENERS, '.zip')]
    return suffixes[-1] if suffixes else ''


def mark_nan(records: Iterable[Record], label: str, names: Collection[str] = ()) -> Iterator[Record]:
    """Put the number NaN for labels of a CSV or TSV that read so, except the ones in `names`."""
    for location, values in records:
        name = values[label].strip()
        yield Record(location, {**values, label: math.nan} if name.lower() == 'nan' and name not in names else values)


def read_hub(
    name: str,
    text: str | Sequence[str] = 'text',
    label: str = 'label',
    config: str | None = None,
    split: str = 'train',
    label_names: LabelNames | None = None,
    load_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Read labelled texts from the Hugging Face hub, or from any other source of `datasets.load_dataset`.

    Args:
        name: Such as `fancyzhx/ag_news`.
        text, label, label_names, options: As `read_table` takes them; names that the data set has are kept.
        config, split: Which split of the data set.
        load_options: More for `datasets.load_dataset`, such as `revision`.
    """
    dataset = load_dataset(name, config, split=split, **(load_options or {}))
    return from_dataset(dataset, text, label, label_names, **options)


def from_dataset(
    dataset: Dataset,
    text: str | Sequence[str] = 'text',
    label: str = 'label',
    label_names: LabelNames | None = None,
    **options: Any,
) -> Dataset:
    """Make labelled texts of a `datasets.Dataset`, as `read_table` does of a file.

    Labels of a ClassLabel keep their names and order; its -1, which stands for no label, counts as missing.
    """
    columns = name_columns(text)
    records = dataset_records(dataset, [*columns, label])
    feature = dataset.features[label]
    if isinstance(feature, ClassLabel):
        label_names = label_names or feature.names
        records = _with_names(records, label, feature.names)
    return collect(records, columns, label, label_names, **options)


def dataset_records(dataset: Dataset, columns: Sequence[str]) -> Iterator[Record]:
    """Stream some columns of a `datasets.Dataset`; a location counts rows from 1.

    Raises:
        ValueError: it lacks a column.
    """
    if not set(columns) <= set(dataset.column_names):
        raise missing_columns('the data set', columns, dataset.column_names)
    rows = dataset.select_columns(list(dict.fromkeys(columns)))
    return (Record(f'row {number}', row) for number, row in enumerate(rows, 1))


def collect(
    records: Iterable[Record],
    text: Sequence[str],
    label: str,
    label_names: LabelNames | None = None,
    drop_incomplete: bool = False,
    **options: Any,
) -> Dataset:
    """Make a data set of records; only the columns asked for, and the sample, are kept in memory.

    Args:
        text: Columns whose texts are joined by a space; empty ones are skipped.
        label: The column of the class.
        label_names: The classes in their order, or the name for each value; None for the values found: sorted as
            numbers if all are, else by the alphabet.
        drop_incomplete: Leave out rows whose label, or text of all columns, is missing, null, NaN or blank; otherwise
            they are errors, except a blank text.
        options: `sample` and `seed`, as `draw_complete` takes them.

    Raises:
        ValueError: as `draw_complete`, or a text is not a string, or a label is unknown.
    """
    names = _name_by_value(label_names)
    seen: set[str] = set()

    def as_row(location: str, values: Mapping[str, Any]) -> tuple[str, str] | None:
        name = as_label(values[label])
        if drop_incomplete and name == '':
            return None
        content = join_texts(location, values, text)
        if drop_incomplete and not content.strip():
            return None
        if not name:
            raise ValueError(
                f'{location}, column {label!r}: expected a label, got {values[label]!r}; drop_incomplete leaves rows '
                'without one out'
            )
        if names is not None:
            if name not in names:
                raise ValueError(f'{location}, column {label!r}: expected one of {", ".join(names):.200}, got {name!r}')
            name = names[name]
        seen.add(name)
        return content, name

    rows = draw_complete(records, [*text, label], as_row, drop_incomplete, **options)
    classes = _in_order(seen) if names is None else list(dict.fromkeys(names.values()))
    index = {name: number for number, name in enumerate(classes)}
    columns = {'text': [content for content, _ in rows], 'label': [index[name] for _, name in rows]}
    return Dataset.from_dict(columns, features=Features(text=Value('string'), label=ClassLabel(names=classes)))


def label_maps(dataset: Dataset) -> dict[str, Any]:
    """Return `num_labels`, `id2label` and `label2id` of a data set, for the configuration of a model."""
    names = dataset.features['label'].names
    return dict(num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})


def check_text(location: str, column: str, value: Any) -> str:
    """Return a value if it is a text.

    Raises:
        ValueError: it is something else; names location and column.
    """
    if not isinstance(value, str):
        raise ValueError(f'{location}, column {column!r}: expected a text, got {value!r:.80}')
    return value


def join_texts(location: str, values: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Join the texts of some columns by a space; empty ones are skipped."""
    return ' '.join(filter(None, (check_text(location, column, values[column]) for column in columns)))


def draw_complete(
    records: Iterable[Record],
    columns: Sequence[str],
    as_row: Callable[[str, Mapping[str, Any]], Row | None],
    drop_incomplete: bool = False,
    sample: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """Return the rows of complete records, and log how many are not.

    Args:
        as_row: Makes a row of a location and its values, or None to leave it out.
        drop_incomplete: Put '', as in an empty field of a CSV, for a column that is absent, null or NaN.
        sample: Number of rows to draw at random, in the order of the file; None, or more rows than exist, for all.
        seed: Seed of that draw.

    Raises:
        ValueError: a record lacks a column, with drop_incomplete every record does, for example because the column is
            misspelt, or no record is complete.
    """
    unseen, read, left_out = set(columns), 0, 0
    first: Record | None = None

    def rows() -> Iterator[Row]:
        nonlocal read, left_out, first
        for record in records:
            location, values = record
            first, read = first or record, read + 1
            unseen.difference_update(values)
            if drop_incomplete:
                values = {name: '' if _is_null(value := values.get(name)) else value for name in columns}
            elif not values.keys() >= set(columns):
                raise missing_columns(location, columns, list(values))
            row = as_row(location, values)
            left_out += row is None
            if row is not None:
                yield row

    kept = draw_rows(rows(), sample, seed)
    if first is not None and unseen:
        raise missing_columns(first.location, columns, list(first.values))
    if left_out:
        _logger.warning('left out %d of %d rows, which are incomplete', left_out, read)
    if not kept:
        raise ValueError(f'expected complete rows of the columns {", ".join(columns)}, got none')
    return kept


def _is_null(value: Any) -> bool:
    # pandas writes a missing number as NaN.
    return value is None or (isinstance(value, float) and math.isnan(value))


def draw_rows(rows: Iterable[Row], count: int | None, seed: int) -> list[Row]:
    """Draw rows at random, each subset equally likely, while they stream past (reservoir sampling).

    Args:
        count: How many, at least 1; None, or more than there are, for all.
    """
    if count is None:
        return list(rows)
    generator = random.Random(seed)
    kept: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        if number < count:
            kept.append((number, row))
        elif (slot := generator.randrange(number + 1)) < count:
            kept[slot] = (number, row)
    return [row for _, row in sorted(kept, key=itemgetter(0))]


def _with_names(records: Iterable[Record], label: str, names: Sequence[str]) -> Iterator[Record]:
    for location, values in records:
        value = values[label]
        yield Record(location, {**values, label: None if value is None or value < 0 else names[value]})


def _name_by_value(label_names: LabelNames | None) -> dict[str, str] | None:
    if label_names is None:
        return None
    if not isinstance(label_names, Mapping):
        label_names = {name: name for name in label_names}
    return {as_label(value) or '': name for value, name in label_names.items()}


def as_label(value: Any) -> str | None:
    """Format a label as text, 5.0 as 5; None if it is not a label."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip() if isinstance(value, (str, int, float)) and value == value else None


def _in_order(names: Iterable[str]) -> list[str]:
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return sorted(names)
    # NaN has no place in an order of numbers.
    if not all(map(math.isfinite, numbers.values())):
        return sorted(numbers)
    return sorted(numbers, key=lambda name: (numbers[name], name))
