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
        that was not wanted or makes no sense. Both are what `time_calls` gives; `eager` in training has `saved_bytes`,
        which autograd keeps beside leaves and inputs, and `compiled` is what `time_compiled` gives.
    """
    rows = []
    for direction in DIRECTIONS[: 1 + training]:
        learns = direction == 'training'
        with contextlib.nullcontext() if learns else torch.inference_mode():
            prepared = {each.name: each.prepare(learns) for each in candidates}
            makers = {name: _maker(each, learns, device, dtype) for name, each in prepared.items()}
            eager = time_calls({name: make(_as_is) for name, make in makers.items()}, device, rounds, progress)
            for name, (forward, leaves, given) in prepared.items() if learns else ():
                eager[name]['saved_bytes'] = saved_memory(_in_precision(forward, device, dtype), [*leaves, *given])
            sensible = {each.name: makers[each.name] for each in candidates if each.compiles}
            found = time_compiled(sensible, device, rounds, progress) if compiled else {}
        for name in prepared:
            rows.append({'direction': direction, 'name': name, 'eager': eager[name], 'compiled': found.get(name)})
    return rows


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
    makers: Mapping[str, Callable[[Callable[..., Any]], Call]],
    device: torch.device,
    rounds: int,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Compile calls, and time those that could be, among themselves.

    Args:
        makers: Each makes its call, with the given `torch.compile` around the function to be compiled.

    Returns:
        What `time_calls` gives, with `compile_seconds`, which are no part of the times; or `error` alone, where the
        compiler failed. There is no ratio if it failed for the first.
    """
    calls: dict[str, Call] = {}
    found: dict[str, dict[str, Any]] = {}
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
        first = next(iter(makers), None)
        for name, figures in time_calls(calls, device, rounds, progress).items():
            lost: dict[str, Any] = {} if first in calls else {'ratio': None, 'ratio_quartiles': None}
            found[name] |= figures | lost
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


def format_comparison(rows: Sequence[dict[str, Any]], indent: str = '') -> str:
    """The rows as text: the eager columns, and the compiled ones where there are any."""
    compiled = any(row['compiled'] for row in rows)
    width = max(len(row['name']) for row in rows)
    rated = 'images_per_second' in rows[0]['eager']
    columns = f'{"ms":>9} {"ratio":>6} {"quartiles":>13} {"peak MiB":>8}'
    head = f'{indent}{"":8} {"":{width}} {columns} {"kept MiB":>8}' + f' {"images/s":>8}' * rated
    lines = [head + (f' | compiled {columns} {"compile s":>9}' if compiled else '')]
    for row in rows:
        saved = row['eager'].get('saved_bytes')
        kept = '' if saved is None else f'{saved / 2**20:8.1f}'
        line = f'{indent}{row["direction"]:8} {row["name"]:{width}} {format_times(row["eager"])} {kept:>8}'
        line += f' {row["eager"]["images_per_second"]:8.1f}' if rated else ''
        if compiled:
            line += f' |          {format_compiled(row["compiled"])}'
        lines.append(line.rstrip())
    return '\n'.join(lines)


def format_times(figures: dict[str, Any]) -> str:
    """What `time_calls` gives, as columns."""
    ratio, quartiles = '-', '-'
    if figures['ratio'] is not None:
        low, high = figures['ratio_quartiles']
        ratio, quartiles = f'{figures["ratio"]:.2f}', f'{low:.2f} - {high:.2f}'
    return f'{figures["milliseconds"]:9.2f} {ratio:>6} {quartiles:>13} {figures["peak_bytes"] / 2**20:8.1f}'


def format_compiled(figures: dict[str, Any] | None) -> str:
    """What `time_compiled` gives, as columns, or why there is nothing."""
    if figures is None:
        return f'{"-":>9}'
    if 'error' in figures:
        return f'failed: {figures["error"][:100]}'
    return f'{format_times(figures)} {figures["compile_seconds"]:9.1f}'


def _maker(prepared: Prepared, learns: bool, device: torch.device, dtype: str) -> Callable[[Callable[..., Any]], Call]:
    def make(wrap: Callable[..., Any]) -> Call:
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
