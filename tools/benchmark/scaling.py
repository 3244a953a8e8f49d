"""Time and memory against the size of the inputs: measuring until a limit, fits, and the section memory."""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tools.benchmark.compare import DIRECTIONS, Candidate, compare, most_bytes
from tools.benchmark.models import check_model, classifiers
from tools.benchmark.printer import Report, plot_curves

TOKENS = tuple(2**power for power in range(7, 17))
QUANTITIES = ('milliseconds', 'peak_bytes')
# Defaults of the section memory.
MODELS = ('deit_tiny_patch16_224', 'aft_conv_tiny', 'aft_full_tiny')
SIZES = ((224, 224), (384, 384), (512, 512), (512, 683), (768, 768), (1024, 768), (1024, 1024))


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
    limits = {'milliseconds': (1e3 * most_seconds, 1e3, 's'), 'peak_bytes': (most_bytes(device), 2**30, 'GiB')}
    for direction in directions:
        # The last row of each candidate that goes on; None before the first shape.
        last: dict[str, dict[str, Any]] | None = None
        before = shapes[0]
        for shape in shapes:
            label = {'tokens': shape.tokens, 'batch_size': shape.batch}
            # No call grows faster than this.
            growth = shape.batch * shape.tokens**2 / (before.batch * before.tokens**2)
            candidates, before = make(shape), shape
            reasons = {name: _excess(row, growth, limits) for name, row in (last or {}).items()}
            refused = {name: reason for name, reason in reasons.items() if reason}
            rows += [{**label, 'direction': direction, 'name': name, 'refused': refused[name]} for name in refused]
            running = [
                each._replace(baseline=each.baseline or candidates[0].name)
                for each in candidates
                if last is None or (each.name in last and each.name not in refused)
            ]
            found = compare(running, device, rounds, dtype=dtype, directions=[direction]) if running else []
            rows += [{**label, **row} for row in found]
            last = {row['name']: row for row in found if 'error' not in row}
    return rows


def _excess(row: dict[str, Any], growth: float, limits: dict[str, tuple[float, float, str]]) -> str | None:
    """Return why a call is not tried that could take `growth` times the figures of a row, or None.

    Args:
        limits: For each figure its limit, and the number and the name of the unit that it is told in.
    """
    for key, (most, unit, name) in limits.items():
        if growth * row[key] > most:
            return f'a call could take {growth * row[key] / unit:.3g} {name}, the limit is {most / unit:.3g} {name}'
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
    # The middle of 128 to 2048 is 512, which a rounded root must not leave out.
    points = [(a, b) for a, b in points if a >= middle * (1 - 1e-9)]
    if len({a for a, _ in points}) < 2:
        return None
    logarithms = np.log(points)
    return float(np.polyfit(logarithms[:, 0], logarithms[:, 1], 1)[0])


def report_fits(
    rows: list[dict[str, Any]], x: str, head: str, quantities: Sequence[str] = QUANTITIES, upper: bool = True
) -> Report:
    """Return a report with a fit for each direction, quantity and name: its `exponent` as a power of `x`.

    Of pixels a fit has `bytes_per_pixel` too, the slope of the least-squares line, and its ratio to the first model's.
    """
    fits: list[dict[str, Any]] = []
    for direction in dict.fromkeys(row['direction'] for row in rows):
        for quantity in quantities:
            own = [row for row in rows if row['direction'] == direction and row.get(quantity) is not None]
            first = None
            for name in dict.fromkeys(row['name'] for row in own):
                points = [(row[x], row[quantity]) for row in own if row['name'] == name]
                sizes, values = zip(*points, strict=True)
                fit = {'direction': direction, 'quantity': quantity, 'name': name}
                fits.append({**fit, 'exponent': fit_exponent(sizes, values, upper)})
                if x == 'pixels':
                    slope = float(np.polyfit(sizes, values, 1)[0])
                    first = first or slope
                    fits[-1] |= {'bytes_per_pixel': slope, 'slope_ratio': slope / first}
    return Report(rows, head, fits, partial(plot_curves, rows, fits, x, head))


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the memory of dense features (`features_only`, the last three maps) at image sizes.

    The rows are those of `compare` with `size` (H, W), padded to whole patches, and `pixels` of the batch, and without
    times. A model with fused attention is measured with materialised attention too.

    Raises:
        ValueError: there are fewer than two sizes to fit a line through, or timm has no such model.
    """
    sizes = sorted(args.sizes or SIZES, key=math.prod)
    if math.prod(sizes[0]) == math.prod(sizes[-1]):
        raise ValueError(f'expected at least 2 image sizes of different area, got {sizes}')
    rows = []
    for name in args.models or MODELS:
        check_model(name)
        for size in sizes:
            candidates = classifiers([name], (args.batch_size, 3, *size), device, dense=True)
            found = compare(candidates, device, 0, dtype=args.dtype, directions=DIRECTIONS[: 1 + args.training])
            rows += [{**row, 'size': size, 'pixels': args.batch_size * math.prod(size)} for row in found]
    head = f'dense features, batch of {args.batch_size}, beyond weights and images; slopes to the first model'
    return report_fits(rows, 'pixels', head, ('peak_bytes', 'saved_bytes'), upper=False)
