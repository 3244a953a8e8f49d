"""How each kind of figure of the table of goals is measured; every function gives what measures it."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import timm
import torch
from timm.layers import Attention
from timm.utils import reparameterize_model
from torch import Tensor, nn

from aft_vision.layers import AFTConv
from aft_vision.timing import time_interleaved
from tools.benchmark.compare import DIRECTIONS, materialised, too_large, with_backward
from tools.benchmark.decode import measure_decode
from tools.benchmark.goals import Figure
from tools.benchmark.kernel_time import time_kernels
from tools.benchmark.memory import peak_memory, saved_memory
from tools.benchmark.models import materialise_attention
from tools.benchmark.onehot import Shape, measure_onehot
from tools.benchmark.operations import CPU, KERNEL_SIZE, Operation
from tools.benchmark.times import Call
from tools.machine import autocast, free_memory

Measure = Callable[[int], Figure]
# The paper's baseline is shown, not promised.
PAPER_ROUNDS = 3
# The times of kernels hardly vary.
KERNEL_ROUNDS = 5


def speed(
    operation: Operation,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    device: torch.device = CPU,
) -> Measure:
    """Time of attention over that of the operation."""

    def measure(rounds: int) -> Figure:
        batch, tokens, _ = operation.shape
        room = free_memory(device)
        fits = room is None or not too_large(batch, operation.heads, tokens, 1 + training, room)
        attend, operate, *paper = operation.calls(dtype, training, device, written_out=fits)
        return _faster(attend, operate, rounds, paper[0] if paper else None, device)

    return measure


def memory(operation: Operation) -> Measure:
    """Peak of the forward over that of attention."""

    def measure(rounds: int) -> Figure:
        theirs, own, paper = (peak_memory(call, CPU) for call in operation.calls())
        return Figure(own / theirs, paper=own / paper)

    return measure


def kept(operation: Operation) -> Measure:
    """What is kept for the backward over what attention keeps."""

    def measure(rounds: int) -> Figure:
        attention, own = operation.attention(training=True), operation.own(training=True)
        # q, k and v count: attention and the operation are given the same. The position bias is a weight.
        found = saved_memory(own.forward, own.leaves[3:])
        theirs, paper = (saved_memory(each) for each in (attention.forward, materialised(attention.forward)))
        return Figure(found / theirs, paper=found / paper)

    return measure


def layer_speed(dim: int, heads: int, batch: int, training: bool) -> Measure:
    """Time of a multi-head attention layer over that of an AFT-conv layer, kernel 11, on a 14 x 14 grid."""

    def measure(rounds: int) -> Figure:
        grid = (14, 14)
        x = torch.randn(batch, grid[0] * grid[1], dim)
        attention = Attention(dim, dim // 64, qkv_bias=True)
        conv = AFTConv(dim, num_heads=heads, kernel_size=KERNEL_SIZE)

        def attend() -> Tensor:
            return attention(x)

        def mix() -> Tensor:
            return conv(x, grid)

        if training:
            x.requires_grad_()
            theirs = with_backward(attend, [x, *attention.parameters()])
            paper = with_backward(materialised(attend), [x, *attention.parameters()])
            return _faster(theirs, with_backward(mix, [x, *conv.parameters()]), rounds, paper)
        reparameterize_model(conv.eval(), inplace=True)
        with torch.inference_mode():
            return _faster(attend, mix, rounds, materialised(attend))

    return measure


def model_speed(name: str, baseline: str, batch: int, dtype: str = 'float32', training: bool = False) -> Measure:
    """Time of a model of timm over that of one of ours, at 224 px."""

    def measure(rounds: int) -> Figure:
        models = [timm.create_model(each).train(training) for each in (baseline, name, baseline)]
        materialise_attention(models[2])
        images = torch.randn(batch, 3, 224, 224)
        if training:
            theirs, ours, paper = (_training_step(model, images) for model in models)
            return _faster(theirs, ours, rounds, paper)
        theirs, ours, paper = map(reparameterize_model, models)
        with torch.inference_mode(), autocast(CPU, dtype):
            return _faster(lambda: theirs(images), lambda: ours(images), rounds, lambda: paper(images))

    return measure


def model_memory(name: str, baseline: str, batch: int) -> Measure:
    """Peak of a training step of one of our models over that of one of timm."""

    def measure(rounds: int) -> Figure:
        images = torch.randn(batch, 3, 224, 224)
        models = [timm.create_model(each) for each in (name, baseline, baseline)]
        materialise_attention(models[2])
        own, theirs, paper = (peak_memory(_training_step(model, images), CPU) for model in models)
        return Figure(own / theirs, paper=own / paper)

    return measure


def growth(operation: Callable[[int], Operation], tokens: int) -> Measure:
    """Time of twice the tokens over that of the tokens."""
    return lambda rounds: _faster(operation(2 * tokens).calls()[1], operation(tokens).calls()[1], rounds)


def memory_exponent(operation: Callable[[int], Operation], lengths: Sequence[int]) -> Measure:
    """The power of the tokens that the peak of the forward grows with; 1 is linear."""

    def measure(rounds: int) -> Figure:
        peaks = [math.log(peak_memory(operation(length).calls()[1], CPU)) for length in lengths]
        return Figure((peaks[-1] - peaks[0]) / math.log(lengths[-1] / lengths[0]))

    return measure


def onehot_speed(training: bool) -> Measure:
    """Time of AFT-conv over that of the operation with one offset a head, of the same result."""

    def measure(rounds: int) -> Figure:
        direction = DIRECTIONS[training]
        rows = measure_onehot(CPU, 'float32', rounds, (Shape(8, 384, 384),))
        row = next(row for row in rows if (row['direction'], row['form']) == (direction, 'one-hot'))
        return Figure(row['ratio'], row['ratio_quartiles'])

    return measure


class Decoding:
    """The figures of decoding, which come from one measurement of a number of rounds, made when first asked for."""

    def __init__(self, **model_args: Any) -> None:
        self.model_args = model_args
        self._rows: dict[int, list[dict[str, Any]] | Exception] = {}

    def speed(self, name: str, batch: int) -> Measure:
        """Time of an image with the Transformer over that with a model."""
        return lambda rounds: self._figure(rounds, name, batch, 'ratio')

    def flatness(self, name: str, batch: int) -> Measure:
        """Time of the last token over that of an early one."""
        return lambda rounds: self._figure(rounds, name, batch, 'flatness')

    def _figure(self, rounds: int, name: str, batch: int, key: str) -> Figure:
        if rounds not in self._rows:
            try:
                self._rows[rounds] = measure_decode(CPU, rounds, **self.model_args)
            # It would fail for every figure anew, after minutes.
            except Exception as error:
                self._rows[rounds] = error
        found = self._rows[rounds]
        if isinstance(found, Exception):
            raise found
        row = next(row for row in found if (row['model'], row['batch_size']) == (name, batch))
        return Figure(row[key], row[f'{key}_quartiles'])


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
    kernels = time_kernels([baseline, candidate], device, min(rounds, KERNEL_ROUNDS))
    return figure._replace(
        milliseconds=(1e3 * first.seconds, 1e3 * own.seconds),
        kernel_milliseconds=None if kernels is None else (1e3 * median(kernels[0]), 1e3 * median(kernels[1])),
    )
