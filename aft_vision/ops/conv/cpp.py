"""AFT-conv on a CPU: `conv.cpp`, with sums in float32.

A call with a denominator that underflows is done again by the torch form, which repairs it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    LEAST,
    address,
    cast,
    compiled,
    float_buffer,
    floats,
    lanes,
    multiplies_pairs,
    narrow_like,
    narrow_output,
    pack,
    profiled,
    stream,
    whole_vectors,
)
from aft_vision.ops.common.inputs import ConvInputs, empty_denominator, empty_output
from aft_vision.ops.conv import eager as conv


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 6)."""
    out = empty_output(inputs.q, inputs.v)
    den = empty_denominator(inputs.k, inputs.v, save) if save else None
    y, held = narrow_output(out), list[Tensor]()
    fields = *_call(inputs, held), *stream(y, held), *stream(den, held)
    with profiled('aft_vision::conv_forward'):
        good = compiled().aft_conv_forward(pack(*fields), LEAST, torch.get_num_threads())
    if not good:
        return conv.conv_forward(inputs, save)
    return out if y is out else out.copy_(y), den


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel."""
    q, k, v, kernel = inputs.q, inputs.k, inputs.v, inputs.kernel
    dq, dk, dv = narrow_like(q), narrow_like(k), narrow_like(v)
    threads, d_table, d_kernel = torch.get_num_threads(), None, None
    if need_bias:
        parts = (threads, len(kernel), _words(inputs.grid))
        d_table, d_kernel = torch.zeros(parts, dtype=torch.float32, device='cpu'), float_buffer(kernel.shape)
    held: list[Tensor] = []
    fields = _call(inputs, held)
    for x in (grad, y, den, dq, dk, dv):
        fields += stream(x, held)
    fields += address(d_table, held), address(d_kernel, held)
    with profiled('aft_vision::conv_backward'):
        good = compiled().aft_conv_backward(pack(*fields), LEAST, threads)
    if not good:
        return conv.conv_backward(grad, y, den, inputs, need_bias)
    found = cast((dq, dk, dv, d_kernel), (q, k, v, kernel), k)
    return found[0], found[1], found[2], found[3]


def _call(inputs: ConvInputs, held: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Call` in C++; `held` gets the tensors that must outlive the call.
    q, k, v, kernel, (height, width), mask, global_context = inputs
    (batch, _, channels), (heads, size, _) = v.shape, kernel.shape
    pairs, words = multiplies_pairs(v), _words((height, width))
    scratch = float_buffer(heads * (words + 1) + k.numel())
    held.append(scratch)
    sizes = batch, height, width, channels, heads, floats(kernel, held), size, global_context, pairs, words
    streams = *stream(q, held), *stream(k, held), *stream(v, held)
    return *sizes, scratch.data_ptr(), *streams, address(mask, held)


def _words(grid: Sequence[int]) -> int:
    # The length of a head's table of distances and a vector of zeros after it, in whole vectors.
    return whole_vectors((2 * grid[0] - 1) * (2 * grid[1] - 1)) + lanes()
