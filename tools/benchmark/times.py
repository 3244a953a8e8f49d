"""Times of calls that are interleaved, as they are and compiled; what fails is named, and the others go on."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.memory import peak_memory

Call = Callable[[], object]
# `torch.compile`, or what stands in its place.
Wrap = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
# Every call of a group is compiled anew, and they may share their code.
MOST_COMPILED = 64


def time_calls(
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int,
    progress: bool = False,
    baselines: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Time calls that are interleaved.

    Args:
        baselines: The name that each is compared to; None is the first of the calls for all.

    Returns:
        For each `milliseconds`, the median `ratio` of the time of what it is compared to, in the same round, to its own
        with `ratio_quartiles`, both None where that is not among the calls, and `peak_bytes` beyond what there was
        before.
    """
    if not calls:
        return {}
    seconds = dict(zip(calls, time_rounds(list(calls.values()), device, rounds, progress=progress), strict=True))
    found: dict[str, dict[str, Any]] = {}
    for name, own in seconds.items():
        first = seconds.get(next(iter(calls)) if baselines is None else baselines[name])
        timing = compare_rounds(own, own if first is None else first)
        found[name] = {
            'milliseconds': 1e3 * timing.seconds,
            'ratio': None if first is None else timing.ratio,
            'ratio_quartiles': None if first is None else timing.quartiles,
            'peak_bytes': peak_memory(calls[name], device),
        }
    return found


def time_what_runs(
    calls: Mapping[str, Call], device: torch.device, rounds: int, progress: bool, baselines: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """What `time_calls` gives, and `error` of the calls that fail: without them the rounds begin anew."""
    failed: dict[str, dict[str, Any]] = {}
    while True:
        # That is what an error belongs to; one of a GPU comes when it is waited for, before the next call.
        begun: list[str] = []
        running = {name: _noting(name, call, begun) for name, call in calls.items() if name not in failed}
        try:
            return failed | time_calls(running, device, rounds, progress, baselines)
        except Exception as error:
            if not begun:
                raise
            failed[begun[0]] = {'error': describe_error(error)}


def time_compiled(
    makers: Mapping[str, Callable[[Wrap], Call]],
    device: torch.device,
    rounds: int,
    progress: bool = False,
    baselines: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Compile calls, and time those that could be, among themselves.

    Args:
        makers: Each makes its call, with the given `torch.compile` around the function to be compiled.
        baselines: As of `time_calls`.

    Returns:
        What `time_calls` gives, with `compile_seconds`, which are no part of the times; or `error` alone, where the
        compiler, or what it has made, failed. There is no ratio to what failed.
    """
    calls: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
    baselines = baselines or dict.fromkeys(makers, next(iter(makers), ''))
    with fresh_compiler():
        for name, make in makers.items():
            start = time.perf_counter()
            try:
                call = make(_compile)
                call()
            # Whatever the compiler or what it has made raises: the others are measured all the same.
            except Exception as error:
                found[name] = {'error': describe_error(error)}
            else:
                calls[name], found[name] = call, {'compile_seconds': time.perf_counter() - start}
        for name, figures in time_what_runs(calls, device, rounds, progress, baselines).items():
            found[name] = figures if 'error' in figures else found[name] | figures
    return found


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forget what was compiled, and let functions that share their code be compiled each for itself."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED):
        yield


def describe_error(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__


def _noting(name: str, call: Call, begun: list[str]) -> Call:
    def run() -> object:
        begun[:] = [name]
        return call()

    return run


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
