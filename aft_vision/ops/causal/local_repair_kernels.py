"""Repair of causal AFT-local after a jump of the keys inside a block: exact, one source at a time, and rarely needed.

UNDERFLOWED (blocks, B, strips) marks tiles with such elements; programs without any return immediately. The terms of a
target are relative to the largest one, with its key and its bias subtracted separately, so that no digits of a large
key are lost.
"""

import triton
import triton.language as tl

from aft_vision.ops.causal.local_kernels import LIMIT, load_past, load_sources
from aft_vision.ops.common.kernels import load_keys, load_tile, load_values, store_tile


@triton.jit
def has_underflowed(UNDERFLOWED, first, count, stride):
    """Return whether any of `count` tiles is marked, starting at `first` with step `stride`."""
    found = 0
    for start in range(0, count, 128):
        i = start + tl.arange(0, 128)
        found = tl.maximum(found, tl.max(tl.load(UNDERFLOWED + first + i * stride, mask=i < count, other=0), 0))
    return found > 0


@triton.jit
def load_bias(BAND, t, s, T, window):
    """Load the bias of sources s for targets t, along different axes; minus infinity in the future."""
    place = s - t + window - 1
    inside = (t < T) & (place >= 0) & (place < window)
    return tl.where(s > t, float('-inf'), tl.load(BAND + t * window + place, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def target_sums(
    K, V, MASK, BAND, PAST, b, j, c, T, D, window, blocks, tiles, k_strides, v_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Return for each element of a tile key and bias of its largest term, and its two sums relative to it."""
    t = j * BC + tl.arange(0, BC)
    zero = tl.zeros([BC, BD], tl.float32)
    base = zero + load_past(PAST, b, j, 1, c, blocks, D)[None, :]
    num = zero + load_past(PAST, b, j, 2, c, blocks, D)[None, :]
    den = zero + load_past(PAST, b, j, 3, c, blocks, D)[None, :]
    bias = zero
    for source in range(tl.maximum(j - tiles + 1, 0) * BC, tl.minimum(j * BC + BC, T)):
        s = source + tl.arange(0, 1)
        k, v = load_sources(K, V, MASK, b, s, c, k_strides, v_strides, T, D)  # (1, BD)
        w = load_bias(BAND, t[:, None], s[None, :], T, window)  # (BC, 1)
        # The key of a later source may be NaN.
        step = tl.where(t[:, None] < s[None, :], float('-inf'), (k - base) + (w - bias))
        rises = step > 0.0
        scale = tl.exp(-tl.abs(step))
        num = tl.where(rises, num * scale + v, num + scale * v)
        den = tl.where(rises, den * scale + 1.0, den + scale)
        base = tl.where(rises, k + zero, base)
        bias = tl.where(rises, w + zero, bias)
    return base, bias, num, den


@triton.jit
def load_rows(G, Y, DEN, Q, sums, b, t, c, g_strides, y_strides, q_strides, T, D):
    """Load the gradients of the two sums, relative like `sums`; 0 for elements that did not underflow."""
    g = load_tile(G, b, t, c, g_strides[0], g_strides[1], T, D)
    gy = g * load_tile(Y, b, t, c, y_strides[0], y_strides[1], T, D)
    if Q is not None:
        g = g * tl.sigmoid(load_tile(Q, b, t, c, q_strides[0], q_strides[1], T, D))
    underflowed = (load_tile(DEN, b, t, c, T * D, D, T, D) < LIMIT) & (sums > 0.0)
    inverse = tl.where(underflowed, 1.0 / tl.where(underflowed, sums, 1.0), 0.0)
    return g * inverse, -gy * inverse


@triton.jit
def pick(x, i, axis: tl.constexpr):
    """Return row or column i of a tile."""
    here = tl.expand_dims(tl.arange(0, x.shape[axis]) == i, 1 - axis)
    return tl.sum(tl.where(here, x, 0.0), axis)


@triton.jit
def forward_kernel(
    Q, K, V, MASK, BAND, PAST, Y, UNDERFLOWED, T, D, window, blocks, tiles, q_strides, k_strides, v_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y of underflowed elements, which is NaN so far, in marked tiles."""
    j, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    if tl.load(UNDERFLOWED + (j * tl.num_programs(2) + b) * tl.num_programs(1) + tl.program_id(1)) > 0:
        c = tl.program_id(1) * BD + tl.arange(0, BD)
        t = j * BC + tl.arange(0, BC)
        _, _, num, den = target_sums(
            K, V, MASK, BAND, PAST, b, j, c, T, D, window, blocks, tiles, k_strides, v_strides, BC, BD
        )
        y = num / tl.where(den > 0.0, den, 1.0)
        if Q is not None:
            y = y * tl.sigmoid(load_tile(Q, b, t, c, q_strides[0], q_strides[1], T, D))
        found = load_tile(Y, b, t, c, T * D, D, T, D)
        # Several threads may have the same element: all must read it before one writes it.
        tl.debug_barrier()
        store_tile(Y, tl.where(found != found, y, found), b, t, c, T, D)


@triton.jit
def sources_kernel(
    G, Y, DEN, Q, K, V, MASK, BAND, PAST, UNDERFLOWED, DK, DV, T, D, window, blocks, tiles,
    g_strides, y_strides, q_strides, k_strides, v_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of k and v."""
    i, b, step = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(1) * tl.num_programs(2)
    UNDERFLOWED += b * tl.num_programs(1) + tl.program_id(1)
    if has_underflowed(UNDERFLOWED, i * step, blocks - i, step):
        c = tl.program_id(1) * BD + tl.arange(0, BD)
        s = i * BC + tl.arange(0, BC)
        k = load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D)
        v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
        dk = load_tile(DK, b, s, c, T * D, D, T, D)
        dv = load_tile(DV, b, s, c, T * D, D, T, D)
        for j in range(i, blocks):
            if tl.load(UNDERFLOWED + j * step) > 0:
                base, bias, _, den = target_sums(
                    K, V, MASK, BAND, PAST, b, j, c, T, D, window, blocks, tiles, k_strides, v_strides, BC, BD
                )
                t = j * BC + tl.arange(0, BC)
                r_num, r_den = load_rows(G, Y, DEN, Q, den, b, t, c, g_strides, y_strides, q_strides, T, D)
                for row in range(0, BC):
                    target = j * BC + row + tl.arange(0, 1)
                    w = load_bias(BAND, target[None, :], s[:, None], T, window) - pick(bias, row, 0)[None, :]
                    p = tl.exp((k - pick(base, row, 0)[None, :]) + w)
                    row_num = pick(r_num, row, 0)[None, :]
                    dv += p * row_num
                    dk += p * (row_num * v + pick(r_den, row, 0)[None, :])
        # Several threads may have the same element: all must read it before one writes it.
        tl.debug_barrier()
        store_tile(DK, dk, b, s, c, T, D)
        store_tile(DV, dv, b, s, c, T, D)


@triton.jit
def band_kernel(
    G, Y, DEN, Q, K, V, MASK, BAND, PAST, UNDERFLOWED, DBAND, B, T, D, window, blocks, tiles, strips,
    g_strides, y_strides, q_strides, k_strides, v_strides,
    BC: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of a tile of the band."""
    j = tl.program_id(0)
    t = j * BC + tl.arange(0, BC)
    s = (j - tl.program_id(1)) * BC + tl.arange(0, BC)
    s = tl.where(s < 0, T, s)
    if has_underflowed(UNDERFLOWED, j * B * strips, B * strips, 1):
        sums = tl.zeros([BC, BC], tl.float32)
        for i in range(0, B * strips):
            if tl.load(UNDERFLOWED + j * B * strips + i) > 0:
                b, c = (i // strips).to(tl.int64), i % strips * BD + tl.arange(0, BD)
                base, bias, _, den = target_sums(
                    K, V, MASK, BAND, PAST, b, j, c, T, D, window, blocks, tiles, k_strides, v_strides, BC, BD
                )
                r_num, r_den = load_rows(G, Y, DEN, Q, den, b, t, c, g_strides, y_strides, q_strides, T, D)
                k = load_keys(K, MASK, b, s, c, k_strides[0], k_strides[1], T, D)
                v = load_values(V, MASK, b, s, c, v_strides[0], v_strides[1], T, D)
                for channel in range(0, BD):
                    w = load_bias(BAND, t[:, None], s[None, :], T, window) - pick(bias, channel, 1)[:, None]
                    p = tl.exp((pick(k, channel, 1)[None, :] - pick(base, channel, 1)[:, None]) + w)
                    sums += p * (
                        pick(r_num, channel, 1)[:, None] * pick(v, channel, 1)[None, :]
                        + pick(r_den, channel, 1)[:, None]
                    )
        place = s[None, :] - t[:, None] + window - 1
        inside = (t < T)[:, None] & (s < T)[None, :] & (place >= 0) & (place < window)
        tile = DBAND + t[:, None] * window + place
        sums += tl.load(tile, mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(tile, sums, mask=inside)
