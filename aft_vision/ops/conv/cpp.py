"""AFT-conv on a CPU: `conv.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    SINGLE,
    TILES,
    address,
    cast,
    float_buffer,
    floats,
    lanes,
    operands,
    run_backward,
    run_forward,
    stream,
    whole_vectors,
)
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv.eager import ConvInputs

# By peak rates tiles take as long as float32 vectors at 6 columns, half as long at 8. Not measured.
TILED_WIDTH = 8


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 6)."""
    keep_alive: list[Tensor] = []
    return run_forward('conv', inputs, _call(inputs, keep_alive), keep_alive, save) or conv.conv_forward(inputs, save)


def conv_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and kernel."""
    kernel, d_table, d_kernel = inputs.kernel, None, None
    if need_bias:
        by_thread = (torch.get_num_threads(), len(kernel), _words(inputs.grid))
        d_table, d_kernel = torch.zeros(by_thread, dtype=torch.float32, device='cpu'), float_buffer(kernel.shape)
    keep_alive: list[Tensor] = []
    found = run_backward('conv', (grad, y, den), inputs, _call(inputs, keep_alive), keep_alive, (d_table, d_kernel))
    if found is None:
        return conv.conv_backward(grad, y, den, inputs, need_bias)
    return cast((*found, d_kernel), inputs[:4], inputs.k)


def _call(inputs: ConvInputs, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Call` in C++; `keep_alive` gets the tensors that must outlive the call.
    q, k, v, kernel, (height, width), mask, global_context = inputs
    (batch, _, channels), (heads, size, _) = v.shape, kernel.shape
    kind, words = operands(v), _words((height, width))
    if kind == TILES and width < TILED_WIDTH:
        kind = SINGLE
    scratch = float_buffer(heads * (words + 1) + k.numel())
    keep_alive.append(scratch)
    sizes = batch, height, width, channels, heads, floats(kernel, keep_alive), size, global_context, kind, words
    streams = *stream(q, keep_alive), *stream(k, keep_alive), *stream(v, keep_alive)
    return *sizes, scratch.data_ptr(), *streams, address(mask, keep_alive)


def _words(grid: Sequence[int]) -> int:
    # The length of a head's table of distances and a vector of zeros after it, in whole vectors.
    return whole_vectors((2 * grid[0] - 1) * (2 * grid[1] - 1)) + lanes()
