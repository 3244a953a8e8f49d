"""AFT-conv on a CPU: `conv.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import empty_denominator, empty_output
from aft_vision.ops.common.product import LEAST, lanes, multiplies_pairs, pack_neighbours
from aft_vision.ops.common.tensors import (
    cast,
    narrow_neighbours,
    narrow_output,
    number,
    numbers,
    pointer,
    profiled,
    room,
    stream,
)
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv.eager import ConvInputs


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 6)."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y = narrow_output(out)
    tensors, mask_ = [narrow_neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    table = _Table(inputs)
    words, e = table.words(table.shifts), room(k.shape)
    with profiled('aft_vision::conv_forward'):
        good = compiled().aft_conv_forward(
            table.sizes(k, v),
            pointer(words),
            pointer(table.outside),
            *map(stream, tensors),
            pointer(mask_),
            pointer(e),
            stream(y),
            stream(den if save else None),
            number(LEAST),
            torch.get_num_threads(),
        )
    if not good:
        return conv.conv_forward(inputs, save)
    return out if y is out else out.copy_(y), den


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel."""
    q, k, v, kernel, mask = inputs.q, inputs.k, inputs.v, inputs.kernel, inputs.mask
    tensors, mask_ = (
        [narrow_neighbours(x) for x in (grad, y, den, q, k, v)],
        None if mask is None else mask.contiguous(),
    )
    dq, dk, dv = (None if x is None else narrow_output(x.new_empty(x.shape)) for x in (q, k, v))
    threads = torch.get_num_threads()
    table = _Table(inputs)
    words, e = table.words(table.shifts.flip(1, 2)), room(k.shape)
    d_table = torch.zeros((threads if need_bias else 0, *words.shape[:2]), dtype=torch.float32, device='cpu')
    with profiled('aft_vision::conv_backward'):
        good = compiled().aft_conv_backward(
            table.sizes(k, v),
            pointer(words),
            pointer(table.outside),
            *map(stream, tensors),
            pointer(mask_),
            pointer(e),
            *map(stream, (dq, dk, dv)),
            pointer(d_table if need_bias else None),
            number(LEAST),
            threads,
        )
    if not good:
        return conv.conv_backward(grad, y, den, inputs, need_bias)
    d_kernel = table.kernel_grad(d_table.sum(0)) if need_bias else None
    found = cast((dq, dk, dv, d_kernel), (q, k, v, kernel), k)
    return found[0], found[1], found[2], found[3]


class _Table:
    """exp(w - reference) of every head by the distance from target to source, (h, 2H - 1, 2W - 1)."""

    def __init__(self, inputs: ConvInputs) -> None:
        self.weights = conv.ConvWeights(inputs)
        self.shifts = conv.shifted_kernel(self.weights.exp, self.weights.grid, self.weights.outside)
        self.outside = self.weights.outside
        self.pairs = multiplies_pairs(inputs.v)

    def words(self, shifts: Tensor) -> Tensor:
        """A row for each head, with a vector of zeros behind it."""
        return pack_neighbours(F.pad(shifts.flatten(1), (0, lanes())), self.pairs)

    def sizes(self, k: Tensor, v: Tensor) -> ctypes.Array[ctypes.c_int64]:
        """B, H, W, D, h, s, whether words are pairs, and the words of a head."""
        height, width = self.weights.grid
        words = (2 * height - 1) * (2 * width - 1) + lanes()
        return numbers(
            (len(v), height, width, v.shape[2], k.shape[2], self.weights.kernel.shape[-1], self.pairs, words)
        )

    def kernel_grad(self, d_table: Tensor) -> Tensor:
        """That of the kernel, (h, s, s), from that of the rows of `words`."""
        found = d_table[:, : self.shifts[0].numel()].view(self.shifts.shape)
        self.weights.grad_exp.add_(conv.unshifted_kernel(found, self.weights.kernel.shape[-1]))
        return self.weights.bias_grad()
