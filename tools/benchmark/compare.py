"""Alternatives side by side: time, peak memory and what is kept for the backward, eager and compiled."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aft_vision.timing import compare_rounds, time_rounds
from tools.benchmark.memory import peak_memory, saved_memory
from tools.machine import autocast

Call = Callable[[], object]
# `torch.compile`, or what stands in its place.
Wrap = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
DIRECTIONS = ('forward', 'training')
# Attention that forms its (h, T, T) weights, as every attention did when the AFT paper was written.
PAPER_BASELINE = "the paper's baseline"
# Matrices of the size of its weights that a layer holds: before and after the softmax, and of the mask or a gradient.
MATERIALISED_MATRICES = 3
# Every call of a group is compiled anew, and they may share their code.
MOST_COMPILED = 64


class Prepared(NamedTuple):
    """A forward pass, and the tensors that get gradients in its backward.

    Args:
        given: Inputs and constants, which are there whatever is kept for the backward.
    """

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()
    given: Sequence[Tensor] = ()


class Candidate(NamedTuple):
    """One of the alternatives.

    Args:
        prepare: Makes its forward pass, for training or not.
        compiles: Whether a compiled form makes sense; the compiler would make fused attention of a materialised one.
    """

    name: str
    prepare: Callable[[bool], Prepared]
    compiles: bool = True


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """Within it, `F.scaled_dot_product_attention` forms its weights; half precision stays half."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def materialised(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The forward pass within `math_attention`."""

    def run() -> Tensor:
        with math_attention():
            return forward()

    return run


def too_large(batch: int, heads: int, tokens: int, layers: int, most_bytes: float) -> str | None:
    """Why materialised attention cannot be measured, or None where it can.

    Args:
        layers: That hold their weights at once: all in training, else one.
        most_bytes: What it may take.
    """
    needed = 4 * MATERIALISED_MATRICES * layers * batch * heads * tokens**2
    if needed <= most_bytes:
        return None
    return f'its weights alone take {needed / 2**30:.1f} GiB, the limit is {most_bytes / 2**30:.1f} GiB'


def with_backward(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Call:
    """A call of the forward and of its backward, with the gradients of the leaves that it reaches."""
    grad = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, grad, allow_unused=True)


def compare(
    candidates: Sequence[Candidate],
    device: torch.device,
    rounds: int,
    *,
    dtype: str = 'float32',
    training: bool = True,
    compiled: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure alternatives.

    Args:
        candidates: The first is compared to.
        dtype: Key of PRECISIONS; autocast is entered anew in every forward, so that it casts the weights as in use.
        training: Forward and backward too.
        compiled: Each under `torch.compile` too, where that makes sense.

    Returns:
        A row for each direction of DIRECTIONS and candidate: `direction`, `name`, `eager`, and `compiled`, None where
        that was not wanted, makes no sense or the eager form failed. Both are what `time_calls` gives, or `error` alone
        where the candidate failed, as for lack of memory: the others go on without it. `eager` in training has
        `saved_bytes`, which autograd keeps beside leaves and inputs, and `compiled` is what `time_compiled` gives.
    """
    rows = []
    baselines = dict.fromkeys((each.name for each in candidates), candidates[0].name)
    for direction in DIRECTIONS[: 1 + training]:
        learns = direction == 'training'
        with contextlib.nullcontext() if learns else torch.inference_mode():
            ready, eager = _prepare(candidates, learns, device, dtype)
            calls = {name: each.call for name, each in ready.items()}
            eager |= _time_what_runs(calls, device, rounds, progress, baselines)
            for name in [name for name in ready if learns and 'error' not in eager[name]]:
                eager[name] = _with_saved(eager[name], ready[name])
            sensible = [each.name for each in candidates if each.compiles and 'error' not in eager[each.name]]
            makers = {name: ready[name].make for name in sensible}
            found = time_compiled(makers, device, rounds, progress, baselines) if compiled else {}
        for name in baselines:
            rows.append({'direction': direction, 'name': name, 'eager': eager[name], 'compiled': found.get(name)})
    return rows


def require_figures(rows: Sequence[dict[str, Any]]) -> None:
    """Raise a RuntimeError if one of the rows of `compare` has none in its eager form."""
    for row in rows:
        if 'error' in row['eager']:
            raise RuntimeError(f'{row["name"]} failed: {row["eager"]["error"]}')


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
        for name, figures in _time_what_runs(calls, device, rounds, progress, baselines).items():
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


class _Ready(NamedTuple):
    """A candidate that is ready to be measured.

    Args:
        make: Its call, with something around its forward.
        call: As it is.
        forward: In its precision.
        leave_out: What is there whatever is kept for the backward.
    """

    make: Callable[[Wrap], Call]
    call: Call
    forward: Callable[[], Tensor]
    leave_out: list[Tensor]


def _prepare(
    candidates: Sequence[Candidate], learns: bool, device: torch.device, dtype: str
) -> tuple[dict[str, _Ready], dict[str, dict[str, Any]]]:
    # Those that are ready, and `error` of the others.
    ready: dict[str, _Ready] = {}
    failed: dict[str, dict[str, Any]] = {}
    for each in candidates:
        try:
            prepared = each.prepare(learns)
            make = _maker(prepared, learns, device, dtype)
            forward, leave_out = _in_precision(prepared.forward, device, dtype), [*prepared.leaves, *prepared.given]
            ready[each.name] = _Ready(make, make(_as_is), forward, leave_out)
        # Whatever it is: the others are measured all the same.
        except Exception as error:
            failed[each.name] = {'error': describe_error(error)}
    return ready, failed


def _with_saved(figures: dict[str, Any], ready: _Ready) -> dict[str, Any]:
    # With what is kept for the backward, or `error` alone: to find it takes one more forward, which may fail too.
    try:
        return {**figures, 'saved_bytes': saved_memory(ready.forward, ready.leave_out)}
    # As above.
    except Exception as error:
        return {'error': describe_error(error)}


def _time_what_runs(
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


def _noting(name: str, call: Call, begun: list[str]) -> Call:
    def run() -> object:
        begun[:] = [name]
        return call()

    return run


def _maker(prepared: Prepared, learns: bool, device: torch.device, dtype: str) -> Callable[[Wrap], Call]:
    def make(wrap: Wrap) -> Call:
        forward = _in_precision(wrap(prepared.forward), device, dtype)
        return with_backward(forward, prepared.leaves) if learns else forward

    return make


def _in_precision(forward: Callable[[], Tensor], device: torch.device, dtype: str) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with autocast(device, dtype):
            return forward()

    return run


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
