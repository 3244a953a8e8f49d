"""One token at a time on a CPU: `step.cpp`, with states in float32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.eager import decode
from aft_vision.ops.eager.causal import HEADROOM
from aft_vision.ops.kernels.cpu.build import compiled, library
from aft_vision.ops.kernels.cpu.tensors import Tokens, number, numbers, pointer, room


class _Band(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ('row', 'u', 'v')),
        *((name, ctypes.c_int64) for name in ('tokens', 'width')),
    ]


class _Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ('headroom', 'reach', 'negligible', 'smallest')]


LIMITS = _Limits(HEADROOM, decode.REACH, decode.NEGLIGIBLE, decode.SMALLEST)


def covers_step(state: Sequence[Tensor], *inputs: Tensor | None) -> bool:
    """Whether this is made for a token with such a state: on a CPU, in float32."""
    for x in inputs:
        if x is not None and not x.is_cpu:
            return False
    for x in state:
        if not (x.is_cpu and x.is_contiguous()):
            return False
    return state[0].dtype == torch.float32 and state[0].numel() > 0 and library() is not None


def covers_factors(*factors: Tensor) -> bool:
    """Whether this is made for such factors of a bias."""
    return all(x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() for x in factors)


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
    row = band_row.float().contiguous()
    return _local_step(q, k, v, row, _Band(row.data_ptr()), state)


def factorized_local_step(
    q: Tensor | None, k: Tensor, v: Tensor, bias_u: Tensor, bias_v: Tensor, state: Sequence[Tensor]
) -> Tensor:
    """`local_step` with the position bias given by its factors.

    Raises:
        IndexError: the bias has no row for the token.
    """
    row = room((state[2].shape[1],))
    band = _Band(row.data_ptr(), bias_u.data_ptr(), bias_v.data_ptr(), *bias_u.shape)
    return _local_step(q, k, v, row, band, state)


def _local_step(q: Tensor | None, k: Tensor, v: Tensor, row: Tensor, band: _Band, state: Sequence[Tensor]) -> Tensor:
    reference, sums, ring, position, holds_keys = state
    out = torch.empty_like(reference)
    q, k, v = _rows(q), _float_rows(k), _float_rows(v)
    found = compiled().aft_local_step(
        numbers((*reference.shape, ring.shape[1])),
        *map(_tokens, (q, k, v)),
        band,
        *map(pointer, (reference, sums, ring, position, holds_keys, out)),
        LIMITS,
        torch.get_num_threads(),
    )
    if found == 0:
        return out
    if found == 3:
        raise IndexError(f'expected a position below {band.tokens}, the rows of the bias, got {int(position)}')
    with torch.no_grad():
        if found == 1:
            k, v = k.contiguous(), v.contiguous()
            mean = decode.local_step(k, v, row, reference, sums, ring, position, holds_keys)
        else:
            mean = decode.held_mean(row, reference, sums, ring, position, holds_keys)
        return mean if q is None else mean * torch.sigmoid(q.contiguous())


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else _float_rows(x)


def _float_rows(x: Tensor) -> Tensor:
    # (B, D) float32 whose channels are neighbours in memory.
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _tokens(x: Tensor | None) -> Tokens:
    return Tokens(None, 0, 0) if x is None else Tokens(x.data_ptr(), x.stride(0), 0)
