"""AFT-conv (AFT Eq. 6) on long grids: Toeplitz blocks of the weights of a head, which stay in shared memory.

The weights between two lines of the grid depend on their distance only. A program has one head, whose blocks it keeps:
those of the sources of one line, for each distance from the first of LINES lines of targets, from REACH lines above to
REACH below the last. All other sources have one weight for all targets of the block; their terms are summed without a
difference, so no digits are lost: those of lines above as the targets go down, those of lines below before, in AFTER.
A line is padded to WIDE columns. Elements are (tokens, sequences b, channels c), operands as in `whole_kernels`.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32
from aft_vision.ops.common.launch import tuned
from aft_vision.ops.conv.kernels import largest_bias, load_keys, load_seen, load_window, store_results
from aft_vision.ops.conv.whole_kernels import (
    INTERPRETED_TILE,
    STATIONARY,
    move,
    repair_marked,
    shifted_terms,
    split_sums,
)

# Tokens per step of the search for the largest keys.
TOKENS = tl.constexpr(128)


@triton.jit
def line_tokens(first, width, height, T, LINES: tl.constexpr, WIDE: tl.constexpr):
    """Return the tokens of padded lines of the grid as (tokens, 1, 1), T outside."""
    i = tl.arange(0, LINES * WIDE)
    y, x = first + i // WIDE, i % WIDE
    return tl.where((x < width) & (y >= 0) & (y < height), y * width + x, T)[:, None, None]


@triton.jit
def block_weights(WINDOW, head, distance, most, width, REACH: tl.constexpr, LINES: tl.constexpr, WIDE: tl.constexpr):
    """Return weights (sources, targets) of a line that is so far below the first of the targets, 0 beyond the grid."""
    source, i = tl.arange(0, WIDE)[:, None], tl.arange(0, LINES * WIDE)[None, :]
    dy, target = distance - i // WIDE, i % WIDE
    w = load_window(WINDOW, head, dy, source - target)
    w = tl.where((dy <= REACH) & (dy >= -REACH), w, WINDOW.outside)
    # The bias of a distance that no two lines have may be above the largest.
    return tl.where((source < width) & (target < width), tl.exp(tl.minimum(w - most, 0.0)), 0.0)


@tuned(['T', 'C'], INTERPRETED_TILE, *STATIONARY)
@triton.jit
def lines_kernel(
    Q, K, V, MASK, WINDOW, Y, DEN, AFTER, B, T, width, q_strides, k_strides, v_strides, y_strides, den_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, REACH: tl.constexpr, LINES: tl.constexpr, WIDE: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr, REPAIR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given. AFTER holds (programs, blocks, COLUMNS) sums."""
    BB: tl.constexpr = COLUMNS // BC
    head, b, c = tl.program_id(1).to(tl.int64), tl.arange(0, BB)[None, :, None], tl.arange(0, BC)[None, None, :]
    height, blocks = T // width, tl.cdiv(T // width, LINES)
    most, weights = largest_bias(WINDOW, head, T, width, BLOCK), ()
    for i in tl.static_range(2 * REACH + LINES):
        weights += (block_weights(WINDOW, head, i - REACH, most, width, REACH, LINES, WIDE).to(PRODUCT),)
    far = tl.exp(tl.minimum(WINDOW.outside - most, 0.0))
    AFTER += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * blocks * COLUMNS
    for first in range(tl.program_id(0) * BB, B, tl.num_programs(0) * BB):
        q, y = move(Q, q_strides, first, head, C), move(Y, y_strides, first, head, C)
        k, v = move(K, k_strides, first, head, 1), move(V, v_strides, first, head, C)
        den_, mask = move(DEN, den_strides, first, head, 1), move(MASK, (T, 1, 0), first, head, 1)
        exists, peak = b < B - first, tl.full([1, BB, 1], MIN_FLOAT32, tl.float32)
        for start in range(0, T, TOKENS):
            s = start + tl.arange(0, TOKENS)[:, None, None]
            keys = load_keys(k, k_strides, b, s, 0, load_seen(mask, b, s, exists, T))
            peak = tl.maximum(peak, tl.max(keys, 0)[None, :, :])
        sources = tl.zeros([1, BB, BC], tl.float32)
        # The sums of an earlier sequence have been read.
        tl.debug_barrier()
        for n in range(0, blocks):
            s = line_tokens((blocks - n) * LINES + REACH, width, height, T, LINES, WIDE)
            x = shifted_terms(k, v, mask, k_strides, v_strides, b, s, c, exists, peak, T, C)
            sources += tl.sum(x, 0)[None, :, :]
            tl.store(AFTER + (blocks - 1 - n) * COLUMNS + b * BC + c, sources)
        tl.debug_barrier()
        sources, lowest = tl.zeros([1, BB, BC], tl.float32), tl.full([1, BB, 1], 1.0, tl.float32)
        for block in range(0, blocks):
            s = line_tokens((block - 1) * LINES - REACH, width, height, T, LINES, WIDE)
            x = shifted_terms(k, v, mask, k_strides, v_strides, b, s, c, exists, peak, T, C)
            sources += tl.sum(x, 0)[None, :, :]
            others = far * (sources + tl.load(AFTER + block * COLUMNS + b * BC + c))
            sums = tl.zeros([COLUMNS, LINES * WIDE], tl.float32) + others.reshape(COLUMNS)[:, None]
            for i in tl.static_range(2 * REACH + LINES):
                s = line_tokens(block * LINES + i - REACH, width, height, T, 1, WIDE)
                x = shifted_terms(k, v, mask, k_strides, v_strides, b, s, c, exists, peak, T, C)
                x = tl.trans(x.reshape(WIDE, COLUMNS).to(PRODUCT))
                sums = tl.dot(x, weights[i], sums, input_precision=PRECISION)
            num, den = split_sums(tl.trans(sums), c, BB, C)
            t = line_tokens(block * LINES, width, height, T, LINES, WIDE)
            store_results(*(num, den, q, y, den_, q_strides, y_strides, den_strides, b, t, 0, c, exists & (t < T), C))
            lowest = tl.minimum(lowest, tl.min(tl.where(t < T, den, 1.0), 0)[None, :, :])
        underflowed = exists & (lowest < LIMIT) & (peak > MIN_FLOAT32)
        repair_marked(
            *(underflowed.reshape(BB), Q, K, V, MASK, WINDOW, Y, first, head, T, width, C),
            *(q_strides, k_strides, v_strides, y_strides, PRECISION, REPAIR, BB),
        )
