"""AFT-conv (AFT Eq. 6) with a head per channel, of few sequences: sums term by term in float32.

They do not repay writing the (T, T) weights of a head. A table (shifts, D) has the weights instead; its last row is
that of all sources outside the window. Elements are (targets, sources, channels).
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32
from aft_vision.ops.common.launch import tuned
from aft_vision.ops.conv.kernels import largest_bias, load_terms, load_window, store_results

# Targets, sources and channels of a tile in the interpreter, and on a GPU with the number of warps.
INTERPRETED_TILE = {'BT': 4, 'BS': 8, 'BD': 16}
TILES = ({'BT': 16, 'BS': 8, 'BD': 32}, 4), ({'BT': 16, 'BS': 16, 'BD': 32}, 8), ({'BT': 32, 'BS': 8, 'BD': 32}, 8)


@triton.jit
def shifts_kernel(WINDOW, TABLE, heads, T, width, BLOCK: tl.constexpr):
    """Write exp(bias - largest bias) of (shifts, heads), last of those outside the window."""
    head, reach = tl.program_id(0).to(tl.int64), WINDOW.size // 2
    most, shifts = largest_bias(WINDOW, head, T, width, BLOCK), WINDOW.size * WINDOW.size + 1
    for start in range(0, shifts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        w = load_window(WINDOW, head, i // WINDOW.size - reach, i % WINDOW.size - reach)
        tl.store(TABLE + i * heads + head, tl.exp(w - most), mask=i < shifts)


@triton.jit
def shift_index(t, s, width, size):
    """Return the row of the table for targets and sources."""
    reach = size // 2
    dy, dx = s // width - t // width + reach, s % width - t % width + reach
    return tl.where((dy >= 0) & (dy < size) & (dx >= 0) & (dx < size), dy * size + dx, size * size)


@tuned(['T', 'D', 'size'], INTERPRETED_TILE, *TILES)
@triton.jit
def direct_kernel(
    Q, K, V, MASK, PEAK, TABLE, Y, DEN, UNDERFLOWED, B, T, D, width, size, q_strides, k_strides, v_strides, y_strides,
    den_strides, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given, and mark underflowed ones."""
    d_tiles, t_tiles = tl.cdiv(D, BD), tl.cdiv(T, BT)
    program = tl.program_id(0)
    c, first = program % d_tiles * BD + tl.arange(0, BD), program // d_tiles % t_tiles * BT
    t, b = first + tl.arange(0, BT), (program // (d_tiles * t_tiles)).to(tl.int64)
    # The lines of the first and last source in the windows of the targets.
    low, high = first // width - size // 2, tl.minimum(first + BT - 1, T - 1) // width + size // 2
    channel, inside = c[None, :], (c < D)[None, :]
    outside = tl.load(TABLE + size * size * D + c, mask=c < D, other=0.0)[None, None, :]
    num, den = tl.zeros([BT, BS, BD], tl.float32), tl.zeros([BT, BS, BD], tl.float32)
    for start in range(0, T, BS):
        s = start + tl.arange(0, BS)
        ek, v = load_terms(K, V, MASK, PEAK, k_strides, v_strides, b, s[:, None], channel, 0, inside, T, D, 1)
        weights = tl.broadcast_to(outside, [BT, BS, BD])
        if ((start + BS - 1) // width >= low) & (start // width <= high):
            # Sources beyond the end need a finite weight: the table is infinite at some shifts beyond the grid.
            shift = shift_index(t[:, None], tl.minimum(s, T - 1)[None, :], width, size)
            weights = tl.load(TABLE + shift[:, :, None] * D + channel, mask=inside[None, :, :], other=0.0)
        num += weights * (ek * v)[None, :, :]
        den += weights * ek[None, :, :]
    num, den = tl.sum(num, 1), tl.sum(den, 1)
    inside = inside & (t < T)[:, None]
    store_results(num, den, Q, Y, DEN, q_strides, y_strides, den_strides, b, t[:, None], channel, 0, inside, 1)
    peak = tl.load(PEAK + b * D + channel, mask=inside, other=MIN_FLOAT32)
    tl.store(UNDERFLOWED + b * D + channel + 0 * t[:, None], 1, mask=inside & (den < LIMIT) & (peak > MIN_FLOAT32))
