"""AFT-simple up to each token (AFT Eq. 5, footnote 2): a scan over T for each sequence and tile of channels.

Partial sums have their largest key as reference and are merged at the larger reference. So nothing overflows or is lost
for any jump of the keys, and no later key affects an earlier token. A saved denominator is relative to the largest key
up to its token: it is between 1 and T, or 0 if no token was seen.

If there are few sequences, each is cut into chunks of `length` tokens, whole tiles, which programs scan in parallel:
PAST (B, chunks, 3, D) has the sums before each chunk, NEXT the gradients of the sums after it. Without it there is one
chunk.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import MIN_FLOAT32, load_keys, load_row, load_tile, load_values, store_tile
from aft_vision.ops.common.launch import tuned

# Tokens of a group with a common largest key for the backward, whose blocks have whole groups.
GROUP = tl.constexpr(16)
TILES = ({'BT': 16, 'BD': 32}, 1), ({'BT': 32, 'BD': 32}, 4), ({'BT': 32, 'BD': 64}, 4), ({'BT': 64, 'BD': 32}, 4)
INTERPRETED_TILE = {'BT': 16, 'BD': 4}


@triton.jit
def merge(peak_a, den_a, num_a, peak_b, den_b, num_b):
    """Merge the sums over two runs of tokens, at the larger reference."""
    peak = tl.maximum(peak_a, peak_b)
    scale_a, scale_b = tl.exp(peak_a - peak), tl.exp(peak_b - peak)
    return peak, den_a * scale_a + den_b * scale_b, num_a * scale_a + num_b * scale_b


@triton.jit
def merge_gradients(peak_a, d_den_a, d_num_a, peak_b, d_den_b, d_num_b):
    """Merge gradients from two runs of targets, at the smaller reference, which is that of the first target."""
    peak = tl.minimum(peak_a, peak_b)
    scale_a, scale_b = tl.exp(peak - peak_a), tl.exp(peak - peak_b)
    return peak, d_den_a * scale_a + d_den_b * scale_b, d_num_a * scale_a + d_num_b * scale_b


@triton.jit
def larger(a, b):
    """Return the larger of two."""
    return tl.maximum(a, b)


@triton.jit
def row(x, i, BT: tl.constexpr):
    """Return row i of a tile."""
    return tl.sum(tl.where((tl.arange(0, BT) == i)[:, None], x, 0.0), 0)


@triton.jit
def program_chunk(T, D, length, BD: tl.constexpr):
    """Return sequence, chunk, channels, first token and end of a program in a grid over the first three."""
    tiles, chunks = tl.cdiv(D, BD), tl.cdiv(T, length)
    chunk = tl.program_id(0) // tiles % chunks
    b = (tl.program_id(0) // (tiles * chunks)).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    return b, chunk, c, chunk * length, tl.minimum(chunk * length + length, T)


@triton.jit
def load_sums(SUMS, b, chunk, c, chunks, D):
    """Load the reference and the two sums of a chunk."""
    place = SUMS + (b * chunks + chunk) * 3 * D + c
    reference = tl.load(place, mask=c < D, other=0.0)
    return reference, tl.load(place + D, mask=c < D, other=0.0), tl.load(place + 2 * D, mask=c < D, other=0.0)


@triton.jit
def store_sums(SUMS, reference, den, num, b, chunk, c, chunks, D):
    """Store the reference and the two sums of a chunk."""
    place = SUMS + (b * chunks + chunk) * 3 * D + c
    tl.store(place, reference, mask=c < D)
    tl.store(place + D, den, mask=c < D)
    tl.store(place + 2 * D, num, mask=c < D)


@triton.jit
def summary_kernel(K, V, MASK, PAST, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr):
    """Store the largest key and the sums of each chunk; strides are those of q, k and v."""
    b, chunk, c, first, end = program_chunk(T, D, length, BD)
    peak = tl.full([BD], MIN_FLOAT32, tl.float32)
    num = tl.zeros([BD], tl.float32)
    den = tl.zeros([BD], tl.float32)
    for start in range(first, end, BT):
        t = start + tl.arange(0, BT)
        k = load_keys(K, MASK, b, t, c, strides[2], strides[3], T, D)
        v = load_values(V, MASK, b, t, c, strides[4], strides[5], T, D)
        new = tl.maximum(peak, tl.max(k, 0))
        scale = tl.exp(peak - new)
        ek = tl.exp(k - new[None, :])
        num = num * scale + tl.sum(ek * v, 0)
        den = den * scale + tl.sum(ek, 0)
        peak = new
    store_sums(PAST, peak, den, num, b, chunk, c, tl.cdiv(T, length), D)


@triton.jit
def scan_kernel(SUMS, D, chunks, REVERSE: tl.constexpr, BD: tl.constexpr):
    """Scan the sums of each chunk to the sums of the chunks before it, or after it for gradients."""
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    reference = tl.full([BD], -MIN_FLOAT32 if REVERSE else MIN_FLOAT32, tl.float32)
    den = tl.zeros([BD], tl.float32)
    num = tl.zeros([BD], tl.float32)
    for i in range(0, chunks):
        chunk = chunks - 1 - i if REVERSE else i
        own, own_den, own_num = load_sums(SUMS, b, chunk, c, chunks, D)
        store_sums(SUMS, reference, den, num, b, chunk, c, chunks, D)
        if REVERSE:
            reference, den, num = merge_gradients(own, own_den, own_num, reference, den, num)
        else:
            reference, den, num = merge(reference, den, num, own, own_den, own_num)


@tuned(['T', 'D'], INTERPRETED_TILE, *TILES)
@triton.jit
def forward_kernel(Q, K, V, MASK, PAST, Y, DEN, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr):
    """Compute y, and the denominators if DEN is given; strides of q, k and v."""
    b, chunk, c, first, end = program_chunk(T, D, length, BD)
    past_peak = tl.full([BD], MIN_FLOAT32, tl.float32)
    past_den = tl.zeros([BD], tl.float32)
    past_num = tl.zeros([BD], tl.float32)
    if PAST is not None:
        past_peak, past_den, past_num = load_sums(PAST, b, chunk, c, tl.cdiv(T, length), D)
    for start in range(first, end, BT):
        t = start + tl.arange(0, BT)
        k = load_keys(K, MASK, b, t, c, strides[2], strides[3], T, D)
        v = load_tile(V, b, t, c, strides[4], strides[5], T, D)
        hidden = k < MIN_FLOAT32
        own = (tl.where(hidden, MIN_FLOAT32, k), tl.where(hidden, 0.0, 1.0), tl.where(hidden, 0.0, v))
        peak, den, num = tl.associative_scan(own, 0, merge)
        peak, den, num = merge(past_peak[None, :], past_den[None, :], past_num[None, :], peak, den, num)
        past_peak, past_den, past_num = row(peak, BT - 1, BT), row(den, BT - 1, BT), row(num, BT - 1, BT)
        y = num / tl.where(den == 0.0, 1.0, den)
        if Q is not None:
            y *= tl.sigmoid(load_tile(Q, b, t, c, strides[0], strides[1], T, D))
        store_tile(Y, y, b, t, c, T, D)
        if DEN is not None:
            store_tile(DEN, den, b, t, c, T, D)


@triton.jit
def group_kernel(K, MASK, PEAKS, T, D, k_batch, k_token, BD: tl.constexpr):
    """Find the largest key of every group of tokens, (B, 1 + groups, D); the first row is not written."""
    groups, tiles = tl.cdiv(T, GROUP), tl.cdiv(D, BD)
    group = tl.program_id(0) // tiles % groups
    b = (tl.program_id(0) // (tiles * groups)).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    k = load_keys(K, MASK, b, group * GROUP + tl.arange(0, GROUP), c, k_batch, k_token, T, D)
    tl.store(PEAKS + (b * (groups + 1) + group + 1) * D + c, tl.maximum(tl.max(k, 0), MIN_FLOAT32), mask=c < D)


@triton.jit
def load_gradients(G, Y, DEN, Q, K, MASK, PEAKS, b, start, t, c, T, D, strides):
    """Load for a tile of targets the keys, the largest up to each, the gradients of both sums, and that of q."""
    k = load_keys(K, MASK, b, t, c, strides[4], strides[5], T, D)
    g = load_tile(G, b, t, c, strides[0], strides[1], T, D)
    gy = g * load_tile(Y, b, t, c, T * D, D, T, D)
    dq = gy
    if Q is not None:
        s = tl.sigmoid(load_tile(Q, b, t, c, strides[2], strides[3], T, D))
        dq = gy * (1.0 - s)
        g *= s
    past = load_row(PEAKS, b, start // GROUP, c, (tl.cdiv(T, GROUP) + 1) * D, D, D, MIN_FLOAT32)
    peak = tl.maximum(tl.associative_scan(k, 0, larger), past[None, :])
    # Tokens beyond the sequence must not lower the reference.
    peak = tl.where((t < T)[:, None], peak, -MIN_FLOAT32)
    den = load_tile(DEN, b, t, c, T * D, D, T, D)
    inverse = tl.where(den == 0.0, 0.0, 1.0 / tl.where(den == 0.0, 1.0, den))
    return k, peak, -gy * inverse, g * inverse, dq


@triton.jit
def gradient_summary_kernel(
    G, Y, DEN, Q, K, MASK, PEAKS, NEXT, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute the gradients of the sums of each chunk, relative to the largest key up to its first token."""
    b, chunk, c, first, end = program_chunk(T, D, length, BD)
    reference = tl.full([BD], -MIN_FLOAT32, tl.float32)
    d_den = tl.zeros([BD], tl.float32)
    d_num = tl.zeros([BD], tl.float32)
    for start in range(first, end, BT):
        t = start + tl.arange(0, BT)
        _, peak, own_den, own_num, _ = load_gradients(G, Y, DEN, Q, K, MASK, PEAKS, b, start, t, c, T, D, strides)
        lowest = tl.min(peak, 0)
        scale = tl.exp(lowest[None, :] - peak)
        own_den, own_num = tl.sum(own_den * scale, 0), tl.sum(own_num * scale, 0)
        reference, d_den, d_num = merge_gradients(reference, d_den, d_num, lowest, own_den, own_num)
    store_sums(NEXT, reference, d_den, d_num, b, chunk, c, tl.cdiv(T, length), D)


@tuned(['T', 'D'], INTERPRETED_TILE, *TILES)
@triton.jit
def backward_kernel(
    G, Y, DEN, Q, K, V, MASK, PEAKS, NEXT, DQ, DK, DV, T, D, length, strides, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute the gradients of q, k and v, last block of tokens first; strides of the gradient, q, k and v.

    PEAKS: (B, 1 + groups, D), the largest key before every group.
    """
    b, chunk, c, first, end = program_chunk(T, D, length, BD)
    next_peak = tl.full([BD], -MIN_FLOAT32, tl.float32)
    next_d_den = tl.zeros([BD], tl.float32)
    next_d_num = tl.zeros([BD], tl.float32)
    if NEXT is not None:
        next_peak, next_d_den, next_d_num = load_sums(NEXT, b, chunk, c, tl.cdiv(T, length), D)
    blocks = tl.cdiv(end - first, BT)
    for block in range(0, blocks):
        start = first + (blocks - 1 - block) * BT
        t = start + tl.arange(0, BT)
        k, peak, own_den, own_num, dq = load_gradients(G, Y, DEN, Q, K, MASK, PEAKS, b, start, t, c, T, D, strides)
        if Q is not None:
            store_tile(DQ, dq, b, t, c, T, D)
        reference, d_den, d_num = tl.associative_scan((peak, own_den, own_num), 0, merge_gradients, reverse=True)
        reference, d_den, d_num = merge_gradients(
            next_peak[None, :], next_d_den[None, :], next_d_num[None, :], reference, d_den, d_num
        )
        next_peak, next_d_den, next_d_num = row(reference, 0, BT), row(d_den, 0, BT), row(d_num, 0, BT)
        ek = tl.exp(k - reference)
        v = load_values(V, MASK, b, t, c, strides[6], strides[7], T, D)
        store_tile(DV, ek * d_num, b, t, c, T, D)
        store_tile(DK, ek * (d_num * v + d_den), b, t, c, T, D)
