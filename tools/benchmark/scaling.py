"""Time and memory against the size of the inputs: measuring until a limit, and exponents."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tools.benchmark.compare import Candidate, compare, most_bytes
from tools.benchmark.printer import Report, plot_curves

TOKENS = tuple(2**power for power in range(7, 17))
QUANTITIES = ('milliseconds', 'peak_bytes')


class Shape(NamedTuple):
    """The inputs of a call: sequences of a batch, and tokens of each."""

    batch: int
    tokens: int


def shapes_of(tokens: Sequence[int], total_tokens: int = 1) -> list[Shape]:
    """Return the shapes of lengths, sorted and each once, with at least one sequence in a batch of `total_tokens`.

    Raises:
        ValueError: there are fewer than two lengths to fit a line through, one is below 1, or no token in a batch.
    """
    lengths = sorted(set(tokens))
    if len(lengths) < 2 or lengths[0] < 1:
        raise ValueError(f'expected at least 2 lengths from 1 token, got {list(tokens)}')
    if total_tokens < 1:
        raise ValueError(f'expected at least 1 token in a batch, got {total_tokens}')
    return [Shape(max(1, total_tokens // length), length) for length in lengths]


def measure_until(
    make: Callable[[Shape], list[Candidate]],
    shapes: Sequence[Shape],
    most_seconds: float,
    device: torch.device,
    rounds: int,
    *,
    dtype: str = 'float32',
    directions: Sequence[str] = ('forward',),
) -> list[dict[str, Any]]:
    """Measure candidates at one shape after the other, each until a call could take more than a limit.

    Args:
        make: Makes the candidates of a shape.
        most_seconds: Limit of a call; that of its memory is half of what is free.

    Returns:
        The rows of `compare` with `tokens` and `batch_size`. A candidate that stops has one row more with `refused`,
        the reason; one that fails stops too.
    """
    rows: list[dict[str, Any]] = []
    most = most_bytes(device)
    for direction in directions:
        last: dict[str, dict[str, Any]] = {}
        before = shapes[0]
        for shape in shapes:
            label = {'tokens': shape.tokens, 'batch_size': shape.batch}
            # No call grows faster than this.
            growth = shape.batch * shape.tokens**2 / (before.batch * before.tokens**2)
            candidates, running, before = make(shape), [], shape
            for each in candidates:
                reason = _reason(last.get(each.name), growth, most_seconds, most)
                if reason:
                    last[each.name] = {'error': reason}
                    rows.append({**label, 'direction': direction, 'name': each.name, 'refused': reason})
                elif 'error' not in last.get(each.name, {}):
                    running.append(each._replace(baseline=each.baseline or candidates[0].name))
            found = compare(running, device, rounds, dtype=dtype, directions=[direction]) if running else []
            rows += [{**label, **row} for row in found]
            last |= {row['name']: row for row in found}
    return rows


def _reason(last: dict[str, Any] | None, growth: float, most_seconds: float, most: float) -> str | None:
    """Return why a call is not tried that could take `growth` times what the last one took, or None."""
    if last is None or 'error' in last:
        return None
    seconds, size = (growth * last[key] for key in QUANTITIES)
    if seconds > 1e3 * most_seconds:
        return f'a call could take {seconds / 1e3:.3g} s, the limit is {most_seconds:g} s'
    if size > most:
        return f'a call could take {size / 2**30:.3g} GiB, the limit is {most / 2**30:.3g} GiB'
    return None


def fit_exponent(x: Sequence[float], values: Sequence[float], upper: bool = True) -> float | None:
    """Return the slope of the least-squares line through the logarithms.

    Args:
        upper: Fit the upper half of the range of x, in logarithms; else all of it.

    Returns:
        The power of x that the values grow with; None where fewer than two sizes are left.
    """
    points = [(a, b) for a, b in zip(x, values, strict=True) if b > 0]
    middle = math.sqrt(min(a for a, _ in points) * max(a for a, _ in points)) if points and upper else 0.0
    # Of 128 to 2048 the middle is 512, which a rounded root must not leave out.
    points = [(a, b) for a, b in points if a >= middle * (1 - 1e-9)]
    if len({a for a, _ in points}) < 2:
        return None
    logarithms = np.log(points)
    return float(np.polyfit(logarithms[:, 0], logarithms[:, 1], 1)[0])


def report_fits(
    rows: list[dict[str, Any]], x: str, head: str, quantities: Sequence[str] = QUANTITIES, upper: bool = True
) -> Report:
    """Return a report with a fit for each direction, quantity and name: its `exponent` as a power of `x`."""
    fits = []
    for direction in dict.fromkeys(row['direction'] for row in rows):
        for quantity in quantities:
            own = [row for row in rows if row['direction'] == direction and row.get(quantity) is not None]
            for name in dict.fromkeys(row['name'] for row in own):
                points = [(row[x], row[quantity]) for row in own if row['name'] == name]
                exponent = fit_exponent([a for a, _ in points], [b for _, b in points], upper)
                fits.append({'direction': direction, 'quantity': quantity, 'name': name, 'exponent': exponent})
    return Report(rows, head, fits, partial(plot_curves, rows, fits, x, head))
