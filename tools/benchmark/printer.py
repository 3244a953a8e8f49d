"""Rows of measurements as text and as pictures: one table printer and one plot for every section."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aft_vision.visualize import new_figure, save_figure

# Characters of an error that are shown; the JSON has all of it.
LONGEST_ERROR = 100


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
        reason = f'  {row["error"][:LONGEST_ERROR]}' if 'error' in row else ''
        lines.append(line.rstrip() + reason)
    return '\n'.join(lines)


def plot_curves(report: Report, path: Path) -> None:
    """Draw the rows of each fit with logarithmic axes, a panel for each direction and quantity.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = list(dict.fromkeys((fit['direction'], fit['quantity']) for fit in report.fits))
    figure = new_figure(7 * len(panels), 5.5)
    for axes, (direction, quantity) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        unit = 2**20 if quantity.endswith('bytes') else 1
        own = [fit for fit in report.fits if (fit['direction'], fit['quantity']) == (direction, quantity)]
        for place, fit in enumerate(own):
            kept = (row for row in report.rows if (row['name'], row['direction']) == (fit['name'], direction))
            points = [(row['tokens'], row[quantity] / unit) for row in kept if row.get(quantity)]
            exponent = 'no exponent' if fit['exponent'] is None else f'exponent {fit["exponent"]:.2f}'
            # Every other line is dashed, so that one that lies on another does not hide it.
            style, label = '--' if place % 2 else '-', f'{fit["name"]}: {exponent}'
            axes.plot(*zip(*points, strict=True), linestyle=style, marker='o', markersize=4, label=label)
        axes.set(xlabel=COLUMNS['tokens'][0], ylabel=COLUMNS[quantity][0], xscale='log', yscale='log', title=direction)
        axes.grid(alpha=0.3, which='both')
        axes.legend(fontsize=8)
    figure.suptitle(report.head)
    save_figure(figure, path)


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
    'token_ms': ('ms of a token by position', lambda by: ' '.join(f'{place}: {ms:.2f}' for place, ms in by.items())),
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
