"""What was measured against the number of tokens: exponents, a table and a plot."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aft_vision.visualize import new_figure

# What is measured, and the words for it.
QUANTITIES = {'milliseconds': 'time of a call (ms)', 'peak_bytes': 'peak memory beyond the inputs (MiB)'}


def fit_exponent(tokens: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope of the least-squares line through the logarithms, over the upper half of their range.

    Returns:
        The power of the tokens that the values grow with; None where less than two lengths lie in the upper half.
    """
    points = [(x, y) for x, y in zip(tokens, values, strict=True) if y > 0]
    middle = math.sqrt(min(x for x, _ in points) * max(x for x, _ in points)) if points else 0.0
    # Of 128 to 2048 the middle is 512, which a rounded root must not leave out.
    upper = [(x, y) for x, y in points if x >= middle * (1 - 1e-9)]
    if len({x for x, _ in upper}) < 2:
        return None
    x, y = np.log(upper).T
    return float(np.polyfit(x, y, 1)[0])


def fit_scaling(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each operation `operation` and the exponent of each of QUANTITIES."""
    fits = []
    for name in dict.fromkeys(row['operation'] for row in rows):
        own = [row for row in rows if row['operation'] == name]
        lengths = [row['tokens'] for row in own]
        exponents = {quantity: fit_exponent(lengths, [row[quantity] for row in own]) for quantity in QUANTITIES}
        fits.append({'operation': name, **exponents})
    return fits


def format_scaling(
    rows: Sequence[dict[str, Any]],
    fits: Sequence[dict[str, Any]],
    stops: Sequence[dict[str, Any]],
    quantities: Mapping[str, str] = QUANTITIES,
) -> str:
    """A table for each quantity, with the exponent at the end of its lines, and a line for each that stopped.

    Args:
        quantities: The keys of QUANTITIES and the words for them.
    """
    lengths = sorted({row['tokens'] for row in rows})
    names = [fit['operation'] for fit in fits]
    width, lines = max(len(name) for name in [*names, *quantities.values()]), []
    for quantity, words in quantities.items():
        lines.append(' '.join([f'{words:{width}}', *(f'{length:>9}' for length in lengths), 'exponent']))
        for fit in fits:
            found = {row['tokens']: row[quantity] for row in rows if row['operation'] == fit['operation']}
            cells = [f'{found[each] / _unit(quantity):9.2f}' if each in found else f'{"-":>9}' for each in lengths]
            exponent = '-' if fit[quantity] is None else f'{fit[quantity]:.2f}'
            lines.append(' '.join([f'{fit["operation"]:{width}}', *cells, f'{exponent:>8}']))
        lines.append('')
    lines += [f'{stop["operation"]} stopped before T = {stop["before"]}: {stop["reason"]}' for stop in stops]
    return '\n'.join(lines).rstrip()


def plot_scaling(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw time and memory over the tokens with logarithmic axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(14, 5.5)
    for axes, (quantity, words) in zip(figure.subplots(1, len(QUANTITIES)), QUANTITIES.items(), strict=True):
        draw_curves(axes, rows, fits, quantity, words)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def draw_curves(
    axes: Any, rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], quantity: str, words: str
) -> None:
    """Draw a quantity over the tokens, a curve for each operation, with its exponent in the legend."""
    for place, fit in enumerate(fits):
        own = [row for row in rows if row['operation'] == fit['operation']]
        points = [(row['tokens'], row[quantity] / _unit(quantity)) for row in own if row[quantity] > 0]
        if points:
            exponent = 'no exponent' if fit[quantity] is None else f'exponent {fit[quantity]:.2f}'
            # Every other line is dashed, so that one that lies on another does not hide it.
            style, label = '--' if place % 2 else '-', f'{fit["operation"]}: {exponent}'
            axes.plot(*zip(*points, strict=True), linestyle=style, marker='o', markersize=4, label=label)
    axes.set(xlabel='tokens T', ylabel=words)
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    axes.grid(alpha=0.3, which='both')
    axes.legend(fontsize=8)


def _unit(quantity: str) -> float:
    return 2**20 if quantity == 'peak_bytes' else 1.0
