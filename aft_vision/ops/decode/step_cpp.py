"""One token at a time on a CPU: `step.cpp`, with states in float32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aft_vision.ops.common.build import compiled, library
from aft_vision.ops.common.tensors import Tokens, number, numbers, pointer, room
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.decode.dense_cpp import DenseBlock


class _Band(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ('row', 'u', 'v')),
        *((name, ctypes.c_int64) for name in ('tokens', 'width')),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ('layers', ctypes.c_void_p),
        ('batch', ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ('x', 'room', 'out')),
        ('gated', ctypes.c_int32),
    ]


class _Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ('headroom', 'reach', 'smallest')]


LIMITS = _Limits(decode.HEADROOM, decode.REACH, decode.SMALLEST)


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
        number(decode.HEADROOM),
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
        ValueError: the position of the state is negative.
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
    return out if found == 0 else _repair(found, q, k, v, row, state)


def _repair(found: int, q: Tensor | None, k: Tensor, v: Tensor, row: Tensor, state: Sequence[Tensor]) -> Tensor:
    # y (B, D) by torch, after what `aft_local_step` has returned.
    reference, sums, ring, position, holds_keys = state
    if found >= 3:
        raise IndexError(f'expected a position with a row of the bias, got {decode.tokens_seen(position)}')
    with torch.no_grad():
        if found == 1:
            k, v = k.contiguous(), v.contiguous()
            mean = decode.local_step(k, v, row, reference, sums, ring, position, holds_keys)
        else:
            mean = decode.held_mean(row, reference, sums, ring, position, holds_keys)
        return mean if q is None else mean * torch.sigmoid(q.contiguous())


def simple_block(dense: DenseBlock, x: Tensor, gated: bool, state: Sequence[Tensor]) -> Tensor:
    """A block with AFT-simple for a token x (B, C), which is added to the state."""
    block, _, out = _block(dense, x, gated)
    compiled().aft_simple_block(block, *map(pointer, state), number(decode.HEADROOM), torch.get_num_threads())
    return out


def local_block(
    dense: DenseBlock, x: Tensor, gated: bool, bias_u: Tensor, bias_v: Tensor, state: Sequence[Tensor]
) -> Tensor:
    """A block with AFT-local for a token x (B, C), which goes into the state; the bias is given by its factors.

    Raises:
        IndexError: the bias has no row for the token.
        ValueError: the position of the state is negative.
    """
    size = state[2].shape[1]
    block, parts, out = _block(dense, x, gated, size)
    row = parts[len(parts) - size :]
    band = _Band(row.data_ptr(), bias_u.data_ptr(), bias_v.data_ptr(), *bias_u.shape)
    found = compiled().aft_local_block(
        block, ctypes.c_int64(size), band, *map(pointer, state), LIMITS, torch.get_num_threads()
    )
    if found == 0:
        return out
    projected = parts[: len(x) * dense.projected].view(len(x), -1)
    *queries, k, v = projected.split(x.shape[1], 1)
    q = queries[0] if queries else None
    return dense.finish(x, _repair(found, q, k, v, row, state))


def _block(dense: DenseBlock, x: Tensor, gated: bool, more: int = 0) -> tuple[_Block, Tensor, Tensor]:
    # What a block is called with, its room and `more` numbers behind it, and its result.
    batch, channels = x.shape
    parts, out = room((batch * (dense.projected + 2 * channels + dense.hidden) + more,)), torch.empty_like(x)
    return (
        _Block(ctypes.addressof(dense.layers), batch, x.data_ptr(), parts.data_ptr(), out.data_ptr(), gated),
        parts,
        out,
    )


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else _float_rows(x)


def _float_rows(x: Tensor) -> Tensor:
    # (B, D) float32 whose channels are neighbours in memory.
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _tokens(x: Tensor | None) -> Tokens:
    return Tokens(None, 0, 0) if x is None else Tokens(x.data_ptr(), x.stride(0), 0)
