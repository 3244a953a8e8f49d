"""AFT-local with the future masked on a CPU: `local.cpp` and `local_backward.cpp`, with sums in float32.

Blocks and repairs are those of `ops.causal.eager`, which it replaces. Here a reference lies up to 8 nats above the keys
before its block, and stays until one of them exceeds it, or one of the block by the headroom.
"""

import ctypes

import torch
from torch import Tensor

from aft_vision.ops.causal.bias import BandBias
from aft_vision.ops.causal.eager import (
    HEADROOM,
    repair_backward,
    repair_forward,
    scaled_forward,
    sees_keys,
    shield_backward,
    shield_forward,
    vanishing_limit,
)
from aft_vision.ops.common import cpp
from aft_vision.ops.common.cpp import (
    MIN_DENOMINATOR,
    address,
    cast,
    compiled,
    float_buffer,
    float_output,
    floats,
    narrow_like,
    narrow_output,
    operands,
    pack,
    profiled,
    stream,
)
from aft_vision.ops.common.inputs import empty_denominator, empty_output
from aft_vision.ops.common.numerics import gate
from aft_vision.ops.local.band import block_length
from aft_vision.ops.local.eager import LocalInputs


class _Limits(ctypes.Structure):
    _fields_ = [('underflow', ctypes.c_float), ('vanishing', ctypes.c_float)]


cpp.STRUCTS['aft_local_limits'] = _Limits


def supports(inputs: LocalInputs) -> bool:
    """Return whether the kernels support these inputs on this machine."""
    return inputs.band.dtype != torch.float64 and cpp.supports(inputs)


@shield_forward
@scaled_forward
def local_causal_forward(inputs: LocalInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 4, causal)."""
    q, k, v, _, _ = inputs
    out, den = empty_output(q, v), empty_denominator(k, v, save)
    y, denominator = narrow_output(out), narrow_output(den)
    if not _forward(inputs, y, denominator if save else None):
        # With denominators as the kernel compares them.
        y, denominator = float_output(out), float_buffer(v.shape)
        _forward(inputs, y, denominator)
        _repair(y, denominator, inputs)
    if save and denominator is not den:
        den.copy_(denominator)
    return (out if y is out else out.copy_(y)), den


@shield_backward
def local_causal_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: LocalInputs, need_bias: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and band. A scan over the blocks, last to first."""
    q, k, v, band, mask = inputs
    bias = BandBias(band)
    dq, dk, dv = narrow_like(q), narrow_like(k), narrow_like(v)
    d_band = float_buffer(band.shape) if need_bias else None
    keep_alive: list[Tensor] = []
    fields = _call(inputs, keep_alive)
    for x in (grad, y, den, dq, dk, dv):
        fields += stream(x, keep_alive)
    fields += (address(d_band, keep_alive),)
    with profiled('aft_vision::local_backward'):
        good = compiled().aft_local_causal_backward(
            pack('aft_local_causal_backward', *fields),
            ctypes.c_float(HEADROOM),
            MIN_DENOMINATOR,
            torch.get_num_threads(),
        )
    if d_band is not None:
        bias.grad = d_band
    if not good:
        # Compared as in the kernel: in bfloat16 the limit itself would be rounded.
        underflowed, s = (den.float() < MIN_DENOMINATOR.value) & sees_keys(k, mask), gate(q, torch.float32)
        a = grad.float() if s is None else grad.float() * s
        assert dk is not None
        assert dv is not None
        dk, dv = dk.float(), dv.float()
        repair_backward(a, inputs, bias, underflowed, dk, dv, need_bias)
    return cast((dq, dk, dv, d_band), (q, k, v, band), k)


def _forward(inputs: LocalInputs, y: Tensor, den: Tensor | None) -> bool:
    # True if y and den are right everywhere.
    keep_alive: list[Tensor] = []
    fields = *_call(inputs, keep_alive), *stream(y, keep_alive), *stream(den, keep_alive)
    with profiled('aft_vision::local_forward'):
        good = compiled().aft_local_causal_forward(
            pack('aft_local_causal_forward', *fields),
            ctypes.c_float(HEADROOM),
            _Limits(MIN_DENOMINATOR, vanishing_limit(torch.float32, y.shape[1])),
            torch.get_num_threads(),
        )
    return bool(good)


def _repair(y: Tensor, den: Tensor, inputs: LocalInputs) -> None:
    # Compute again what has underflowed in y.
    underflowed = (den < MIN_DENOMINATOR.value) & sees_keys(inputs.k, inputs.mask)
    ratio = torch.zeros_like(y)
    repair_forward(ratio, inputs, BandBias(inputs.band), underflowed, 0, None)
    s = gate(inputs.q, y.dtype)
    y.copy_(torch.where(underflowed, ratio if s is None else ratio * s, y))


def _call(inputs: LocalInputs, keep_alive: list[Tensor]) -> tuple[int, ...]:
    # The fields of `Call` in C++; `keep_alive` gets the tensors that must outlive the call.
    q, k, v, band, mask = inputs
    window = band.shape[1]
    sizes = *v.shape, window, block_length(window), operands(v), floats(band, keep_alive)
    return *sizes, *stream(q, keep_alive), *stream(k, keep_alive), *stream(v, keep_alive), address(mask, keep_alive)
