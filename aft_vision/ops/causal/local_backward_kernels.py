"""The backward of causal AFT-local; see `local_kernels` for the blocks and the layout of PAST."""

import triton
import triton.language as tl

from aft_vision.ops.causal.local_kernels import (
    KEY,
    LIMIT,
    STAGES,
    load_pair,
    load_past,
    load_weights,
    mark_underflowed,
    store_pair,
)
from aft_vision.ops.common.kernels import load_keys, load_tile, load_values, mask_if, store_tile
from aft_vision.ops.common.launch import tuned


@triton.jit
def scale_used(grad, by):
    """Return the product, 0 where the gradient is 0: the other factor is NaN after a source that is not finite."""
    return tl.where(grad == 0.0, 0.0, grad * by)


@triton.jit
def rows_kernel(
    G, Y, DEN, Q, OLDER, DQ, R, DPAST, UNDERFLOWED, FIRST, B, T, D, blocks, g_strides, y_strides, q_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q, of sums and denominators as R, laid out as TERMS, and its part for the older sums.

    Underflowed elements pass no gradient; UNDERFLOWED marks their tiles. Where G is 0 all of them are 0, although y and
    the denominator are NaN after a source that is not finite.
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
    underflowed = den < LIMIT
    inverse = tl.where(underflowed | unused, 0.0, 1.0 / tl.where(underflowed, 1.0, den))
    r_num, r_den = g * inverse, -gy * inverse
    store_pair(R, r_num, r_den, b, j, c, B, blocks, D, BC)
    older = tl.load(OLDER + t, mask=t < T, other=0.0)[:, None]
    DPAST += (b * blocks + j) * 2 * D + c
    tl.store(DPAST, tl.sum(older * r_num, 0), mask=c < D)
    tl.store(DPAST + D, tl.sum(older * r_den, 0), mask=c < D)
    if FIRST is not None:
        underflowed = underflowed & (t >= tl.load(FIRST + b))[:, None]
    mark_underflowed(UNDERFLOWED, underflowed, b, j, t, c, T, D)


@triton.jit
def reverse_kernel(PAST, DPAST, D, blocks, BD: tl.constexpr):
    """Sum DPAST over a block and the blocks after it, at its reference."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    d_num = tl.zeros([BD], tl.float32)
    d_den = tl.zeros([BD], tl.float32)
    following = load_past(PAST, b, blocks - 1, 0, c, blocks, D)
    for i in tl.range(0, blocks, num_stages=STAGES):
        j = blocks - 1 - i
        reference = load_past(PAST, b, j, 0, c, blocks, D)
        scale = tl.exp(reference - following)
        block = DPAST + (b * blocks + j) * 2 * D + c
        d_num = scale_used(d_num, scale) + tl.load(block, mask=c < D, other=0.0)
        d_den = scale_used(d_den, scale) + tl.load(block + D, mask=c < D, other=0.0)
        tl.store(block, d_num, mask=c < D)
        tl.store(block + D, d_den, mask=c < D)
        following = reference


@tuned(KEY, {}, ({}, 4), ({}, 8))
@triton.jit
def sources_kernel(
    R, K, V, MASK, WEIGHTS, PAST, DPAST, DK, DV, B, T, D, window, blocks, tiles, k_strides, v_strides,
    PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v. The window is only there for KEY."""
    i, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    s = i * BC + tl.arange(0, BC)
    k = load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D)
    v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
    # For the block after all that weight it individually, a source is part of the older sums.
    later = i + tiles
    inside = mask_if(later < blocks, c < D)
    place = DPAST + (b * blocks + later) * 2 * D + c
    older_num = tl.load(place, mask=inside, other=0.0)[None, :]
    older_den = tl.load(place + D, mask=inside, other=0.0)[None, :]
    ek = tl.exp(k - load_past(PAST, b, tl.minimum(later, blocks - 1), 0, c, blocks, D)[None, :])
    dv = scale_used(older_num, ek)
    dk = scale_used(scale_used(older_num, v) + older_den, ek)
    for j in range(i, tl.minimum(blocks, later)):
        weight = tl.trans(load_weights(WEIGHTS, j, i, tiles, BC))
        r_num, r_den = load_pair(R, b, j, c, B, blocks, D, BC)
        # Under way during the products.
        reference = load_past(PAST, b, j, 0, c, blocks, D)
        z_num = tl.dot(weight, r_num, input_precision=PRECISION)
        z_den = tl.dot(weight, r_den, input_precision=PRECISION)
        ek = tl.exp(k - reference[None, :])
        dv += scale_used(z_num, ek)
        dk += scale_used(scale_used(z_num, v) + z_den, ek)
    store_tile(DK, dk, b, t=s, c=c, T=T, D=D)
    store_tile(DV, dv, b, t=s, c=c, T=T, D=D)


@triton.jit
def load_fall(PAST, strip, i, j, strips, blocks, D, BD: tl.constexpr):
    """Load by how much the reference of block i is below that of block j, in the channels of a strip."""
    b, c = (strip // strips).to(tl.int64), strip % strips * BD + tl.arange(0, BD)
    return load_past(PAST, b, i, 0, c, blocks, D) - load_past(PAST, b, j, 0, c, blocks, D)


@tuned(KEY, {}, ({}, 4), ({}, 8))
@triton.jit
def band_kernel(
    R, WEIGHTS, PAST, TERMS, DBAND, B, T, D, window, blocks, tiles, strips, strips_each,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of the band, summed over some of the B * strips tiles of channels."""
    j = tl.program_id(0)
    i = j - tl.program_id(1)
    if i < 0:
        return
    first = tl.program_id(2) * strips_each
    last = tl.minimum(first + strips_each, B * strips)
    sums = tl.zeros([BC, BC], tl.float32)
    fall = load_fall(PAST, tl.minimum(first, last - 1), i, j, strips, blocks, D, BD)
    for strip in range(first, last):
        b = (strip // strips).to(tl.int64)
        c = strip % strips * BD + tl.arange(0, BD)
        r_num, r_den = load_pair(R, b, j, c, B, blocks, D, BC)
        ekv, ek = load_pair(TERMS, b, i, c, B, blocks, D, BC)
        # In two steps, as in the forward.
        scale = tl.exp(0.5 * fall)[None, :]
        # Under way during the products.
        fall = load_fall(PAST, tl.minimum(strip + 1, last - 1), i, j, strips, blocks, D, BD)
        sums = tl.dot((r_num * scale * scale).to(PRODUCT), tl.trans(ekv), sums, input_precision=PRECISION)
        sums = tl.dot((r_den * scale * scale).to(PRODUCT), tl.trans(ek), sums, input_precision=PRECISION)
    weight = load_weights(WEIGHTS, j, i, tiles, BC).to(tl.float32)
    # Sums of sources that a target does not see may be infinite, or NaN.
    grad = tl.where(weight > 0.0, sums * weight, 0.0)
    t, s = j * BC + tl.arange(0, BC), i * BC + tl.arange(0, BC)
    place = s[None, :] - t[:, None] + window - 1
    inside = (t < T)[:, None] & (s < T)[None, :] & (place >= 0) & (place < window)
    tl.store(DBAND + (tl.program_id(2) * T + t[:, None]) * window + place, grad, mask=inside)
