"""AFT-axial on a CPU: `axial.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

import ctypes

import torch
from torch import Tensor

from aft_vision.ops.axial import eager
from aft_vision.ops.axial.eager import AxialInputs
from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import empty_denominator, empty_output
from aft_vision.ops.common.product import LEAST
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


def axial_forward(inputs: AxialInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y = narrow_output(out)
    tensors, mask = [narrow_neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    biases = _biases(inputs)
    with profiled('aft_vision::axial_forward'):
        good = compiled().aft_axial_forward(
            _sizes(inputs),
            *map(pointer, biases),
            *map(stream, tensors),
            pointer(mask),
            stream(y),
            stream(den if save else None),
            number(LEAST),
            torch.get_num_threads(),
        )
    if not good:
        return eager.axial_forward(inputs, save)
    return out if y is out else out.copy_(y), den


def axial_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: AxialInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and both biases."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    tensors = [narrow_neighbours(x) for x in (grad, y, den, q, k, v)]
    mask = None if mask is None else mask.contiguous()
    dq, dk, dv = (None if x is None else narrow_output(x.new_empty(x.shape)) for x in (q, k, v))
    biases = _biases(inputs)
    d_biases = [room(x.shape) if need_bias else None for x in biases]
    with profiled('aft_vision::axial_backward'):
        good = compiled().aft_axial_backward(
            _sizes(inputs),
            *map(pointer, biases),
            *map(stream, tensors),
            pointer(mask),
            *map(stream, (dq, dk, dv)),
            *map(pointer, d_biases),
            number(LEAST),
            torch.get_num_threads(),
        )
    if not good:
        return eager.axial_backward(grad, y, den, inputs, need_bias)
    found = cast((dq, dk, dv, *d_biases), (q, k, v, inputs.row_bias, inputs.column_bias), k)
    return found[0], found[1], found[2], found[3], found[4]


def _biases(inputs: AxialInputs) -> list[Tensor]:
    return [x.float().contiguous() for x in (inputs.row_bias, inputs.column_bias)]


def _sizes(inputs: AxialInputs) -> ctypes.Array[ctypes.c_int64]:
    # B, H, W, D, h, and the s of both biases.
    v, reaches = inputs.v, [(x.shape[1] + 1) // 2 for x in (inputs.row_bias, inputs.column_bias)]
    return numbers((len(v), *inputs.grid, v.shape[2], inputs.k.shape[2], *reaches))
