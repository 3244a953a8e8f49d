"""Lines and records of plain or compressed files; errors name line and column.

Python's own csv and json read them. `datasets.load_dataset` leaves short rows of a CSV and a second column of the same
name without a word, makes timestamps of texts that are dates, counts the line of damaged JSON from the start of a block
within the file, and copies each file to a cache.
"""

import bz2
import csv
import gzip
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

# Errors of the openers for a damaged or encrypted file; bz2 and gzip raise OSError too.
DAMAGE_ERRORS = (EOFError, OSError, RuntimeError, lzma.LZMAError, zlib.error, zipfile.BadZipFile)
OPENERS: dict[str, Any] = {'.gz': gzip.open, '.xz': lzma.open, '.bz2': bz2.open}
MAX_FIELD_SIZE = 2**31 - 1


class Record(NamedTuple):
    """One row: `location` names the file and the line, for an error."""

    location: str
    values: dict[str, Any]


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Stream the lines of a file, which may be a .gz, .xz, .bz2 or .zip, with their numbers from 1.

    Raises:
        ValueError: the file is missing or damaged, or a .zip of several.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'expected a file, got {path}, which is none')
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except PermissionError:
        raise
    except DAMAGE_ERRORS as error:
        raise ValueError(f'{path} is damaged after line {number}: {error}') from error


def read_text_lines(path: str | Path, encoding: str = 'utf-8') -> Iterator[tuple[int, str]]:
    """Stream the lines of a file as `read_lines` does, decoded, and of UTF-8 without a byte-order mark."""
    for number, line in read_lines(path):
        try:
            yield number, line.decode('utf-8-sig' if number == 1 and encoding == 'utf-8' else encoding)
        except UnicodeDecodeError as error:
            raise ValueError(
                f'{path}, line {number}, byte {error.start + 1}: expected UTF-8, got {line[error.start]:#x}'
            ) from error


def read_json(path: str | Path) -> Iterator[Record]:
    """Stream the objects of JSON lines, or of one JSON list.

    Raises:
        ValueError: the file is damaged, or holds something else; names line and column, or the item of a list.
    """
    lines = read_text_lines(path)
    start, first = next(((number, line) for number, line in lines if line.strip()), (1, ''))
    if first.lstrip().startswith('['):
        # Blank lines before it count for the line of an error.
        values = _parse_json(path, '\n' * (start - 1) + first + ''.join(line for _, line in lines))
        yield from (_as_record(f'{path}, item {number}', value) for number, value in enumerate(values, 1))
        return
    for number, line in chain([(start, first)], lines):
        if line.strip():
            yield _as_record(f'{path}, line {number}', _parse_json(path, line, number))


def read_delimited(
    path: str | Path,
    delimiter: str = ',',
    columns: Sequence[str] | None = None,
    quoted: bool = True,
    encoding: str = 'utf-8',
    needed: Sequence[str] = (),
    typed: bool = False,
) -> Iterator[Record]:
    """Stream the rows of a CSV or TSV.

    Args:
        columns: Their names; None where the first line holds them.
        quoted: Quotes may surround a field with delimiters and line ends; False: a quote is a character.
        encoding: Encoding of the characters, by its name in Python.
        needed: Columns that the first line must have.
        typed: The names in the first line end with types, such as RecBole's `user_id:token`, which are removed.

    Raises:
        ValueError: the file is damaged, or a row has another number of columns, or the first line lacks one; names the
            line where the row begins.
    """
    for number, row in _read_rows(path, delimiter, quoted, encoding):
        location = f'{path}, line {number}'
        if columns is None:
            columns = [name.partition(':')[0] for name in row] if typed else row
            if len(set(columns)) < len(columns):
                raise ValueError(f'{location}: expected column names that differ, got {", ".join(columns)}')
            if not set(needed) <= set(columns):
                raise missing_columns(location, needed, columns)
        elif len(row) == len(columns):
            yield Record(location, dict(zip(columns, row, strict=True)))
        else:
            raise ValueError(
                f'{location}, column {min(len(row), len(columns)) + 1}: expected {len(columns)} columns '
                f'({", ".join(columns)}), got {len(row)}'
            )


def read_parquet(path: str | Path, columns: Sequence[str]) -> Iterator[Record]:
    """Stream some columns of a parquet file; a location counts rows from 1.

    Raises:
        ValueError: the file is missing or damaged, or lacks a column.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        names = file.schema_arrow.names
        if not set(columns) <= set(names):
            raise missing_columns(f'{path}, row 1', columns, names)
        rows = (row for batch in file.iter_batches(columns=list(columns)) for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield Record(f'{path}, row {number}', row)
    except (ArrowException, OSError) as error:
        raise ValueError(f'expected a parquet file, got {path}: {error}') from error


def missing_columns(location: str, expected: Sequence[str], got: Sequence[str]) -> ValueError:
    """Build the error for a row without a column."""
    listed = ', '.join(got) or 'none'
    return ValueError(f'{location}: expected the columns {", ".join(expected):.200}, got {listed:.200}')


def _open(path: Path) -> IO[bytes]:
    if path.suffix != '.zip':
        return OPENERS.get(path.suffix, lambda path: path.open('rb'))(path)
    archive = zipfile.ZipFile(path)
    members = [name for name in archive.namelist() if not name.endswith('/') and not name.startswith('__MACOSX/')]
    if len(members) != 1:
        raise ValueError(f'expected one file in {path}, got {len(members)}: {", ".join(members)}')
    return archive.open(members[0])


def _parse_json(path: str | Path, text: str, line: int | None = None) -> Any:
    """Parse a line of a file, or a whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'{path}, line {line or error.lineno}, column {error.colno}: not JSON: {error.msg}') from error


def _as_record(location: str, value: Any) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f'{location}: expected a JSON object with the columns as keys, got {type(value).__name__}')
    return Record(location, value)


def _read_rows(path: str | Path, delimiter: str, quoted: bool, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Stream the rows that are not empty with the numbers of the lines where they begin."""
    if not quoted:
        for number, line in read_text_lines(path, encoding):
            if line.strip() or delimiter in line:
                yield number, line.rstrip('\r\n').split(delimiter)
        return
    lines = (line for _, line in read_text_lines(path, encoding))
    reader, number = csv.reader(lines, delimiter=delimiter, strict=True), 1
    while True:
        # The limit is one of the process, in which other readers may be open.
        limit = csv.field_size_limit(MAX_FIELD_SIZE)
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f'{path}, line {number}: not a CSV with {delimiter!r} between columns: {error}') from error
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        if row:
            yield number, row
        number = reader.line_num + 1
