"""Time and memory against the size of the inputs: measuring until a limit, and exponents."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tools.benchmark.compare import Candidate, compare

TOKENS = tuple(2**power for power in range(7, 17))


class Shape(NamedTuple):
    """The inputs of a call: texts of a batch, and tokens of each."""

    batch: int
    tokens: int


class Limit(NamedTuple):
    """The most that a call may take: a candidate stops before a length at which it could take more."""

    seconds: float
    bytes: float

    def reason(self, seconds: float, size: float) -> str | None:
        """Return why a call that could take so much is not tried, or None."""
        if seconds > self.seconds:
            return f'a call could take {seconds:.3g} s, the limit is {self.seconds:g} s'
        if size > self.bytes:
            return f'a call could take {size / 2**30:.3g} GiB, the limit is {self.bytes / 2**30:.3g} GiB'
        return None


def ascending_lengths(tokens: Sequence[int]) -> list[int]:
    """Return the lengths sorted and each once.

    Raises:
        ValueError: there are fewer than two lengths to fit a line through, or one is below 1.
    """
    lengths = sorted(set(tokens))
    if len(lengths) < 2 or lengths[0] < 1:
        raise ValueError(f'expected at least 2 lengths from 1 token, got {list(tokens)}')
    return lengths


def measure_until(
    make: Callable[[Shape], list[Candidate]],
    shapes: Sequence[Shape],
    limit: Limit,
    device: torch.device,
    rounds: int,
    *,
    dtype: str = 'float32',
    directions: Sequence[str] = ('forward',),
    guess: Callable[[str, Shape], float] = lambda name, shape: 0.0,
) -> list[dict[str, Any]]:
    """Measure candidates at one shape after the other, each until a call could take more than a limit.

    Args:
        make: Makes the candidates of a shape.
        guess: Bytes that the first call of a name takes at least.

    Returns:
        The rows of `compare` with `tokens` and `batch_size`. A candidate that stops has one row more with `refused`,
        the reason; one that fails stops too.
    """
    rows: list[dict[str, Any]] = []
    for direction in directions:
        spent: dict[str, tuple[float, float]] = {}
        stopped: set[str] = set()
        for place, shape in enumerate(shapes):
            label = {'tokens': shape.tokens, 'batch_size': shape.batch}
            # No call grows faster than this.
            growth = float(shape.batch * shape.tokens**2)
            growth /= shapes[place - 1].batch * shapes[place - 1].tokens ** 2 if place else growth
            running = []
            candidates = make(shape)
            for each in candidates:
                seconds, size = spent.get(each.name, (0.0, guess(each.name, shape)))
                if each.name not in stopped and (reason := limit.reason(seconds * growth, size * growth)):
                    stopped.add(each.name)
                    rows.append({**label, 'direction': direction, 'name': each.name, 'refused': reason})
                if each.name not in stopped:
                    running.append(each._replace(baseline=each.baseline or candidates[0].name))
            if running:
                for row in compare(running, device, rounds, dtype=dtype, directions=[direction]):
                    rows.append({**label, **row})
                    if 'error' in row:
                        stopped.add(row['name'])
                    else:
                        spent[row['name']] = row['milliseconds'] / 1e3, row['peak_bytes']
    return rows


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


def fit_rows(
    rows: Sequence[dict[str, Any]], x: str, quantities: Sequence[str], upper: bool = True
) -> list[dict[str, Any]]:
    """Return a fit for each direction, quantity and name: the `exponent` of the quantity as a power of `x`."""
    fits = []
    for direction in dict.fromkeys(row['direction'] for row in rows):
        for quantity in quantities:
            own = [row for row in rows if row['direction'] == direction and row.get(quantity) is not None]
            for name in dict.fromkeys(row['name'] for row in own):
                points = [(row[x], row[quantity]) for row in own if row['name'] == name]
                exponent = fit_exponent([a for a, _ in points], [b for _, b in points], upper)
                fits.append({'direction': direction, 'quantity': quantity, 'name': name, 'exponent': exponent})
    return fits
