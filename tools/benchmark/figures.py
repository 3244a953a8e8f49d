"""Measurements of each kind of figure of the table of goals; every call returns a function of the rounds."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision.layers import AFTConv
from aft_vision.timing import quartiles, time_interleaved, time_rounds
from tools.benchmark import gpu
from tools.benchmark.compare import compare, materialised, too_large, with_backward
from tools.benchmark.decode import measure_decode
from tools.benchmark.memory import peak_memory, saved_memory
from tools.benchmark.models import create_classifier, runtime_candidate
from tools.benchmark.ops import CPU, KERNEL_SIZE, Operation, draw, onehot_group
from tools.benchmark.times import Call
from tools.machine import autocast, free_memory

# The paper's baseline is shown, not promised.
PAPER_ROUNDS = 3
# The times of kernels hardly vary.
KERNEL_ROUNDS = 5


class Figure(NamedTuple):
    """A measured figure.

    Args:
        ratio_quartiles: Over the rounds, where it is a time.
        paper: The same against materialised attention, the paper's baseline, where that was measured.
        milliseconds_pair: Of a call of what is compared with, and of ours, on a GPU.
        kernel_milliseconds_pair: Of the kernels in them, without what the host adds, where they could be told.
    """

    value: float
    ratio_quartiles: tuple[float, float] | None = None
    paper: float | None = None
    milliseconds_pair: tuple[float, float] | None = None
    kernel_milliseconds_pair: tuple[float, float] | None = None


Measure = Callable[[int], Figure]


def deferred(function: Callable[..., Figure]) -> Callable[..., Measure]:
    """Return the function without `rounds`, which its result takes."""
    return lambda *args, **kwargs: lambda rounds: function(*args, rounds=rounds, **kwargs)


@deferred
def speed(
    operation: Operation,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    device: torch.device = CPU,
    *,
    rounds: int,
) -> Figure:
    """Measure the time of attention over that of the operation."""
    batch, tokens, _ = operation.shape
    free = free_memory(device)
    with_paper = free is None or not too_large(batch, operation.heads, tokens, 1 + training, free)
    attend, operate, *paper = operation.calls(dtype, training, device, with_paper)
    return _faster(attend, operate, rounds, paper[0] if paper else None, device)


@deferred
def call_cost(operation: Operation, *, rounds: int) -> Figure:
    """Measure the time of the operation in inference over that of F.scaled_dot_product_attention, its heads split."""
    inputs = draw(operation.shape, torch.float32, False, CPU)
    q, k, v = (x.unflatten(2, (operation.heads, -1)).transpose(1, 2) for x in inputs)
    with torch.inference_mode():
        return _faster(operation.own().forward, lambda: F.scaled_dot_product_attention(q, k, v), rounds)


@deferred
def memory(operation: Operation, *, rounds: int) -> Figure:
    """Measure the peak of the forward over that of attention."""
    theirs, own, paper = (peak_memory(call, CPU) for call in operation.calls())
    return Figure(own / theirs, paper=own / paper)


@deferred
def kept(operation: Operation, *, rounds: int) -> Figure:
    """Measure the bytes kept for the backward over those of attention."""
    attention, own = operation.attention(training=True), operation.own(training=True)
    # q, k and v count: attention and the operation are given the same. The position bias is a weight.
    found = saved_memory(own.forward, own.leaves[3:])
    theirs, paper = (saved_memory(each) for each in (attention.forward, materialised(attention.forward)))
    return Figure(found / theirs, paper=found / paper)


@deferred
def layer_speed(dim: int, heads: int, batch: int, training: bool, *, rounds: int) -> Figure:
    """Measure the time of a multi-head layer over that of AFT-conv, kernel 11, on a 14 x 14 grid."""
    grid = (14, 14)
    x = torch.randn(batch, grid[0] * grid[1], dim)
    attention = Attention(dim, dim // 64, qkv_bias=True)
    conv = AFTConv(dim, num_heads=heads, kernel_size=KERNEL_SIZE)
    attend: Callable[[], Tensor] = partial(attention, x)
    mix: Callable[[], Tensor] = partial(conv, x, grid)
    if training:
        x.requires_grad_()
        theirs = with_backward(attend, [x, *attention.parameters()])
        paper = with_backward(materialised(attend), [x, *attention.parameters()])
        return _faster(theirs, with_backward(mix, [x, *conv.parameters()]), rounds, paper)
    reparameterize_model(conv.eval(), inplace=True)
    with torch.inference_mode():
        return _faster(attend, mix, rounds, materialised(attend))


@deferred
def model_speed(
    name: str,
    baseline: str,
    batch: int,
    dtype: str = 'float32',
    training: bool = False,
    size: int = 224,
    *,
    rounds: int,
) -> Figure:
    """Measure the time of a model of timm over that of one of ours, at a side in pixels."""
    theirs, ours, paper = _three_models(name, baseline, training, size)
    images = torch.randn(batch, 3, size, size)
    if training:
        steps = [_training_step(model, images) for model in (theirs, ours, paper)]
        return _faster(steps[0], steps[1], rounds, steps[2])
    with torch.inference_mode(), autocast(CPU, dtype):
        return _faster(lambda: theirs(images), lambda: ours(images), rounds, lambda: paper(images))


@deferred
def model_memory(name: str, baseline: str, batch: int, *, rounds: int) -> Figure:
    """Measure the peak of a training step of one of our models over that of one of timm."""
    images = torch.randn(batch, 3, 224, 224)
    theirs, own, paper = (
        peak_memory(_training_step(model, images), CPU) for model in _three_models(name, baseline, True, 224)
    )
    return Figure(own / theirs, paper=own / paper)


@deferred
def runtime_speed(name: str, baseline: str, size: int, runtime: str, *, rounds: int) -> Figure:
    """Measure the time of a model of timm over that of ours, exported, one thread and one image."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory() as folder:
            theirs, ours = (
                runtime_candidate(each, (1, 3, size, size), runtime, Path(folder)).prepare(False).forward
                for each in (baseline, name)
            )
            return _faster(theirs, ours, rounds)
    finally:
        torch.set_num_threads(threads)


@deferred
def growth(operation: Callable[[int], Operation], tokens: int, *, rounds: int) -> Figure:
    """Measure the time of twice the tokens over that of the tokens."""
    return _faster(operation(2 * tokens).calls()[1], operation(tokens).calls()[1], rounds)


@deferred
def memory_exponent(operation: Callable[[int], Operation], lengths: Sequence[int], *, rounds: int) -> Figure:
    """Measure the power of the tokens that the peak of the forward grows with; 1 is linear."""
    peaks = [math.log(peak_memory(operation(length).calls()[1], CPU)) for length in lengths]
    return Figure((peaks[-1] - peaks[0]) / math.log(lengths[-1] / lengths[0]))


@deferred
def onehot_speed(direction: str, *, rounds: int) -> Figure:
    """Measure the time of AFT-conv over that of the operation with one offset a head."""
    candidates = onehot_group((8, 196, 384), 384, (14, 14)).candidates[:2]
    row = compare(candidates, CPU, rounds, directions=[direction])[1]
    if 'error' in row:
        raise RuntimeError(row['error'])
    return Figure(row['ratio'], row['ratio_quartiles'])


@deferred
def roofline_share(
    operation: Operation,
    dtype: torch.dtype,
    device: torch.device,
    side: int = gpu.MATRIX_SIDE,
    size: int = gpu.COPY_BYTES,
    *,
    rounds: int,
) -> Figure:
    """Measure the shortest time that a device could take for a forward over that of its kernels.

    Where the kernels cannot be told from the rest, as on a CPU, it is the time of the call.

    Args:
        side, size: Of the matrices and of the copy whose rates are taken for what the device does at best.
    """
    flops, bandwidth = gpu.device_rates(dtype, device, rounds, side, size)
    least = max(gpu.count_flops(operation) / flops, gpu.count_bytes(operation, dtype) / bandwidth)
    call = operation.calls(dtype, device=device, with_paper=False)[1]
    (whole,) = time_rounds([call], device, rounds, warmup=3)
    found = gpu.time_kernels([call], device, rounds)
    kernels = whole if found is None else found[0]
    shares = [least / seconds for seconds in kernels]
    return Figure(
        median(shares),
        quartiles(shares),
        milliseconds_pair=(1e3 * least, 1e3 * median(whole)),
        kernel_milliseconds_pair=None if found is None else (1e3 * least, 1e3 * median(kernels)),
    )


class Decoding:
    """The figures of decoding, which come from one measurement of a number of rounds, made when first asked for."""

    def __init__(self, **model_args: Any) -> None:
        self.model_args = model_args
        self._rows: dict[int, list[dict[str, Any]] | Exception] = {}

    def figure(self, name: str, batch: int, key: str) -> Measure:
        """Return a measure of a figure of `measure_decode`: `ratio` or `flatness`."""

        def measure(rounds: int) -> Figure:
            row = next(row for row in self._measured(rounds) if (row['model'], row['batch_size']) == (name, batch))
            return Figure(row[key], row[f'{key}_quartiles'])

        return measure

    def _measured(self, rounds: int) -> list[dict[str, Any]]:
        if rounds not in self._rows:
            try:
                self._rows[rounds] = measure_decode(CPU, rounds, **self.model_args)
            # It would fail for every figure again, after minutes.
            except Exception as error:
                self._rows[rounds] = error
        found = self._rows[rounds]
        if isinstance(found, Exception):
            raise found
        return found


def _three_models(name: str, baseline: str, training: bool, size: int) -> list[nn.Module]:
    """Return a model of timm, one of ours, and that of timm with materialised attention."""
    kinds = ((baseline, False), (name, False), (baseline, True))
    return [create_classifier(each, (size, size), CPU, written_out, training) for each, written_out in kinds]


def _training_step(model: nn.Module, images: Tensor) -> Call:
    return with_backward(lambda: model(images), [x for x in model.parameters() if x.requires_grad])


def _faster(
    baseline: Call, candidate: Call, rounds: int, paper: Call | None = None, device: torch.device = CPU
) -> Figure:
    first, own = time_interleaved([baseline, candidate], device, rounds)
    figure = Figure(own.ratio, own.quartiles)
    if paper is not None:
        ratio = time_interleaved([paper, candidate], device, min(rounds, PAPER_ROUNDS))[1].ratio
        figure = figure._replace(paper=ratio)
    if device.type != 'cuda':
        # Absolute times of a processor say nothing of another.
        return figure
    kernels = gpu.time_kernels([baseline, candidate], device, min(rounds, KERNEL_ROUNDS))
    return figure._replace(
        milliseconds_pair=(1e3 * first.seconds, 1e3 * own.seconds),
        kernel_milliseconds_pair=None if kernels is None else (1e3 * median(kernels[0]), 1e3 * median(kernels[1])),
    )
