"""Time and memory against the number of tokens: measuring until a limit, and fits."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from tools.benchmark.compare import Candidate, compare, max_call_bytes
from tools.benchmark.printer import Report

TOKENS = tuple(2**power for power in range(7, 17))
QUANTITIES = ('milliseconds', 'peak_bytes')


def measure_until(
    make: Callable[[int, int], list[Candidate]],
    tokens: Sequence[int],
    device: torch.device,
    rounds: int,
    *,
    most_seconds: float,
    total_tokens: int = 1,
    directions: Sequence[str] = ('forward',),
    dtype: str = 'float32',
) -> list[dict[str, Any]]:
    """Measure candidates at one length after the other, each until a call could take more than a limit.

    Args:
        make: Makes the candidates for a number of sequences and their length.
        tokens: Lengths; none are TOKENS.
        total_tokens: Tokens of a batch, which has at least one sequence.

    Returns:
        The rows of `compare` with `tokens` and `batch_size`. A candidate that stops has one row more, whose `error` is
        the reason; one that fails stops too.

    Raises:
        ValueError: there are fewer than two lengths to fit a line through.
    """
    lengths = sorted(set(tokens or TOKENS))
    if len(lengths) < 2:
        raise ValueError(f'expected at least 2 lengths, got {lengths}')
    rows: list[dict[str, Any]] = []
    limit = max_call_bytes(device) / 2**30
    for direction in directions:
        stopped: set[str] = set()
        for length, following in pairwise([*lengths, 0]):
            batch, more = (max(1, total_tokens // (each or 1)) for each in (length, following))
            candidates = make(batch, length)
            first = candidates[0].name
            running = [x._replace(baseline=x.baseline or first) for x in candidates if x.name not in stopped]
            measured = compare(running, device, rounds, dtype=dtype, directions=[direction]) if running else []
            rows += [{'tokens': length, 'batch_size': batch, **row} for row in measured]
            stopped |= {row['name'] for row in measured if 'error' in row}
            # No call grows faster than this.
            growth = more * following**2 / (batch * length**2)
            for row in (row for row in measured if 'error' not in row):
                seconds, gib = growth * row.get('milliseconds', 0) / 1e3, growth * row['peak_bytes'] / 2**30
                if seconds > most_seconds or gib > limit:
                    stopped.add(row['name'])
                    reason = f'left out: could take {seconds:.3g} s of {most_seconds:.3g}, {gib:.3g} GiB of {limit:.3g}'
                    label = {'tokens': following, 'batch_size': more, 'direction': direction, 'name': row['name']}
                    rows.append({**label, 'error': reason})
    return rows


def fit_exponent(x: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the power of x that the values grow with, over the upper half of the range of x.

    That is the slope of the least-squares line through the logarithms; None where fewer than two sizes are left.
    """
    # The middle of 128 to 2048 is 512, which a rounded root must not leave out.
    middle = (1 - 1e-9) * math.sqrt(min(x) * max(x))
    points = np.array([(a, b) for a, b in zip(x, values, strict=True) if a >= middle and b > 0])
    if len({a for a, _ in points}) < 2:
        return None
    sizes, log_values = np.log(points).T
    return float(np.polyfit(sizes, log_values, 1)[0])


def report_fits(rows: list[dict[str, Any]], head: str, quantities: Sequence[str] = QUANTITIES) -> Report:
    """Return a report with a fit for each direction, quantity and name: its `exponent` as a power of the tokens."""
    fits: list[dict[str, Any]] = []
    for direction, quantity in product(dict.fromkeys(row['direction'] for row in rows), quantities):
        own = [row for row in rows if row['direction'] == direction and row.get(quantity) is not None]
        for name in dict.fromkeys(row['name'] for row in own):
            sizes, values = zip(*((row['tokens'], row[quantity]) for row in own if row['name'] == name), strict=True)
            fit = {'direction': direction, 'quantity': quantity, 'name': name}
            fits.append({**fit, 'exponent': fit_exponent(sizes, values)})
    return Report(rows, head, fits)
