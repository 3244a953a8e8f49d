"""One token at a time on a CPU: `step.cpp`, with states in float32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.eager import decode
from aft_vision.ops.eager.causal import HEADROOM
from aft_vision.ops.kernels.cpu.build import compiled, library
from aft_vision.ops.kernels.cpu.tensors import Tokens, number, numbers, on_cpu, pointer, room


class _Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ('headroom', 'reach', 'negligible', 'smallest')]


LIMITS = _Limits(HEADROOM, decode.REACH, decode.NEGLIGIBLE, decode.SMALLEST)


def covers_step(state: Sequence[Tensor], *inputs: Tensor | None) -> bool:
    """Whether this is made for a token with such a state, or such factors of a bias: on a CPU, in float32."""
    return (
        state[0].dtype == torch.float32
        and state[0].numel() > 0
        and on_cpu(*inputs, *state)
        and all(x.is_contiguous() for x in state)
        and library() is not None
    )


def simple_step(q: Tensor | None, k: Tensor, v: Tensor, state: Sequence[Tensor]) -> Tensor:
    """y (B, D) in float32 of a token, which is added to the state (AFT Eq. 5)."""
    reference, numerator, denominator = state
    out = torch.empty_like(reference)
    rows = _rows(q), _rows(k), _rows(v)
    compiled().aft_simple_step(
        numbers(reference.shape),
        *map(_tokens, rows),
        *map(pointer, (reference, numerator, denominator, out)),
        number(HEADROOM),
    )
    return out


def local_step(q: Tensor | None, k: Tensor, v: Tensor, band_row: Tensor, state: Sequence[Tensor]) -> Tensor:
    """y (B, D) in float32 of a token, which goes into the state (AFT Eq. 4)."""
    reference, sums, ring, position, holds_keys = state
    out = torch.empty_like(reference)
    band_row = band_row.float().contiguous()
    q, k, v = _rows(q), _float_rows(k), _float_rows(v)
    found = 1
    if not holds_keys:
        found = compiled().aft_local_step(
            numbers((*reference.shape, ring.shape[1])),
            *map(_tokens, (q, k, v)),
            *map(pointer, (band_row, reference, sums, ring, position, out)),
            LIMITS,
            torch.get_num_threads(),
        )
    if found == 0:
        return out
    if found == 1:
        mean = decode.local_step(k.contiguous(), v.contiguous(), band_row, reference, sums, ring, position, holds_keys)
    else:
        mean = decode.held_mean(band_row, reference, sums, ring, position, holds_keys)
    return mean if q is None else mean * torch.sigmoid(q.contiguous())


def band_row(bias_u: Tensor, bias_v: Tensor, position: Tensor, window: int | None) -> Tensor:
    """`ops.factorized_band_row` of a position in the sequence; 0 before it."""
    size = len(bias_u) if window is None else min(window, len(bias_u))
    out = room((size,))
    compiled().aft_band_row(
        numbers((*bias_u.shape, size)), *map(pointer, (bias_u, bias_v)), ctypes.c_int64(int(position)), pointer(out)
    )
    return out


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else _float_rows(x)


def _float_rows(x: Tensor) -> Tensor:
    # (B, D) float32 whose channels are neighbours in memory.
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _tokens(x: Tensor | None) -> Tokens:
    return Tokens(None, 0, 0) if x is None else Tokens(x.data_ptr(), x.stride(0), 0)
