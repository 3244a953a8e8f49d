"""AFT-conv (AFT Eq. 6): what comes before and after the products of its terms by (T, T) matrices of weights.

The matrices of terms are (heads, length, columns): `length` is T, and columns the C channels of a head and its key,
each of B sequences, both padded to what tensor cores take. Tiles of elements are (sequences b, heads h, channels c) of
one token. They are contiguous along b in these matrices, and along h and c in the tensors of a call, whose pointers are
those of the first of `heads` of its `total` heads.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32, mask_if


@triton.jit
def program_elements(B, heads, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):
    """Return the token of a program, its sequences, heads, and channels of a head, and which of the first two exist."""
    b_tiles, h_tiles = tl.cdiv(B, BB), tl.cdiv(heads, BH)
    program = tl.program_id(0)
    b = (program % b_tiles * BB + tl.arange(0, BB)).to(tl.int64)
    h = (program // b_tiles % h_tiles * BH + tl.arange(0, BH)).to(tl.int64)
    b, h = b[:, None, None], h[None, :, None]
    return program // (b_tiles * h_tiles), b, h, tl.arange(0, BC)[None, None, :], (b < B) & (h < heads)


@triton.jit
def load_elements(X, strides, b, t, h, c, C: tl.constexpr, seen, other):
    """Load elements of (B, T, D) in float32, `other` where they are not seen."""
    place = b * strides[0] + t * strides[1] + (h * C + c) * strides[2]
    return tl.load(X + place, mask=seen & (c < C), other=other).to(tl.float32)


@triton.jit
def load_seen(MASK, b, t, inside, T):
    """Return which tokens count."""
    seen = mask_if(t < T, inside)
    if MASK is not None:
        seen = seen & (tl.load(MASK + b * T + t, mask=seen, other=0) != 0)
    return seen


@triton.jit
def load_keys(K, strides, b, t, h, seen):
    """Load k of tokens in float32, minus infinity where they are not seen."""
    place = b * strides[0] + t * strides[1] + h * strides[2]
    return tl.load(K + place, mask=seen, other=float('-inf')).to(tl.float32)


@triton.jit
def load_sources(K, V, MASK, k_strides, v_strides, b, t, h, c, inside, T, C: tl.constexpr):
    """Load k and v of tokens, minus infinity and 0 where they are masked or outside the sequence."""
    seen = load_seen(MASK, b, t, inside, T)
    return load_keys(K, k_strides, b, t, h, seen), load_elements(V, v_strides, b, t, h, c, C, seen, 0.0)


@triton.jit
def load_terms(
    K, V, MASK, PEAK, k_strides, v_strides, b, t, h, c, inside, T, total, C: tl.constexpr
):  # fmt: skip
    """Load exp(k - peak) and v of a token, 0 where it is masked or outside the sequence."""
    k, v = load_sources(K, V, MASK, k_strides, v_strides, b, t, h, c, inside, T, C)
    return tl.exp(k - tl.load(PEAK + b * total + h, mask=inside, other=0.0)), v


@triton.jit
def gradients_of_sums(
    G, Y, DEN, Q, DQ, g_strides, y_strides, den_strides, q_strides, dq_strides, b, t, h, c, seen, C: tl.constexpr
):  # fmt: skip
    """Return the gradients of both sums of targets, 0 where the denominator underflowed, and whether it did.

    Writes the gradient of q.
    """
    g = load_elements(G, g_strides, b, t, h, c, C, seen, 0.0)
    gy = g * load_elements(Y, y_strides, b, t, h, c, C, seen, 0.0)
    if Q is not None:
        gate = tl.sigmoid(load_elements(Q, q_strides, b, t, h, c, C, seen, 0.0))
        g *= gate
        place = b * dq_strides[0] + t * dq_strides[1] + (h * C + c) * dq_strides[2]
        tl.store(DQ + place, gy * (1.0 - gate), mask=seen & (c < C))
    place = b * den_strides[0] + t * den_strides[1] + h * den_strides[2]
    den = tl.load(DEN + place, mask=seen, other=0.0).to(tl.float32)
    inverse = tl.where(den < LIMIT, 0.0, 1.0 / tl.where(den < LIMIT, 1.0, den))
    return g * inverse, -tl.sum(gy, 2)[:, :, None] * inverse, den < LIMIT


@triton.jit
def store_results(
    num, den, Q, Y, DEN, q_strides, y_strides, den_strides, b, t, h, c, inside, C: tl.constexpr
):  # fmt: skip
    """Write y from its sums, and the denominators if DEN is given."""
    scale = tl.maximum(den, LIMIT)
    if Q is not None:
        # The sigmoid in the same division.
        scale = scale * (1.0 + tl.exp(-load_elements(Q, q_strides, b, t, h, c, C, inside, 0.0)))
    y = num / scale
    tl.store(Y + b * y_strides[0] + t * y_strides[1] + (h * C + c) * y_strides[2], y, mask=inside & (c < C))
    if DEN is not None:
        tl.store(DEN + b * den_strides[0] + t * den_strides[1] + h * den_strides[2], den, mask=inside)


@triton.jit
def store_sources(
    d_num, d_den, ek, v, DK, DV, dk_strides, dv_strides, b, s, h, c, inside, C: tl.constexpr
):  # fmt: skip
    """Write the gradients of k and v from those of their terms, of which d_num is 0 beyond the channels."""
    dk = tl.sum(d_num * v, 2)[:, :, None] + d_den
    tl.store(DK + b * dk_strides[0] + s * dk_strides[1] + h * dk_strides[2], dk * ek, mask=inside)
    place = b * dv_strides[0] + s * dv_strides[1] + (h * C + c) * dv_strides[2]
    tl.store(DV + place, d_num * ek, mask=inside & (c < C))


@triton.jit
def load_window(WINDOW, head, dy, dx):
    """Load the bias of the shift (dy, dx) in float32: of the kernel, or `outside`."""
    reach = WINDOW.size // 2
    inside = (dy <= reach) & (dy >= -reach) & (dx <= reach) & (dx >= -reach)
    place = (head * WINDOW.size + reach + dy) * WINDOW.size + reach + dx
    w = tl.load(WINDOW.kernel + place, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, w, WINDOW.outside)


@triton.jit
def load_bias(WINDOW, head, t, s, T, width):
    """Load the biases of targets t and sources s, which may be beyond the end, in float32."""
    t, s = tl.minimum(t, T - 1), tl.minimum(s, T - 1)
    return load_window(WINDOW, head, s // width - t // width, s % width - t % width)


@triton.jit
def largest_bias(WINDOW, head, T, width, BLOCK: tl.constexpr):
    """Return the largest bias of a head on the grid, finite."""
    reach = WINDOW.size // 2
    height = T // width
    reach_y, reach_x = tl.minimum(reach, height - 1), tl.minimum(reach, width - 1)
    columns = 2 * reach_x + 1
    most = tl.full([BLOCK], MIN_FLOAT32, tl.float32)
    if (reach_y < height - 1) | (reach_x < width - 1):
        most = tl.maximum(most, WINDOW.outside)
    for start in range(0, (2 * reach_y + 1) * columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = load_window(WINDOW, head, i // columns - reach_y, i % columns - reach_x)
        most = tl.maximum(most, tl.where(i < (2 * reach_y + 1) * columns, w, MIN_FLOAT32))
    return tl.max(most, 0)


@triton.jit
def weights_kernel(
    WINDOW, WEIGHTS, T, width, length, BLOCK: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Write exp(bias - largest bias) of (heads, targets, sources), padded by 0."""
    tiles, head = tl.cdiv(length, BS), tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) // tiles * BT + tl.arange(0, BT)[:, None]
    s = tl.program_id(0) % tiles * BS + tl.arange(0, BS)[None, :]
    w = tl.exp(load_bias(WINDOW, head, t, s, T, width) - largest_bias(WINDOW, head, T, width, BLOCK))
    inside = (t < length) & (s < length)
    tl.store(WEIGHTS + (head * length + t) * length + s, tl.where((t < T) & (s < T), w, 0.0), mask=inside)


@triton.jit
def terms_kernel(
    K, V, MASK, PEAK, TERMS, B, T, heads, total, length, columns, k_strides, v_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the terms e^k v of each channel, and e^k, of one token."""
    t, b, h, c, inside = program_elements(B, heads, BB, BH, BC)
    ek, v = load_terms(K, V, MASK, PEAK, k_strides, v_strides, b, t, h, c, inside, T, total, C)
    place = TERMS + (h * length + t) * columns + b
    tl.store(place + c * B, ek * v, mask=inside & (c < C))
    tl.store(place + C * B, ek, mask=inside)


@triton.jit
def results_kernel(
    Q, SUMS, PEAK, Y, DEN, UNDERFLOWED, B, heads, total, length, columns, q_strides, y_strides, den_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute y of one token from its sums, and the denominators if DEN is given, and mark underflowed ones."""
    t, b, h, c, inside = program_elements(B, heads, BB, BH, BC)
    place = SUMS + (h * length + t) * columns + b
    den = tl.load(place + C * B, mask=inside, other=1.0)
    num = tl.load(place + c * B, mask=inside & (c < C), other=0.0)
    store_results(num, den, Q, Y, DEN, q_strides, y_strides, den_strides, b, t, h, c, inside, C)
    peak = tl.load(PEAK + b * total + h, mask=inside, other=MIN_FLOAT32)
    tl.store(UNDERFLOWED + b * total + h, 1, mask=(den < LIMIT) & (peak > MIN_FLOAT32))


@triton.jit
def targets_kernel(
    G, Y, DEN, Q, PEAK, DQ, SLOPES, UNDERFLOWED,
    B, T, heads, total, length, columns, g_strides, y_strides, den_strides, q_strides, dq_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q and of the sums of one token, 0 where the denominator underflowed; marks those."""
    t, b, h, c, inside = program_elements(B, heads, BB, BH, BC)
    seen = mask_if(t < T, inside)
    d_num, d_den, underflowed = gradients_of_sums(
        G, Y, DEN, Q, DQ, g_strides, y_strides, den_strides, q_strides, dq_strides, b, t, h, c, seen, C
    )
    place = SLOPES + (h * length + t) * columns + b
    tl.store(place + c * B, d_num, mask=inside & (c < C))
    tl.store(place + C * B, d_den, mask=inside)
    peak = tl.load(PEAK + b * total + h, mask=inside, other=MIN_FLOAT32)
    tl.store(UNDERFLOWED + b * total + h, 1, mask=seen & underflowed & (peak > MIN_FLOAT32))


@triton.jit
def sources_kernel(
    SUMS, K, V, MASK, PEAK, DK, DV, B, T, heads, total, length, columns, k_strides, v_strides, dk_strides, dv_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v of one token from those of its terms."""
    t, b, h, c, inside = program_elements(B, heads, BB, BH, BC)
    ek, v = load_terms(K, V, MASK, PEAK, k_strides, v_strides, b, t, h, c, inside, T, total, C)
    place = SUMS + (h * length + t) * columns + b
    d_num = tl.load(place + c * B, mask=inside & (c < C), other=0.0)
    d_den = tl.load(place + C * B, mask=inside, other=0.0)
    store_sources(d_num, d_den, ek, v, DK, DV, dk_strides, dv_strides, b, t, h, c, inside, C)


@triton.jit
def count_near_tiles(width, reach, BW: tl.constexpr):
    """Count the adjacent tiles of sources that have all columns within reach of a tile of targets."""
    return tl.minimum(2 * tl.cdiv(reach, BW) + 1, tl.cdiv(width, BW))


@triton.jit
def tile_pair(i, width, reach, BW: tl.constexpr):
    """Return the first columns of targets and of sources of a pair of tiles: columns within reach are in one pair."""
    tiles, near = tl.cdiv(width, BW), count_near_tiles(width, reach, BW)
    target = i // near
    source = tl.minimum(tl.maximum(target - tl.cdiv(reach, BW), 0), tiles - near) + i % near
    return target * BW, source * BW


@triton.jit
def store_band(OUT, sums, line, target, source, width, reach):
    """Write sums (targets, sources) of a line of the grid to (line, target, reach + source - target)."""
    dx = source - target
    inside = (target < width) & (source < width) & (dx >= -reach) & (dx <= reach)
    tl.store(OUT + (line * width + target) * (2 * reach + 1) + dx + reach, sums, mask=inside)


@triton.jit
def bands_kernel(SLOPES, OUT, height, width, length, reach_y, reach_x, BW: tl.constexpr):
    """Sum the gradients (heads, targets, sources) of pairs of tokens over lines that are dy apart."""
    pairs, head = tl.cdiv(width, BW) * count_near_tiles(width, reach_x, BW), tl.program_id(1).to(tl.int64)
    dy = tl.program_id(0) // pairs - reach_y
    target, source = tile_pair(tl.program_id(0) % pairs, width, reach_x, BW)
    target, source = target + tl.arange(0, BW)[:, None], source + tl.arange(0, BW)[None, :]
    inside = (target < width) & (source < width)
    sums = tl.zeros([BW, BW], tl.float32)
    for y in range(tl.maximum(0, -dy), tl.minimum(height, height - dy)):
        place = (head * length + y * width + target) * length + (y + dy) * width + source
        sums += tl.load(SLOPES + place, mask=inside, other=0.0)
    store_band(OUT, sums, head * (2 * reach_y + 1) + dy + reach_y, target, source, width, reach_x)


@triton.jit
def window_kernel(
    SUMS, REPAIRED, WINDOW, OUT, T, width, reach_y, reach_x,
    BLOCK: tl.constexpr, BX: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the kernel (heads, size, size) from sums over lines, 0 for shifts beyond the grid."""
    i, head = tl.program_id(0) * BI + tl.arange(0, BI), tl.program_id(1).to(tl.int64)
    reach = WINDOW.size // 2
    dy, dx = i // WINDOW.size - reach, i % WINDOW.size - reach
    inside = (dy <= reach_y) & (dy >= -reach_y) & (dx <= reach_x) & (dx >= -reach_x)
    found, repaired = tl.zeros([BI], tl.float32), tl.zeros([BI], tl.float32)
    if tl.max(inside.to(tl.int32), 0) > 0:
        line = (head * (2 * reach_y + 1) + dy + reach_y)[None, :] * width
        for start in range(0, width, BX):
            x = start + tl.arange(0, BX)[:, None]
            seen = inside[None, :] & (x < width) & (x + dx[None, :] >= 0) & (x + dx[None, :] < width)
            place = (line + x) * (2 * reach_x + 1) + dx[None, :] + reach_x
            found += tl.sum(tl.load(SUMS + place, mask=seen, other=0.0), 0)
            repaired += tl.sum(tl.load(REPAIRED + place, mask=seen, other=0.0), 0)
        w = load_window(WINDOW, head, dy, dx) - largest_bias(WINDOW, head, T, width, BLOCK)
        found = tl.where(inside, found * tl.exp(tl.where(inside, w, 0.0)) + repaired, 0.0)
    size = WINDOW.size * WINDOW.size
    tl.store(OUT + head * size + i, found, mask=i < size)
