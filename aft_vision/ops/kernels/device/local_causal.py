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
from aft_vision.ops.kernels.device.common import FLOOR, load_keys, load_tile, store_tile
from aft_vision.ops.kernels.launch import LIMIT as _LIMIT
from aft_vision.ops.kernels.launch import tuned

HEADROOM = tl.constexpr(_HEADROOM)
LIMIT = tl.constexpr(_LIMIT)
KEY = ['T', 'D', 'window', 'B']


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
    k_batch,
    k_token,
    v_batch,
    v_token,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """Into PAST the largest key of a block, then maximum and sums of the sources that leave the window with it."""
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    keys = load_keys(K, MASK, b, j * BC + tl.arange(0, BC), c, k_batch, k_token, T, D)
    s = j * BC - window + 1 - BC + tl.arange(0, BC)
    s = tl.where(s < 0, T, s)
    k = load_keys(K, MASK, b, s, c, k_batch, k_token, T, D)
    v = load_tile(V, b, s, c, v_batch, v_token, T, D)
    peak = tl.maximum(tl.max(k, 0), FLOOR)
    ek = tl.exp(k - peak[None, :])
    PAST += (b * blocks + j) * 4 * D + c
    tl.store(PAST, tl.max(keys, 0), mask=c < D)
    tl.store(PAST + D, peak, mask=c < D)
    tl.store(PAST + 2 * D, tl.sum(ek * v, 0), mask=c < D)
    tl.store(PAST + 3 * D, tl.sum(ek, 0), mask=c < D)


@triton.jit
def scan_kernel(K, MASK, PAST, T, D, blocks, k_batch, k_token, BD: tl.constexpr):
    """From the summaries of single blocks to what PAST says."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    first = load_keys(K, MASK, b, tl.arange(0, 1), c, k_batch, k_token, T, D)
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


@tuned(KEY, {}, ({}, 4), ({}, 8))
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
    q_batch,
    q_token,
    k_batch,
    k_token,
    v_batch,
    v_token,
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
        ek = tl.exp(load_keys(K, MASK, b, s, c, k_batch, k_token, T, D) - reference[None, :])
        v = load_tile(V, b, s, c, v_batch, v_token, T, D)
        weight = load_weights(E, OLDER, t[:, None], s[None, :], low, T, window).to(PRODUCT)
        num = tl.dot(weight, (ek * v).to(PRODUCT), num, input_precision=PRECISION)
        den = tl.dot(weight, ek.to(PRODUCT), den, input_precision=PRECISION)
    scale = tl.exp(load_past(PAST, b, j, 1, c, blocks, D) - reference)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    num += older * (scale * load_past(PAST, b, j, 2, c, blocks, D))[None, :]
    den += older * (scale * load_past(PAST, b, j, 3, c, blocks, D))[None, :]
    y = num / tl.maximum(den, LIMIT)
    if Q is not None:
        y = y * tl.sigmoid(load_tile(Q, b, t, c, q_batch, q_token, T, D))
    store_tile(Y, y, b, t, c, T, D)
    if DEN is not None:
        store_tile(DEN, den, b, t, c, T, D)
    mark_lost(LOST, FIRST, den, b, j, t, c, T, D)


@triton.jit
def rows_kernel(
    G,
    Y,
    DEN,
    Q,
    OLDER,
    DQ,
    R,
    DPAST,
    LOST,
    FIRST,
    B,
    T,
    D,
    blocks,
    g_batch,
    g_token,
    y_batch,
    y_token,
    q_batch,
    q_token,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradient of q, that of sums and denominators as R (2, B, T, D), and what it gives to the older sums.

    Nothing passes through elements that underflowed; LOST says which tiles have any.
    """
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    t = j * BC + tl.arange(0, BC)
    g = load_tile(G, b, t, c, g_batch, g_token, T, D)
    gy = g * load_tile(Y, b, t, c, y_batch, y_token, T, D)
    if Q is not None:
        gate = tl.sigmoid(load_tile(Q, b, t, c, q_batch, q_token, T, D))
        store_tile(DQ, gy * (1.0 - gate), b, t, c, T, D)
        g = g * gate
    den = load_tile(DEN, b, t, c, T * D, D, T, D)
    top = tl.where(den < LIMIT, 0.0, 1.0 / tl.maximum(den, LIMIT))
    r_num, r_den = g * top, -gy * top
    store_tile(R, r_num, b, t, c, T, D)
    store_tile(R + B.to(tl.int64) * T * D, r_den, b, t, c, T, D)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    DPAST += (b * blocks + j) * 2 * D + c
    tl.store(DPAST, tl.sum(older * r_num, 0), mask=c < D)
    tl.store(DPAST + D, tl.sum(older * r_den, 0), mask=c < D)
    mark_lost(LOST, FIRST, den, b, j, t, c, T, D)


@triton.jit
def reverse_kernel(PAST, DPAST, D, blocks, BD: tl.constexpr):
    """Sums of DPAST over a block and those after it, at its reference."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    d_num = tl.zeros([BD], tl.float32)
    d_den = tl.zeros([BD], tl.float32)
    following = load_past(PAST, b, blocks - 1, 0, c, blocks, D)
    for i in range(0, blocks):
        j = blocks - 1 - i
        reference = load_past(PAST, b, j, 0, c, blocks, D)
        scale = tl.exp(reference - following)
        block = DPAST + (b * blocks + j) * 2 * D + c
        d_num = d_num * scale + tl.load(block, mask=c < D, other=0.0)
        d_den = d_den * scale + tl.load(block + D, mask=c < D, other=0.0)
        tl.store(block, d_num, mask=c < D)
        tl.store(block + D, d_den, mask=c < D)
        following = reference


@tuned(KEY, {}, ({}, 4), ({}, 8))
@triton.jit
def sources_kernel(
    R,
    K,
    V,
    MASK,
    E,
    OLDER,
    PAST,
    DPAST,
    DK,
    DV,
    B,
    T,
    D,
    window,
    blocks,
    k_batch,
    k_token,
    v_batch,
    v_token,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradients of k and v."""
    i, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    s = i * BC + tl.arange(0, BC)
    k = load_keys(K, MASK, b, s, c, k_batch, k_token, T, D)
    v = load_tile(V, b, s, c, v_batch, v_token, T, D)
    # Later blocks have the source among the older sums.
    leaves = (s + window - 1) // BC + 1
    place = ((b * blocks + leaves) * 2 * D)[:, None] + c[None, :]
    inside = (leaves < blocks)[:, None] & (c < D)[None, :]
    reference = tl.load(PAST + 2 * place - c[None, :], mask=inside, other=0.0)
    ek = tl.where(inside, tl.exp(k - reference), 0.0)
    z_num = tl.load(DPAST + place, mask=inside, other=0.0)
    z_den = tl.load(DPAST + place + D, mask=inside, other=0.0)
    dv = z_num * ek
    dk = (z_num * v + z_den) * ek
    for j in range(i, tl.minimum(blocks, (i * BC + BC + window - 2) // BC + 1)):
        t = j * BC + tl.arange(0, BC)
        weight = load_weights(E, OLDER, t[None, :], s[:, None], find_low(j, window, BC), T, window).to(PRODUCT)
        r_num = load_tile(R, b, t, c, T * D, D, T, D).to(PRODUCT)
        r_den = load_tile(R + B.to(tl.int64) * T * D, b, t, c, T * D, D, T, D).to(PRODUCT)
        z_num = tl.dot(weight, r_num, input_precision=PRECISION)
        z_den = tl.dot(weight, r_den, input_precision=PRECISION)
        ek = tl.exp(k - load_past(PAST, b, j, 0, c, blocks, D)[None, :])
        dv += z_num * ek
        dk += (z_num * v + z_den) * ek
    store_tile(DK, dk, b, t=s, c=c, T=T, D=D)
    store_tile(DV, dv, b, t=s, c=c, T=T, D=D)


@tuned(KEY, {}, ({}, 4), ({}, 8))
@triton.jit
def band_kernel(
    R,
    K,
    V,
    MASK,
    E,
    OLDER,
    PAST,
    DBAND,
    B,
    T,
    D,
    window,
    blocks,
    strips,
    strips_each,
    k_batch,
    k_token,
    v_batch,
    v_token,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
):
    """The gradient of a tile of the band, summed over some of the B * strips tiles of channels of all sequences."""
    j = tl.program_id(0)
    low = find_low(j, window, BC)
    t = j * BC + tl.arange(0, BC)
    s = (low // BC + tl.program_id(1)) * BC + tl.arange(0, BC)
    # Tiles after the block are not worked: their keys may be far above its reference.
    s = tl.where(s < j * BC + BC, s, T)
    first = tl.program_id(2) * strips_each
    sums = tl.zeros([BC, BC], tl.float32)
    for strip in range(first, tl.minimum(first + strips_each, B * strips)):
        b = (strip // strips).to(tl.int64)
        c = strip % strips * BD + tl.arange(0, BD)
        reference = load_past(PAST, b, j, 0, c, blocks, D)
        ek = tl.exp(load_keys(K, MASK, b, s, c, k_batch, k_token, T, D) - reference[None, :])
        v = load_tile(V, b, s, c, v_batch, v_token, T, D)
        r_num = load_tile(R, b, t, c, T * D, D, T, D).to(PRODUCT)
        r_den = load_tile(R + B.to(tl.int64) * T * D, b, t, c, T * D, D, T, D).to(PRODUCT)
        sums = tl.dot(r_num, tl.trans((ek * v).to(PRODUCT)), sums, input_precision=PRECISION)
        sums = tl.dot(r_den, tl.trans(ek.to(PRODUCT)), sums, input_precision=PRECISION)
    weight = load_weights(E, OLDER, t[:, None], s[None, :], low, T, window)
    # What the future gives may have overflowed.
    grad = tl.where(weight > 0.0, sums * weight, 0.0)
    place = s[None, :] - t[:, None] + window - 1
    inside = (t < T)[:, None] & (s < T)[None, :] & (place >= 0) & (place < window)
    tl.store(DBAND + (tl.program_id(2) * T + t[:, None]) * window + place, grad, mask=inside)
