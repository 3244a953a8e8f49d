"""Repair of AFT-conv for targets whose sources all underflowed: exact, term by term, and rarely needed.

UNDERFLOWED (B, heads) marks the sequences and heads with such targets. Almost never is one marked, so a program reads
FLAGS of them at once. The terms of a target are relative to the largest one, with its key and its bias subtracted
separately, so that no digits of a large key are lost.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32, load_seen
from aft_vision.ops.conv.kernels import count_near_tiles, load_bias, store_band, tile_pair

FLAGS = tl.constexpr(128)


@triton.jit
def load_tokens(X, MASK, strides, b, head, t, c, T, C):
    """Load elements (t, c) of a head of a sequence in float32, 0 at masked tokens and outside."""
    place = b * strides[0] + t[:, None] * strides[1] + (head * C + c)[None, :] * strides[2]
    return tl.load(X + place, mask=load_seen(MASK, b, t, c, T, C), other=0.0).to(tl.float32)


@triton.jit
def load_keys(K, MASK, strides, b, head, t, T):
    """Load keys t of a head of a sequence in float32, minus infinity at masked tokens and outside the sequence."""
    seen = t < T
    if MASK is not None:
        seen = seen & (tl.load(MASK + b * T + t, mask=seen, other=0) != 0)
    place = b * strides[0] + t * strides[1] + head * strides[2]
    return tl.load(K + place, mask=seen, other=float('-inf')).to(tl.float32)


@triton.jit
def load_logits(K, MASK, BIAS, strides, b, head, t, s, T, width):
    """Load keys (1, s), minus infinity for missing ones, and biases (t, s) of a head."""
    k = load_keys(K, MASK, strides, b, head, s, T)[None, :]
    return k, load_bias(BIAS, head, t[:, None], s[None, :], T, width)


@triton.jit
def largest_terms(K, MASK, BIAS, strides, b, head, t, T, width, BS: tl.constexpr):
    """Return for each target key and bias of its largest term, and the sum of terms relative to it."""
    base = tl.full([t.shape[0]], MIN_FLOAT32, tl.float32)
    bias = tl.zeros([t.shape[0]], tl.float32)
    for start in range(0, T, BS):
        k, w = load_logits(K, MASK, BIAS, strides, b, head, t, start + tl.arange(0, BS), T, width)
        best = tl.argmax(k + w, 1)[:, None] == tl.arange(0, BS)[None, :]
        top_k = tl.sum(tl.where(best, k, 0.0), 1)
        top_w = tl.sum(tl.where(best, w, 0.0), 1)
        rises = (top_k - base) + (top_w - bias) > 0.0
        base, bias = tl.where(rises, top_k, base), tl.where(rises, top_w, bias)
    den = tl.zeros([t.shape[0]], tl.float32)
    for start in range(0, T, BS):
        k, w = load_logits(K, MASK, BIAS, strides, b, head, t, start + tl.arange(0, BS), T, width)
        den += tl.sum(tl.exp((k - base[:, None]) + (w - bias[:, None])), 1)
    return base, bias, den


@triton.jit
def inverse_underflowed(DEN, sums, b, head, t, T, heads):
    """Return 1 / sums of underflowed targets, 0 for others and for those that see no source."""
    den = tl.load(DEN + (b * T + t) * heads + head, mask=t < T, other=1.0).to(tl.float32)
    underflowed = (den < LIMIT) & (sums > 0.0)
    return tl.where(underflowed, 1.0 / tl.where(underflowed, sums, 1.0), 0.0)


@triton.jit
def source_shares(K, MASK, BIAS, DEN, strides, b, head, t, s, T, width, heads, BS: tl.constexpr):
    """Return the shares of sources s in the means of underflowed targets t; 0 for other targets."""
    base, bias, den = largest_terms(K, MASK, BIAS, strides, b, head, t, T, width, BS)
    k, w = load_logits(K, MASK, BIAS, strides, b, head, t, s, T, width)
    inverse = inverse_underflowed(DEN, den, b, head, t, T, heads)[:, None]
    return tl.exp((k - base[:, None]) + (w - bias[:, None])) * inverse


@triton.jit
def term_gradients(G, Y, Q, V, MASK, strides, b, head, t, s, T, C, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the gradient of the terms (t, s), relative to their sum; strides of G, Y, Q and V."""
    slopes = tl.zeros([t.shape[0], s.shape[0]], tl.float32)
    for start in range(0, C, BD):
        c = start + tl.arange(0, BD)
        g = load_tokens(G, None, strides[0], b, head, t, c, T, C)
        slopes -= tl.sum(g * load_tokens(Y, None, strides[1], b, head, t, c, T, C), 1)[:, None]
        if Q is not None:
            g = g * tl.sigmoid(load_tokens(Q, None, strides[2], b, head, t, c, T, C))
        v = load_tokens(V, MASK, strides[3], b, head, s, c, T, C)
        slopes = tl.dot(g, tl.trans(v), slopes, input_precision=PRECISION)
    return slopes


@triton.jit
def repair_targets(
    Q, K, V, MASK, BIAS, Y, b, head, t, T, width, C, q_strides, k_strides, v_strides, y_strides,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y of BT targets t of a head of a sequence."""
    base, bias, den = largest_terms(K, MASK, BIAS, k_strides, b, head, t, T, width, BT)
    inverse = tl.where(den > 0.0, 1.0 / tl.where(den > 0.0, den, 1.0), 0.0)[:, None]
    for start in range(0, C, BD):
        c = start + tl.arange(0, BD)
        y = tl.zeros([BT, BD], tl.float32)
        for other in range(0, T, BT):
            s = other + tl.arange(0, BT)
            k, w = load_logits(K, MASK, BIAS, k_strides, b, head, t, s, T, width)
            p = tl.exp((k - base[:, None]) + (w - bias[:, None]))
            y = tl.dot(p, load_tokens(V, MASK, v_strides, b, head, s, c, T, C), y, input_precision=PRECISION)
        y = y * inverse
        if Q is not None:
            y = y * tl.sigmoid(load_tokens(Q, None, q_strides, b, head, t, c, T, C))
        place = b * y_strides[0] + t[:, None] * y_strides[1] + (head * C + c)[None, :] * y_strides[2]
        tl.store(Y + place, y, mask=(t < T)[:, None] & (c < C)[None, :])


@triton.jit
def repair_sequence(
    Q, K, V, MASK, BIAS, Y, b, head, T, width, C, q_strides, k_strides, v_strides, y_strides,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y of all targets of a head of a sequence."""
    for start in range(0, T, BT):
        repair_targets(
            *(Q, K, V, MASK, BIAS, Y, b, head, start + tl.arange(0, BT), T, width, C),
            *(q_strides, k_strides, v_strides, y_strides, PRECISION, BT, BD),
        )


@triton.jit
def forward_kernel(
    Q, K, V, MASK, BIAS, Y, UNDERFLOWED, B, T, width, heads, C, q_strides, k_strides, v_strides, y_strides,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y of marked sequences and heads."""
    first, total = tl.program_id(0) * FLAGS, B * heads
    flags = first + tl.arange(0, FLAGS)
    if tl.max(tl.load(UNDERFLOWED + flags, mask=flags < total, other=0), 0) == 0:
        return
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    for pair in range(first, tl.minimum(first + FLAGS, total)):
        if tl.load(UNDERFLOWED + pair) > 0:
            b, head = tl.full([], pair // heads, tl.int64), tl.full([], pair % heads, tl.int64)
            repair_targets(
                *(Q, K, V, MASK, BIAS, Y, b, head, t, T, width, C, q_strides, k_strides, v_strides, y_strides),
                *(PRECISION, BT, BD),
            )


@triton.jit
def sources_kernel(
    G, Y, DEN, Q, K, V, MASK, BIAS, UNDERFLOWED, DK, DV, B, T, width, heads, C, strides, k_strides, dv_strides,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of k and v."""
    first, total = tl.program_id(0) * FLAGS, B * heads
    flags = first + tl.arange(0, FLAGS)
    if tl.max(tl.load(UNDERFLOWED + flags, mask=flags < total, other=0), 0) == 0:
        return
    s = tl.program_id(1) * BT + tl.arange(0, BT)
    for pair in range(first, tl.minimum(first + FLAGS, total)):
        if tl.load(UNDERFLOWED + pair) > 0:
            b, head = tl.full([], pair // heads, tl.int64), tl.full([], pair % heads, tl.int64)
            dk = tl.zeros([BT], tl.float32)
            for other in range(0, T, BT):
                t = other + tl.arange(0, BT)
                p = source_shares(K, MASK, BIAS, DEN, k_strides, b, head, t, s, T, width, heads, BT)
                dk += tl.sum(p * term_gradients(G, Y, Q, V, MASK, strides, b, head, t, s, T, C, BD, PRECISION), 0)
            # Sum over all targets before rounding to the type of v.
            for start in range(0, C, BD):
                c = start + tl.arange(0, BD)
                place = b * dv_strides[0] + s[:, None] * dv_strides[1] + (head * C + c)[None, :] * dv_strides[2]
                inside = (s < T)[:, None] & (c < C)[None, :]
                dv = tl.load(DV + place, mask=inside, other=0.0).to(tl.float32)
                for other in range(0, T, BT):
                    t = other + tl.arange(0, BT)
                    p = source_shares(K, MASK, BIAS, DEN, k_strides, b, head, t, s, T, width, heads, BT)
                    g = load_tokens(G, None, strides[0], b, head, t, c, T, C)
                    if Q is not None:
                        g = g * tl.sigmoid(load_tokens(Q, None, strides[2], b, head, t, c, T, C))
                    dv = tl.dot(tl.trans(p), g, dv, input_precision=PRECISION)
                # Several threads may have the same element: all must read it before one writes it.
                tl.debug_barrier()
                tl.store(DV + place, dv, mask=inside)
            place = (b * T + s) * heads + head
            dk += tl.load(DK + place, mask=s < T, other=0.0)
            tl.debug_barrier()
            tl.store(DK + place, dk, mask=s < T)


@triton.jit
def table_kernel(
    G, Y, DEN, Q, K, V, MASK, BIAS, UNDERFLOWED, OUT, B, T, width, heads, C, reach_y, reach_x, strides, k_strides,
    PRECISION: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the biases between targets of a grid line and sources dy lines below, over all lines."""
    pairs, head = tl.cdiv(width, BW) * count_near_tiles(width, reach_x, BW), tl.program_id(1).to(tl.int64)
    dy = tl.program_id(0) // pairs - reach_y
    target, source = tile_pair(tl.program_id(0) % pairs, width, reach_x, BW)
    target, source = target + tl.arange(0, BW), source + tl.arange(0, BW)
    height = T // width
    sums = tl.zeros([BW, BW], tl.float32)
    for start in range(0, B, FLAGS):
        sequence = start + tl.arange(0, FLAGS)
        if tl.max(tl.load(UNDERFLOWED + sequence * heads + head, mask=sequence < B, other=0), 0) > 0:
            for i in range(start, tl.minimum(start + FLAGS, B)):
                if tl.load(UNDERFLOWED + i * heads + head) > 0:
                    b = tl.full([], i, tl.int64)
                    for y in range(tl.maximum(0, -dy), tl.minimum(height, height - dy)):
                        t = tl.where(target < width, y * width + target, T)
                        s = tl.where(source < width, (y + dy) * width + source, T)
                        p = source_shares(K, MASK, BIAS, DEN, k_strides, b, head, t, s, T, width, heads, BW)
                        sums += p * term_gradients(G, Y, Q, V, MASK, strides, b, head, t, s, T, C, BD, PRECISION)
    line = head * (2 * reach_y + 1) + dy + reach_y
    store_band(OUT, sums, line, target[:, None], source[None, :], width, reach_x)
