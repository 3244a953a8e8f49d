"""AFT-axial: products of lines of tokens by Toeplitz matrices, along columns and along rows.

A line is what the grid has along one axis: a row of the grid along columns. A tile of columns has BC / GROUP lines of
GROUP columns each: GROUP - 1 channels of a head, weighted by the exponentials of its keys, and these exponentials.
Between two products they lie in a workspace (heads, groups, B T, GROUP). C is the number of channels of a head, BLOCK
the number of tokens of a line in a tile.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32
from aft_vision.ops.common.launch import tuned
from aft_vision.ops.conv.repair_kernels import inverse_underflowed, largest_terms, load_logits, term_gradients

KEY = ['T', 'heads', 'C', 'ROWS', 'BLOCK']
TILES = ({'BC': 64}, 4), ({'BC': 128}, 4), ({'BC': 128}, 8), ({'BC': 256}, 8)
INTERPRETED_TILE = {'BC': 32}


@triton.jit
def group_channels(group, C, GROUP: tl.constexpr):
    """Return the channels of the rows of a group; the last row, of the key, has an index beyond all of them."""
    row = tl.arange(0, GROUP)
    return tl.where(row < GROUP - 1, group * (GROUP - 1) + row, C).to(tl.int64)


@triton.jit
def program_tile(axis, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr, BC: tl.constexpr):
    """Return the group of a head, the head, the lines and the first token of a program."""
    tiles = tl.cdiv(axis.length, BLOCK)
    first = tl.program_id(0) // groups // tiles * (BC // GROUP)
    token = tl.program_id(0) // groups % tiles * BLOCK
    return tl.program_id(0) % groups, tl.program_id(1).to(tl.int64), first + tl.arange(0, BC // GROUP), token


@triton.jit
def line_tokens(axis, n, i, B):
    """Return the sequences of lines n, the places of their tokens i in it, and whether there are such."""
    b = (n // axis.lines).to(tl.int64)[None, :]
    t = i[:, None] * axis.step + (n % axis.lines * axis.between)[None, :]
    return b, t, (i < axis.length)[:, None] & (b < B)


@triton.jit
def load_weights(W, head, target, source, length):
    """Load weights of targets and sources on an axis by their distance, 0 beyond its ends."""
    place = head * (2 * length - 1) + length - 1 + source - target
    return tl.load(W + place, mask=(target < length) & (source < length), other=0.0)


@triton.jit
def load_channels(X, strides, head, b, t, c, inside, C, other):
    """Load elements (tokens, lines, channels) of a head in float32, `other` outside."""
    place = (b * strides[0] + t * strides[1])[:, :, None] + (head * C + c)[None, None, :] * strides[2]
    return tl.load(X + place, mask=inside[:, :, None] & (c < C)[None, None, :], other=other).to(tl.float32)


@triton.jit
def store_channels(X, x, strides, head, b, t, c, inside, C):
    """Write elements (tokens, lines, channels) of a head."""
    place = (b * strides[0] + t * strides[1])[:, :, None] + (head * C + c)[None, None, :] * strides[2]
    tl.store(X + place, x, mask=inside[:, :, None] & (c < C)[None, None, :])


@triton.jit
def load_sources(K, V, MASK, PEAK, k_strides, v_strides, head, b, t, c, inside, T, heads, C):
    """Load the exponentials of keys (tokens, lines), 0 at masked tokens and outside, and values, 1 for the key."""
    if MASK is not None:
        inside = inside & (tl.load(MASK + b * T + t, mask=inside, other=0) != 0)
    place = b * k_strides[0] + t * k_strides[1] + head * k_strides[2]
    k = tl.load(K + place, mask=inside, other=float('-inf')).to(tl.float32)
    ek = tl.exp(k - tl.load(PEAK + b * heads + head + t * 0, mask=inside, other=0.0))
    return ek, load_channels(V, v_strides, head, b, t, c, inside, C, 1.0)


@triton.jit
def columns_at(head, group, groups, b, t, B, T, GROUP: tl.constexpr):
    """Return the places of columns (tokens, lines, GROUP) in a workspace."""
    row = ((head * groups + group) * B + b) * T + t
    return row[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]


@triton.jit
def mark_underflowed(UNDERFLOWED, den, PEAK, head, b, inside, heads):
    """Mark sequences with an underflowed target that may see a source."""
    place = b * heads + head + tl.zeros(den.shape, tl.int64)
    underflowed = inside & (den < LIMIT)
    underflowed = underflowed & (tl.load(PEAK + place, mask=underflowed, other=MIN_FLOAT32) > MIN_FLOAT32)
    tl.store(UNDERFLOWED + place, 1, mask=underflowed)


@triton.jit
def store_means(
    sums, Q, Y, DEN, UNDERFLOWED, PEAK, q_strides, y_strides, head, b, t, c, inside, T, heads, C, GROUP: tl.constexpr
):  # fmt: skip
    """Write y from sums (tokens, lines, GROUP), and the denominators if DEN is given; every group writes the same."""
    is_key = (tl.arange(0, GROUP) == GROUP - 1)[None, None, :]
    den = tl.sum(tl.where(is_key, sums, 0.0), 2)
    mark_underflowed(UNDERFLOWED, den, PEAK, head, b, inside, heads)
    y = sums / tl.maximum(den, LIMIT)[:, :, None]
    if Q is not None:
        y = y * tl.sigmoid(load_channels(Q, q_strides, head, b, t, c, inside, C, 0.0))
    store_channels(Y, y, y_strides, head, b, t, c, inside, C)
    if DEN is not None:
        tl.store(DEN + (b * T + t) * heads + head, den, mask=inside)


@tuned(KEY, INTERPRETED_TILE, *TILES)
@triton.jit
def columns_kernel(
    K, V, MASK, PEAK, W, X, OUT, B, T, heads, C, groups, axis, k_strides, v_strides,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute the product of the sources along columns, and write the sources if X is given."""
    group, head, n, first = program_tile(axis, groups, GROUP, BLOCK, BC)
    c = group_channels(group, C, GROUP)
    target = first + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK, BC], tl.float32)
    for start in range(0, axis.length, BLOCK):
        s = start + tl.arange(0, BLOCK)
        b, t, inside = line_tokens(axis, n, s, B)
        ek, v = load_sources(K, V, MASK, PEAK, k_strides, v_strides, head, b, t, c, inside, T, heads, C)
        x = (ek[:, :, None] * v).to(PRODUCT)
        if X is not None:
            # The first of the programs that read these sources.
            own = inside & (0 * n == first)[None, :]
            tl.store(X + columns_at(head, group, groups, b, t, B, T, GROUP), x, mask=own[:, :, None])
        w = load_weights(W, head, target[:, None], s[None, :], axis.length)
        sums = tl.dot(w, tl.reshape(x, [BLOCK, BC]), sums, input_precision=PRECISION)
    b, t, inside = line_tokens(axis, n, target, B)
    place = columns_at(head, group, groups, b, t, B, T, GROUP)
    tl.store(OUT + place, tl.reshape(sums, [BLOCK, BC // GROUP, GROUP]), mask=inside[:, :, None])


@tuned(KEY, INTERPRETED_TILE, *TILES)
@triton.jit
def rows_kernel(
    Q, HALFWAY, PEAK, W, Y, DEN, UNDERFLOWED, B, T, heads, C, groups, axis, q_strides, y_strides,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute y from the product along columns, and the denominators if DEN is given."""
    group, head, n, first = program_tile(axis, groups, GROUP, BLOCK, BC)
    target = first + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK, BC], tl.float32)
    for start in range(0, axis.length, BLOCK):
        s = start + tl.arange(0, BLOCK)
        b, t, inside = line_tokens(axis, n, s, B)
        place = columns_at(head, group, groups, b, t, B, T, GROUP)
        x = tl.load(HALFWAY + place, mask=inside[:, :, None], other=0.0)
        w = load_weights(W, head, target[:, None], s[None, :], axis.length)
        sums = tl.dot(w, tl.reshape(x, [BLOCK, BC]), sums, input_precision=PRECISION)
    b, t, inside = line_tokens(axis, n, target, B)
    c, sums = group_channels(group, C, GROUP), tl.reshape(sums, [BLOCK, BC // GROUP, GROUP])
    store_means(sums, Q, Y, DEN, UNDERFLOWED, PEAK, q_strides, y_strides, head, b, t, c, inside, T, heads, C, GROUP)


@tuned(KEY, INTERPRETED_TILE, *TILES)
@triton.jit
def targets_kernel(
    G, Y, DEN, Q, PEAK, W, DQ, R, OUT, UNDERFLOWED, B, T, heads, C, groups, axis,
    g_strides, y_strides, q_strides, dq_strides,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute the transposed product of the gradient of the sums along rows, write that if R is given, and dq."""
    group, head, n, first = program_tile(axis, groups, GROUP, BLOCK, BC)
    c = group_channels(group, C, GROUP)
    source = first + tl.arange(0, BLOCK)
    is_key = (tl.arange(0, GROUP) == GROUP - 1)[None, None, :]
    sums = tl.zeros([BLOCK, BC], tl.float32)
    for start in range(0, axis.length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b, t, inside = line_tokens(axis, n, i, B)
        # The first of the programs that read these targets.
        own = inside & (0 * n == first)[None, :]
        g = load_channels(G, g_strides, head, b, t, c, inside, C, 0.0)
        gy = g * load_channels(Y, y_strides, head, b, t, c, inside, C, 0.0)
        if Q is not None:
            gate = tl.sigmoid(load_channels(Q, q_strides, head, b, t, c, inside, C, 0.0))
            store_channels(DQ, gy * (1.0 - gate), dq_strides, head, b, t, c, own, C)
            g = g * gate
        den = tl.load(DEN + (b * T + t) * heads + head, mask=inside, other=1.0).to(tl.float32)
        mark_underflowed(UNDERFLOWED, den, PEAK, head, b, own, heads)
        inverse = tl.where(den < LIMIT, 0.0, 1.0 / tl.where(den < LIMIT, 1.0, den))[:, :, None]
        r = (tl.where(is_key, -tl.sum(gy, 2)[:, :, None], g) * inverse).to(PRODUCT)
        if R is not None:
            tl.store(R + columns_at(head, group, groups, b, t, B, T, GROUP), r, mask=own[:, :, None])
        w = load_weights(W, head, i[None, :], source[:, None], axis.length)
        sums = tl.dot(w, tl.reshape(r, [BLOCK, BC]), sums, input_precision=PRECISION)
    b, t, inside = line_tokens(axis, n, source, B)
    place = columns_at(head, group, groups, b, t, B, T, GROUP)
    tl.store(OUT + place, tl.reshape(sums, [BLOCK, BC // GROUP, GROUP]), mask=inside[:, :, None])


@tuned(KEY, INTERPRETED_TILE, *TILES)
@triton.jit
def sources_kernel(
    HALFWAY, K, V, MASK, PEAK, W, DK, DV, B, T, heads, C, groups, axis, k_strides, v_strides, dv_strides,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of v and, for the channels of a group, of k from the transposed product along rows."""
    group, head, n, first = program_tile(axis, groups, GROUP, BLOCK, BC)
    source = first + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK, BC], tl.float32)
    for start in range(0, axis.length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b, t, inside = line_tokens(axis, n, i, B)
        place = columns_at(head, group, groups, b, t, B, T, GROUP)
        r = tl.load(HALFWAY + place, mask=inside[:, :, None], other=0.0)
        w = load_weights(W, head, i[None, :], source[:, None], axis.length)
        sums = tl.dot(w, tl.reshape(r, [BLOCK, BC]), sums, input_precision=PRECISION)
    b, t, inside = line_tokens(axis, n, source, B)
    c, sums = group_channels(group, C, GROUP), tl.reshape(sums, [BLOCK, BC // GROUP, GROUP])
    ek, v = load_sources(K, V, MASK, PEAK, k_strides, v_strides, head, b, t, c, inside, T, heads, C)
    store_channels(DV, sums * ek[:, :, None], dv_strides, head, b, t, c, inside, C)
    tl.store(DK + ((group * B + b) * T + t) * heads + head, tl.sum(sums * v, 2) * ek, mask=inside)


@tuned(KEY, INTERPRETED_TILE, ({'BC': 64}, 4), ({'BC': 128}, 4), ({'BC': 64}, 2))
@triton.jit
def pairs_kernel(
    R, X, OUT, B, T, heads, C, groups, splits, axis,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Compute sums of R[i] X[j] over lines and columns, (splits, heads, L, L), each over every splits-th tile."""
    tiles, head = tl.cdiv(axis.length, BLOCK), tl.program_id(1).to(tl.int64)
    split = tl.program_id(0) // (tiles * tiles)
    target = tl.program_id(0) // tiles % tiles * BLOCK + tl.arange(0, BLOCK)
    source = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(split, tl.cdiv(B * axis.lines, BC // GROUP) * groups, splits):
        n = step // groups * (BC // GROUP) + tl.arange(0, BC // GROUP)
        b, t, inside = line_tokens(axis, n, target, B)
        r = tl.load(R + columns_at(head, step % groups, groups, b, t, B, T, GROUP), mask=inside[:, :, None], other=0.0)
        b, t, inside = line_tokens(axis, n, source, B)
        x = tl.load(X + columns_at(head, step % groups, groups, b, t, B, T, GROUP), mask=inside[:, :, None], other=0.0)
        r, x = tl.reshape(r, [BLOCK, BC]), tl.reshape(x, [BLOCK, BC])
        sums = tl.dot(r, tl.trans(x), sums, input_precision=PRECISION)
    place = ((split * heads + head) * axis.length + target[:, None]) * axis.length + source[None, :]
    tl.store(OUT + place, sums, mask=(target < axis.length)[:, None] & (source < axis.length)[None, :])


@triton.jit
def repair_kernel(
    G, Y, DEN, Q, K, V, MASK, BIAS, UNDERFLOWED, OUT, B, T, width, heads, C, axis, strides, k_strides,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the biases between places on an axis, (heads, L, L), through repaired targets."""
    tiles, head = tl.cdiv(axis.length, BT), tl.program_id(1).to(tl.int64)
    target = tl.program_id(0) // tiles * BT + tl.arange(0, BT)
    source = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
    sums = tl.zeros([BT, BT], tl.float32)
    for start in range(0, B, 128):
        sequence = start + tl.arange(0, 128)
        if tl.max(tl.load(UNDERFLOWED + sequence * heads + head, mask=sequence < B, other=0), 0) > 0:
            for i in range(start, tl.minimum(start + 128, B)):
                if tl.load(UNDERFLOWED + i * heads + head) > 0:
                    b = tl.full([], i, tl.int64)
                    for line in range(0, axis.lines):
                        t = tl.where(target < axis.length, target * axis.step + line * axis.between, T)
                        base, bias, den = largest_terms(K, MASK, BIAS, k_strides, b, head, t, T, width, BT)
                        inverse = inverse_underflowed(DEN, den, b, head, t, T, heads)[:, None]
                        for other in range(0, axis.lines):
                            s = tl.where(source < axis.length, source * axis.step + other * axis.between, T)
                            k, w = load_logits(K, MASK, BIAS, k_strides, b, head, t, s, T, width)
                            p = tl.exp((k - base[:, None]) + (w - bias[:, None])) * inverse
                            sums += p * term_gradients(G, Y, Q, V, MASK, strides, b, head, t, s, T, C, BD, PRECISION)
    place = (head * axis.length + target[:, None]) * axis.length + source[None, :]
    tl.store(OUT + place, sums, mask=(target < axis.length)[:, None] & (source < axis.length)[None, :])
