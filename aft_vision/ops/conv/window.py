"""AFT-conv on a CPU as sums over a window of sources around each target, with float32 sums.

`depthwise.cpp` takes one kernel, or one biased offset, per channel. As the depthwise form of `ops.conv.eager` it
subtracts, and if digits are lost, the whole call is repeated in the torch form. `wide.cpp` takes heads of several
channels for a few sequences, and adds up all that no window reaches. A call with a denominator that underflows is done
again by the torch form, which repairs it; the backward is that of `conv.cpp`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    PAIRS,
    address,
    cast,
    compiled,
    float_buffer,
    floats,
    lanes,
    operands,
    pack,
    run_backward,
    run_forward,
    stream,
    supports,
    whole_vectors,
)
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import onehot
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.onehot import OnehotInputs

# The minimal number of channels of a vector; a thread should have several blocks of them, to balance the load.
LANES = 8
BLOCKS_PER_THREAD = 4


# Heads with fewer channels than this are narrow, by the floats of a vector.
WIDE_CHANNELS = {8: 32, 16: 16}


def supports_depthwise(inputs: ConvInputs | OnehotInputs) -> bool:
    """Return whether there are many heads of one channel, which weights outside the window can be subtracted from."""
    k = inputs.k
    if not (k.shape == inputs.v.shape and k.shape[2] > conv.TOEPLITZ_HEADS and getattr(inputs, 'global_context', True)):
        return False
    return supports(inputs)


def supports_wide(inputs: ConvInputs) -> bool:
    """Return whether heads are narrow, or a kernel not larger than its grid is for one sequence."""
    # Measured (docs/reference/kernels.md).
    if not (inputs.global_context and supports(inputs)):
        return False
    narrow = inputs.channels < WIDE_CHANNELS[lanes()] and operands(inputs.v) != PAIRS
    return narrow or (inputs.v.shape[0] == 1 and inputs.kernel.shape[1] <= max(inputs.grid))


def is_wide_candidate(inputs: ConvInputs) -> bool:
    """Return whether both 'wide' and 'conv' can compute these inputs, whichever is the faster."""
    return inputs.k.shape[2] < inputs.v.shape[2] and inputs.global_context and supports(inputs)


def bias_weights(kernel: Tensor, v: Tensor) -> Tensor:
    """Compute the weights of a kernel (h, s, s) for grids of any size.

    Returns:
        (s * s + 1, h or more) float32, as the forms read it: the weight of each tap relative to the largest of its
        head or to 1, and that of sources outside the window.
    """
    keep_alive: list[Tensor] = []
    fields = _place_weights(kernel, kernel.shape[-1], None, keep_alive)
    compiled().aft_window_weights(pack('aft_window_weights', *fields), len(kernel), torch.get_num_threads())
    return keep_alive[0].view(_weights_shape(len(kernel), kernel.shape[-1]))


def weights_layout(kernel: Tensor, v: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the type of the weights of a kernel (h, s, s)."""
    return _weights_shape(len(kernel), kernel.shape[-1]), torch.float32


def wide_forward(inputs: ConvInputs, save: bool, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 6)."""
    q, k, v, kernel, (height, width), mask, _ = inputs
    batch, count, channels = v.shape
    keep_alive: list[Tensor] = []
    size = _window_size(kernel, inputs.grid)
    place = _place_weights(kernel, size, weights, keep_alive)
    scratch = float_buffer(2 * batch * count * place[1])
    sizes = batch, height, width, channels, k.shape[2], size, *place, scratch.data_ptr()
    fields = *sizes, *stream(q, keep_alive), *stream(k, keep_alive), *stream(v, keep_alive), address(mask, keep_alive)
    return run_forward('conv_wide', inputs, fields, keep_alive, save) or conv.conv_forward(inputs, save)


def depthwise_forward(inputs: ConvInputs, save: bool, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 6)."""
    keep_alive: list[Tensor] = []
    fields = _call(inputs, inputs.kernel, None, keep_alive, weights)
    return run_forward('depthwise', inputs, fields, keep_alive, save) or conv.conv_forward(inputs, save)


def onehot_forward(inputs: OnehotInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y, and nothing saved (AFT Eq. 10)."""
    keep_alive: list[Tensor] = []
    fields = _call(inputs, inputs.weight.view(-1, 1, 1), inputs.offset, keep_alive)
    return run_forward('depthwise', inputs, fields, keep_alive, False) or onehot.onehot_forward(inputs, save)


def depthwise_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and kernel."""
    found = _backward((grad, y, den), inputs, inputs.kernel, None, need_bias)
    return found or conv.conv_backward(grad, y, den, inputs, need_bias)


def onehot_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: OnehotInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and weight."""
    found = _backward((grad, y, None), inputs, inputs.weight.view(-1, 1, 1), inputs.offset, need_bias)
    return (
        onehot.onehot_backward(grad, y, den, inputs, need_bias) if found is None else (*found[:3], found[3].flatten())
    )


def _backward(
    results: Sequence[Tensor | None],
    inputs: ConvInputs | OnehotInputs,
    bias: Tensor,
    offset: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, ...] | None:
    # Gradients of q, k, v and the bias from grad, y and the denominators, if there are; None where digits are lost.
    q, k, v = inputs.q, inputs.k, inputs.v
    slices, d_taps, d_bias = _batch_slices(v), None, None
    if need_bias:
        d_taps = float_buffer(slices * _window_size(bias, inputs.grid) ** 2 * v.shape[2])
        d_bias = float_buffer(bias.shape)
    keep_alive: list[Tensor] = []
    fields = *_call(inputs, bias, offset, keep_alive), slices
    found = run_backward('depthwise', results, inputs, fields, keep_alive, (d_taps, d_bias))
    return None if found is None else cast((*found, d_bias), (q, k, v, bias), k)


def _call(
    inputs: ConvInputs | OnehotInputs,
    bias: Tensor,
    offset: Tensor | None,
    keep_alive: list[Tensor],
    weights: Tensor | None = None,
) -> tuple[int, ...]:
    # The fields of `Inputs` in C++ for a bias (D, s, s), or (D, 1, 1) with offsets (D, 2), whose weights may be given;
    # `keep_alive` gets the tensors that must outlive the call.
    (batch, _, channels), (height, width) = inputs.v.shape, inputs.grid
    size = _window_size(bias, inputs.grid)
    placed = _place_weights(bias, size, weights, keep_alive)
    sizes = batch, height, width, channels, size, *placed, address(offset, keep_alive)
    streams = *stream(inputs.q, keep_alive), *stream(inputs.k, keep_alive), *stream(inputs.v, keep_alive)
    return *sizes, *streams, address(inputs.mask, keep_alive)


def _place_weights(bias: Tensor, size: int, weights: Tensor | None, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `WindowWeights` in C++: weights of the whole bias, if they are given, or a place for those of its
    # middle, and the bias, from which they are computed first.
    heads, _, side = bias.shape
    if weights is not None:
        return weights.data_ptr(), weights.shape[1], side, 0, side
    rows, stride = _weights_shape(heads, size)
    weights = float_buffer(rows * stride)
    keep_alive.append(weights)
    return weights.data_ptr(), stride, size, floats(bias, keep_alive), side


def _weights_shape(heads: int, size: int) -> tuple[int, int]:
    return size * size + 1, whole_vectors(heads) + lanes()


def _window_size(bias: Tensor, grid: Sequence[int]) -> int:
    # The side of the part of a kernel that leads from one token to another.
    return min(bias.shape[-1], 2 * max(grid) - 1)


def _batch_slices(v: Tensor) -> int:
    # The number of slices of a batch, each with a buffer for its sums, so that all threads have work.
    blocks = -(-v.shape[2] // LANES)
    return max(1, min(len(v), -(-BLOCKS_PER_THREAD * torch.get_num_threads() // blocks)))
