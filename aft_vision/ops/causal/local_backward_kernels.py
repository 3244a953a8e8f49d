"""The backward of causal AFT-local; see `local_kernels` for the blocks and the layout of PAST."""

import triton
import triton.language as tl

from aft_vision.ops.causal.local_kernels import KEY, LIMIT, ROWS, find_low, load_past, load_weights, mark_lost
from aft_vision.ops.common.kernels import load_keys, load_tile, load_values, store_tile
from aft_vision.ops.common.launch import tuned


@triton.jit
def scale_used(grad, by):
    """Return the product, 0 where the gradient is 0: the other factor is NaN after a source that is not finite."""
    return tl.where(grad == 0.0, 0.0, grad * by)


@triton.jit
def rows_kernel(
    G, Y, DEN, Q, OLDER, DQ, R, DPAST, LOST, FIRST, B, T, D, blocks, g_strides, y_strides, q_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q, of sums and denominators as R (2, B, T, D), and its part for the older sums.

    Underflowed elements pass no gradient; LOST marks their tiles. Where G is 0 all of them are 0, although y and the
    denominator are NaN after a source that is not finite.
    """
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    t = j * BC + tl.arange(0, BC)
    g = load_tile(G, b, t, c, g_strides[0], g_strides[1], T, D)
    unused = g == 0.0
    gy = tl.where(unused, 0.0, g * load_tile(Y, b, t, c, y_strides[0], y_strides[1], T, D))
    if Q is not None:
        gate = tl.sigmoid(load_tile(Q, b, t, c, q_strides[0], q_strides[1], T, D))
        store_tile(DQ, tl.where(unused, 0.0, gy * (1.0 - gate)), b, t, c, T, D)
        g = tl.where(unused, 0.0, g * gate)
    den = load_tile(DEN, b, t, c, T * D, D, T, D)
    lost = den < LIMIT
    top = tl.where(lost | unused, 0.0, 1.0 / tl.where(lost, 1.0, den))
    r_num, r_den = g * top, -gy * top
    store_tile(R, r_num, b, t, c, T, D)
    store_tile(R, r_den, B + b, t, c, T, D)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    DPAST += (b * blocks + j) * 2 * D + c
    tl.store(DPAST, tl.sum(older * r_num, 0), mask=c < D)
    tl.store(DPAST + D, tl.sum(older * r_den, 0), mask=c < D)
    if FIRST is not None:
        lost = lost & (t >= tl.load(FIRST + b))[:, None]
    mark_lost(LOST, lost, b, j, t, c, T, D)


@triton.jit
def reverse_kernel(PAST, DPAST, D, blocks, BD: tl.constexpr):
    """Sum DPAST over a block and the blocks after it, at its reference."""
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
        d_num = scale_used(d_num, scale) + tl.load(block, mask=c < D, other=0.0)
        d_den = scale_used(d_den, scale) + tl.load(block + D, mask=c < D, other=0.0)
        tl.store(block, d_num, mask=c < D)
        tl.store(block + D, d_den, mask=c < D)
        following = reference


@tuned(KEY, {}, ({}, 8), ({}, 4))
@triton.jit
def sources_kernel(
    R, K, V, MASK, E, OLDER, PAST, DPAST, DK, DV, B, T, D, window, blocks, k_strides, v_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v."""
    i, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    s = i * BC + tl.arange(0, BC)
    k = load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D)
    v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
    # For later blocks the source is part of the older sums.
    leaves = (s + window - 1) // BC + 1
    place = ((b * blocks + leaves) * 2 * D)[:, None] + c[None, :]
    inside = (leaves < blocks)[:, None] & (c < D)[None, :]
    reference = tl.load(PAST + ((b * blocks + leaves) * ROWS * D)[:, None] + c[None, :], mask=inside, other=0.0)
    ek = tl.where(inside, tl.exp(k - reference), 0.0)
    z_num = tl.load(DPAST + place, mask=inside, other=0.0)
    z_den = tl.load(DPAST + place + D, mask=inside, other=0.0)
    dv = scale_used(z_num, ek)
    dk = scale_used(scale_used(z_num, v) + z_den, ek)
    for j in range(i, tl.minimum(blocks, (i * BC + BC + window - 2) // BC + 1)):
        t = j * BC + tl.arange(0, BC)
        weight = load_weights(E, OLDER, t[None, :], s[:, None], find_low(j, window, BC), T, window).to(PRODUCT)
        r_num = load_tile(R, b, t, c, T * D, D, T, D).to(PRODUCT)
        r_den = load_tile(R, B + b, t, c, T * D, D, T, D).to(PRODUCT)
        z_num = tl.dot(weight, r_num, input_precision=PRECISION)
        z_den = tl.dot(weight, r_den, input_precision=PRECISION)
        ek = tl.exp(k - load_past(PAST, b, j, 0, c, blocks, D)[None, :])
        dv += scale_used(z_num, ek)
        dk += scale_used(scale_used(z_num, v) + z_den, ek)
    store_tile(DK, dk, b, t=s, c=c, T=T, D=D)
    store_tile(DV, dv, b, t=s, c=c, T=T, D=D)


@tuned(KEY, {}, ({}, 8), ({}, 4))
@triton.jit
def band_kernel(
    R, K, V, MASK, E, OLDER, PAST, DBAND, B, T, D, window, blocks, strips, strips_each, k_strides, v_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of the band, summed over some of the B * strips tiles of channels."""
    j = tl.program_id(0)
    low = find_low(j, window, BC)
    t = j * BC + tl.arange(0, BC)
    s = (low // BC + tl.program_id(1)) * BC + tl.arange(0, BC)
    # Tiles after the block are skipped: their keys may be far above its reference.
    s = tl.where(s < j * BC + BC, s, T)
    first = tl.program_id(2) * strips_each
    sums = tl.zeros([BC, BC], tl.float32)
    for strip in range(first, tl.minimum(first + strips_each, B * strips)):
        b = (strip // strips).to(tl.int64)
        c = strip % strips * BD + tl.arange(0, BD)
        reference = load_past(PAST, b, j, 0, c, blocks, D)
        ek = tl.exp(load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D) - reference[None, :])
        v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
        r_num = load_tile(R, b, t, c, T * D, D, T, D).to(PRODUCT)
        r_den = load_tile(R, B + b, t, c, T * D, D, T, D).to(PRODUCT)
        sums = tl.dot(r_num, tl.trans((ek * v).to(PRODUCT)), sums, input_precision=PRECISION)
        sums = tl.dot(r_den, tl.trans(ek.to(PRODUCT)), sums, input_precision=PRECISION)
    weight = load_weights(E, OLDER, t[:, None], s[None, :], low, T, window)
    # Terms of the future may have overflowed.
    grad = tl.where(weight > 0.0, sums * weight, 0.0)
    place = s[None, :] - t[:, None] + window - 1
    inside = (t < T)[:, None] & (s < T)[None, :] & (place >= 0) & (place < window)
    tl.store(DBAND + (tl.program_id(2) * T + t[:, None]) * window + place, grad, mask=inside)
