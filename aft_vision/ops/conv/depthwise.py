"""AFT-conv with one kernel, or one biased offset, per channel on a CPU: `depthwise.cpp`, with float32 sums.

This is the depthwise form of `ops.conv.eager` with its check of cancellation: if digits are lost, the whole call is
repeated in the torch form.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.cpp import (
    address,
    cast,
    compiled,
    float_buffer,
    float_output,
    floats,
    pack,
    profiled,
    tokens,
)
from aft_vision.ops.common.inputs import ConvInputs, OnehotInputs, empty_denominator, empty_output
from aft_vision.ops.common.numerics import UNDERFLOW
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import onehot
from aft_vision.ops.position_bias import kept_weights

# The minimal number of channels of a vector; a thread should have several blocks of them, to balance the load.
LANES = 8
BLOCKS_PER_THREAD = 4


class _DigitLimits(ctypes.Structure):
    _fields_ = [('cancellation', ctypes.c_float), ('underflow', ctypes.c_float)]


LIMITS = _DigitLimits(conv.CANCELLATION[torch.float32], UNDERFLOW[torch.float32])


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y and the denominators (AFT Eq. 6)."""
    if not save:
        y = _forward(inputs, inputs.kernel, None, None)
        return conv.conv_forward(inputs, save) if y is None else (y, None)
    den = empty_denominator(inputs.k, inputs.v, save)
    bottom = float_output(den)
    y = _forward(inputs, inputs.kernel, None, bottom)
    if y is None:
        return conv.conv_forward(inputs, save)
    return y, den if bottom is den else den.copy_(bottom)


def onehot_forward(inputs: OnehotInputs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Return y, and nothing saved (AFT Eq. 10)."""
    y = _forward(inputs, inputs.weight, inputs.offset, None)
    return onehot.onehot_forward(inputs, save) if y is None else (y, None)


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel."""
    found = _backward((grad, y, den), inputs, inputs.kernel, None, need_bias)
    return found or conv.conv_backward(grad, y, den, inputs, need_bias)


def onehot_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: OnehotInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and weight."""
    found = _backward((grad, y, None), inputs, inputs.weight, inputs.offset, need_bias)
    return found or onehot.onehot_backward(grad, y, den, inputs, need_bias)


def _forward(
    inputs: ConvInputs | OnehotInputs, bias: Tensor, offset: Tensor | None, den: Tensor | None
) -> Tensor | None:
    # Compute y and write the denominators into den; return None if digits are lost.
    out = empty_output(inputs.q, inputs.v)
    y, held = float_output(out), list[Tensor]()
    layout, kept = ('depthwise', _window_size(bias, inputs.grid)), kept_weights(bias)
    taps = None if kept is None else kept.get(layout)
    fields = *_call(inputs, bias, offset, False, held, taps), *tokens(y, held), *tokens(den, held)
    with profiled('aft_vision::depthwise_forward'):
        keeps_digits = compiled().aft_depthwise_forward(pack(*fields), LIMITS, torch.get_num_threads())
    if not keeps_digits:
        return None
    if kept is not None:
        kept[layout] = held[0]
    return out if y is out else out.copy_(y)


def _backward(
    results: Sequence[Tensor | None],
    inputs: ConvInputs | OnehotInputs,
    bias: Tensor,
    offset: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    # Gradients of q, k, v and the bias from grad, y and the denominators, if these are kept; empty ones where there is
    # no such input. None where digits are lost.
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = (None if x is None else float_buffer(x.shape) for x in (q, k, v))
    parts, d_taps, d_bias = _parts(v), None, None
    if need_bias:
        d_taps = float_buffer(parts * _window_size(bias, inputs.grid) ** 2 * v.shape[2])
        d_bias = float_buffer(bias.shape)
    held: list[Tensor] = []
    fields = _call(inputs, bias, offset, need_bias, held)
    for x in (*results, dq, dk, dv):
        fields += tokens(x, held)
    fields += parts, address(d_taps, held), address(d_bias, held)
    with profiled('aft_vision::depthwise_backward'):
        keeps_digits = compiled().aft_depthwise_backward(pack(*fields), LIMITS, torch.get_num_threads())
    if not keeps_digits:
        return None
    found = cast((dq, dk, dv, d_bias), (q, k, v, bias), k)
    return found[0], found[1], found[2], found[3]


def _call(
    inputs: ConvInputs | OnehotInputs,
    bias: Tensor,
    offset: Tensor | None,
    keep_exp: bool,
    held: list[Tensor],
    taps: Tensor | None = None,
) -> tuple[int, ...]:
    # The fields of `Call` in C++ for a position bias (D, s, s), or (D,) with offsets (D, 2), whose taps may be given;
    # `held` gets the tensors that must outlive the call, first the taps.
    (batch, _, channels), (height, width) = inputs.v.shape, inputs.grid
    side, size = 1 if offset is not None else bias.shape[1], _window_size(bias, inputs.grid)
    held.append(float_buffer(((2 if keep_exp else 1) * size * size + 1) * channels) if taps is None else taps)
    source = floats(bias, held) if taps is None else 0
    sizes = batch, height, width, channels, source, side, size, address(offset, held), held[0].data_ptr()
    streams = *tokens(inputs.q, held), *tokens(inputs.k, held), *tokens(inputs.v, held)
    return *sizes, *streams, address(inputs.mask, held)


def _window_size(bias: Tensor, grid: Sequence[int]) -> int:
    # The side of the part of a kernel that leads from one token to another; 1 with offsets.
    return 1 if bias.ndim == 1 else min(bias.shape[1], 2 * max(grid) - 1)


def _parts(v: Tensor) -> int:
    # Return the number of parts of a batch, so that all threads have work.
    blocks = -(-v.shape[2] // LANES)
    return max(1, min(len(v), -(-BLOCKS_PER_THREAD * torch.get_num_threads() // blocks)))
