"""AFT-axial on a CPU: `axial.cpp`, with sums in float32.

A call with a denominator that underflows is repeated by the torch form, which repairs it.
"""

import torch
from torch import Tensor

from aft_vision.ops.axial import eager
from aft_vision.ops.common.cpp import (
    LEAST,
    address,
    cast,
    compiled,
    float_buffer,
    floats,
    narrow_like,
    narrow_output,
    pack,
    profiled,
    stream,
)
from aft_vision.ops.common.inputs import AxialInputs, empty_denominator, empty_output


def axial_forward(inputs: AxialInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators."""
    q, k, v = inputs[:3]
    out, den = empty_output(q, v), empty_denominator(k, v, save) if save else None
    y, held = narrow_output(out), list[Tensor]()
    fields = *_call(inputs, held), *stream(y, held), *stream(den, held)
    with profiled('aft_vision::axial_forward'):
        good = compiled().aft_axial_forward(pack(*fields), LEAST, torch.get_num_threads())
    if not good:
        return eager.axial_forward(inputs, save)
    return out if y is out else out.copy_(y), den


def axial_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: AxialInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and both biases."""
    q, k, v, *biases = inputs[:5]
    dq, dk, dv = narrow_like(q), narrow_like(k), narrow_like(v)
    d_biases = [float_buffer(x.shape) if need_bias else None for x in biases]
    held: list[Tensor] = []
    fields = _call(inputs, held)
    for x in (grad, y, den, dq, dk, dv):
        fields += stream(x, held)
    fields += address(d_biases[0], held), address(d_biases[1], held)
    with profiled('aft_vision::axial_backward'):
        good = compiled().aft_axial_backward(pack(*fields), LEAST, torch.get_num_threads())
    if not good:
        return eager.axial_backward(grad, y, den, inputs, need_bias)
    found = cast((dq, dk, dv, *d_biases), (q, k, v, *biases), k)
    return found[0], found[1], found[2], found[3], found[4]


def _call(inputs: AxialInputs, held: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Packed` in C++; `held` gets the tensors that must outlive the call.
    q, k, v, row_bias, column_bias, grid, mask = inputs
    reaches = (row_bias.shape[1] + 1) // 2, (column_bias.shape[1] + 1) // 2
    sizes = len(v), *grid, v.shape[2], k.shape[2], *reaches
    streams = *stream(q, held), *stream(k, held), *stream(v, held)
    return *sizes, floats(row_bias, held), floats(column_bias, held), *streams, address(mask, held)
