"""AFT-local, causal (AFT Eq. 4, footnote 2): blocks of BC targets, all at once, and tiles of BD channels.

A block weights the sources of its own and the blocks that its window reaches individually, `tiles` blocks in all, by
WEIGHTS (blocks * BC, tiles * BC): the exponential of the band inside the window of a target, and OLDER (T) before it.
TERMS (2, B, blocks * BC, D) are e^(k - reference) v and e^(k - reference) at the reference of a source's own block.
References never fall along a sequence, and no key of a block exceeds its reference by more than HEADROOM.

PAST (B, blocks, ROWS, D) holds for each block its reference, then the largest key of all blocks before those `tiles`
and their sums of e^(k - that) v and e^(k - that), then the place in the block of its first source that is not finite,
or BC.

A source is not finite if its key is NaN or plus infinity, or its value is not finite. Its channel is NaN from its token
on, and it reaches no earlier target: references after its block are NaN.
"""

import triton
import triton.language as tl

from aft_vision.ops.causal.eager import HEADROOM as _HEADROOM
from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32, load_keys, load_tile, load_values, mask_if, store_tile
from aft_vision.ops.common.launch import tuned

HEADROOM = tl.constexpr(_HEADROOM)
# Rows of PAST of a block.
ROWS = tl.constexpr(5)
# Steps of a scan whose loads are under way at once.
STAGES = tl.constexpr(4)
# All blocks have the same size, so the choice depends neither on the length nor on the batch.
KEY = ['D', 'window']


@triton.jit
def load_weights(WEIGHTS, j, i, tiles, BC: tl.constexpr):
    """Load the weights of block j's targets for the sources of block i."""
    side = tl.arange(0, BC)
    t = (j * BC + side).to(tl.int64)
    place = t[:, None] * (tiles * BC) + ((i - j + tiles - 1) * BC + side)[None, :]
    return tl.load(WEIGHTS + place)


@triton.jit
def load_pair(X, b, i, c, B, blocks, D, BC: tl.constexpr):
    """Load both tiles of block i from a tensor (2, B, blocks * BC, D)."""
    length, inside = blocks * BC * D, (c < D)[None, :]
    X += (i * BC + tl.arange(0, BC))[:, None] * D + c[None, :]
    return tl.load(X + b * length, mask=inside, other=0.0), tl.load(X + (b + B) * length, mask=inside, other=0.0)


@triton.jit
def store_pair(X, first, second, b, i, c, B, blocks, D, BC: tl.constexpr):
    """Write both tiles of block i of a tensor (2, B, blocks * BC, D)."""
    length, inside = blocks * BC * D, (c < D)[None, :]
    X += (i * BC + tl.arange(0, BC))[:, None] * D + c[None, :]
    tl.store(X + b * length, first, mask=inside)
    tl.store(X + (b + B) * length, second, mask=inside)


@triton.jit
def load_past(PAST, b, j, i, c, blocks, D):
    """Load row i of PAST of a block, or of several along the first axis."""
    return tl.load(PAST + ((b * blocks + j) * ROWS + i) * D + c, mask=c < D, other=0.0)


@triton.jit
def load_sources(K, V, MASK, b, s, c, k_strides, v_strides, T, D):
    """Load keys, NaN for sources that are not finite, and values, 0 for these sources."""
    k = load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D)
    v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
    finite = (k < float('inf')) & (tl.abs(v) < float('inf'))
    return tl.where(finite, k, float('nan')), tl.where(finite, v, 0.0)


@triton.jit
def larger(a, b):
    """Return the larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def may_underflow(den, ek, FIRST, b, t, window, PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr):
    """Return whether elements of targets, whose exponentials these are, may have lost digits to underflow.

    Only targets that see a source can. Each of the BC + window weights may be off by up to the smallest normal float,
    times the largest exponential up to the target, so the error of a denominator without underflow is below 1e-8.
    No later key is used.
    """
    past = (tl.arange(0, BC)[:, None] >= tl.arange(0, BC)[None, :]).to(PRODUCT)
    above = tl.maximum(tl.dot(past, ek, input_precision=PRECISION), 1.0)
    underflowed = den < (BC + window) * LIMIT * above
    if FIRST is not None:
        underflowed = underflowed & (t >= tl.load(FIRST + b))[:, None]
    return underflowed


@triton.jit
def mark_underflowed(UNDERFLOWED, underflowed, b, j, t, c, T, D):
    """Store whether any element of a tile is underflowed."""
    underflowed = underflowed & (t < T)[:, None] & (c < D)[None, :]
    tile = (j * tl.num_programs(2) + b) * tl.num_programs(1) + tl.program_id(1)
    tl.store(UNDERFLOWED + tile, tl.max(tl.max(underflowed.to(tl.int32), 1), 0))


@tuned([], {'BS': 32}, ({'BS': 256}, 4))
@triton.jit
def weights_kernel(BAND, WEIGHTS, OLDER, T, window, count, BC: tl.constexpr, BS: tl.constexpr):
    """Write the weights of a target for `count` sources up to the end of its block, and that of the sources before.

    They are relative to the largest that the target sees; a row of minus infinity sees no source in its window.
    """
    t = tl.program_id(0).to(tl.int64)
    highest = tl.full([BS], MIN_FLOAT32, tl.float32)
    for start in range(0, window, BS):
        place = start + tl.arange(0, BS)
        inside = mask_if(t < T, (place < window) & (place >= window - 1 - t))
        highest = tl.maximum(
            highest, tl.load(BAND + t * window + place, mask=inside, other=float('-inf')).to(tl.float32)
        )
    largest = tl.max(highest, 0)
    largest = tl.where(t < window, largest, tl.maximum(largest, 0.0))
    tl.store(OLDER + t, tl.exp(-tl.maximum(largest, 0.0)), mask=t < T)
    first = (t // BC + 1) * BC - count
    for start in range(0, count, BS):
        x = start + tl.arange(0, BS)
        place = first + x - t + window - 1
        seen = mask_if(t < T, (x < count) & (first + x >= 0) & (place < window))
        w = tl.load(BAND + t * window + place, mask=seen & (place >= 0), other=0.0).to(tl.float32)
        tl.store(WEIGHTS + t * count + x, tl.where(seen, tl.exp(w - largest), 0.0), mask=x < count)


@triton.jit
def summary_kernel(
    K, V, MASK, SUMMARY, T, D, blocks, k_strides, v_strides, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store the largest finite key of a block, the largest, NaN with a source that is not finite, and sums at that."""
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    k, v = load_sources(K, V, MASK, b, j * BC + tl.arange(0, BC), c, k_strides, v_strides, T, D)
    finite_peak = tl.max(tl.where(k != k, float('-inf'), k), 0)
    peak = tl.where(tl.max((k != k).to(tl.int32), 0) > 0, float('nan'), tl.maximum(finite_peak, MIN_FLOAT32))
    ek = tl.exp(k - peak[None, :])
    SUMMARY += (b * blocks + j) * 4 * D + c
    tl.store(SUMMARY, finite_peak, mask=c < D)
    tl.store(SUMMARY + D, peak, mask=c < D)
    tl.store(SUMMARY + 2 * D, tl.sum(ek * v, 0), mask=c < D)
    tl.store(SUMMARY + 3 * D, tl.sum(ek, 0), mask=c < D)


@triton.jit
def scan_kernel(K, MASK, SUMMARY, PAST, T, D, blocks, tiles, k_strides, BD: tl.constexpr):
    """Compute all but the last row of PAST from the summaries of single blocks."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    first = load_keys(K, MASK, b, tl.arange(0, 1), c, k_strides[0], k_strides[1], T, D)
    past = tl.maximum(tl.max(first, 0), MIN_FLOAT32)
    largest = tl.full([BD], MIN_FLOAT32, tl.float32)
    num = tl.zeros([BD], tl.float32)
    den = tl.zeros([BD], tl.float32)
    SUMMARY += b * blocks * 4 * D + c
    PAST += b * blocks * ROWS * D + c
    for j in tl.range(0, blocks, num_stages=STAGES):
        # The block that now is before all that are weighted individually.
        leaving, leaves = SUMMARY + (j - tiles) * 4 * D, mask_if(j >= tiles, c < D)
        peak = tl.load(leaving + D, mask=leaves, other=MIN_FLOAT32)
        new = larger(largest, peak)
        num = num * tl.exp(largest - new) + tl.load(leaving + 2 * D, mask=leaves, other=0.0) * tl.exp(peak - new)
        den = den * tl.exp(largest - new) + tl.load(leaving + 3 * D, mask=leaves, other=0.0) * tl.exp(peak - new)
        largest = new
        block, own = PAST + j * ROWS * D, SUMMARY + j * 4 * D
        tl.store(block, larger(past, tl.load(own, mask=c < D, other=0.0) - HEADROOM), mask=c < D)
        tl.store(block + D, largest, mask=c < D)
        tl.store(block + 2 * D, num, mask=c < D)
        tl.store(block + 3 * D, den, mask=c < D)
        past = larger(past, tl.load(own + D, mask=c < D, other=0.0))


@triton.jit
def terms_kernel(
    K, V, MASK, PAST, TERMS, B, T, D, blocks, k_strides, v_strides, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the terms of a block, 0 for sources that are not finite, and the last row of PAST."""
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    place = tl.arange(0, BC)
    k, v = load_sources(K, V, MASK, b, j * BC + place, c, k_strides, v_strides, T, D)
    ek = tl.exp(tl.where(k != k, float('-inf'), k) - load_past(PAST, b, j, 0, c, blocks, D)[None, :])
    store_pair(TERMS, ek * v, ek, b, j, c, B, blocks, D, BC)
    first = tl.min(tl.where(k != k, place[:, None], BC), 0)
    tl.store(PAST + ((b * blocks + j) * ROWS + 4) * D + c, first, mask=c < D)


@tuned(KEY, {}, ({}, 4), ({}, 8))
@triton.jit
def forward_kernel(
    Q, WEIGHTS, OLDER, PAST, TERMS, Y, DEN, UNDERFLOWED, FIRST, B, T, D, window, blocks, tiles, q_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y, the denominators at their block's reference if DEN is given, and flags for underflowed tiles.

    Underflowed elements have y = NaN and the denominator 0.
    """
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    t = j * BC + tl.arange(0, BC)
    num = tl.zeros([BC, BD], tl.float32)
    den = tl.zeros([BC, BD], tl.float32)
    first = tl.maximum(j - tiles + 1, 0)
    reference = load_past(PAST, b, first, 0, c, blocks, D)
    for i in range(first, j + 1):
        weight = load_weights(WEIGHTS, j, i, tiles, BC)
        ekv, ek = load_pair(TERMS, b, i, c, B, blocks, D, BC)
        # Under way during the products.
        higher = load_past(PAST, b, tl.minimum(i + 1, j), 0, c, blocks, D)
        num = tl.dot(weight, ekv, num, input_precision=PRECISION)
        den = tl.dot(weight, ek, den, input_precision=PRECISION)
        # In two steps: the factor may be too small for float32 where its product with a term of e^HEADROOM is not.
        scale = tl.exp(0.5 * (reference - higher))[None, :]
        num = num * scale * scale
        den = den * scale * scale
        reference = higher
    scale = tl.exp(load_past(PAST, b, j, 1, c, blocks, D) - reference)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    num += older * (scale * load_past(PAST, b, j, 2, c, blocks, D))[None, :]
    den += older * (scale * load_past(PAST, b, j, 3, c, blocks, D))[None, :]
    own = load_pair(TERMS, b, j, c, B, blocks, D, BC)[1]
    underflowed = may_underflow(den, own, FIRST, b, t, window, PRODUCT, PRECISION, BC)
    finite = tl.arange(0, BC)[:, None] < load_past(PAST, b, j, 4, c, blocks, D)[None, :]
    den = tl.where(finite, tl.where(underflowed, 0.0, den), float('nan'))
    y = tl.where(underflowed, float('nan'), num / tl.where(den == 0.0, 1.0, den))
    if Q is not None:
        y = y * tl.sigmoid(load_tile(Q, b, t, c, q_strides[0], q_strides[1], T, D))
    store_tile(Y, y, b, t, c, T, D)
    if DEN is not None:
        store_tile(DEN, den, b, t, c, T, D)
    mark_underflowed(UNDERFLOWED, underflowed, b, j, t, c, T, D)
