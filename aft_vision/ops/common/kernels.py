"""Functions of the kernels of all operations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aft_vision.ops.common import launch
from aft_vision.ops.common.launch import strides, tuned

MIN_FLOAT32 = tl.constexpr(launch.MIN_FLOAT32)
# A denominator below this has lost precision by underflow; its elements are recomputed by a joint softmax.
LIMIT = tl.constexpr(launch.LIMIT)


@triton.jit
def mask_if(condition, mask):
    """Return a mask where a condition holds, which may be a scalar, else False.

    Triton 3.9's interpreter does not take `mask & condition` for a mask: it gives a comparison of scalars their type.
    """
    return tl.where(condition, mask, False)


@triton.constexpr_function
def start_of(sizes, i):
    """Return where the i-th of adjacent pieces of these sizes starts."""
    return sum(tl.core._unwrap_if_constexpr(size) for size in sizes[:i])


@triton.jit
def load_weights(WEIGHTS, side, TARGETS: tl.constexpr, SOURCES: tl.constexpr):
    """Load (sources, targets) of each piece of the two, targets first, of weights (side, side), 0 outside."""
    found = ()
    for j in tl.static_range(len(TARGETS)):
        t = start_of(TARGETS, j) + tl.arange(0, TARGETS[j])
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])
            found += (tl.load(WEIGHTS + t[None, :] * side + s[:, None]),)
    return found


@triton.jit
def load_seen(MASK, b, t, c, T, D):
    """Return whether tokens t of sequence b count, and channels c exist."""
    seen = (t < T)[:, None] & (c < D)[None, :]
    if MASK is not None:
        seen = seen & (tl.load(MASK + b * T + t, mask=t < T, other=0) != 0)[:, None]
    return seen


@triton.jit
def load_keys(K, MASK, b, t, c, k_batch, k_token, T, D):
    """Load keys (t, c) of sequence b in float32, minus infinity at masked tokens and outside the sequence."""
    seen = load_seen(MASK, b, t, c, T, D)
    return tl.load(K + b * k_batch + t[:, None] * k_token + c[None, :], mask=seen, other=float('-inf')).to(tl.float32)


@triton.jit
def load_values(V, MASK, b, t, c, v_batch, v_token, T, D):
    """Load values (t, c) of sequence b in float32, 0 at masked tokens, even if NaN, and outside the sequence."""
    seen = load_seen(MASK, b, t, c, T, D)
    return tl.load(V + b * v_batch + t[:, None] * v_token + c[None, :], mask=seen, other=0.0).to(tl.float32)


@triton.jit
def load_tile(X, b, t, c, x_batch, x_token, T, D):
    """Load elements (t, c) of sequence b in float32, 0 outside the sequence."""
    inside = (t < T)[:, None] & (c < D)[None, :]
    return tl.load(X + b * x_batch + t[:, None] * x_token + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(X, x, b, t, c, T, D):
    """Write elements (t, c) of sequence b of a contiguous tensor."""
    inside = (t < T)[:, None] & (c < D)[None, :]
    tl.store(X + b * T * D + t[:, None] * D + c[None, :], x, mask=inside)


@triton.jit
def load_row(X, b, t, c, x_batch, x_token, D, other):
    """Load elements of token t of sequence b in float32, `other` outside."""
    return tl.load(X + b * x_batch + t * x_token + c, mask=c < D, other=other).to(tl.float32)


@tuned([], {'BT': 8, 'BD': 16}, ({'BT': 64, 'BD': 64}, 4))
@triton.jit
def peak_kernel(K, MASK, PEAK, UNDERFLOWED, T, D, strides, BT: tl.constexpr, BD: tl.constexpr):
    """Find the largest key that counts of each sequence and channel (B, D), finite; fill UNDERFLOWED with 0."""
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * BD + tl.arange(0, BD)
    peak = tl.full([BD], MIN_FLOAT32, tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        peak = tl.maximum(peak, tl.max(load_keys(K, MASK, b, t, c, strides[0], strides[1], T, D), 0))
    tl.store(PEAK + b * D + c, peak, mask=c < D)
    tl.store(UNDERFLOWED + b * D + c, 0, mask=c < D)


def largest_keys(k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the largest key that counts of each sequence of (B, T, h) as (B, h), finite, and as many flags, all 0.

    Args:
        k: its channels are contiguous.
        mask: (B, T) bytes.
    """
    B, T, h = k.shape
    peak = torch.empty((B, h), dtype=torch.float32, device=k.device)
    flags = torch.empty((B, h), dtype=torch.int32, device=k.device)
    peak_kernel[lambda tile: (B * triton.cdiv(h, tile['BD']),)](k, mask, peak, flags, T, h, strides(k))
    return peak, flags
