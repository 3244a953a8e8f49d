"""AFT-conv (AFT Eq. 6) with the product by the (T, T) weights of a head in the kernel: short sequences in bfloat16.

A program has one head of several whole sequences, whose terms, or gradients of sums, stay in shared memory. They are
the columns of one operand: BC for each sequence, of which the first C are those of its channels and the next is that of
its key. Elements are (tokens, sequences b, channels c). In the forward with stationary weights those of a program stay
in shared memory instead, for all sequences that it takes in turn.
"""

import triton
import triton.language as tl

from aft_vision.ops.common.kernels import LIMIT, MIN_FLOAT32, load_weights, start_of
from aft_vision.ops.common.launch import tuned
from aft_vision.ops.conv.kernels import (
    gradients_of_sums,
    largest_bias,
    load_bias,
    load_keys,
    load_seen,
    load_sources,
    store_results,
    store_sources,
)
from aft_vision.ops.conv.repair_kernels import repair_sequence

# Targets or sources of a tile of weights and columns of an operand, in the interpreter, and on a GPU with the numbers
# of warps and of stages.
INTERPRETED_TILE = {'BT': 8, 'COLUMNS': 16}
TILES = ({'BT': 32, 'COLUMNS': 64}, 8, 2), ({'BT': 64, 'COLUMNS': 64}, 8, 2), ({'BT': 64, 'COLUMNS': 128}, 8, 2)

# Columns of a product of eight or four warps with stationary weights.
STATIONARY = ({'COLUMNS': 128}, 8, 1), ({'COLUMNS': 64}, 4, 1)


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


@triton.jit
def find_weights(
    WINDOW, head, T, width, TARGETS: tl.constexpr, SOURCES: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return exp(bias - largest bias) as `load_weights`."""
    most, found = largest_bias(WINDOW, head, T, width, BLOCK), ()
    for j in tl.static_range(len(TARGETS)):
        t = start_of(TARGETS, j) + tl.arange(0, TARGETS[j])[None, :]
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])[:, None]
            w = tl.exp(load_bias(WINDOW, head, t, s, T, width) - most)
            found += (tl.where((t < T) & (s < T), w, 0.0).to(PRODUCT),)
    return found


@triton.jit
def shifted_terms(K, V, MASK, k_strides, v_strides, b, s, c, exists, peak, T, C: tl.constexpr):
    """Return the terms of sources relative to the largest key; those of c = C are those of the key."""
    k, v = load_sources(K, V, MASK, k_strides, v_strides, b, s, 0, c, exists, T, C)
    return tl.exp(k - peak) * tl.where(c == C, 1.0, v)


@triton.jit
def repair_marked(
    marked, Q, K, V, MASK, WINDOW, Y, first, head, T, width, C, q_strides, k_strides, v_strides, y_strides,
    PRECISION: tl.constexpr, REPAIR: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Compute y of a head of marked sequences, of those from `first` on."""
    if tl.max(marked.to(tl.int32), 0) > 0:
        # Other threads may have written the same elements.
        tl.debug_barrier()
        for n in range(0, BB):
            if tl.max(((tl.arange(0, BB) == n) & marked).to(tl.int32), 0) > 0:
                repair_sequence(
                    *(Q, K, V, MASK, WINDOW, Y, tl.full([], first + n, tl.int64), head, T, width, C),
                    *(q_strides, k_strides, v_strides, y_strides, PRECISION, REPAIR, REPAIR),
                )


@triton.jit
def move(X, strides, b, head, C: tl.constexpr):
    """Return the pointer to the first element of a head of sequence b, or None for None."""
    found = None
    if X is not None:
        found = X + tl.full([], b, tl.int64) * strides[0] + head * C * strides[2]
    return found


@tuned(['T', 'C'], INTERPRETED_TILE, *STATIONARY)
@triton.jit
def stationary_kernel(
    Q, K, V, MASK, WINDOW, WEIGHTS, Y, DEN, B, T, width, heads, side,
    q_strides, k_strides, v_strides, y_strides, den_strides,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, TARGETS: tl.constexpr, SOURCES: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, BLOCK: tl.constexpr, REPAIR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute y, and the denominators if DEN is given. Weights are (h, side, side), or None."""
    BB: tl.constexpr = COLUMNS // BC
    head, c = tl.program_id(1).to(tl.int64), tl.arange(0, BC)[None, None, :]
    if WEIGHTS is not None:
        weights = load_weights(WEIGHTS + head * side * side, side, TARGETS, SOURCES)
    else:
        weights = find_weights(WINDOW, head, T, width, TARGETS, SOURCES, PRODUCT, BLOCK)
    b = tl.arange(0, BB)[None, :, None]
    for first in range(tl.program_id(0) * BB, B, tl.num_programs(0) * BB):
        # Offsets from the first sequence are 32-bit integers, of which there are as many as elements.
        q, k, v, y = (
            move(Q, q_strides, first, head, C),
            move(K, k_strides, first, head, 1),
            move(V, v_strides, first, head, C),
            move(Y, y_strides, first, head, C),
        )
        den_, mask = move(DEN, den_strides, first, head, 1), move(MASK, (T, 1, 0), first, head, 1)
        exists, peak, terms = b < B - first, tl.full([1, BB, 1], MIN_FLOAT32, tl.float32), ()
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])[:, None, None]
            keys = load_keys(k, k_strides, b, s, 0, load_seen(mask, b, s, exists, T))
            peak = tl.maximum(peak, tl.max(keys, 0)[None, :, :])
        for i in tl.static_range(len(SOURCES)):
            s = start_of(SOURCES, i) + tl.arange(0, SOURCES[i])[:, None, None]
            x = shifted_terms(k, v, mask, k_strides, v_strides, b, s, c, exists, peak, T, C)
            terms += (tl.trans(x.reshape(SOURCES[i], COLUMNS).to(PRODUCT)),)
        lowest = tl.full([1, BB, 1], 1.0, tl.float32)
        for j in tl.static_range(len(TARGETS)):
            sums = tl.zeros([COLUMNS, TARGETS[j]], tl.float32)
            for i in tl.static_range(len(SOURCES)):
                sums = tl.dot(terms[i], weights[j * len(SOURCES) + i], sums, input_precision=PRECISION)
            t = start_of(TARGETS, j) + tl.arange(0, TARGETS[j])[:, None, None]
            num, den = split_sums(tl.trans(sums), c, BB, C)
            store_results(*(num, den, q, y, den_, q_strides, y_strides, den_strides, b, t, 0, c, exists & (t < T), C))
            lowest = tl.minimum(lowest, tl.min(tl.where(t < T, den, 1.0), 0)[None, :, :])
        underflowed = exists & (lowest < LIMIT) & (peak > MIN_FLOAT32)
        repair_marked(
            *(underflowed.reshape(BB), Q, K, V, MASK, WINDOW, Y, first, head, T, width, C),
            *(q_strides, k_strides, v_strides, y_strides, PRECISION, REPAIR, BB),
        )


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
