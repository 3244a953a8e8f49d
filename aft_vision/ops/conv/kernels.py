"""AFT-conv (AFT Eq. 6): what comes before and after the products of its terms by (T, T) matrices of weights.

The matrices of terms are (heads, length, columns): `length` is T, and columns the C channels of a head and its key,
each of B sequences, both padded to what tensor cores take. Tiles of elements are (sequences b, heads h, channels c) of
one token. They are contiguous along b in these matrices, and along h and c in the tensors of a call, whose pointers are
those of the first of `heads` of its `total` heads.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import FLOOR, LIMIT


@triton.jit
def find_place(t, T, width):
    """Return a position: find_place(source) - find_place(target) + find_middle() is the table index of their shift."""
    t = tl.minimum(t, T - 1)
    return t // width * (2 * width - 1) + t % width


@triton.jit
def find_middle(T, width):
    """Return the position of the shift (0, 0) in the (2H - 1, 2W - 1) table."""
    return 2 * T - width - T // width


@triton.jit
def find_elements(B, heads, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr):
    """Return the token of a program and its sequences, heads, and channels of a head."""
    b_tiles, h_tiles = tl.cdiv(B, BB), tl.cdiv(heads, BH)
    program = tl.program_id(0)
    b = (program % b_tiles * BB + tl.arange(0, BB)).to(tl.int64)
    h = (program // b_tiles % h_tiles * BH + tl.arange(0, BH)).to(tl.int64)
    return program // (b_tiles * h_tiles), b[:, None, None], h[None, :, None], tl.arange(0, BC)[None, None, :]


@triton.jit
def load_elements(X, strides, b, t, h, c, C: tl.constexpr, seen, other):
    """Load elements of (B, T, D) in float32, `other` where they are not seen."""
    place = b * strides[0] + t * strides[1] + (h * C + c) * strides[2]
    return tl.load(X + place, mask=seen & (c < C), other=other).to(tl.float32)


@triton.jit
def load_exponentials(K, MASK, PEAK, strides, b, t, h, B, T, heads, total):
    """Load exp(k - peak) of a token, 0 where it is masked or outside the sequence, and whether it counts."""
    seen = (b < B) & (t < T) & (h < heads)
    peak = tl.load(PEAK + b * total + h, mask=(b < B) & (h < heads), other=0.0)
    if MASK is not None:
        seen = seen & (tl.load(MASK + b * T + t, mask=(b < B) & (t < T), other=0) != 0)
    k = tl.load(K + b * strides[0] + t * strides[1] + h * strides[2], mask=seen, other=float('-inf'))
    return tl.exp(k.to(tl.float32) - peak), seen


@triton.jit
def weights_kernel(TABLE, WEIGHTS, T, width, length, BT: tl.constexpr, BS: tl.constexpr):
    """Write the weights (heads, targets, sources) from those of shifts (heads, 2H - 1, 2W - 1), padded by 0."""
    tiles, head = tl.cdiv(length, BS), tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) // tiles * BT + tl.arange(0, BT)[:, None]
    s = tl.program_id(0) % tiles * BS + tl.arange(0, BS)[None, :]
    middle = find_middle(T, width)
    place = middle + find_place(s, T, width) - find_place(t, T, width)
    w = tl.load(TABLE + head * (2 * middle + 1) + place, mask=(t < T) & (s < T), other=0.0)
    tl.store(WEIGHTS + (head * length + t) * length + s, w, mask=(t < length) & (s < length))


@triton.jit
def terms_kernel(
    K, V, MASK, PEAK, TERMS, B, T, heads, total, length, columns, k_strides, v_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the terms e^k v of each channel, and e^k, of one token."""
    t, b, h, c = find_elements(B, heads, BB, BH, BC)
    ek, seen = load_exponentials(K, MASK, PEAK, k_strides, b, t, h, B, T, heads, total)
    v = load_elements(V, v_strides, b, t, h, c, C, seen, 0.0)
    inside = (b < B) & (h < heads)
    place = TERMS + (h * length + t) * columns + b
    tl.store(place + c * B, ek * v, mask=inside & (c < C))
    tl.store(place + C * B, ek, mask=inside)


@triton.jit
def results_kernel(
    Q, SUMS, PEAK, Y, DEN, LOST, B, heads, total, length, columns, q_strides, y_strides, den_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute y of one token from its sums, and the denominators if DEN is given, and mark underflowed ones."""
    t, b, h, c = find_elements(B, heads, BB, BH, BC)
    inside = (b < B) & (h < heads)
    place = SUMS + (h * length + t) * columns + b
    den = tl.load(place + C * B, mask=inside, other=1.0)
    y = tl.load(place + c * B, mask=inside & (c < C), other=0.0) / tl.maximum(den, LIMIT)
    if Q is not None:
        y *= tl.sigmoid(load_elements(Q, q_strides, b, t, h, c, C, inside, 0.0))
    tl.store(Y + b * y_strides[0] + t * y_strides[1] + (h * C + c) * y_strides[2], y, mask=inside & (c < C))
    peak = tl.load(PEAK + b * total + h, mask=inside, other=FLOOR)
    tl.store(LOST + b * total + h, 1, mask=(den < LIMIT) & (peak > FLOOR))
    if DEN is not None:
        tl.store(DEN + b * den_strides[0] + t * den_strides[1] + h * den_strides[2], den, mask=inside)


@triton.jit
def targets_kernel(
    G, Y, DEN, Q, PEAK, DQ, SLOPES, LOST,
    B, T, heads, total, length, columns, g_strides, y_strides, den_strides, q_strides, dq_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q and of the sums of one token, 0 where the denominator underflowed; marks those."""
    t, b, h, c = find_elements(B, heads, BB, BH, BC)
    inside = (b < B) & (h < heads)
    seen = inside & (t < T)
    g = load_elements(G, g_strides, b, t, h, c, C, seen, 0.0)
    gy = g * load_elements(Y, y_strides, b, t, h, c, C, seen, 0.0)
    if Q is not None:
        gate = tl.sigmoid(load_elements(Q, q_strides, b, t, h, c, C, seen, 0.0))
        g *= gate
        place = b * dq_strides[0] + t * dq_strides[1] + (h * C + c) * dq_strides[2]
        tl.store(DQ + place, gy * (1.0 - gate), mask=seen & (c < C))
    place = b * den_strides[0] + t * den_strides[1] + h * den_strides[2]
    den = tl.load(DEN + place, mask=seen, other=0.0).to(tl.float32)
    top = tl.where(den < LIMIT, 0.0, 1.0 / tl.maximum(den, LIMIT))
    place = SLOPES + (h * length + t) * columns + b
    tl.store(place + c * B, g * top, mask=inside & (c < C))
    tl.store(place + C * B, -tl.sum(gy, 2)[:, :, None] * top, mask=inside)
    peak = tl.load(PEAK + b * total + h, mask=inside, other=FLOOR)
    tl.store(LOST + b * total + h, 1, mask=seen & (den < LIMIT) & (peak > FLOOR))


@triton.jit
def sources_kernel(
    SUMS, K, V, MASK, PEAK, DK, DV, B, T, heads, total, length, columns, k_strides, v_strides, dk_strides, dv_strides,
    C: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of k and v of one token from those of its terms."""
    t, b, h, c = find_elements(B, heads, BB, BH, BC)
    ek, seen = load_exponentials(K, MASK, PEAK, k_strides, b, t, h, B, T, heads, total)
    v = load_elements(V, v_strides, b, t, h, c, C, seen, 0.0)
    inside = (b < B) & (h < heads)
    place = SUMS + (h * length + t) * columns + b
    d = tl.load(place + c * B, mask=inside & (c < C), other=0.0)
    dk = tl.sum(d * v, 2)[:, :, None] + tl.load(place + C * B, mask=inside, other=0.0)
    tl.store(DK + b * dk_strides[0] + t * dk_strides[1] + h * dk_strides[2], dk * ek, mask=inside)
    place = b * dv_strides[0] + t * dv_strides[1] + (h * C + c) * dv_strides[2]
    tl.store(DV + place, d * ek, mask=inside & (c < C))


@triton.jit
def find_near(width, reach, BW: tl.constexpr):
    """Count the adjacent tiles of sources that have all columns within reach of a tile of targets."""
    return tl.minimum(2 * tl.cdiv(reach, BW) + 1, tl.cdiv(width, BW))


@triton.jit
def find_columns(i, width, reach, BW: tl.constexpr):
    """Return the first columns of targets and of sources of a pair of tiles: columns within reach are in one pair."""
    tiles, near = tl.cdiv(width, BW), find_near(width, reach, BW)
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
    pairs, head = tl.cdiv(width, BW) * find_near(width, reach_x, BW), tl.program_id(1).to(tl.int64)
    dy = tl.program_id(0) // pairs - reach_y
    target, source = find_columns(tl.program_id(0) % pairs, width, reach_x, BW)
    target, source = target + tl.arange(0, BW)[:, None], source + tl.arange(0, BW)[None, :]
    inside = (target < width) & (source < width)
    sums = tl.zeros([BW, BW], tl.float32)
    for y in range(tl.maximum(0, -dy), tl.minimum(height, height - dy)):
        place = (head * length + y * width + target) * length + (y + dy) * width + source
        sums += tl.load(SLOPES + place, mask=inside, other=0.0)
    store_band(OUT, sums, head * (2 * reach_y + 1) + dy + reach_y, target, source, width, reach_x)
