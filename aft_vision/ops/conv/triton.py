"""AFT-conv on a GPU (AFT Eq. 6): products by the Toeplitz matrix of each head.

With enough shared memory the forward of heads of several channels is one launch, in programs that keep the matrix of a
head, or its blocks. Elsewhere the products are in torch, between Triton functions.

The terms of all sequences are columns of one product with the (T, T) weights of their head. A depthwise sum would need
fewer products, but tensor cores compute over ten in the time of one. Few sequences with a head per channel are summed
directly in the forward: they have too few products with each matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from aft_vision.ops.common.inputs import empty_denominator, empty_output
from aft_vision.ops.common.kernels import largest_keys
from aft_vision.ops.common.launch import (
    SOURCES,
    TARGETS,
    as_bytes,
    interprets,
    keeps_weights,
    known_weights,
    launching,
    like,
    multiply,
    multiprocessors,
    pad,
    pieces,
    precision,
    product_type,
    products,
    programs,
    rows,
    whole_length,
)
from aft_vision.ops.common.tuner import run_fastest
from aft_vision.ops.conv import repair_kernels as repair
from aft_vision.ops.conv.direct_kernels import direct_kernel, shifts_kernel
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.kernels import (
    bands_kernel,
    results_kernel,
    sources_kernel,
    targets_kernel,
    terms_kernel,
    weights_kernel,
    window_kernel,
)
from aft_vision.ops.conv.line_kernels import lines_kernel
from aft_vision.ops.conv.whole_kernels import (
    INTERPRETED_TILE,
    STATIONARY,
    TILES,
    stationary_kernel,
    whole_results_kernel,
    whole_sources_kernel,
)

# The fewest channels of a head whose product is in a function of whole sequences.
NARROWEST = 4
# The most sequences with a head per channel that are summed directly; and in the interpreter.
DIRECT, DIRECT_INTERPRETED = 4, 2
# Elements of a tile, of which so many sequences at most, and of the matrices of weights of heads that are made at once.
TILE, SEQUENCES, WEIGHTS = 4096, 64, 1 << 25
# Those of a tile in the interpreter, so small that small tests have several.
INTERPRETED_ELEMENTS, INTERPRETED_SEQUENCES = 64, 4
# Elements of the Toeplitz blocks that a program keeps, and the most of them.
BLOCKS, OFFSETS = 60_000, 32
# Elements from one sequence to the next, of which 16 are in 32-bit integers.
LONGEST = 1 << 26
# Targets and sources of a tile of weights; targets and shifts of one of their gradients.
WEIGHTS_TILE, GRADIENT_TILE = 32, 32
# The most columns of a tile of gradients by their distance; and in the interpreter.
LINE, LINE_INTERPRETED = 64, 16
# Tiles of tokens and channels of the repair.
REPAIR = {'BT': 32, 'BD': 32}


class Window(NamedTuple):
    """The bias of shifts: the kernel (h, size, size) of those in the window, and that of those outside of it."""

    kernel: Tensor
    size: int
    outside: float


class _Call:
    """The sizes of a call, the tiles of its functions, and the weights of its heads."""

    def __init__(self, inputs: ConvInputs, product: torch.dtype | None = None) -> None:
        self.q, self.k, self.v = rows(inputs.q), rows(inputs.k), rows(inputs.v)
        self.grid, self.mask, self.product = inputs.grid, as_bytes(inputs.mask), product or product_type(self.v)
        self.B, self.T, self.heads = self.k.shape
        self.C = self.v.shape[2] // self.heads
        self.length, self.columns = pad(self.T), pad(self.B * (self.C + 1))
        kernel = inputs.kernel.contiguous()
        self.window = Window(kernel, kernel.shape[-1], 0.0 if inputs.global_context else float('-inf'))
        # Biases of the window that are looked at together.
        self.block = min(1024, triton.next_power_of_2(kernel.shape[-1] ** 2))
        # The length to which one function pads sequences, or 0: pieces of few channels are not contiguous enough.
        widest = INTERPRETED_TILE['COLUMNS'] if interprets() else TILES[0][0]['COLUMNS']
        self.narrow = not NARROWEST <= self.C < widest
        self.whole = 0 if self.narrow else whole_length(self.T, self.product)
        self.direct = self.C == 1 and (self.B <= DIRECT_INTERPRETED if interprets() else self.B <= DIRECT)
        elements, most = (INTERPRETED_ELEMENTS, INTERPRETED_SEQUENCES) if interprets() else (TILE, SEQUENCES)
        channels, few = triton.next_power_of_2(self.C), min(most, triton.next_power_of_2(self.B))
        sequences = min(few, max(1, elements // channels))
        self.tile = {'BB': sequences, 'BH': max(1, elements // (sequences * channels)), 'BC': channels, 'C': self.C}

    @cached_property
    def peak(self) -> Tensor:
        """Return the largest keys (B, h)."""
        found, self.underflowed = largest_keys(self.k, self.mask)
        return found

    @cached_property
    def underflowed(self) -> Tensor:
        """Return flags, all 0, of heads of sequences with underflowed targets."""
        return torch.zeros((self.B, self.heads), dtype=torch.int32, device=self.k.device)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes that a repair takes."""
        return self.B, self.T, self.grid[1], self.heads, self.C

    def weights(self, first: int, heads: int, length: int) -> Tensor:
        """Return the weights (heads, length, length) of targets and sources of some heads."""
        found = torch.empty((heads, length, length), dtype=self.product, device=self.v.device)
        window = self.window._replace(kernel=self.window.kernel[first : first + heads])
        weights_kernel[(triton.cdiv(length, WEIGHTS_TILE) ** 2, heads)](
            *(window, found, self.T, self.grid[1], length), BLOCK=self.block, BT=WEIGHTS_TILE, BS=WEIGHTS_TILE
        )
        return found

    def forward_direct(self, y: Tensor, den: Tensor | None) -> None:
        """Write y and the denominators of few sequences with a head per channel."""
        window, D = self.window, self.heads
        table = torch.empty((window.size**2 + 1, D), dtype=torch.float32, device=self.v.device)
        shifts_kernel[(D,)](window, table, D, self.T, self.grid[1], BLOCK=self.block)
        tensors = self.q, self.k, self.v, self.mask, self.peak, table, y, den, self.underflowed
        direct_kernel[lambda tile: (triton.cdiv(D, tile['BD']) * triton.cdiv(self.T, tile['BT']) * self.B,)](
            *(*tensors, self.B, self.T, D, self.grid[1], window.size), *strides(self.q, self.k, self.v, y, den)
        )

    def run_whole(self, function: Any, tensors: tuple[Tensor | None, ...], *arguments: Any) -> None:
        """Launch a Triton function over all heads of whole sequences."""
        columns = _columns(self.C)
        sizes = {'LENGTH': self.whole, 'C': self.C, 'BC': columns}
        function[lambda tile: (triton.cdiv(self.B, tile['COLUMNS'] // columns) * self.heads,)](
            *tensors, self.B, self.T, self.heads, *arguments, **sizes, **products(self.product)
        )

    def forward_whole(self, y: Tensor, den: Tensor | None) -> None:
        """Write y and the denominators of short sequences."""
        tensors = self.q, self.k, self.v, self.mask, self.weights(0, self.heads, self.whole), y, den, self.underflowed
        self.run_whole(whole_results_kernel, tensors, *strides(self.q, self.k, self.v, y, den))

    def forward_stationary(self, kernel: Tensor, y: Tensor, den: Tensor | None) -> None:
        """Write y and the denominators of short sequences by programs that keep the weights of a head."""
        sizes = {'TARGETS': pieces(self.T, TARGETS), 'SOURCES': pieces(self.T, SOURCES)}
        side, columns = sum(sizes['SOURCES']), _columns(self.C)
        key = side, self.product, self.grid, self.window.outside
        weights = known_weights(kernel, key, lambda: self.weights(0, self.heads, side))

        def grid(tile: dict[str, int]) -> tuple[int, int]:
            each = max(1, multiprocessors(self.v.device) // self.heads)
            return programs(triton.cdiv(self.B, tile['COLUMNS'] // columns), each), self.heads

        stationary_kernel[grid](
            *(self.q, self.k, self.v, self.mask, self.window, weights, y, den),
            *(self.B, self.T, self.grid[1], self.heads, side, *strides(self.q, self.k, self.v, y, den)),
            **sizes,
            **products(self.product),
            C=self.C,
            BC=columns,
            BLOCK=self.block,
            REPAIR=REPAIR['BT'],
        )

    def find_lines(self) -> tuple[int, int, int] | None:
        """Return the reach of the window in lines, the lines of a block of targets, and the columns of a padded line.

        None where their weights do not fit, or products have operands in float32.
        """
        (height, width), (most, least) = self.grid, (32, 16) if interprets() else (128, 16)
        if self.narrow or (self.product == torch.float32 and not interprets()):
            return None
        reach, wide = min(self.window.size // 2, height - 1), max(least, triton.next_power_of_2(width))
        for lines in (8, 4, 2, 1):
            elements = (2 * reach + lines) * lines * wide * wide
            if lines * wide <= most and elements <= BLOCKS and 2 * reach + lines <= OFFSETS:
                return reach, lines, wide
        return None

    def forward_lines(self, lines: tuple[int, int, int], y: Tensor, den: Tensor | None) -> None:
        """Write y and the denominators of long sequences by programs that keep Toeplitz blocks of a head."""
        columns, each = _columns(self.C), max(1, multiprocessors(self.v.device) // self.heads)

        def grid(tile: dict[str, int]) -> tuple[int, int]:
            return programs(triton.cdiv(self.B, tile['COLUMNS'] // columns), each), self.heads

        # Of the largest tile.
        after = (each * self.heads, triton.cdiv(self.grid[0], lines[1]), max(x['COLUMNS'] for x, *_ in STATIONARY))
        lines_kernel[grid](
            *(self.q, self.k, self.v, self.mask, self.window, y, den),
            torch.empty(after, dtype=torch.float32, device=self.v.device),
            *(self.B, self.T, self.grid[1], *strides(self.q, self.k, self.v, y, den)),
            **products(self.product),
            **dict(zip(('REACH', 'LINES', 'WIDE'), lines, strict=True)),
            C=self.C,
            BC=columns,
            BLOCK=self.block,
            REPAIR=REPAIR['BT'],
        )

    def find_stationary(self, kernel: Tensor, y: Tensor, den: Tensor | None) -> Callable[[], None] | None:
        """Return what writes y and the denominators in programs that keep weights; None where they do not fit."""
        if not keeps_weights() or max(x.stride(0) for x in (self.k, self.v, y)) >= LONGEST:
            return None
        if self.whole:
            return lambda: self.forward_stationary(kernel, y, den)
        lines = self.find_lines()
        return None if lines is None else lambda: self.forward_lines(lines, y, den)

    def forward_streamed(self, y: Tensor, den: Tensor | None) -> None:
        """Write y and the denominators with weights in memory, or without any."""
        if self.whole:
            self.forward_whole(y, den)
        elif self.direct:
            self.forward_direct(y, den)
        else:
            for part in self.parts():
                part.forward(y, den)
        repair.forward_kernel[repairs(self.k)](
            *(self.q, self.k, self.v, self.mask, self.window, y, self.underflowed),
            *(*self.sizes, *strides(self.q, self.k, self.v, y)),
            PRECISION=precision(),
            **REPAIR,
        )

    def backward_whole(
        self, grad: Tensor, y: Tensor, den: Tensor, dq: Tensor | None, dk: Tensor, dv: Tensor, need_bias: bool
    ) -> Tensor | None:
        """Write the gradients of q, k and v of short sequences; return those of the weights if needed."""
        operand = self.heads, self.length, self.B * _columns(self.C)
        slopes, terms = (
            torch.empty(operand, dtype=self.product, device=self.v.device) if need_bias else None for _ in range(2)
        )
        known = grad, y, den, self.q, self.k, self.v
        tensors = (
            *known,
            self.mask,
            self.weights(0, self.heads, self.whole),
            dq,
            dk,
            dv,
            slopes,
            terms,
            self.underflowed,
        )
        self.run_whole(whole_sources_kernel, tensors, self.length, *strides(*known, dq, dk, dv))
        return None if slopes is None or terms is None else multiply(slopes, terms.mT)

    def parts(self) -> Iterator['_Part']:
        """Yield parts of the heads whose matrices of weights are not too large together."""
        step = max(1, WEIGHTS // self.length**2)
        for first in range(0, self.heads, step):
            yield _Part(self, first, min(step, self.heads - first))


def _columns(channels: int) -> int:
    # Those of a head of one sequence in an operand: its channels and its key.
    return triton.next_power_of_2(channels + 1)


class _Part:
    """Some heads of a call, which start at `first`."""

    def __init__(self, call: _Call, first: int, heads: int) -> None:
        self.call, self.first, self.heads = call, first, heads
        self.sizes = call.B, call.T, heads, call.heads, call.length, call.columns
        self.k, self.v, self.peak, self.underflowed = (
            self.of(x) for x in (call.k, call.v, call.peak, call.underflowed)
        )
        self.q = None if call.q is None else self.of(call.q)

    def of(self, x: Tensor) -> Tensor:
        """Return the part of these heads of (B, T, h), (B, h) or, with channels, (B, T, D)."""
        each = x.shape[-1] // self.call.heads
        return x.narrow(-1, self.first * each, self.heads * each)

    def run(self, function: Any, tensors: Sequence[Tensor | None], tokens: int, *arguments: Any) -> None:
        """Launch a Triton function over all elements of so many tokens."""
        call, tile = self.call, self.call.tile
        programs = triton.cdiv(call.B, tile['BB']) * triton.cdiv(self.heads, tile['BH']) * tokens
        function[(programs,)](*tensors, *arguments, **tile, num_warps=4 if interprets() else 8)

    def matrix(self) -> Tensor:
        """Return a buffer (heads, length, columns) of terms, or of the gradients of sums."""
        call = self.call
        found = torch.empty((self.heads, call.length, call.columns), dtype=call.product, device=call.v.device)
        if call.columns > call.B * (call.C + 1):
            # What a product sums over must be finite.
            found[:, :, call.B * (call.C + 1) :].zero_()
        return found

    def weights(self) -> Tensor:
        """Return the weights (heads, length, length) of targets and sources."""
        return self.call.weights(self.first, self.heads, self.call.length)

    def terms(self) -> Tensor:
        """Return the terms (heads, length, columns)."""
        found, steps = self.matrix(), strides(self.k, self.v)
        tensors = self.k, self.v, self.call.mask, self.peak, found
        self.run(terms_kernel, tensors, self.call.length, *self.sizes, *steps)
        return found

    def forward(self, y: Tensor, den: Tensor | None) -> None:
        """Write y and the denominators."""
        call, sums = self.call, multiply(self.weights(), self.terms())
        y, den = self.of(y), None if den is None else self.of(den)
        sizes = call.B, self.heads, call.heads, call.length, call.columns
        tensors = self.q, sums, self.peak, y, den, self.underflowed
        self.run(results_kernel, tensors, call.T, *sizes, *strides(self.q, y, den))

    def backward(self, grad: Tensor, y: Tensor, den: Tensor, dq: Tensor | None, dk: Tensor, dv: Tensor) -> Tensor:
        """Write the gradients of q, k and v, and return those of the sums (heads, length, columns)."""
        call, slopes = self.call, self.matrix()
        grad, y, den, dk, dv = (self.of(x) for x in (grad, y, den, dk, dv))
        dq = None if dq is None else self.of(dq)
        known = grad, y, den, self.q, self.peak, dq, slopes, self.underflowed
        self.run(targets_kernel, known, call.length, *self.sizes, *strides(grad, y, den, self.q, dq))
        results = multiply(self.weights().mT, slopes), self.k, self.v, call.mask, self.peak, dk, dv
        self.run(sources_kernel, results, call.T, *self.sizes, *strides(self.k, self.v, dk, dv))
        return slopes


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 6)."""
    y, den = empty_output(inputs.q, inputs.v), empty_denominator(inputs.k, inputs.v, save)
    with launching('conv_forward', inputs.v):
        call = _Call(inputs)
        sizes = triton.next_power_of_2(call.B), triton.next_power_of_2(call.T), call.heads, call.C, call.window.size
        found = y, den if save else None
        stationary = call.find_stationary(inputs.kernel, *found)
        ways = [] if stationary is None else [stationary]
        run_fastest(('conv', *sizes, inputs.grid[1]), *ways, lambda: call.forward_streamed(*found))
    return y, den


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool, product: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel, by products of a type other than that of the forward if given."""
    q, k, v, kernel, grid = inputs[:5]
    dq, dk, dv = None if q is None else like(q), torch.empty(k.shape, dtype=torch.float32, device=k.device), like(v)
    with launching('conv_backward', v):
        call, grad, y, den = _Call(inputs, product), rows(grad), rows(y), den.contiguous()
        lines = _Lines(kernel.shape[-1], grid)
        sums, repaired = (lines.empty(call.heads if need_bias else 0, v) for _ in range(2))
        if call.whole:
            found = call.backward_whole(grad, y, den, dq, dk, dv, need_bias)
            if found is not None:
                lines.add(found, sums)
        else:
            for part in call.parts():
                slopes = part.backward(grad, y, den, dq, dk, dv)
                if need_bias:
                    lines.add(multiply(slopes, part.terms().mT), sums[part.first :])
        tensors = grad, y, den, call.q, call.k, call.v, call.mask, call.window, call.underflowed
        steps = tuple(strides(grad, y, call.q, call.v)), *strides(call.k)
        repair.sources_kernel[repairs(call.k)](
            *(*tensors, dk, dv, *call.sizes, *steps), *strides(dv), PRECISION=precision(), **REPAIR
        )
        dkernel = kernel.new_empty(0)
        if need_bias:
            repair.table_kernel[(lines.count * lines.pairs, call.heads)](
                *(*tensors, repaired, *call.sizes, lines.reach_y, lines.reach_x, *steps),
                PRECISION=precision(),
                BW=lines.wide,
                BD=REPAIR['BD'],
            )
            dkernel = torch.empty(kernel.shape, dtype=kernel.dtype, device=kernel.device)
            window_kernel[(triton.cdiv(call.window.size**2, GRADIENT_TILE), call.heads)](
                *(sums, repaired, call.window, dkernel, call.T, grid[1], lines.reach_y, lines.reach_x),
                BLOCK=call.block,
                BX=GRADIENT_TILE,
                BI=GRADIENT_TILE,
            )
    return k.new_empty(0) if dq is None else dq, dk.to(k.dtype), dv, dkernel


def repairs(k: Tensor) -> tuple[int, int]:
    """Return the grid of programs that repair: heads of sequences, tiles of tokens."""
    B, T, heads = k.shape
    return triton.cdiv(B * heads, repair.FLAGS.value), triton.cdiv(T, REPAIR['BT'])


class _Lines:
    """Sums over pairs of tokens by their distance in lines and columns of the grid, within the window.

    count: number of distances in lines; wide: columns in a tile; pairs: number of tile pairs with columns within reach.
    """

    def __init__(self, size: int, grid: Sequence[int]) -> None:
        self.height, self.width = grid
        self.reach_y, self.reach_x = min(size // 2, self.height - 1), min(size // 2, self.width - 1)
        self.count = 2 * self.reach_y + 1
        self.wide = min(LINE_INTERPRETED if interprets() else LINE, max(16, triton.next_power_of_2(self.width)))
        tiles = triton.cdiv(self.width, self.wide)
        self.pairs = tiles * min(2 * triton.cdiv(self.reach_x, self.wide) + 1, tiles)

    def empty(self, heads: int, like: Tensor) -> Tensor:
        """Return a buffer for sums (h, distances in lines, W targets, distances in columns)."""
        shape = heads, self.count, self.width, 2 * self.reach_x + 1
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    def add(self, slopes: Tensor, sums: Tensor) -> None:
        """Write the sums of slopes (heads, length, length) of pairs of tokens."""
        bands_kernel[(self.count * self.pairs, len(slopes))](
            *(slopes, sums, self.height, self.width, slopes.shape[1], self.reach_y, self.reach_x), BW=self.wide
        )


def strides(*tensors: Tensor | None) -> list[tuple[int, ...]]:
    """Return the strides of each (B, T, D) tensor, in elements."""
    return [(0, 0, 0) if x is None else x.stride() for x in tensors]
