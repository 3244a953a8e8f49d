"""AFT-full (AFT Eq. 2): products of exp(w - row maximum) with tiles of e^k v and e^k that are computed on the fly.

The two maxima can be at different sources, so a denominator may underflow if w and k both spread over more than 69
nats. Each program checks its denominators after its products and recomputes such elements by a joint log-sum-exp over
the sources, in a branch that otherwise costs one reduction.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import FLOOR, LIMIT, load_keys, load_row, load_tile, load_values, store_tile
from aft_vision.ops.common.launch import tuned

# Sources per step of a repair: few, so that the repair takes no registers from the products.
REPAIR = tl.constexpr(8)


@triton.jit
def joint_sums(K, V, MASK, BIAS, b, t, c, strides, T, D, BS: tl.constexpr, BD: tl.constexpr):
    """Return for target t the largest logit k + w in float64, the sum of weights relative to it, and the mean value."""
    peak = tl.full([BD], -1e38, tl.float64)
    den = tl.zeros([BD], tl.float32)
    num = tl.zeros([BD], tl.float32)
    for start in range(0, T, BS):
        s = start + tl.arange(0, BS)
        logits = load_logits(K, MASK, BIAS, b, t, s, c, strides, T, D)
        v = load_values(V, MASK, b, s, c, strides[2], strides[3], T, D)
        new = tl.maximum(peak, tl.max(logits, 0))
        scale = tl.exp((peak - new).to(tl.float32))
        p = tl.exp((logits - new[None, :]).to(tl.float32))
        den = den * scale + tl.sum(p, 0)
        num = num * scale + tl.sum(p * v, 0)
        peak = new
    den = tl.where(den == 0.0, 1.0, den)
    return peak, den, num / den


@triton.jit
def load_logits(K, MASK, BIAS, b, t, s, c, strides, T, D):
    """Load k + w of target t for sources s, in float64, because large terms may cancel."""
    w = tl.load(BIAS + t * T + s, mask=s < T, other=0.0)
    k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
    return k.to(tl.float64) + w.to(tl.float64)[:, None]


@triton.jit
def load_weights(WEIGHTS, w_row, t, s, T):
    """Load exp(w - row maximum) of targets t and sources s. Rows are padded by zeros to a multiple of 16 elements."""
    return tl.load(WEIGHTS + t[:, None] * w_row + s[None, :], mask=(t < T)[:, None] & (s < w_row)[None, :], other=0.0)


@triton.jit
def load_rows(G, Y, DEN, Q, b, t, c, strides, T, D):
    """Load the gradients of num and den of targets t, 0 where the denominator is lost, and (g, y, s)."""
    g = load_tile(G, b, t, c, strides[4], strides[5], T, D)
    y = load_tile(Y, b, t, c, T * D, D, T, D)
    den = load_tile(DEN, b, t, c, T * D, D, T, D)
    s = tl.full(g.shape, 1.0, tl.float32)
    if Q is not None:
        s = tl.sigmoid(load_tile(Q, b, t, c, strides[6], strides[7], T, D))
    top = tl.where(den < LIMIT, 0.0, 1.0 / tl.where(den < LIMIT, 1.0, den))
    return g * s * top, -g * y * top, g * y * (1.0 - s)


@triton.jit
def lost_row(G, DEN, Q, K, V, MASK, BIAS, b, t, s, c, strides, T, D, BD: tl.constexpr):
    """Return the part of target t, with lost sums, in the gradients of v and of the logits of sources s."""
    lost = load_row(DEN, b, t, c, T * D, D, D, 1.0) < LIMIT
    a = load_row(G, b, t, c, strides[4], strides[5], D, 0.0)
    if Q is not None:
        a *= tl.sigmoid(load_row(Q, b, t, c, strides[6], strides[7], D, 0.0))
    peak, den, mean = joint_sums(K, V, MASK, BIAS, b, t, c, strides, T, D, REPAIR, BD)
    logits = load_logits(K, MASK, BIAS, b, t, s, c, strides, T, D)
    p = tl.exp((logits - peak[None, :]).to(tl.float32)) * tl.where(lost, a / den, 0.0)[None, :]
    return p, p * (load_values(V, MASK, b, s, c, strides[2], strides[3], T, D) - mean[None, :])


@tuned(
    ['T', 'D'],
    {'BT': 16, 'BS': 8, 'BD': 16},
    ({'BT': 64, 'BS': 32, 'BD': 64}, 8),
    ({'BT': 32, 'BS': 32, 'BD': 32}, 4),
    ({'BT': 128, 'BS': 32, 'BD': 64}, 8),
    ({'BT': 128, 'BS': 32, 'BD': 32}, 8),
)
@triton.jit
def forward_kernel(
    Q, K, V, MASK, WEIGHTS, w_row, BIAS, Y, DEN, T, D, strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given; strides of k, v and q.

    The denominator of a sequence without a token is 1.
    """
    row_tiles, tiles = tl.cdiv(T, BT), tl.cdiv(D, BD)
    first = (tl.program_id(0) % row_tiles) * BT
    c = (tl.program_id(0) // row_tiles % tiles) * BD + tl.arange(0, BD)
    b = (tl.program_id(0) // (row_tiles * tiles)).to(tl.int64)
    t = first + tl.arange(0, BT)
    peak = tl.full([BD], FLOOR, tl.float32)
    num = tl.zeros([BT, BD], tl.float32)
    den = tl.zeros([BT, BD], tl.float32)
    for start in range(0, T, BS):
        s = start + tl.arange(0, BS)
        w = load_weights(WEIGHTS, w_row, t, s, T)
        k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
        v = load_values(V, MASK, b, s, c, strides[2], strides[3], T, D)
        new = tl.maximum(peak, tl.max(k, 0))
        scale = tl.exp(peak - new)[None, :]
        ek = tl.exp(k - new[None, :])
        num = tl.dot(w, (ek * v).to(PRODUCT), num * scale, input_precision=PRECISION)
        den = tl.dot(w, ek.to(PRODUCT), den * scale, input_precision=PRECISION)
        peak = new
    attends = (peak > FLOOR)[None, :] & (t < T)[:, None] & (c < D)[None, :]
    lost = attends & (den < LIMIT)
    y = num / tl.where(den < LIMIT, 1.0, den)
    if Q is not None:
        y *= tl.sigmoid(load_tile(Q, b, t, c, strides[4], strides[5], T, D))
    place = t[:, None] * D + c[None, :]
    inside = (t < T)[:, None] & (c < D)[None, :]
    tl.store(Y + b * T * D + place, y, mask=inside & (lost == 0))
    if DEN is not None:
        tl.store(DEN + b * T * D + place, tl.where(attends, den, 1.0), mask=inside)
    if tl.max(lost.to(tl.int32)) > 0:
        for i in range(0, BT):
            here = tl.max(tl.where((tl.arange(0, BT) == i)[:, None], lost.to(tl.int32), 0), 0) > 0
            if tl.max(here.to(tl.int32)) > 0:
                mean = joint_sums(K, V, MASK, BIAS, b, first + i, c, strides, T, D, REPAIR, BD)[2]
                if Q is not None:
                    mean *= tl.sigmoid(load_row(Q, b, first + i, c, strides[4], strides[5], D, 0.0))
                tl.store(Y + (b * T + first + i) * D + c, mean, mask=here)


@tuned(['T', 'D'], {'BT': 8, 'BD': 16}, ({'BT': 64, 'BD': 32}, 4), ({'BT': 32, 'BD': 64}, 4))
@triton.jit
def column_kernel(K, MASK, DEN, PEAK, LOWEST, T, D, k_batch, k_token, BT: tl.constexpr, BD: tl.constexpr):
    """Find the largest key and the smallest denominator of each sequence and channel."""
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    peak = tl.full([BD], FLOOR, tl.float32)
    lowest = tl.full([BD], 1.0, tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        peak = tl.maximum(peak, tl.max(load_keys(K, MASK, b, t, c, k_batch, k_token, T, D), 0))
        den = load_tile(DEN, b, t, c, T * D, D, T, D)
        lowest = tl.minimum(lowest, tl.min(tl.where((t < T)[:, None], den, 1.0), 0))
    tl.store(PEAK + b * D + c, peak, mask=c < D)
    tl.store(LOWEST + b * D + c, lowest, mask=c < D)


@tuned(
    ['T', 'D'],
    {'BT': 8, 'BS': 16, 'BD': 16},
    ({'BT': 32, 'BS': 128, 'BD': 32}, 8),
    ({'BT': 32, 'BS': 32, 'BD': 32}, 4),
    ({'BT': 32, 'BS': 64, 'BD': 64}, 8),
)
@triton.jit
def backward_kernel(
    G, Y, DEN, Q, K, V, MASK, WEIGHTS, w_row, BIAS, PEAK, LOWEST, DQ, DK, DV, T, D, strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and v; strides of k, v, the gradient and q."""
    row_tiles, tiles = tl.cdiv(T, BS), tl.cdiv(D, BD)
    row = tl.program_id(0) % row_tiles
    c = (tl.program_id(0) // row_tiles % tiles) * BD + tl.arange(0, BD)
    b = (tl.program_id(0) // (row_tiles * tiles)).to(tl.int64)
    s = row * BS + tl.arange(0, BS)
    d_num = tl.zeros([BS, BD], tl.float32)
    d_den = tl.zeros([BS, BD], tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        r_num, r_den, dq = load_rows(G, Y, DEN, Q, b, t, c, strides, T, D)
        if Q is not None:
            # The first of the programs that read these rows.
            store_tile(DQ, dq, b, tl.where(row == 0, t, T), c, T, D)
        w = load_weights(WEIGHTS, w_row, t, s, T)
        d_num = tl.dot(tl.trans(w), r_num.to(PRODUCT), d_num, input_precision=PRECISION)
        d_den = tl.dot(tl.trans(w), r_den.to(PRODUCT), d_den, input_precision=PRECISION)
    k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
    v = load_values(V, MASK, b, s, c, strides[2], strides[3], T, D)
    ek = tl.exp(k - tl.load(PEAK + b * D + c, mask=c < D, other=0.0)[None, :])
    dv = d_num * ek
    dk = (d_num * v + d_den) * ek
    if tl.min(tl.load(LOWEST + b * D + c, mask=c < D, other=1.0)) < LIMIT:
        for i in range(0, T):
            if tl.min(load_row(DEN, b, i, c, T * D, D, D, 1.0)) < LIMIT:
                more_dv, more_dk = lost_row(G, DEN, Q, K, V, MASK, BIAS, b, i, s, c, strides, T, D, BD)
                dv += more_dv
                dk += more_dk
    store_tile(DV, dv, b, s, c, T, D)
    store_tile(DK, dk, b, s, c, T, D)


@tuned(
    ['T', 'D'],
    {'BT': 16, 'BS': 16, 'BD': 16},
    ({'BT': 64, 'BS': 64, 'BD': 32}, 8),
    ({'BT': 32, 'BS': 32, 'BD': 32}, 4),
    ({'BT': 64, 'BS': 64, 'BD': 64}, 8),
    ({'BT': 128, 'BS': 64, 'BD': 32}, 8),
)
@triton.jit
def bias_kernel(
    G, Y, DEN, Q, K, V, MASK, WEIGHTS, w_row, BIAS, PEAK, LOWEST, PARTS, B, T, D, strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the bias, (splits, T, T), each from every splits-th pair of sequence and channel tile."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    split, tiles = tl.program_id(2), tl.cdiv(D, BD)
    dw = tl.zeros([BT, BS], tl.float32)
    for pair in range(split, B * tiles, tl.num_programs(2)):
        b, c = (pair // tiles).to(tl.int64), pair % tiles * BD + tl.arange(0, BD)
        r_num, r_den, _ = load_rows(G, Y, DEN, Q, b, t, c, strides, T, D)
        k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
        ek = tl.exp(k - tl.load(PEAK + b * D + c, mask=c < D, other=0.0)[None, :])
        ekv = ek * load_values(V, MASK, b, s, c, strides[2], strides[3], T, D)
        dw = tl.dot(r_num.to(PRODUCT), tl.trans(ekv.to(PRODUCT)), dw, input_precision=PRECISION)
        dw = tl.dot(r_den.to(PRODUCT), tl.trans(ek.to(PRODUCT)), dw, input_precision=PRECISION)
    place = t[:, None] * T + s[None, :]
    inside = (t < T)[:, None] & (s < T)[None, :]
    dw *= load_weights(WEIGHTS, w_row, t, s, T).to(tl.float32)
    for pair in range(split, B * tiles, tl.num_programs(2)):
        b, c = (pair // tiles).to(tl.int64), pair % tiles * BD + tl.arange(0, BD)
        if tl.min(tl.load(LOWEST + b * D + c, mask=c < D, other=1.0)) < LIMIT:
            for i in range(0, tl.minimum(BT, T - tl.program_id(0) * BT)):
                row = tl.program_id(0) * BT + i
                if tl.min(load_row(DEN, b, row, c, T * D, D, D, 1.0)) < LIMIT:
                    _, d_logits = lost_row(G, DEN, Q, K, V, MASK, BIAS, b, row, s, c, strides, T, D, BD)
                    dw += tl.where((t == row)[:, None], tl.sum(d_logits, 1)[None, :], 0.0)
    tl.store(PARTS + split * T * T + place, dw, mask=inside)
