"""AFT-conv with a kernel, or one biased offset, per channel on a CPU: `depthwise.cpp`, with sums in float32.

The depthwise form of `ops.conv.eager`, with its check of the digits that subtraction leaves: where they are lost, the
whole call is done again by the torch form.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import UNDERFLOW, empty_denominator, empty_output
from aft_vision.ops.common.tensors import cast, float_output, neighbours, numbers, pointer, room, tokens
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import onehot
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.onehot import OnehotInputs

# Channels of a vector, at least; a thread should have several blocks of them, so that threads end together.
LANES = 8
BLOCKS_PER_THREAD = 4


class _DigitLimits(ctypes.Structure):
    _fields_ = [('cancellation', ctypes.c_float), ('underflow', ctypes.c_float)]


LIMITS = _DigitLimits(conv.CANCELLATION[torch.float32], UNDERFLOW[torch.float32])


class _Taps:
    """A position bias relative to the larger of 0 and the largest of each head, the reference.

    taps: (s, s, D), e^(w - reference) minus what lies outside; one of them where there are offsets, (D, 2).
    outside: (D,), e^-reference, what every source has without a bias.
    """

    def __init__(self, bias: Tensor, offset: Tensor | None = None) -> None:
        # (s, s, D): one token's channels are neighbours.
        bias = bias.float().reshape(len(bias), -1).t()
        reference = bias.amax(dim=0).clamp_min(0.0)
        self.exp, self.outside = torch.exp(bias - reference), torch.exp(-reference)
        self.taps = (self.exp - self.outside).contiguous()
        self.offset = None if offset is None else offset.contiguous()

    def sizes(self, v: Tensor, grid: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
        """B, H, W, D and s."""
        return numbers((len(v), grid[0], grid[1], v.shape[2], round(len(self.taps) ** 0.5)))

    def pointers(self) -> list[ctypes.c_void_p]:
        """As the functions take them."""
        return [pointer(x) for x in (self.taps, self.offset, self.outside)]


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
    found = _backward(grad, y, den, inputs, _Taps(inputs.kernel), inputs.kernel, need_bias)
    return found or conv.conv_backward(grad, y, den, inputs, need_bias)


def onehot_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: OnehotInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and weight."""
    found = _backward(grad, y, None, inputs, _Taps(inputs.weight, inputs.offset), inputs.weight, need_bias)
    return found or onehot.onehot_backward(grad, y, den, inputs, need_bias)


def _forward(inputs: ConvInputs | OnehotInputs, taps: _Taps, den: Tensor | None = None) -> Tensor | None:
    # y, with the denominators written into den; None where digits are lost.
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    out = empty_output(q, v)
    y = float_output(out)
    tensors, mask = [neighbours(x) for x in (q, k, v)], None if mask is None else mask.contiguous()
    with record_function('aft_vision::depthwise_forward'):
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
    # Gradients of q, k, v and the bias, empty where there is no such input; None where digits are lost.
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    tensors = [neighbours(x) for x in (grad, y, den, q, k, v)]
    mask = None if mask is None else mask.contiguous()
    dq, dk, dv = (None if x is None else room(x.shape) for x in (q, k, v))
    parts = _parts(v)
    d_taps = room((parts, *taps.taps.shape)) if need_bias else None
    with record_function('aft_vision::depthwise_backward'):
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
    # Into how many parts a batch is cut so that all threads have work.
    blocks = -(-v.shape[2] // LANES)
    return max(1, min(len(v), -(-BLOCKS_PER_THREAD * torch.get_num_threads() // blocks)))
