"""AFT-conv with one biased offset per head (AFT Eq. 10): sums over all tokens, and one shifted source a target.

den = sum e^k + (e^w - 1) e^k[o] cancels if o is the largest key, w is very negative and all other keys are much
smaller. So the sums leave out the largest key, the top, and are relative to the second largest. Only sources other than
the top are subtracted from them, which leaves at least the top. Every weight is relative to its largest term, so no w
overflows.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import MIN_FLOAT32, load_keys, load_tile, load_values, store_tile
from aft_vision.ops.common.launch import tuned

TILES = ({'BT': 32, 'BD': 32}, 4), ({'BT': 64, 'BD': 32}, 4), ({'BT': 32, 'BD': 64}, 4), ({'BT': 64, 'BD': 64}, 8)
# For the backward, which needs more registers: with fewer warps tiles spill.
BACKWARD_TILES = ({'BT': 32, 'BD': 32}, 4), ({'BT': 64, 'BD': 32}, 8), ({'BT': 32, 'BD': 64}, 8)
INTERPRETED_TILE = {'BT': 8, 'BD': 8}


@triton.jit
def load_heads(K, MASK, b, t, c, strides, CHANNELS, T, D):
    """Load the keys of tokens t for channels c, each from its head; minus infinity if no token counts."""
    return load_keys(K, MASK, b, t, tl.where(c < D, c // CHANNELS, D), strides[0], strides[1], T, D)


@triton.jit
def gather(X, MASK, b, t, inside, c, x_batch, x_token, T, other):
    """Gather elements (t, c) of sequence b in float32 for tokens t (BT, BD), `other` outside or where the mask is 0."""
    if MASK is not None:
        inside = inside & (tl.load(MASK + b * T + t, mask=inside, other=0) != 0)
    return tl.load(X + b * x_batch + t * x_token + c[None, :], mask=inside, other=other).to(tl.float32)


@triton.jit
def shift(t, dy, dx, c, H, W, D):
    """Return the token at an offset (dy, dx) of each channel from tokens t, (BT, BD), and whether it is in the grid."""
    y, x = (t // W)[:, None] + dy[None, :], (t % W)[:, None] + dx[None, :]
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W) & (t < H * W)[:, None] & (c < D)[None, :]
    return y * W + x, inside


@triton.jit
def pool(K, V, MASK, b, c, strides, CHANNELS, T, D, BT: tl.constexpr, BD: tl.constexpr):
    """Find the top's key and position, the second largest key relative to it, the top's value, and the other sums."""
    top = tl.full([BD], MIN_FLOAT32, tl.float32)
    second = tl.full([BD], MIN_FLOAT32, tl.float32)
    place = tl.full([BD], -1, tl.int32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        k = load_heads(K, MASK, b, t, c, strides, CHANNELS, T, D)
        high = tl.max(k, 0)
        first = tl.min(tl.where(k == high[None, :], t[:, None], T), 0)
        rest = tl.max(tl.where(t[:, None] == first[None, :], float('-inf'), k), 0)
        second = tl.maximum(tl.maximum(second, rest), tl.minimum(top, high))
        place = tl.where(high > top, first, place)
        top = tl.maximum(top, high)
    den = tl.zeros([BD], tl.float32)
    num = tl.zeros([BD], tl.float32)
    value = tl.zeros([BD], tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        is_top = t[:, None] == place[None, :]
        k = load_heads(K, MASK, b, t, c, strides, CHANNELS, T, D)
        v = load_values(V, MASK, b, t, c, strides[2], strides[3], T, D)
        ek = tl.where(is_top, 0.0, tl.exp(k - second[None, :]))
        den += tl.sum(ek, 0)
        num += tl.sum(ek * v, 0)
        value += tl.sum(tl.where(is_top, v, 0.0), 0)
    return top, place, second - top, value, den, num


@triton.jit
def weigh(k, v, w, is_top, second, value, den, num):
    """Return for targets with source (k, v) the mean, v - mean, the source's share, and 1 / den at the others' scale.

    Keys are relative to the top. The others' reference is 0, or the second largest key where the source is the top.
    """
    reference = tl.where(is_top, second[None, :], 0.0)
    biased = k + w[None, :]
    peak = tl.maximum(biased, reference)
    own, scale = tl.exp(biased - peak), tl.exp(reference - peak)
    # The top has weight 1 among the others, so the rounding error of a subtracted source is small.
    ek, scaled = tl.where(is_top, 0.0, tl.exp(k)), tl.exp(second)[None, :]
    others = tl.where(is_top, den[None, :], 1.0 + tl.maximum(den[None, :] * scaled - ek, 0.0))
    others_num = tl.where(is_top, num[None, :], value[None, :] + num[None, :] * scaled - ek * v)
    total = own + scale * others
    # The only token is its own source, and a bias of minus infinity leaves it no weight.
    total = tl.where(total == 0.0, 1.0, total)
    share, inverse = own / total, scale / total
    # v - mean would cancel if the source has nearly all of the weight.
    return share * v + inverse * others_num, inverse * (others * v - others_num), share, inverse


@tuned(['T', 'D'], INTERPRETED_TILE, *TILES)
@triton.jit
def forward_kernel(
    Q, K, V, MASK, DY, DX, WEIGHT, Y, T, D, H, W, CHANNELS, strides, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Compute y; strides of k, v and q."""
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    head = c // CHANNELS
    dy, dx = tl.load(DY + head, mask=c < D, other=0), tl.load(DX + head, mask=c < D, other=0)
    w = tl.load(WEIGHT + head, mask=c < D, other=0.0)
    top, place, second, value, den, num = pool(K, V, MASK, b, c, strides, CHANNELS, T, D, BT, BD)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        o, inside = shift(t, dy, dx, c, H, W, D)
        k = gather(K, MASK, b, o, inside, head, strides[0], strides[1], T, float('-inf')) - top[None, :]
        v = gather(V, MASK, b, o, inside, c, strides[2], strides[3], T, 0.0)
        y, _, _, _ = weigh(k, v, w, inside & (o == place[None, :]), second, value, den, num)
        if Q is not None:
            y *= tl.sigmoid(load_tile(Q, b, t, c, strides[4], strides[5], T, D))
        store_tile(Y, y, b, t, c, T, D)


@triton.jit
def load_source(G, Q, K, V, MASK, b, t, dy, dx, c, top, strides, T, D, H, W, CHANNELS):
    """Load for sources t the keys relative to the top, the values, and the gradient of the mean of each target."""
    k = load_heads(K, MASK, b, t, c, strides, CHANNELS, T, D) - top[None, :]
    v = load_values(V, MASK, b, t, c, strides[2], strides[3], T, D)
    target, inside = shift(t, -dy, -dx, c, H, W, D)
    a = gather(G, None, b, target, inside, c, strides[4], strides[5], T, 0.0)
    if Q is not None:
        a *= tl.sigmoid(gather(Q, None, b, target, inside, c, strides[6], strides[7], T, 0.0))
    return k, v, a


@tuned(['T', 'D'], INTERPRETED_TILE, *BACKWARD_TILES)
@triton.jit
def backward_kernel(
    G, Y, Q, K, V, MASK, DY, DX, WEIGHT, DQ, DK, DV, DW, T, D, H, W, CHANNELS, strides,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q and v, of k per channel, (B, T, D), and of w per sequence and channel, (B, D).

    strides: strides of k, v, the gradient and q.
    """
    tiles = tl.cdiv(D, BD)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    head = c // CHANNELS
    dy, dx = tl.load(DY + head, mask=c < D, other=0), tl.load(DX + head, mask=c < D, other=0)
    w = tl.load(WEIGHT + head, mask=c < D, other=0.0)
    top, place, second, value, den, num = pool(K, V, MASK, b, c, strides, CHANNELS, T, D, BT, BD)
    all_den = 1.0 + den * tl.exp(second)
    whole = (value + num * tl.exp(second)) / all_den
    # Sums over targets: a / den and a * mean / den; the target whose source is the top has its own reference.
    d_num, d_den = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    top_num, top_den = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    dw = tl.zeros([BD], tl.float32)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        g = load_tile(G, b, t, c, strides[4], strides[5], T, D)
        if Q is not None:
            s = tl.sigmoid(load_tile(Q, b, t, c, strides[6], strides[7], T, D))
            store_tile(DQ, g * load_tile(Y, b, t, c, T * D, D, T, D) * (1.0 - s), b, t, c, T, D)
            g *= s
        _, has_source = shift(t, dy, dx, c, H, W, D)
        gone = tl.sum(tl.where(has_source, 0.0, g), 0) / all_den
        k, v, a = load_source(G, Q, K, V, MASK, b, t, dy, dx, c, top, strides, T, D, H, W, CHANNELS)
        is_top = t[:, None] == place[None, :]
        mean, difference, share, inverse = weigh(k, v, w, is_top, second, value, den, num)
        a_top = tl.where(is_top, a * inverse, 0.0)
        a_other = tl.where(is_top, 0.0, a * inverse)
        d_num += tl.sum(a_other, 0) + gone
        d_den += tl.sum(a_other * mean, 0) + gone * whole
        top_num += tl.sum(a_top, 0)
        top_den += tl.sum(a_top * mean, 0)
        dw += tl.sum(a * share * difference, 0)
    tl.store(DW + b * D + c, dw, mask=c < D)
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        k, v, a = load_source(G, Q, K, V, MASK, b, t, dy, dx, c, top, strides, T, D, H, W, CHANNELS)
        is_top = t[:, None] == place[None, :]
        mean, difference, share, inverse = weigh(k, v, w, is_top, second, value, den, num)
        a_other = tl.where(is_top, 0.0, a * inverse)
        ek = tl.exp(k)
        ek_top = tl.where(is_top, 0.0, tl.exp(k - second[None, :]))
        u_num = ek * (d_num[None, :] - a_other) + ek_top * top_num[None, :]
        u_den = ek * (d_den[None, :] - a_other * mean) + ek_top * top_den[None, :]
        store_tile(DV, u_num + share * a, b, t, c, T, D)
        store_tile(DK, u_num * v - u_den + share * a * difference, b, t, c, T, D)
