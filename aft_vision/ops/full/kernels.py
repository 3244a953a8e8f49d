"""AFT-full (AFT Eq. 2): what comes before and after the product of its terms by the (T, T) weights, or all of it.

Terms are (B, length, 2 D): e^k v, then e^k. `length` is T, padded to what tensor cores take. Kernels of whole sequences
make the product too: the terms of a few channels, or the gradients of their sums, stay in shared memory. In the forward
with stationary weights those of a program stay there instead, for all sequences whose channels it takes in turn.

The weights and e^k are relative to two maxima, which can be at different sources, so a denominator may underflow if the
bias and k both spread over more than 69 nats. Such elements are computed again by a joint log-sum-exp over the sources,
in a branch that otherwise costs one reduction.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import (
    LIMIT,
    MIN_FLOAT32,
    load_keys,
    load_row,
    load_tile,
    load_values,
    load_weights,
    mask_if,
    start_of,
    store_tile,
)
from aft_vision.ops.common.launch import tuned

# Sources per step of a repair: few, so that the repair takes few registers.
REPAIR = tl.constexpr(8)
# Tiles in the interpreter, and on a GPU with the number of warps: of elements, and of tokens and channels of whole
# sequences, with that of stages.
INTERPRETED_TILE, ELEMENTS = {'BT': 8, 'BD': 16}, ({'BT': 32, 'BD': 128}, 8)
WHOLE = ({'BT': 32, 'BD': 32}, 8, 2), ({'BT': 64, 'BD': 32}, 8, 2), ({'BT': 64, 'BD': 64}, 8, 2)
# Channels of a program with stationary weights: as many pairs of terms as the rows of a product of four or eight warps.
STATIONARY = ({'BD': 32}, 4, 1), ({'BD': 64}, 8, 1)


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
def underflowed_row(G, DEN, Q, K, V, MASK, BIAS, b, t, s, c, strides, T, D, BD: tl.constexpr):
    """Return the part of target t, with underflowed sums, in the gradients of v and of the logits of sources s."""
    underflowed = load_row(DEN, b, t, c, T * D, D, D, 1.0) < LIMIT
    a = load_row(G, b, t, c, strides[4], strides[5], D, 0.0)
    if Q is not None:
        a *= tl.sigmoid(load_row(Q, b, t, c, strides[6], strides[7], D, 0.0))
    peak, den, mean = joint_sums(K, V, MASK, BIAS, b, t, c, strides, T, D, REPAIR, BD)
    logits = load_logits(K, MASK, BIAS, b, t, s, c, strides, T, D)
    p = tl.exp((logits - peak[None, :]).to(tl.float32)) * tl.where(underflowed, a / den, 0.0)[None, :]
    return p, p * (load_values(V, MASK, b, s, c, strides[2], strides[3], T, D) - mean[None, :])


@triton.jit
def program_elements(T, D, BT: tl.constexpr, BD: tl.constexpr):
    """Return the sequence, the first token and the channels of a program."""
    t_tiles, d_tiles = tl.cdiv(T, BT), tl.cdiv(D, BD)
    program = tl.program_id(0)
    c = program % d_tiles * BD + tl.arange(0, BD)
    return (program // (t_tiles * d_tiles)).to(tl.int64), program // d_tiles % t_tiles * BT, c


@triton.jit
def store_pair(OUT, first, second, b, t, c, length, D):
    """Write the two halves of rows (B, length, 2 D)."""
    place = (b * length + t)[:, None] * (2 * D) + c[None, :]
    inside = (t < length)[:, None] & (c < D)[None, :]
    tl.store(OUT + place, first, mask=inside)
    tl.store(OUT + place + D, second, mask=inside)


@triton.jit
def load_pair(X, b, t, c, T, length, D, other):
    """Load the two halves of rows (B, length, 2 D); `other` in the second outside the sequence."""
    place = (b * length + t)[:, None] * (2 * D) + c[None, :]
    inside = (t < T)[:, None] & (c < D)[None, :]
    return tl.load(X + place, mask=inside, other=0.0), tl.load(X + place + D, mask=inside, other=other)


@tuned([], {'BS': 8}, ({'BS': 256}, 4))
@triton.jit
def weights_kernel(BIAS, WEIGHTS, T, length, BS: tl.constexpr):
    """Write exp(bias - largest of its row), padded by 0 to (length, length); a row of minus infinity sees no source."""
    t = tl.program_id(0).to(tl.int64)
    most = tl.full([BS], MIN_FLOAT32, tl.float32)
    for start in range(0, T, BS):
        s = start + tl.arange(0, BS)
        w = tl.load(BIAS + t * T + s, mask=mask_if(t < T, s < T), other=float('-inf'))
        most = tl.maximum(most, w.to(tl.float32))
    for start in range(0, length, BS):
        s = start + tl.arange(0, BS)
        w = tl.load(BIAS + t * T + s, mask=mask_if(t < T, s < T), other=float('-inf'))
        tl.store(WEIGHTS + t * length + s, tl.exp(w.to(tl.float32) - tl.max(most, 0)), mask=s < length)


@tuned([], INTERPRETED_TILE, ELEMENTS)
@triton.jit
def terms_kernel(K, V, MASK, PEAK, TERMS, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr):
    """Write the terms e^k v and e^k; strides of k and v."""
    b, first, c = program_elements(length, D, BT, BD)
    t = first + tl.arange(0, BT)
    peak = tl.load(PEAK + b * D + c, mask=c < D, other=0.0)
    ek = tl.exp(load_keys(K, MASK, b, t, c, strides[0], strides[1], T, D) - peak[None, :])
    v = load_values(V, MASK, b, t, c, strides[2], strides[3], T, D)
    store_pair(TERMS, ek * v, ek, b, t, c, length, D)


@triton.jit
def store_gated(num, den, Q, Y, DEN, b, t, c, T, D, strides):
    """Write y and, if DEN is given, the denominators; strides of k, v and q."""
    scale = tl.where(den < LIMIT, 1.0, den)
    if Q is not None:
        # The sigmoid in the same division.
        scale *= 1.0 + tl.exp(-load_tile(Q, b, t, c, strides[4], strides[5], T, D))
    place = t[:, None] * D + c[None, :]
    inside = (t < T)[:, None] & (c < D)[None, :]
    tl.store(Y + b * T * D + place, num / scale, mask=inside)
    if DEN is not None:
        tl.store(DEN + b * T * D + place, den, mask=inside)


@triton.jit
def store_results(
    num, den, peak, Q, K, V, MASK, BIAS, Y, DEN, b, first, c, T, D, strides, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Write y of the targets from `first` on, and the denominators if DEN is given; strides of k, v and q.

    The denominator of a sequence without a token is 1.
    """
    t = first + tl.arange(0, BT)
    den = tl.where((peak > MIN_FLOAT32)[None, :] & (t < T)[:, None], den, 1.0)
    underflowed = den < LIMIT
    store_gated(num, den, Q, Y, DEN, b, t, c, T, D, strides)
    if tl.max(underflowed.to(tl.int32)) > 0:
        # Other threads may have written the same elements.
        tl.debug_barrier()
        for i in range(0, BT):
            here = tl.max(tl.where((tl.arange(0, BT) == i)[:, None], underflowed.to(tl.int32), 0), 0) > 0
            if tl.max(here.to(tl.int32)) > 0:
                mean = joint_sums(K, V, MASK, BIAS, b, first + i, c, strides, T, D, REPAIR, BD)[2]
                if Q is not None:
                    mean *= tl.sigmoid(load_row(Q, b, first + i, c, strides[4], strides[5], D, 0.0))
                tl.store(Y + (b * T + first + i) * D + c, mean, mask=here)


@tuned([], INTERPRETED_TILE, ELEMENTS)
@triton.jit
def results_kernel(
    Q, K, V, MASK, BIAS, PEAK, SUMS, Y, DEN, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute y from the sums, and the denominators if DEN is given; strides of k, v and q."""
    b, first, c = program_elements(T, D, BT, BD)
    num, den = load_pair(SUMS, b, first + tl.arange(0, BT), c, T, length, D, 1.0)
    peak = tl.load(PEAK + b * D + c, mask=c < D, other=MIN_FLOAT32)
    store_results(num, den, peak, Q, K, V, MASK, BIAS, Y, DEN, b, first, c, T, D, strides, BT, BD)


@triton.jit
def load_terms(K, V, MASK, b, s, c, strides, T, D):
    """Return the largest key of each channel, which is finite, and the terms of all sources relative to it."""
    k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
    peak = tl.maximum(tl.max(k, 0), MIN_FLOAT32)
    ek = tl.exp(k - peak[None, :])
    return peak, ek * load_values(V, MASK, b, s, c, strides[2], strides[3], T, D), ek


@triton.jit
def join_pair(first, second, PRODUCT: tl.constexpr):
    """Return one operand of a product from two: their columns in turn."""
    return tl.join(first, second).reshape(first.shape[0], 2 * first.shape[1]).to(PRODUCT)


@triton.jit
def split_pair(sums):
    """Return the products with both operands of `join_pair`."""
    return sums.reshape(sums.shape[0], sums.shape[1] // 2, 2).split()


@tuned(['T', 'D'], INTERPRETED_TILE, *WHOLE)
@triton.jit
def whole_results_kernel(
    Q, K, V, MASK, BIAS, WEIGHTS, Y, DEN, T, D, strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, LENGTH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given; strides of k, v and q. Weights are (LENGTH, LENGTH)."""
    b, _, c = program_elements(1, D, BT, BD)
    s = tl.arange(0, LENGTH)
    peak, ekv, ek = load_terms(K, V, MASK, b, s, c, strides, T, D)
    terms = join_pair(ekv, ek, PRODUCT)
    for first in range(0, T, BT):
        weights = tl.load(WEIGHTS + (first + tl.arange(0, BT))[:, None] * LENGTH + s[None, :])
        num, den = split_pair(tl.dot(weights, terms, input_precision=PRECISION))
        store_results(num, den, peak, Q, K, V, MASK, BIAS, Y, DEN, b, first, c, T, D, strides, BT, BD)


@triton.jit
def find_weights(BIAS, T, TARGETS: tl.constexpr, SOURCES: tl.constexpr, PRODUCT: tl.constexpr):
    """Return exp(bias - largest of its row) as `load_weights`; a row of minus infinity sees no source."""
    found = ()
    for j in tl.static_range(len(TARGETS)):
        t = start_of(TARGETS, j) + tl.arange(0, TARGETS[j])
        most = tl.full([TARGETS[j]], MIN_FLOAT32, tl.float32)
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])
            most = tl.maximum(most, tl.max(load_biases(BIAS, s, t, T), 0))
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])
            found += (tl.exp(load_biases(BIAS, s, t, T) - most[None, :]).to(PRODUCT),)
    return found


@triton.jit
def load_biases(BIAS, s, t, T):
    """Load the biases of sources s for targets t in float32, minus infinity outside the sequence."""
    inside = (s < T)[:, None] & (t < T)[None, :]
    return tl.load(BIAS + t[None, :] * T + s[:, None], mask=inside, other=float('-inf')).to(tl.float32)


@triton.jit
def pair_rows(first, second, PRODUCT: tl.constexpr):
    """Return (2 BD, S) from two (S, BD), eight rows of each in turn: tensor cores put them in the same threads."""
    S: tl.constexpr = first.shape[0]
    BD: tl.constexpr = first.shape[1]
    pair = tl.join(first.to(PRODUCT), second.to(PRODUCT)).reshape(S, BD // 8, 8, 2)
    return pair.permute(1, 3, 2, 0).reshape(2 * BD, S)


@triton.jit
def split_rows(sums):
    """Return the products (T, BD) with both operands of `pair_rows`."""
    BD: tl.constexpr = sums.shape[0] // 2
    BT: tl.constexpr = sums.shape[1]
    first, second = sums.reshape(BD // 8, 2, 8, BT).permute(0, 2, 3, 1).split()
    return tl.trans(first.reshape(BD, BT)), tl.trans(second.reshape(BD, BT))


@triton.jit
def repair_channels(Q, K, V, MASK, BIAS, Y, b, c, repaired, strides, T, D, BD: tl.constexpr):
    """Write y of all targets in the channels that are to be repaired."""
    # Other threads may have written the same elements.
    tl.debug_barrier()
    for t in range(0, T):
        mean = joint_sums(K, V, MASK, BIAS, b, t, c, strides, T, D, REPAIR, BD)[2]
        if Q is not None:
            mean *= tl.sigmoid(load_row(Q, b, t, c, strides[4], strides[5], D, 0.0))
        tl.store(Y + (b * T + t) * D + c, mean, mask=repaired)


@tuned(['T', 'D'], INTERPRETED_TILE, *STATIONARY)
@triton.jit
def stationary_kernel(
    Q, K, V, MASK, BIAS, WEIGHTS, Y, DEN, B, T, D, side, strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, TARGETS: tl.constexpr, SOURCES: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given; strides of k, v and q. Weights are (side, side), or None."""
    if WEIGHTS is not None:
        weights = load_weights(WEIGHTS, side, TARGETS, SOURCES)
    else:
        weights = find_weights(BIAS, T, TARGETS, SOURCES, PRODUCT)
    tiles = tl.cdiv(D, BD)
    for tile in range(tl.program_id(0), B * tiles, tl.num_programs(0)):
        b, c = (tile // tiles).to(tl.int64), tile % tiles * BD + tl.arange(0, BD)
        peak, keys, terms = tl.full([BD], MIN_FLOAT32, tl.float32), (), ()
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])
            k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
            peak = tl.maximum(peak, tl.max(k, 0))
            keys += (k,)
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])
            ek = tl.exp(keys[i] - peak[None, :])
            v = load_values(V, MASK, b, s, c, strides[2], strides[3], T, D)
            terms += (pair_rows(ek * v, ek, PRODUCT),)
        lowest = tl.full([BD], 1.0, tl.float32)
        for j in tl.static_range(len(TARGETS)):
            sums = tl.zeros([2 * BD, TARGETS[j]], tl.float32)
            for i in tl.static_range(len(SOURCES)):
                sums = tl.dot(terms[i], weights[j * len(SOURCES) + i], sums, input_precision=PRECISION)
            num, den = split_rows(sums)
            t = start_of(TARGETS, j) + tl.arange(0, TARGETS[j])
            den = tl.where((peak > MIN_FLOAT32)[None, :] & (t < T)[:, None], den, 1.0)
            store_gated(num, den, Q, Y, DEN, b, t, c, T, D, strides)
            lowest = tl.minimum(lowest, tl.min(den, 0))
        if tl.min(lowest) < LIMIT:
            repaired = (lowest < LIMIT) & (c < D)
            repair_channels(Q, K, V, MASK, BIAS, Y, b, c, repaired, strides, T, D, BD)


@triton.jit
def gradients_of_sums(G, Y, DEN, Q, DQ, UNDERFLOWED, ANY, b, t, c, strides, T, D):
    """Return the gradients of sums, 0 where the denominator underflowed, and whether any of a channel did.

    Writes the gradient of q, and marks those channels. Strides of k, v, the gradient and q.
    """
    g = load_tile(G, b, t, c, strides[4], strides[5], T, D)
    gy = g * load_tile(Y, b, t, c, T * D, D, T, D)
    inside = (t < T)[:, None] & (c < D)[None, :]
    den = tl.load(DEN + (b * T + t)[:, None] * D + c[None, :], mask=inside, other=1.0).to(tl.float32)
    if Q is not None:
        gate = tl.sigmoid(load_tile(Q, b, t, c, strides[6], strides[7], T, D))
        g *= gate
        store_tile(DQ, gy * (1.0 - gate), b, t, c, T, D)
    inverse = tl.where(den < LIMIT, 0.0, 1.0 / tl.where(den < LIMIT, 1.0, den))
    underflowed = tl.min(den, 0) < LIMIT
    tl.store(UNDERFLOWED + b * D + c, 1, mask=underflowed)
    tl.store(ANY + 0 * c, 1, mask=underflowed)
    return g * inverse, -gy * inverse, underflowed


@triton.jit
def store_sources(
    d_num, d_den, peak, underflowed, G, DEN, Q, K, V, MASK, BIAS, DK, DV, b, s, c, T, D, strides, BD: tl.constexpr
):  # fmt: skip
    """Write the gradients of k and v of sources from those of their terms; strides of k, v, the gradient and q."""
    k = load_keys(K, MASK, b, s, c, strides[0], strides[1], T, D)
    v = load_values(V, MASK, b, s, c, strides[2], strides[3], T, D)
    ek = tl.exp(k - peak[None, :])
    dv = d_num * ek
    dk = (d_num * v + d_den) * ek
    if tl.max(underflowed.to(tl.int32)) > 0:
        for i in range(0, T):
            if tl.min(load_row(DEN, b, i, c, T * D, D, D, 1.0)) < LIMIT:
                more_dv, more_dk = underflowed_row(G, DEN, Q, K, V, MASK, BIAS, b, i, s, c, strides, T, D, BD)
                dv += more_dv
                dk += more_dk
    store_tile(DV, dv, b, s, c, T, D)
    store_tile(DK, dk, b, s, c, T, D)


@tuned([], INTERPRETED_TILE, ELEMENTS)
@triton.jit
def targets_kernel(
    G, Y, DEN, Q, DQ, SLOPES, UNDERFLOWED, ANY, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute the gradients of q and of the sums; strides of k, v, the gradient and q."""
    b, first, c = program_elements(length, D, BT, BD)
    t = first + tl.arange(0, BT)
    d_num, d_den, _ = gradients_of_sums(G, Y, DEN, Q, DQ, UNDERFLOWED, ANY, b, t, c, strides, T, D)
    store_pair(SLOPES, d_num, d_den, b, t, c, length, D)


@tuned([], INTERPRETED_TILE, ELEMENTS)
@triton.jit
def sources_kernel(
    G, DEN, Q, K, V, MASK, BIAS, PEAK, UNDERFLOWED, SUMS, DK, DV, T, D, length, strides,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v from those of the terms; strides of k, v, the gradient and q."""
    b, first, c = program_elements(T, D, BT, BD)
    s = first + tl.arange(0, BT)
    d_num, d_den = load_pair(SUMS, b, s, c, T, length, D, 0.0)
    peak = tl.load(PEAK + b * D + c, mask=c < D, other=0.0)
    underflowed = tl.load(UNDERFLOWED + b * D + c, mask=c < D, other=0) > 0
    store_sources(d_num, d_den, peak, underflowed, G, DEN, Q, K, V, MASK, BIAS, DK, DV, b, s, c, T, D, strides, BD)


@tuned(['T', 'D'], INTERPRETED_TILE, *WHOLE)
@triton.jit
def whole_sources_kernel(
    G, Y, DEN, Q, K, V, MASK, BIAS, WEIGHTS, DQ, DK, DV, SLOPES, TERMS, UNDERFLOWED, ANY, T, D, length, strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, LENGTH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and v, and write those of the sums and the terms if SLOPES and TERMS are given.

    Strides of k, v, the gradient and q. Weights are (LENGTH, LENGTH).
    """
    b, _, c = program_elements(1, D, BT, BD)
    t = tl.arange(0, LENGTH)
    d_num, d_den, underflowed = gradients_of_sums(G, Y, DEN, Q, DQ, UNDERFLOWED, ANY, b, t, c, strides, T, D)
    slopes = join_pair(d_num, d_den, PRODUCT)
    peak, ekv, ek = load_terms(K, V, MASK, b, t, c, strides, T, D)
    if SLOPES is not None:
        store_pair(SLOPES, d_num, d_den, b, t, c, length, D)
        store_pair(TERMS, ekv, ek, b, t, c, length, D)
    for first in range(0, T, BT):
        s = first + tl.arange(0, BT)
        weights = tl.load(WEIGHTS + t[:, None] * LENGTH + s[None, :])
        z_num, z_den = split_pair(tl.dot(tl.trans(weights), slopes, input_precision=PRECISION))
        store_sources(z_num, z_den, peak, underflowed, G, DEN, Q, K, V, MASK, BIAS, DK, DV, b, s, c, T, D, strides, BD)


@tuned([], {'BT': 16, 'BS': 16, 'BD': 16}, ({'BT': 16, 'BS': 32, 'BD': 64}, 4))
@triton.jit
def repair_kernel(
    G, DEN, Q, K, V, MASK, BIAS, UNDERFLOWED, ANY, DBIAS, B, T, D, strides,
    BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the part of underflowed targets to the gradient of the bias (T, T)."""
    if tl.load(ANY) == 0:
        return
    first, tiles = tl.program_id(0) * BT, tl.cdiv(D, BD)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    for pair in range(0, B * tiles):
        b, c = (pair // tiles).to(tl.int64), pair % tiles * BD + tl.arange(0, BD)
        if tl.max(tl.load(UNDERFLOWED + b * D + c, mask=c < D, other=0)) > 0:
            for t in range(first, tl.minimum(first + BT, T)):
                if tl.min(load_row(DEN, b, t, c, T * D, D, D, 1.0)) < LIMIT:
                    _, d_logits = underflowed_row(G, DEN, Q, K, V, MASK, BIAS, b, t, s, c, strides, T, D, BD)
                    place = DBIAS + t * T + s
                    found = tl.load(place, mask=s < T, other=0.0) + tl.sum(d_logits, 1)
                    # Several threads may have the same element: all read it before one writes it, and after that.
                    tl.debug_barrier()
                    tl.store(place, found, mask=s < T)
                    tl.debug_barrier()
