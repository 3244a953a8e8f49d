"""Interleaved timing of several calls in one process, compared round by round."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from aft_vision.devices import synchronize

# A shorter call is repeated, so that the clock and the first cache misses do not affect the time.
MIN_SECONDS = 0.02


class Timing(NamedTuple):
    """The time of a call, compared with the first one's."""

    # Median over the rounds.
    seconds: float
    # Median of time(first) / time(this) in the same round: above 1 is faster than the first.
    ratio: float
    quartiles: tuple[float, float]


def time_interleaved(
    calls: Sequence[Callable[[], object]], device: torch.device, rounds: int, **options: Any
) -> list[Timing]:
    """Time calls in turn in every round, and compare them within the rounds.

    Args:
        calls: The others are compared with the first.
        options: Further arguments of `time_rounds`.

    Raises:
        ValueError: there is no call, no round or no warm-up.
    """
    times = time_rounds(calls, device, rounds, **options)
    return [compare_rounds(seconds, times[0]) for seconds in times]


def time_rounds(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    rounds: int,
    *,
    warmup: int = 1,
    min_seconds: float = MIN_SECONDS,
    progress: bool = False,
) -> list[list[float]]:
    """Time calls in turn in every round.

    A disturbance of a round affects all of its calls, so take ratios within a round. Every round starts with another
    call, so that no call always follows the same one.

    Args:
        calls: Functions to time.
        device: Device of the calls; an accelerator is synchronised.
        rounds: Number of rounds, each with one time of every call.
        warmup: Warm-up calls of each. One more call determines its number of repetitions per round.
        min_seconds: A call is repeated within a round for about this time.
        progress: Show a progress bar on standard error.

    Returns:
        For each call its seconds in every round.

    Raises:
        ValueError: there is no call, no round or no warm-up.
    """
    if not calls or rounds < 1 or warmup < 1:
        raise ValueError(
            f'expected at least 1 call, 1 round and 1 warm-up, got {len(calls)} calls, {rounds} rounds and {warmup}'
        )
    repeats = []
    for call in calls:
        for _ in range(warmup):
            call()
        # The first calls may include compilation or tuning.
        repeats.append(max(1, math.ceil(min_seconds / max(_time(call, device, 1), 1e-9))))
    times: list[list[float]] = [[] for _ in calls]
    for turn in tqdm(range(rounds), desc='time', unit='round', leave=False, disable=None if progress else True):
        for offset in range(len(calls)):
            index = (turn + offset) % len(calls)
            times[index].append(_time(calls[index], device, repeats[index]))
    return times


def compare_rounds(seconds: Sequence[float], first: Sequence[float]) -> Timing:
    """Compare the seconds of a call in every round with the first call's in the same rounds."""
    ratios = [base / own for base, own in zip(first, seconds, strict=True)]
    return Timing(statistics.median(seconds), statistics.median(ratios), quartiles(ratios))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; for a single value, that value twice."""
    # Quartiles need two values.
    low, _, high = statistics.quantiles(values if len(values) > 1 else [*values] * 2, n=4, method='inclusive')
    return low, high


def _time(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats
