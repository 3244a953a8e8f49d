"""AFT-conv (AFT Eq. 6): products of rows by Toeplitz tiles.

A tile of rows has BR / GROUP sequences of GROUP rows each: GROUP - 1 channels of a head, weighted by the exponentials
of its keys, and these exponentials. A tile of columns has BT tokens. C is the number of channels of a head. ROWS is a
class of batch sizes for the choice of tiles: the same for all except the smallest.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import FLOOR, LIMIT
from aft_vision.ops.common.launch import tuned

KEY = ['T', 'heads', 'C', 'ROWS']
TILES = (
    ({'BR': 64, 'BT': 64, 'BS': 32}, 8),
    ({'BR': 32, 'BT': 64, 'BS': 32}, 4),
    ({'BR': 64, 'BT': 64, 'BS': 32}, 4),
    ({'BR': 64, 'BT': 128, 'BS': 32}, 8),
    ({'BR': 128, 'BT': 64, 'BS': 32}, 8),
)
LITTLE = {'BR': 32, 'BT': 32, 'BS': 32}


@triton.jit
def load_keys(K, MASK, strides, b, t, B, T):
    """Load keys (b, t) in float32, minus infinity at masked tokens and outside the sequences."""
    seen = (b < B)[:, None] & (t < T)[None, :]
    if MASK is not None:
        seen = seen & (tl.load(MASK + b[:, None] * T + t[None, :], mask=seen, other=0) != 0)
    place = b[:, None] * strides[0] + t[None, :] * strides[1]
    return tl.load(K + place, mask=seen, other=float('-inf')).to(tl.float32)


@triton.jit
def find_peak(K, MASK, strides, b, B, T, BLOCK: tl.constexpr):
    """Return the largest key of each sequence b, finite."""
    peak = tl.full([b.shape[0]], FLOOR, tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(load_keys(K, MASK, strides, b, t, B, T), 1))
    return peak


@triton.jit
def load_rows(X, MASK, strides, b, c, t, B, C, T, other):
    """Load elements (b, c, t) in float32, `other` at masked tokens, even if NaN, and outside."""
    seen = (b < B)[:, None] & (t < T)[None, :]
    if MASK is not None:
        seen = seen & (tl.load(MASK + b[:, None] * T + t[None, :], mask=seen, other=0) != 0)
    inside = seen[:, None, :] & (c < C)[None, :, None]
    place = b[:, None, None] * strides[0] + t[None, None, :] * strides[1] + c[None, :, None] * strides[2]
    return tl.load(X + place, mask=inside, other=other).to(tl.float32)


@triton.jit
def store_rows(X, x, strides, b, c, t, B, C, T):
    """Write elements (b, c, t)."""
    inside = (b < B)[:, None, None] & (c < C)[None, :, None] & (t < T)[None, None, :]
    place = b[:, None, None] * strides[0] + t[None, None, :] * strides[1] + c[None, :, None] * strides[2]
    tl.store(X + place, x, mask=inside)


@triton.jit
def find_channels(part, C, GROUP: tl.constexpr):
    """Return the channels of the rows of a group; the last row, of the key, has an index beyond all of them."""
    row = tl.arange(0, GROUP)
    return tl.where(row < GROUP - 1, part * (GROUP - 1) + row, C).to(tl.int64)


@triton.jit
def find_tile(T, C, GROUP: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr):
    """Return the part of a head, the head, the first sequence and the first token of a program."""
    parts, token_tiles = tl.cdiv(C, GROUP - 1), tl.cdiv(T, BT)
    row_tile = tl.program_id(0) // token_tiles
    first_token = tl.program_id(0) % token_tiles * BT
    return row_tile % parts, tl.program_id(1).to(tl.int64), row_tile // parts * (BR // GROUP), first_token


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
def mark_lost(LOST, den, peak, b, head, t, B, T, heads):
    """Write 1 for sequences with an underflowed target that may see a source."""
    lost = (den < LIMIT) & (t < T)[None, :] & (peak > FLOOR)[:, None]
    found = tl.max(lost.to(tl.int32), 1)
    tl.store(LOST + b * heads + head, found, mask=(b < B) & (found > 0))


@tuned(KEY, LITTLE, *TILES)
@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    MASK,
    W,
    Y,
    DEN,
    LOST,
    B,
    T,
    width,
    heads,
    C,
    q_strides,
    k_strides,
    v_strides,
    y_strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    """Compute y, and the denominators if DEN is given."""
    part, head, first, first_token = find_tile(T, C, GROUP, BR, BT)
    b = (first + tl.arange(0, BR // GROUP)).to(tl.int64)
    c = find_channels(part, C, GROUP)
    t = first_token + tl.arange(0, BT)
    K += head * k_strides[2]
    middle = find_middle(T, width)
    W += head * (2 * middle + 1) + middle - find_place(t, T, width)[None, :]
    peak = find_peak(K, MASK, k_strides, b, B, T, BS)
    sums = tl.zeros([BR, BT], tl.float32)
    for start in range(0, T, BS):
        s = start + tl.arange(0, BS)
        ek = tl.exp(load_keys(K, MASK, k_strides, b, s, B, T) - peak[:, None])
        v = load_rows(V + head * C * v_strides[2], MASK, v_strides, b, c, s, B, C, T, 1.0)
        x = tl.reshape(ek[:, None, :] * v, [BR, BS]).to(PRODUCT)
        sums = tl.dot(x, tl.load(W + find_place(s, T, width)[:, None]), sums, input_precision=PRECISION)
    sums = tl.reshape(sums, [BR // GROUP, GROUP, BT])
    is_key = (tl.arange(0, GROUP) == GROUP - 1)[None, :, None]
    den = tl.sum(tl.where(is_key, sums, 0.0), 1)
    mark_lost(LOST, den, peak, b, head, t, B, T, heads)
    y = sums / tl.maximum(den, LIMIT)[:, None, :]
    if Q is not None:
        y = y * tl.sigmoid(load_rows(Q + head * C * q_strides[2], None, q_strides, b, c, t, B, C, T, 0.0))
    store_rows(Y + head * C * y_strides[2], y, y_strides, b, c, t, B, C, T)
    if DEN is not None:
        # Every part of a head writes the same values.
        inside = (b < B)[:, None] & (t < T)[None, :]
        tl.store(DEN + (b[:, None] * T + t[None, :]) * heads + head, den, mask=inside)


@tuned(KEY, {'BR': 32, 'BT': 64}, ({'BR': 32, 'BT': 64}, 4), ({'BR': 64, 'BT': 64}, 8), ({'BR': 32, 'BT': 128}, 8))
@triton.jit
def rows_kernel(
    G,
    Y,
    DEN,
    Q,
    K,
    V,
    MASK,
    DQ,
    R,
    X,
    LOST,
    B,
    T,
    heads,
    C,
    row_length,
    g_strides,
    y_strides,
    q_strides,
    k_strides,
    v_strides,
    dq_strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
):
    """Compute the gradient of q, of sums and denominators as rows R, and the summed rows X if X is given."""
    parts = tl.cdiv(C, GROUP - 1)
    part, head, first, first_token = find_tile(T, C, GROUP, BR, BT)
    b = (first + tl.arange(0, BR // GROUP)).to(tl.int64)
    c = find_channels(part, C, GROUP)
    t = first_token + tl.arange(0, BT)
    inside = (b < B)[:, None] & (t < T)[None, :]
    is_key = (tl.arange(0, GROUP) == GROUP - 1)[None, :, None]
    g = load_rows(G + head * C * g_strides[2], None, g_strides, b, c, t, B, C, T, 0.0)
    gy = g * load_rows(Y + head * C * y_strides[2], None, y_strides, b, c, t, B, C, T, 0.0)
    if Q is not None:
        gate = tl.sigmoid(load_rows(Q + head * C * q_strides[2], None, q_strides, b, c, t, B, C, T, 0.0))
        g = g * gate
        store_rows(DQ + head * C * dq_strides[2], gy * (1.0 - gate), dq_strides, b, c, t, B, C, T)
    den = tl.load(DEN + (b[:, None] * T + t[None, :]) * heads + head, mask=inside, other=0.0).to(tl.float32)
    top = tl.where(den < LIMIT, 0.0, 1.0 / tl.maximum(den, LIMIT))[:, None, :]
    r = tl.where(is_key, -tl.sum(gy, 1)[:, None, :], g) * top
    row = (((head * parts + part) * B + b) * GROUP)[:, None, None] + tl.arange(0, GROUP)[None, :, None]
    place = row * row_length + t[None, None, :]
    inside = (b < B)[:, None, None] & (t < row_length)[None, None, :]
    tl.store(R + place, r, mask=inside)
    K += head * k_strides[2]
    peak = find_peak(K, MASK, k_strides, b, B, T, BT)
    mark_lost(LOST, den, peak, b, head, t, B, T, heads)
    if X is not None:
        ek = tl.exp(load_keys(K, MASK, k_strides, b, t, B, T) - peak[:, None])[:, None, :]
        v = load_rows(V + head * C * v_strides[2], MASK, v_strides, b, c, t, B, C, T, 0.0)
        tl.store(X + place, tl.where(is_key, ek, ek * v), mask=inside)


@tuned(KEY, LITTLE, *TILES)
@triton.jit
def sources_kernel(
    R,
    K,
    V,
    MASK,
    W,
    DK,
    DV,
    B,
    T,
    width,
    heads,
    C,
    row_length,
    k_strides,
    v_strides,
    dv_strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BR: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
):
    """Compute the gradients of v and, for the channels of a group, of k."""
    parts = tl.cdiv(C, GROUP - 1)
    part, head, first, first_token = find_tile(T, C, GROUP, BR, BT)
    b = (first + tl.arange(0, BR // GROUP)).to(tl.int64)
    c = find_channels(part, C, GROUP)
    s = first_token + tl.arange(0, BT)
    middle = find_middle(T, width)
    W += head * (2 * middle + 1) + middle + find_place(s, T, width)[None, :]
    row = first * GROUP + tl.arange(0, BR)
    R += ((head * parts + part) * B * GROUP + row[:, None]) * row_length
    sums = tl.zeros([BR, BT], tl.float32)
    for start in range(0, T, BS):
        t = start + tl.arange(0, BS)
        r = tl.load(R + t[None, :], mask=(row < B * GROUP)[:, None] & (t < T)[None, :], other=0.0)
        sums = tl.dot(r, tl.load(W - find_place(t, T, width)[:, None]), sums, input_precision=PRECISION)
    sums = tl.reshape(sums, [BR // GROUP, GROUP, BT])
    K += head * k_strides[2]
    peak = find_peak(K, MASK, k_strides, b, B, T, BT)
    ek = tl.exp(load_keys(K, MASK, k_strides, b, s, B, T) - peak[:, None])
    v = load_rows(V + head * C * v_strides[2], MASK, v_strides, b, c, s, B, C, T, 1.0)
    store_rows(DV + head * C * dv_strides[2], sums * ek[:, None, :], dv_strides, b, c, s, B, C, T)
    inside = (b < B)[:, None] & (s < T)[None, :]
    tl.store(DK + ((part * B + b[:, None]) * T + s[None, :]) * heads + head, tl.sum(sums * v, 1) * ek, mask=inside)


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


@tuned(['height', 'width', 'heads', 'reach_y', 'reach_x', 'ROWS'], {'BR': 64}, ({'BR': 64}, 4), ({'BR': 32}, 4))
@triton.jit
def table_kernel(
    R,
    X,
    OUT,
    height,
    width,
    heads,
    rows,
    rows_each,
    reach_y,
    reach_x,
    row_length,
    BW: tl.constexpr,
    SHIFTS: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
    BR: tl.constexpr,
):
    """Sum over rows and over y R[y, .] (x) X[y + dy, .] for SHIFTS values of dy and BW columns of the grid."""
    steps, head = tl.cdiv(2 * reach_y + 1, SHIFTS), tl.program_id(1).to(tl.int64)
    pairs = tl.cdiv(width, BW) * find_near(width, reach_x, BW)
    split, first = tl.program_id(0) // pairs // steps, tl.program_id(0) // pairs % steps * SHIFTS - reach_y
    target, source = find_columns(tl.program_id(0) % pairs, width, reach_x, BW)
    column = tl.arange(0, SHIFTS * BW)
    target, source = target + tl.arange(0, BW), source + column % BW
    dy = first + column // BW
    R += head * rows * row_length
    X += head * rows * row_length
    end = tl.minimum((split + 1) * rows_each, rows)
    sums = tl.zeros([BW, SHIFTS * BW], tl.float32)
    for start in range(split * rows_each, end, BR):
        row = (start + tl.arange(0, BR)).to(tl.int64)
        for y in range(tl.maximum(0, 1 - first - SHIFTS), tl.minimum(height, height - first)):
            inside = (row < end)[:, None] & (target < width)[None, :]
            r = tl.load(R + row[:, None] * row_length + (y * width + target)[None, :], mask=inside, other=0.0)
            there = (y + dy >= 0) & (y + dy < height) & (source < width)
            inside = (row < end)[:, None] & there[None, :]
            x = tl.load(X + row[:, None] * row_length + ((y + dy) * width + source)[None, :], mask=inside, other=0.0)
            sums = tl.dot(tl.trans(r), x, sums, input_precision=PRECISION)
    line = (split * heads + head) * (2 * reach_y + 1) + dy + reach_y
    # Distances beyond the last have no line: none of their columns is inside.
    source = tl.where(dy <= reach_y, source, width)
    store_band(OUT, sums, line[None, :], target[:, None], source[None, :], width, reach_x)
