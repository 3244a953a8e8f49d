"""Rows of measurements as text: one table printer for every section."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Characters of an error that are shown; the JSON has all of it.
MAX_ERROR_LENGTH = 100


class Report(NamedTuple):
    """The result of a section: rows of measurements, the line above them, and rows of fits over the tokens."""

    rows: list[dict[str, Any]]
    head: str
    fits: Sequence[dict[str, Any]] = ()


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table: of COLUMNS those that a row has something in, and at the end why a row has none."""
    keys = [key for key in COLUMNS if any(_show(row, key) for row in rows)]
    table = [[COLUMNS[key][0] for key in keys], *([_show(row, key) or '-' for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    align = ['<' if any(isinstance(row.get(key), str) for row in rows) else '>' for key in keys]
    lines = []
    for row, cells in zip(({}, *rows), table, strict=True):
        line = '  '.join(f'{cell:{side}{width}}' for cell, side, width in zip(cells, align, widths, strict=True))
        reason = f'  {row["error"][:MAX_ERROR_LENGTH]}' if 'error' in row else ''
        lines.append(line.rstrip() + reason)
    return '\n'.join(lines)


def _show(row: dict[str, Any], key: str) -> str:
    value, layout = row.get(key), COLUMNS[key][1]
    if value is None:
        return ''
    return layout(value) if callable(layout) else format(value, layout)


# The title of each column, and its layout for `format` or a function; columns come in this order.
COLUMNS: dict[str, tuple[str, str | Callable[[Any], str]]] = {
    'row': ('row', ''),
    'group': ('group', ''),
    'size': ('size', lambda value: 'x'.join(map(str, value))),
    'shape': ('shape', lambda value: 'x'.join(map(str, value))),
    'direction': ('', ''),
    'quantity': ('fit of', lambda key: COLUMNS[key][0]),
    'what': ('', ''),
    'tokens': ('T', ''),
    'behaviors': ('behaviours', ''),
    'batch_size': ('batch', ''),
    'name': ('', ''),
    'form': ('', lambda form: '' if form == 'eager' else form),
    'paper_ratio': ('paper: ratio', '.2f'),
    'paper_memory_ratio': ('memory', '.2f'),
    'parameters': ('params', ','),
    'token_ms': (
        'ms of a token by position',
        lambda by: ' '.join(f'{position}: {ms:.2f}' for position, ms in by.items()),
    ),
    'flatness': ('last/300', '.3f'),
    'image_seconds': ('image s', '.1f'),
    'per_second': ('/s', '.4g'),
    'milliseconds': ('ms', '.3f'),
    'p99_milliseconds': ('p99 ms', '.3f'),
    'cpu_milliseconds': ('CPU ms', '.3f'),
    'cpu_ratio': ('CPU ratio', '.2f'),
    'at_most': ('', lambda at_most: 'at most' if at_most else ''),
    'floor': ('floor', 'g'),
    'goal': ('goal', 'g'),
    'measured': ('measured', '.2f'),
    'ratio': ('ratio', '.2f'),
    'ratio_quartiles': ('quartiles', lambda pair: f'{pair[0]:.2f} - {pair[1]:.2f}'),
    'peak_bytes': ('peak MiB', lambda value: f'{value / 2**20:.1f}'),
    'peak_ratio': ('to first', '.2f'),
    'saved_bytes': ('kept MiB', lambda value: f'{value / 2**20:.1f}'),
    'state_bytes': ('state KiB', lambda value: f'{value / 1024:.0f}'),
    'exponent': ('exponent', '.2f'),
    'milliseconds_pair': ('ms', lambda pair: f'{pair[0]:.4f} / {pair[1]:.4f}'),
    'verdict': ('', ''),
    'processor': ('on', ''),
}
