"""AFT-local, causal (AFT Eq. 4, footnote 2): blocks of BC targets, all at once, and tiles of BD channels.

PAST (B, blocks, ROWS, D) summarises the tokens before a block: its reference, then the largest key and the sums of e^(k
- that) v and e^(k - that) over the sources before its window. Block j weights the sources from low(j), the start of its
first target's window, to its end individually: by E (T, s), the exponential of the band, inside the window of a target
and by OLDER (T) before it. References never fall along a sequence, and no key of a block exceeds its reference by more
than HEADROOM.

A source is not finite if its key is NaN or plus infinity, or its value is not finite. Its channel is NaN from its token
on, and it reaches no earlier target. The last row of PAST is for the scan, which sets the references after such a
source to NaN.
"""

import triton
import triton.language as tl

from aft_vision.ops.causal.eager import HEADROOM as _HEADROOM
from aft_vision.ops.common.kernels import FLOOR, LIMIT, load_keys, load_tile, load_values, store_tile
from aft_vision.ops.common.launch import tuned

HEADROOM = tl.constexpr(_HEADROOM)
# Rows of PAST of a block.
ROWS = tl.constexpr(5)
# All blocks have the same size, so the choice depends neither on the length nor on the batch.
KEY = ['D', 'window']


@triton.jit
def find_low(j, window, BC: tl.constexpr):
    """Return the first source that block j weights individually."""
    return tl.maximum(j * BC - window + 1, 0)


@triton.jit
def load_weights(E, OLDER, t, s, low, T, window):
    """Load weights of sources s from low on for targets t, along different axes; 0 in the future."""
    place = s - t + window - 1
    known = (t < T) & (s >= low)
    weight = tl.load(E + t * window + place, mask=known & (place >= 0) & (place < window), other=0.0).to(tl.float32)
    return tl.where(known & (place < 0), tl.load(OLDER + t, mask=t < T, other=0.0), weight)


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
def find_peak(k):
    """Return the largest finite key of each channel twice, the second one NaN if a source is not finite."""
    peak = tl.max(tl.where(k != k, float('-inf'), k), 0)
    return peak, tl.where(tl.max((k != k).to(tl.int32), 0) > 0, float('nan'), peak)


@triton.jit
def find_lost(
    den, k, reference, FIRST, b, t, window,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return whether elements of targets, whose keys these are, may have lost digits to underflow.

    Only targets that see a source can. Each of the BC + window weights may be off by up to the smallest normal float,
    times the largest exponential up to the target, so the error of a denominator that is not lost is below 1e-8. No
    later key is used.
    """
    past = (tl.arange(0, BC)[:, None] >= tl.arange(0, BC)[None, :]).to(PRODUCT)
    ek = tl.exp(tl.where(k != k, float('-inf'), k) - reference[None, :])
    above = tl.maximum(tl.dot(past, ek.to(PRODUCT), input_precision=PRECISION), 1.0)
    lost = den < (BC + window) * LIMIT * above
    if FIRST is not None:
        lost = lost & (t >= tl.load(FIRST + b))[:, None]
    return lost


@triton.jit
def mark_lost(LOST, lost, b, j, t, c, T, D):
    """Store whether any element of a tile is lost."""
    lost = lost & (t < T)[:, None] & (c < D)[None, :]
    tile = (j * tl.num_programs(2) + b) * tl.num_programs(1) + tl.program_id(1)
    tl.store(LOST + tile, tl.max(tl.max(lost.to(tl.int32), 1), 0))


@triton.jit
def summary_kernel(
    K, V, MASK, PAST, T, D, window, blocks, k_strides, v_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store in PAST the largest finite key of a block, then maximum and sums of the sources that leave its window.

    The last row is the largest key of the block, NaN with a source that is not finite.
    """
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    keys, _ = load_sources(K, V, MASK, b, j * BC + tl.arange(0, BC), c, k_strides, v_strides, T, D)
    s = j * BC - window + 1 - BC + tl.arange(0, BC)
    s = tl.where(s < 0, T, s)
    k, v = load_sources(K, V, MASK, b, s, c, k_strides, v_strides, T, D)
    peak = larger(find_peak(k)[1], FLOOR)
    ek = tl.exp(k - peak[None, :])
    PAST += (b * blocks + j) * ROWS * D + c
    finite_peak, poisoned_peak = find_peak(keys)
    tl.store(PAST, finite_peak, mask=c < D)
    tl.store(PAST + 4 * D, poisoned_peak, mask=c < D)
    tl.store(PAST + D, peak, mask=c < D)
    tl.store(PAST + 2 * D, tl.sum(ek * v, 0), mask=c < D)
    tl.store(PAST + 3 * D, tl.sum(ek, 0), mask=c < D)


@triton.jit
def scan_kernel(K, MASK, PAST, T, D, blocks, k_strides, BD: tl.constexpr):
    """Scan the summaries of single blocks to the final content of PAST."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    first = load_keys(K, MASK, b, tl.arange(0, 1), c, k_strides[0], k_strides[1], T, D)
    past = tl.maximum(tl.max(first, 0), FLOOR)
    top = tl.full([BD], FLOOR, tl.float32)
    num = tl.zeros([BD], tl.float32)
    den = tl.zeros([BD], tl.float32)
    PAST += b * blocks * ROWS * D + c
    for j in range(0, blocks):
        block = PAST + j * ROWS * D
        peak = tl.load(block, mask=c < D, other=0.0)
        leaving = tl.load(block + D, mask=c < D, other=0.0)
        new = larger(top, leaving)
        num = num * tl.exp(top - new) + tl.load(block + 2 * D, mask=c < D, other=0.0) * tl.exp(leaving - new)
        den = den * tl.exp(top - new) + tl.load(block + 3 * D, mask=c < D, other=0.0) * tl.exp(leaving - new)
        top = new
        tl.store(block, larger(past, peak - HEADROOM), mask=c < D)
        tl.store(block + D, top, mask=c < D)
        tl.store(block + 2 * D, num, mask=c < D)
        tl.store(block + 3 * D, den, mask=c < D)
        past = larger(past, tl.load(block + 4 * D, mask=c < D, other=0.0))


@tuned(KEY, {}, ({}, 8), ({}, 4))
@triton.jit
def forward_kernel(
    Q, K, V, MASK, E, OLDER, PAST, Y, DEN, LOST, FIRST, B, T, D, window, blocks, q_strides, k_strides, v_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y, the denominators at their block's reference if DEN is given, and flags for underflowed tiles.

    Underflowed elements have y = NaN and the denominator 0.
    """
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    t = j * BC + tl.arange(0, BC)
    low = find_low(j, window, BC)
    reference = load_past(PAST, b, j, 0, c, blocks, D)
    num = tl.zeros([BC, BD], tl.float32)
    den = tl.zeros([BC, BD], tl.float32)
    for start in range(low // BC * BC, j * BC + BC, BC):
        s = start + tl.arange(0, BC)
        k, v = load_sources(K, V, MASK, b, s, c, k_strides, v_strides, T, D)
        ek = tl.exp(tl.where(k != k, float('-inf'), k) - reference[None, :])
        weight = load_weights(E, OLDER, t[:, None], s[None, :], low, T, window).to(PRODUCT)
        num = tl.dot(weight, (ek * v).to(PRODUCT), num, input_precision=PRECISION)
        den = tl.dot(weight, ek.to(PRODUCT), den, input_precision=PRECISION)
    scale = tl.exp(load_past(PAST, b, j, 1, c, blocks, D) - reference)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    num += older * (scale * load_past(PAST, b, j, 2, c, blocks, D))[None, :]
    den += older * (scale * load_past(PAST, b, j, 3, c, blocks, D))[None, :]
    keys, _ = load_sources(K, V, MASK, b, t, c, k_strides, v_strides, T, D)
    lost = find_lost(den, keys, reference, FIRST, b, t, window, PRODUCT, PRECISION, BC)
    first = tl.min(tl.where(keys != keys, t[:, None], T), 0)
    den = tl.where(t[:, None] < first[None, :], tl.where(lost, 0.0, den), float('nan'))
    y = tl.where(lost, float('nan'), num / tl.where(den == 0.0, 1.0, den))
    if Q is not None:
        y = y * tl.sigmoid(load_tile(Q, b, t, c, q_strides[0], q_strides[1], T, D))
    store_tile(Y, y, b, t, c, T, D)
    if DEN is not None:
        store_tile(DEN, den, b, t, c, T, D)
    mark_lost(LOST, lost, b, j, t, c, T, D)
