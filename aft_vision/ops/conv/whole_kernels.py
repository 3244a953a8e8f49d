"""AFT-conv (AFT Eq. 6) with the product by the (T, T) weights of a head in the kernel: short sequences in bfloat16.

A program has one head of several whole sequences, whose terms, or gradients of sums, stay in shared memory. They are
the columns of one operand: BC for each sequence, of which the first C are those of its channels and the next is that of
its key. Elements are (tokens, sequences b, channels c).
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32
from aft_vision.ops.common.launch import tuned
from aft_vision.ops.conv.kernels import gradients_of_sums, load_sources, store_results, store_sources

# Targets or sources of a tile of weights and columns of an operand, in the interpreter, and on a GPU with the numbers
# of warps and of stages.
INTERPRETED_TILE = {'BT': 8, 'COLUMNS': 16}
TILES = ({'BT': 32, 'COLUMNS': 64}, 8, 2), ({'BT': 64, 'COLUMNS': 64}, 8, 2), ({'BT': 64, 'COLUMNS': 128}, 8, 2)


@triton.jit
def program_sequences(B, heads, BB: tl.constexpr, BC: tl.constexpr):
    """Return the head of a program, its sequences, the channels of a head, and which sequences exist."""
    head, b = tl.program_id(0) % heads, tl.program_id(0) // heads * BB + tl.arange(0, BB)
    b = b.to(tl.int64)[None, :, None]
    return head.to(tl.int64), b, tl.arange(0, BC)[None, None, :], b < B


@triton.jit
def load_terms(K, V, MASK, k_strides, v_strides, b, s, head, c, exists, T, C: tl.constexpr):
    """Return the largest key of each sequence, which is finite, and its terms; those of c = C are those of the key."""
    k, v = load_sources(K, V, MASK, k_strides, v_strides, b, s, head, c, exists, T, C)
    peak = tl.maximum(tl.max(k, 0), MIN_FLOAT32)[None, :, :]
    return peak, tl.exp(k - peak) * tl.where(c == C, 1.0, v)


@triton.jit
def split_sums(sums, c, BB: tl.constexpr, C: tl.constexpr):
    """Return those of the channels of each sequence, 0 beyond them, and that of its key."""
    sums = sums.reshape(sums.shape[0], BB, sums.shape[1] // BB)
    return tl.where(c < C, sums, 0.0), tl.sum(tl.where(c == C, sums, 0.0), 2)[:, :, None]


@triton.jit
def store_operand(X, x, b, t, head, c, inside, B, length, BC: tl.constexpr):
    """Write the columns of a head of (heads, length, B * BC)."""
    tl.store(X + (head * length + t) * (B * BC) + b * BC + c, x, mask=inside & (t < length))


@tuned(['T', 'C'], INTERPRETED_TILE, *TILES)
@triton.jit
def whole_results_kernel(
    Q, K, V, MASK, WEIGHTS, Y, DEN, UNDERFLOWED, B, T, heads, q_strides, k_strides, v_strides, y_strides, den_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, LENGTH: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    BT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given, and mark underflowed ones. Weights are (h, LENGTH, LENGTH)."""
    BB: tl.constexpr = COLUMNS // BC
    head, b, c, exists = program_sequences(B, heads, BB, BC)
    s = tl.arange(0, LENGTH)
    peak, terms = load_terms(K, V, MASK, k_strides, v_strides, b, s[:, None, None], head, c, exists, T, C)
    terms = terms.reshape(LENGTH, COLUMNS).to(PRODUCT)
    WEIGHTS += head * LENGTH * LENGTH
    for first in range(0, T, BT):
        t = first + tl.arange(0, BT)
        weights = tl.load(WEIGHTS + t[:, None] * LENGTH + s[None, :])
        num, den = split_sums(tl.dot(weights, terms, input_precision=PRECISION), c, BB, C)
        t = t[:, None, None]
        inside = exists & (t < T)
        store_results(num, den, Q, Y, DEN, q_strides, y_strides, den_strides, b, t, head, c, inside, C)
        tl.store(UNDERFLOWED + b * heads + head + 0 * t, 1, mask=inside & (den < LIMIT) & (peak > MIN_FLOAT32))


@tuned(['T', 'C'], INTERPRETED_TILE, *TILES)
@triton.jit
def whole_sources_kernel(
    G, Y, DEN, Q, K, V, MASK, WEIGHTS, DQ, DK, DV, SLOPES, TERMS, UNDERFLOWED, B, T, heads, length,
    g_strides, y_strides, den_strides, q_strides, k_strides, v_strides, dq_strides, dk_strides, dv_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, LENGTH: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    BT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of q, k and v, and write those of the sums and the terms if SLOPES and TERMS are given.

    Marks heads of sequences with underflowed targets. Weights are (h, LENGTH, LENGTH).
    """
    BB: tl.constexpr = COLUMNS // BC
    head, b, c, exists = program_sequences(B, heads, BB, BC)
    t = tl.arange(0, LENGTH)
    place = t[:, None, None]
    d_num, d_den, underflowed = gradients_of_sums(
        *(G, Y, DEN, Q, DQ, g_strides, y_strides, den_strides, q_strides, dq_strides),
        *(b, place, head, c, exists & (place < T), C),
    )
    slopes = tl.where(c == C, d_den, d_num)
    peak, terms = load_terms(K, V, MASK, k_strides, v_strides, b, place, head, c, exists, T, C)
    tl.store(
        UNDERFLOWED + b * heads + head + 0 * place, 1, mask=exists & (place < T) & underflowed & (peak > MIN_FLOAT32)
    )
    if SLOPES is not None:
        store_operand(SLOPES, slopes, b, place, head, c, exists, B, length, BC)
        store_operand(TERMS, terms, b, place, head, c, exists, B, length, BC)
    slopes = slopes.reshape(LENGTH, COLUMNS).to(PRODUCT)
    WEIGHTS += head * LENGTH * LENGTH
    for first in range(0, T, BT):
        s = first + tl.arange(0, BT)
        weights = tl.load(WEIGHTS + t[:, None] * LENGTH + s[None, :])
        z_num, z_den = split_sums(tl.dot(tl.trans(weights), slopes, input_precision=PRECISION), c, BB, C)
        s = s[:, None, None]
        k, v = load_sources(K, V, MASK, k_strides, v_strides, b, s, head, c, exists, T, C)
        inside = exists & (s < T)
        store_sources(z_num, z_den, tl.exp(k - peak), v, DK, DV, dk_strides, dv_strides, b, s, head, c, inside, C)
