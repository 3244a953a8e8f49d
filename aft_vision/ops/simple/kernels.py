"""AFT-simple (AFT Eq. 5): a program for each sequence and tile of channels, which reads the tokens in order.

Any finite key is exact: the sums over the tokens read so far are relative to the largest key among them.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import MIN_FLOAT32, load_keys, load_tile, load_values, store_tile
from aft_vision.ops.common.launch import tuned

TILES = ({'BT': 64, 'BD': 32}, 4), ({'BT': 32, 'BD': 64}, 4), ({'BT': 64, 'BD': 64}, 8), ({'BT': 128, 'BD': 32}, 8)
INTERPRETED_TILE = {'BT': 8, 'BD': 16}


@tuned(['T', 'D'], INTERPRETED_TILE, *TILES)
@triton.jit
def forward_kernel(Q, K, V, MASK, Y, CONTEXT, T, D, strides, BT: tl.constexpr, BD: tl.constexpr):
    """Compute y, and the context that all targets share if CONTEXT is given; strides of q, k and v."""
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    peak = tl.full([BD], MIN_FLOAT32, tl.float32)
    num = tl.zeros([BD], tl.float32)
    den = tl.zeros([BD], tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        k = load_keys(K, MASK, b, t, c, strides[2], strides[3], T, D)
        v = load_values(V, MASK, b, t, c, strides[4], strides[5], T, D)
        new = tl.maximum(peak, tl.max(k, 0))
        scale = tl.exp(peak - new)
        ek = tl.exp(k - new[None, :])
        num = num * scale + tl.sum(ek * v, 0)
        den = den * scale + tl.sum(ek, 0)
        peak = new
    mean = num / tl.where(den == 0.0, 1.0, den)  # 0 without a token
    if CONTEXT is not None:
        tl.store(CONTEXT + b * D + c, mean, mask=c < D)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        y = tl.broadcast_to(mean[None, :], [BT, BD])
        if Q is not None:
            y = y * tl.sigmoid(load_tile(Q, b, t, c, strides[0], strides[1], T, D))
        store_tile(Y, y, b, t, c, T, D)


@tuned(['T', 'D'], INTERPRETED_TILE, *TILES)
@triton.jit
def backward_kernel(G, CONTEXT, Q, K, V, MASK, DQ, DK, DV, T, D, strides, BT: tl.constexpr, BD: tl.constexpr):
    """Compute the gradients of q, k and v; strides of the gradient, q, k and v."""
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    mean = tl.load(CONTEXT + b * D + c, mask=c < D, other=0.0)
    peak = tl.full([BD], MIN_FLOAT32, tl.float32)
    den = tl.zeros([BD], tl.float32)
    d_mean = tl.zeros([BD], tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        k = load_keys(K, MASK, b, t, c, strides[4], strides[5], T, D)
        new = tl.maximum(peak, tl.max(k, 0))
        den = den * tl.exp(peak - new) + tl.sum(tl.exp(k - new[None, :]), 0)
        peak = new
        g = load_tile(G, b, t, c, strides[0], strides[1], T, D)
        if Q is not None:
            s = tl.sigmoid(load_tile(Q, b, t, c, strides[2], strides[3], T, D))
            store_tile(DQ, g * mean[None, :] * s * (1.0 - s), b, t, c, T, D)
            g = g * s
        d_mean += tl.sum(g, 0)
    d_num = d_mean / tl.where(den == 0.0, 1.0, den)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        k = load_keys(K, MASK, b, t, c, strides[4], strides[5], T, D)
        v = load_values(V, MASK, b, t, c, strides[6], strides[7], T, D)
        dv = tl.exp(k - peak[None, :]) * d_num[None, :]
        store_tile(DV, dv, b, t, c, T, D)
        store_tile(DK, dv * (v - mean[None, :]), b, t, c, T, D)
