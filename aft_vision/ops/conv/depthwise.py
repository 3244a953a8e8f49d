"""AFT-conv with one kernel, or one biased offset, per channel on a CPU: `depthwise.cpp`, with float32 sums.

This is the depthwise form of `ops.conv.eager` with its check of cancellation: if digits are lost, the whole call is
repeated in the torch form.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import UNDERFLOW, empty_denominator, empty_output
from aft_vision.ops.common.tensors import cast, float_output, neighbours, numbers, pointer, profiled, room, tokens
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import onehot
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.onehot import OnehotInputs

# The minimal number of channels of a vector; a thread should have several blocks of them, to balance the load.
LANES = 8
BLOCKS_PER_THREAD = 4


class _DigitLimits(ctypes.Structure):
    _fields_ = [('cancellation', ctypes.c_float), ('underflow', ctypes.c_float)]


LIMITS = _DigitLimits(conv.CANCELLATION[torch.float32], UNDERFLOW[torch.float32])


class _Taps:
    """A position bias (D, s, s), or (D,) with offsets (D, 2), as weights relative to a reference of each channel.

    The reference is the larger of 0 and the largest bias of the channel.

    Attributes:
        square: s * s, or 1.
        weights: (square + 1, D): e^(w - reference) minus the weight outside, then e^-reference, the weight of every
            source without a bias; with `keep_exp` another (square, D), e^(w - reference).
    """

    def __init__(self, bias: Tensor, offset: Tensor | None = None, keep_exp: bool = False) -> None:
        channels = bias.shape[0]
        self.square = bias.numel() // channels
        self.weights = room(((2 if keep_exp else 1) * self.square + 1, channels))
        self.offset = None if offset is None else offset.contiguous()
        bias, start, row = bias.float().contiguous(), self.weights.data_ptr(), 4 * channels
        self.taps, self.outside = ctypes.c_void_p(start), ctypes.c_void_p(start + self.square * row)
        compiled().aft_depthwise_taps(
            pointer(bias),
            ctypes.c_int64(channels),
            ctypes.c_int64(self.square),
            self.taps,
            self.outside,
            ctypes.c_void_p(start + (self.square + 1) * row if keep_exp else None),
            torch.get_num_threads(),
        )

    @property
    def exp(self) -> Tensor:
        """Return e^(w - reference), (square, D)."""
        return self.weights[self.square + 1 :]

    def sizes(self, v: Tensor, grid: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
        """Return B, H, W, D and s."""
        return numbers((v.shape[0], grid[0], grid[1], v.shape[2], math.isqrt(self.square)))

    def pointers(self) -> list[ctypes.c_void_p]:
        """Return the weights as kernel arguments."""
        return [self.taps, pointer(self.offset), self.outside]


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 6)."""
    den = empty_denominator(inputs.k, inputs.v, save)
    bottom = float_output(den)
    y = _forward(inputs, _Taps(inputs.kernel), bottom if save else None)
    if y is None:
        return conv.conv_forward(inputs, save)
    return y, den if bottom is den else den.copy_(bottom)


def onehot_forward(inputs: OnehotInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y, and nothing saved (AFT Eq. 10)."""
    y = _forward(inputs, _Taps(inputs.weight, inputs.offset))
    return onehot.onehot_forward(inputs, save) if y is None else (y, y.new_empty(0))


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel."""
    found = _backward(grad, y, den, inputs, _Taps(inputs.kernel, keep_exp=need_bias), inputs.kernel, need_bias)
    return found or conv.conv_backward(grad, y, den, inputs, need_bias)


def onehot_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: OnehotInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and weight."""
    taps = _Taps(inputs.weight, inputs.offset, keep_exp=need_bias)
    found = _backward(grad, y, None, inputs, taps, inputs.weight, need_bias)
    return found or onehot.onehot_backward(grad, y, den, inputs, need_bias)


def _forward(inputs: ConvInputs | OnehotInputs, taps: _Taps, den: Tensor | None = None) -> Tensor | None:
    # Compute y and write the denominators into den; return None if digits are lost.
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    out = empty_output(q, v)
    y = float_output(out)
    tensors, mask = [neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    with profiled('aft_vision::depthwise_forward'):
        keeps_digits = compiled().aft_depthwise_forward(
            taps.sizes(v, inputs.grid),
            *map(tokens, tensors),
            pointer(mask),
            *taps.pointers(),
            tokens(y),
            tokens(den),
            LIMITS,
            torch.get_num_threads(),
        )
    if not keeps_digits:
        return None
    return out if y is out else out.copy_(y)


def _backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor | None,
    inputs: ConvInputs | OnehotInputs,
    taps: _Taps,
    bias: Tensor,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    # Compute the gradients of q, k, v and the bias, empty for missing inputs; return None if digits are lost.
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    tensors = [neighbours(x) for x in (grad, y, den, q, k, v)]
    mask = None if mask is None else mask.contiguous()
    dq, dk, dv = (None if x is None else room(x.shape) for x in (q, k, v))
    parts = _parts(v)
    d_taps = room((parts, taps.square, v.shape[2])) if need_bias else None
    with profiled('aft_vision::depthwise_backward'):
        keeps_digits = compiled().aft_depthwise_backward(
            taps.sizes(v, inputs.grid),
            *map(tokens, tensors),
            pointer(mask),
            *taps.pointers(),
            *map(tokens, (dq, dk, dv)),
            pointer(d_taps),
            ctypes.c_int64(parts),
            LIMITS,
            torch.get_num_threads(),
        )
    if not keeps_digits:
        return None
    d_bias = None if d_taps is None else (d_taps.sum(0) * taps.exp).t().reshape(bias.shape)
    found = cast((dq, dk, dv, d_bias), (q, k, v, bias), k)
    return found[0], found[1], found[2], found[3]


def _parts(v: Tensor) -> int:
    # Return the number of parts of a batch, so that all threads have work.
    blocks = -(-v.shape[2] // LANES)
    return max(1, min(len(v), -(-BLOCKS_PER_THREAD * torch.get_num_threads() // blocks)))
