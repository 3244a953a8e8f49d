"""Times of calls that are interleaved, as they are and compiled; a call that fails is named, and the others go on."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from aft_vision.timing import compare_rounds, time_latency, time_rounds
from tools.benchmark.memory import peak_memory

Call = Callable[[], object]
# `torch.compile`, or what replaces it.
Wrap = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
# Every call of a group is compiled separately, and they may share their code.
MOST_COMPILED = 64


def time_calls(
    calls: Mapping[str, Call], device: torch.device, rounds: int, baselines: Mapping[str, str], single: bool = False
) -> dict[str, dict[str, Any]]:
    """Time calls that are interleaved; when one fails, the rounds begin again without it.

    Args:
        baselines: The name that each call is compared with.
        single: Never repeat a call within a round, and give the slowest of a hundred too.

    Returns:
        For each call `milliseconds` (and `p99_milliseconds`), the median `ratio` of the time of its baseline in the
        same round to its own with `ratio_quartiles`, `peak_bytes` beyond what there was before, and `peak_ratio` to the
        baseline's. The ratios are None without a baseline; a call that failed has only `error`.
    """
    failed: dict[str, dict[str, Any]] = {}
    while True:
        # An error belongs to the call that began last; a GPU raises it when it is waited for, before the next call.
        begun: list[str] = []
        running = {name: _noting(name, call, begun) for name, call in calls.items() if name not in failed}
        try:
            return failed | _time(running, device, rounds, baselines, single)
        except Exception as error:
            if not begun:
                raise
            failed[begun[0]] = {'error': describe_error(error)}


def time_compiled(
    makers: Mapping[str, Callable[[Wrap], Call]], device: torch.device, rounds: int, baselines: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Compile calls, and time those that can be compiled.

    Args:
        makers: Each makes its call, with the given `torch.compile` around the function to be compiled.

    Returns:
        The figures of `time_calls` with `compile_seconds`, which are no part of the times.
    """
    calls: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
    with fresh_compiler():
        for name, make in makers.items():
            start = time.perf_counter()
            try:
                call = make(lambda function: torch.compile(function, dynamic=False))
                call()
            # Whatever the compiler or the compiled code raises: the others are measured all the same.
            except Exception as error:
                found[name] = {'error': describe_error(error)}
            else:
                calls[name], found[name] = call, {'compile_seconds': time.perf_counter() - start}
        for name, figures in time_calls(calls, device, rounds, baselines).items():
            found[name] = figures if 'error' in figures else found[name] | figures
    return found


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled, and compile functions that share their code separately."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED):
        yield


def describe_error(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__


def show_progress() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr.isatty()


def _time(
    calls: dict[str, Call], device: torch.device, rounds: int, baselines: Mapping[str, str], single: bool
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    if not calls:
        return found
    if single:
        latencies = time_latency(list(calls.values()), device, rounds, progress=show_progress())
        for name, latency in zip(calls, latencies, strict=True):
            times = {'milliseconds': 1e3 * latency.median, 'p99_milliseconds': 1e3 * latency.p99}
            found[name] = {**times, 'ratio': latency.ratio, 'ratio_quartiles': latency.quartiles}
    else:
        seconds = time_rounds(list(calls.values()), device, rounds, progress=show_progress())
        for name, own in zip(calls, seconds, strict=True):
            first = seconds[list(calls).index(baselines[name])] if baselines[name] in calls else own
            timing = compare_rounds(own, first)
            found[name] = {'milliseconds': 1e3 * timing.seconds, 'ratio': timing.ratio}
            found[name] |= {'ratio_quartiles': timing.quartiles}
    peaks = {name: peak_memory(call, device) for name, call in calls.items()}
    for name, figures in found.items():
        base = peaks.get(baselines[name])
        figures |= {'peak_bytes': peaks[name], 'peak_ratio': peaks[name] / base if base else None}
        if baselines[name] not in calls:
            figures |= {'ratio': None, 'ratio_quartiles': None}
    return found


def _noting(name: str, call: Call, begun: list[str]) -> Call:
    def run() -> object:
        begun[:] = [name]
        return call()

    return run
