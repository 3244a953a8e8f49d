"""AFT-axial on a CPU: `axial.cpp`, with sums in float32.

A call with a denominator that underflows is repeated by the torch form, which repairs it.
"""

from torch import Tensor

from aft_vision.ops.axial import eager
from aft_vision.ops.axial.eager import AxialInputs
from aft_vision.ops.common.cpp import address, cast, float_buffer, floats, run_backward, run_forward, stream


def axial_forward(inputs: AxialInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators."""
    keep_alive: list[Tensor] = []
    found = run_forward('axial', inputs, _call(inputs, keep_alive), keep_alive, save)
    return found or eager.axial_forward(inputs, save)


def axial_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: AxialInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and both biases."""
    d_biases = [float_buffer(x.shape) if need_bias else None for x in inputs[3:5]]
    keep_alive: list[Tensor] = []
    found = run_backward('axial', (grad, y, den), inputs, _call(inputs, keep_alive), keep_alive, d_biases)
    if found is None:
        return eager.axial_backward(grad, y, den, inputs, need_bias)
    return cast((*found, *d_biases), inputs[:5], inputs.k)


def _call(inputs: AxialInputs, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Packed` in C++; `keep_alive` gets the tensors that must outlive the call.
    q, k, v, row_bias, column_bias, grid, mask = inputs
    reaches = (row_bias.shape[1] + 1) // 2, (column_bias.shape[1] + 1) // 2
    sizes = len(v), *grid, v.shape[2], k.shape[2], *reaches
    streams = *stream(q, keep_alive), *stream(k, keep_alive), *stream(v, keep_alive)
    return *sizes, floats(row_bias, keep_alive), floats(column_bias, keep_alive), *streams, address(mask, keep_alive)
