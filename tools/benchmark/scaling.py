"""Time and memory of operations against the number of tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_vision import ops
from tools.benchmark.compare import PAPER_BASELINE, Prepared, with_backward
from tools.benchmark.operations import KERNEL_SIZE, attention
from tools.benchmark.times import Call, time_calls
from tools.machine import PRECISIONS

TOKENS = tuple(2**power for power in range(7, 17))
DIM, HEADS, WINDOW, BIAS_DIM = 256, 4, 256, 64


class Shape(NamedTuple):
    """What a call works on: texts of a batch, and tokens of each."""

    batch: int
    tokens: int

    @property
    def work(self) -> int:
        """What no call grows faster than."""
        return self.batch * self.tokens**2


class Limit(NamedTuple):
    """What a call may take: an operation stops before a length at which it could take more."""

    seconds: float
    bytes: float


class Spent(NamedTuple):
    """What a call of an operation has taken."""

    seconds: float
    bytes: float

    def reason(self, growth: float, limit: Limit) -> str | None:
        """Why a call that takes up to so many times as much is not tried, or None."""
        seconds, size = self.seconds * growth, self.bytes * growth
        if seconds > limit.seconds:
            return f'a call could take {seconds:.3g} s, the limit is {limit.seconds:g} s'
        if size > limit.bytes:
            return f'a call could take {size / 2**30:.3g} GiB, the limit is {limit.bytes / 2**30:.3g} GiB'
        return None


def measure_scaling(
    tokens: Sequence[int],
    limit: Limit,
    device: torch.device,
    dtype: str,
    rounds: int,
    training: bool = False,
    progress: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure the operations of OPERATIONS at lengths, ascending, those of one length interleaved.

    Args:
        tokens: Lengths T.
        dtype: Key of PRECISIONS, of q, k and v.
        training: Forward and backward.

    Returns:
        What `measure_until` gives.

    Raises:
        ValueError: there are fewer than two lengths to fit a line through, or one is below 1.
    """
    precision = PRECISIONS[dtype] or torch.float32

    def prepare(name: str, shape: Shape) -> Call:
        return _call(name, shape.tokens, device, precision, training)

    def guess(name: str, shape: Shape) -> float:
        return 4.0 * MATRICES.get(name, 0) * (1 + training) * shape.tokens**2

    shapes = [Shape(1, length) for length in ascending_lengths(tokens)]
    with torch.set_grad_enabled(training):
        return measure_until(
            list(OPERATIONS),
            shapes,
            prepare,
            limit,
            device,
            rounds,
            baselines=BASELINES,
            guess=guess,
            progress=progress,
        )


def ascending_lengths(tokens: Sequence[int]) -> list[int]:
    """The lengths, sorted and each once.

    Raises:
        ValueError: there are fewer than two lengths to fit a line through, or one is below 1.
    """
    lengths = sorted(set(tokens))
    if len(lengths) < 2 or lengths[0] < 1:
        raise ValueError(f'expected at least 2 lengths from 1 token, got {list(tokens)}')
    return lengths


def measure_until(
    names: Sequence[str],
    shapes: Sequence[Shape],
    prepare: Callable[[str, Shape], Call],
    limit: Limit,
    device: torch.device,
    rounds: int,
    *,
    baselines: Mapping[str, str] | None = None,
    guess: Callable[[str, Shape], float] | None = None,
    progress: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure alternatives at one shape after the other, each until a call could take more than a limit.

    Args:
        names: The first is compared to, unless `baselines` names another.
        prepare: Makes the call of a name at a shape.
        baselines: What a name is compared to.
        guess: Bytes that a call of a name takes at least, for the first shape, which nothing was measured before; None
            tries it.

    Returns:
        A row for each shape and name, `tokens`, `batch_size`, `operation`, its `baseline` and what `time_calls` gives,
        with `ratio` None where the baseline has stopped; and for each that stopped `operation`, `before` (T) and
        `reason`.
    """
    compared = {name: (baselines or {}).get(name, names[0]) for name in names}
    rows: list[dict[str, Any]] = []
    stops: list[dict[str, Any]] = []
    spent: dict[str, Spent] = {}
    running = list(names)
    for place, shape in enumerate(shapes):
        calls: dict[str, Call] = {}
        growth = shape.work / shapes[place - 1].work if place else 1.0
        for name in running:
            known = spent[name] if place else Spent(0.0, guess(name, shape) if guess else 0.0)
            call, reason = _try(name, shape, prepare, known.reason(growth, limit))
            if call is not None:
                calls[name] = call
            else:
                stops.append({'operation': name, 'before': shape.tokens, 'reason': reason})
        running = list(calls)
        for name, figures in time_calls(calls, device, rounds, progress, compared).items():
            spent[name] = Spent(figures['milliseconds'] / 1e3, figures['peak_bytes'])
            place_of = {'tokens': shape.tokens, 'batch_size': shape.batch, 'operation': name}
            rows.append({**place_of, 'baseline': compared[name], **figures})
    return rows, stops


def _try(
    name: str, shape: Shape, prepare: Callable[[str, Shape], Call], reason: str | None
) -> tuple[Call | None, str | None]:
    # The call, which has run, or why there is none: the reason that is known before, or a lack of memory.
    if reason is not None:
        return None, reason
    try:
        call = prepare(name, shape)
        call()
    except torch.OutOfMemoryError:
        return None, 'the device has no memory left'
    return call, None


def _call(name: str, tokens: int, device: torch.device, dtype: torch.dtype, training: bool) -> Call:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, tokens, DIM, generator=generator).to(device, dtype) for _ in 'qkv']
    factors = [0.1 * torch.randn(tokens, BIAS_DIM, generator=generator).to(device) for _ in 'uv']
    for x in (*qkv, *factors):
        x.requires_grad_(training)
    prepared = OPERATIONS[name](qkv, factors)
    return with_backward(prepared.forward, prepared.leaves) if training else prepared.forward


def _full(qkv: list[Tensor], factors: list[Tensor]) -> Prepared:
    q, k, v = qkv
    return Prepared(lambda: ops.aft_full(q, k, v, ops.factorized_bias(factors[0], factors[1])), [*qkv, *factors])


def _local(qkv: list[Tensor], factors: list[Tensor]) -> Prepared:
    q, k, v = qkv
    window = min(WINDOW, q.shape[1])

    def operate() -> Tensor:
        return ops.aft_local_causal(q, k, v, ops.factorized_bias(factors[0], factors[1], window, causal=True))

    return Prepared(operate, [*qkv, *factors])


def _simple(qkv: list[Tensor]) -> Prepared:
    q, k, v = qkv
    return Prepared(lambda: ops.aft_simple_causal(q, k, v), qkv)


def _conv(qkv: list[Tensor]) -> Prepared:
    q, k, v = qkv
    tokens = q.shape[1]
    # The grid of so many tokens that is closest to a square.
    height = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
    kernel = 0.1 * torch.randn(DIM, KERNEL_SIZE, KERNEL_SIZE, generator=torch.Generator().manual_seed(1))
    kernel = kernel.to(q.device).requires_grad_(q.requires_grad)
    return Prepared(lambda: ops.aft_conv(q, k, v, kernel, (height, tokens // height)), [*qkv, kernel])


BASELINE, CAUSAL, WRITTEN_OUT = 'SDPA', 'SDPA causal', f'SDPA math, {PAPER_BASELINE}'
LOCAL, SIMPLE = f'AFT-local causal, s={WINDOW}', 'AFT-simple causal'
# Each makes the operation of q, k and v (1, T, DIM) and the factors (T, BIAS_DIM) of a position bias.
OPERATIONS: dict[str, Callable[[list[Tensor], list[Tensor]], Prepared]] = {
    BASELINE: lambda qkv, factors: attention(qkv, HEADS),
    CAUSAL: lambda qkv, factors: attention(qkv, HEADS, causal=True),
    WRITTEN_OUT: lambda qkv, factors: attention(qkv, HEADS, written_out=True),
    'AFT-full': _full,
    LOCAL: _local,
    SIMPLE: lambda qkv, factors: _simple(qkv),
    f'AFT-conv, k={KERNEL_SIZE}, h=d': lambda qkv, factors: _conv(qkv),
}

# What is causal is compared to causal attention; all else to BASELINE.
BASELINES = {LOCAL: CAUSAL, SIMPLE: CAUSAL}
# (T, T) float32 matrices that are held at once, by the least count; twice as many in training.
MATRICES = {WRITTEN_OUT: 2 * HEADS, 'AFT-full': 1}
