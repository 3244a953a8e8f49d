"""AFT-local, causal (AFT Eq. 4, footnote 2): blocks of BC targets, all at once, and tiles of BD channels.

PAST (B, blocks, 4, D) has what a block knows of the tokens before it: its reference, then the largest key and the sums
of e^(k - that) v and e^(k - that) over the sources before its window. Block j weights the sources from low(j), its
first target's window, up to its end one by one: by E (T, s), the exponential of the band, inside the window of a target
and by OLDER (T) before it. References never fall along a sequence, and no key of a block exceeds its own by more than
HEADROOM.
"""

import triton
import triton.language as tl

from aft_vision.ops.eager.causal import HEADROOM as _HEADROOM
from aft_vision.ops.kernels.gpu.device.common import FLOOR, load_keys, load_tile, load_values, store_tile
from aft_vision.ops.kernels.gpu.launch import LIMIT as _LIMIT
from aft_vision.ops.kernels.gpu.launch import tuned

HEADROOM = tl.constexpr(_HEADROOM)
LIMIT = tl.constexpr(_LIMIT)
# All blocks are alike: neither the length nor the batch decides.
KEY = ['D', 'window']


@triton.jit
def find_low(j, window, BC: tl.constexpr):
    """The first source that block j weights one by one."""
    return tl.maximum(j * BC - window + 1, 0)


@triton.jit
def load_weights(E, OLDER, t, s, low, T, window):
    """Weights of sources s from low on for targets t, which stand along different axes; 0 in the future."""
    place = s - t + window - 1
    known = (t < T) & (s >= low)
    weight = tl.load(E + t * window + place, mask=known & (place >= 0) & (place < window), other=0.0).to(tl.float32)
    return tl.where(known & (place < 0), tl.load(OLDER + t, mask=t < T, other=0.0), weight)


@triton.jit
def load_past(PAST, b, j, i, c, blocks, D):
    """Row i of PAST of a block, or of several along the first axis."""
    return tl.load(PAST + ((b * blocks + j) * 4 + i) * D + c, mask=c < D, other=0.0)


@triton.jit
def mark_lost(LOST, FIRST, den, b, j, t, c, T, D):
    """Whether any of a tile underflowed, of targets that see a source."""
    seeing = t < T
    if FIRST is not None:
        seeing = seeing & (t >= tl.load(FIRST + b))
    lost = (den < LIMIT) & seeing[:, None] & (c < D)[None, :]
    tile = (j * tl.num_programs(2) + b) * tl.num_programs(1) + tl.program_id(1)
    tl.store(LOST + tile, tl.max(tl.max(lost.to(tl.int32), 1), 0))


@triton.jit
def summary_kernel(
    K,
    V,
    MASK,
    PAST,
    T,
    D,
    window,
    blocks,
    k_strides,
    v_strides,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """Into PAST the largest key of a block, then maximum and sums of the sources that leave the window with it."""
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    keys = load_keys(K, MASK, b, j * BC + tl.arange(0, BC), c, k_strides[0], k_strides[1], T, D)
    s = j * BC - window + 1 - BC + tl.arange(0, BC)
    s = tl.where(s < 0, T, s)
    k = load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D)
    v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
    peak = tl.maximum(tl.max(k, 0), FLOOR)
    ek = tl.exp(k - peak[None, :])
    PAST += (b * blocks + j) * 4 * D + c
    tl.store(PAST, tl.max(keys, 0), mask=c < D)
    tl.store(PAST + D, peak, mask=c < D)
    tl.store(PAST + 2 * D, tl.sum(ek * v, 0), mask=c < D)
    tl.store(PAST + 3 * D, tl.sum(ek, 0), mask=c < D)


@triton.jit
def scan_kernel(K, MASK, PAST, T, D, blocks, k_strides, BD: tl.constexpr):
    """From the summaries of single blocks to what PAST says."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    first = load_keys(K, MASK, b, tl.arange(0, 1), c, k_strides[0], k_strides[1], T, D)
    past = tl.maximum(tl.max(first, 0), FLOOR)
    top = tl.full([BD], FLOOR, tl.float32)
    num = tl.zeros([BD], tl.float32)
    den = tl.zeros([BD], tl.float32)
    PAST += b * blocks * 4 * D + c
    for j in range(0, blocks):
        block = PAST + j * 4 * D
        peak = tl.load(block, mask=c < D, other=0.0)
        leaving = tl.load(block + D, mask=c < D, other=0.0)
        new = tl.maximum(top, leaving)
        num = num * tl.exp(top - new) + tl.load(block + 2 * D, mask=c < D, other=0.0) * tl.exp(leaving - new)
        den = den * tl.exp(top - new) + tl.load(block + 3 * D, mask=c < D, other=0.0) * tl.exp(leaving - new)
        top = new
        tl.store(block, tl.maximum(past, peak - HEADROOM), mask=c < D)
        tl.store(block + D, top, mask=c < D)
        tl.store(block + 2 * D, num, mask=c < D)
        tl.store(block + 3 * D, den, mask=c < D)
        past = tl.maximum(past, peak)


@tuned(KEY, {}, ({}, 8), ({}, 4))
@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    MASK,
    E,
    OLDER,
    PAST,
    Y,
    DEN,
    LOST,
    FIRST,
    B,
    T,
    D,
    window,
    blocks,
    q_strides,
    k_strides,
    v_strides,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """y, the denominators at the reference of their block if there is room, and whether any of a tile underflowed."""
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    t = j * BC + tl.arange(0, BC)
    low = find_low(j, window, BC)
    reference = load_past(PAST, b, j, 0, c, blocks, D)
    num = tl.zeros([BC, BD], tl.float32)
    den = tl.zeros([BC, BD], tl.float32)
    for start in range(low // BC * BC, j * BC + BC, BC):
        s = start + tl.arange(0, BC)
        ek = tl.exp(load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D) - reference[None, :])
        v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
        weight = load_weights(E, OLDER, t[:, None], s[None, :], low, T, window).to(PRODUCT)
        num = tl.dot(weight, (ek * v).to(PRODUCT), num, input_precision=PRECISION)
        den = tl.dot(weight, ek.to(PRODUCT), den, input_precision=PRECISION)
    scale = tl.exp(load_past(PAST, b, j, 1, c, blocks, D) - reference)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    num += older * (scale * load_past(PAST, b, j, 2, c, blocks, D))[None, :]
    den += older * (scale * load_past(PAST, b, j, 3, c, blocks, D))[None, :]
    y = num / tl.maximum(den, LIMIT)
    if Q is not None:
        y = y * tl.sigmoid(load_tile(Q, b, t, c, q_strides[0], q_strides[1], T, D))
    store_tile(Y, y, b, t, c, T, D)
    if DEN is not None:
        store_tile(DEN, den, b, t, c, T, D)
    mark_lost(LOST, FIRST, den, b, j, t, c, T, D)
