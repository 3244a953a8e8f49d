"""AFT-axial on a GPU: on a small grid an AFT-conv whose kernel covers it, else a product along each axis in Triton.

Between the product along columns and that along rows is a workspace. The weights of an axis are read from a table of
its distances, which fits into caches.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from aft_vision.ops.axial.eager import AxialInputs, AxisWeights
from aft_vision.ops.axial.kernels import (
    columns_kernel,
    pairs_kernel,
    repair_kernel,
    rows_kernel,
    sources_kernel,
    targets_kernel,
)
from aft_vision.ops.common.inputs import empty_denominator
from aft_vision.ops.common.kernels import largest_keys
from aft_vision.ops.common.launch import as_bytes, interprets, launching, product_type, products, rows
from aft_vision.ops.conv import repair_kernels as repair
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.triton import REPAIR, conv_backward, conv_forward, repairs, strides

# The smallest side of a product on tensor cores, and the largest number of tokens of a line in a tile.
SMALLEST, LARGEST = 16, 32
# The longest side of a grid whose pairs of tokens are all multiplied, by AFT-conv; and in the interpreter.
PAIRED, PAIRED_INTERPRETED = 16, 4
# With fewer channels per head than this, contiguous pieces of (B, T, D) tensors are shorter than a memory transaction.
NEIGHBOURS = 8
# Numbers of columns in a group.
GROUPS = (2, 4, 8, 16, 32)
# Approximate number of programs of `pairs_kernel`: several per multiprocessor of a large GPU.
PROGRAMS = 512


class Axis(NamedTuple):
    """An axis of the grid: tokens of a line, lines of a sequence, and the tokens from one to the next of each."""

    length: int
    lines: int
    step: int
    between: int

    @property
    def block(self) -> int:
        """Return the number of tokens of a line in a tile."""
        return min(LARGEST, _padded(self.length))

    @property
    def tiles(self) -> int:
        """Return the number of tiles of a line."""
        return triton.cdiv(self.length, self.block)


class Biases(NamedTuple):
    """Biases, or weights, (h, 2L - 1) at all distances along rows and along columns."""

    rows: Tensor
    columns: Tensor


class Layout:
    """The layout of a call's tensors in memory, and the tiles of channels and sequences.

    group: rows of a sequence in a tile, the last for the key. groups: of a head. constants: constants of the tuned
    functions.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.B, self.T, self.heads = k.shape
        self.C = v.shape[2] // self.heads
        self.groups, self.group = self.divide(self.C)
        self.by_channel = self.C < NEIGHBOURS
        self.constants = {'GROUP': self.group, 'ROWS': min(128, max(32, triton.next_power_of_2(self.B * self.group)))}

    @staticmethod
    def divide(channels: int) -> tuple[int, int]:
        """Return the number of groups of a head and their rows: the fewest rows in total."""
        choices = [(-(-channels // (group - 1)), group) for group in GROUPS]
        return min(choices, key=lambda choice: (choice[0] * choice[1], -choice[1]))

    def arrange(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return (B, T, D) tensors with contiguous channels, or contiguous tokens if a head has few channels."""
        if not self.by_channel:
            return [rows(x) for x in tensors]
        return [None if x is None else x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in tensors]

    def like(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a buffer for a result (B, T, D)."""
        order = (2, 0, 1) if self.by_channel else (0, 1, 2)
        buffer = torch.empty([x.shape[dim] for dim in order], dtype=dtype, device=x.device)
        return buffer.permute(1, 2, 0) if self.by_channel else buffer


class _Call:
    """The weights, sizes and constants of a call."""

    def __init__(self, inputs: AxialInputs, product: torch.dtype) -> None:
        _, k, v, row_bias, column_bias, (self.height, self.width), mask = inputs
        self.layout, self.mask, self.product = Layout(k, v), as_bytes(mask), product
        axes = AxisWeights(row_bias, self.height, product), AxisWeights(column_bias, self.width, product)
        self.rows, self.columns = axes
        self.tables = Biases(*(axis.table.to(product).contiguous() for axis in axes))
        self.biases = Biases(*(axis.offsets.contiguous() for axis in axes))
        # Flags, all 0, of heads of sequences with underflowed targets.
        self.peak, self.underflowed = largest_keys(rows(k), self.mask)
        self.constants = products(product)
        self.along_rows = Axis(self.height, self.width, self.width, 1)
        self.along_columns = Axis(self.width, self.height, 1, self.width)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return B, T, h, the channels of a head and the groups that they have."""
        layout = self.layout
        return layout.B, layout.T, layout.heads, layout.C, layout.groups

    def workspace(self) -> Tensor:
        """Return a buffer for the columns of all sequences, (h, groups, B T, GROUP)."""
        layout = self.layout
        shape = layout.heads, layout.groups, layout.B * layout.T, layout.group
        return torch.empty(shape, dtype=self.product, device=self.underflowed.device)

    def run(self, function: Any, tensors: tuple[Any, ...], axis: Axis, *steps: tuple[int, ...]) -> None:
        """Launch a Triton function over tiles of lines, groups and heads."""
        layout = self.layout

        def programs(tile: dict[str, int]) -> tuple[int, int]:
            lines = triton.cdiv(layout.B * axis.lines, tile['BC'] // layout.group)
            return lines * axis.tiles * layout.groups, layout.heads

        constants = layout.constants | self.constants
        function[programs](*tensors, *self.sizes, axis, *steps, BLOCK=axis.block, **constants)


def axial_forward(inputs: AxialInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators."""
    if _is_paired(inputs):
        return conv_forward(_as_conv(inputs), save)
    q, k, v = inputs[:3]
    den = empty_denominator(k, v, save)
    with launching('axial_forward', v):
        call = _Call(inputs, product_type(v))
        layout = call.layout
        q_, k_, v_ = layout.arrange(q, k, v)
        y = layout.like(v, v.dtype if q is None else q.dtype)
        results = y, den if save else None, call.underflowed
        steps, halfway = strides(q_, k_, v_, y), call.workspace()
        tensors: tuple[Any, ...] = k_, v_, call.mask, call.peak, call.tables.columns, None, halfway
        call.run(columns_kernel, tensors, call.along_columns, *steps[1:3])
        tensors = q_, halfway, call.peak, call.tables.rows, *results
        call.run(rows_kernel, tensors, call.along_rows, steps[0], steps[3])
        repair.forward_kernel[repairs(k)](
            *(q_, k_, v_, call.mask, call.biases, y, call.underflowed),
            *(layout.B, layout.T, call.width, layout.heads, layout.C, *steps),
            PRECISION=call.constants['PRECISION'],
            **REPAIR,
        )
    return y, den


def axial_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: AxialInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and both biases."""
    # Products are in float32, as in the torch form: the gradient of a bias sums over a whole axis, where it cancels.
    if _is_paired(inputs):
        *grads, dkernel = conv_backward(grad, y, den, _as_conv(inputs), need_bias, torch.float32)
        return *grads, *(_sum_pairs(dkernel, inputs) if need_bias else [dkernel, dkernel.clone()])
    q, k, v = inputs[:3]
    with launching('axial_backward', v):
        call = _Call(inputs, torch.float32)
        layout = call.layout
        dq, dv = None if q is None else layout.like(q, q.dtype), layout.like(v, v.dtype)
        dk = torch.empty((layout.groups, *k.shape), dtype=torch.float32, device=k.device)
        den, (grad_, y_, q_, k_, v_) = den.contiguous(), layout.arrange(grad, y, q, k, v)
        r, halfway = call.workspace() if need_bias else None, call.workspace()
        tensors: tuple[Any, ...] = grad_, y_, den, q_, call.peak, call.tables.rows, dq, r, halfway, call.underflowed
        call.run(targets_kernel, tensors, call.along_rows, *strides(grad_, y_, q_, dq))
        tensors = halfway, k_, v_, call.mask, call.peak, call.tables.columns, dk, dv
        call.run(sources_kernel, tensors, call.along_columns, *strides(k_, v_, dv))
        if r is not None:
            _add_bias_grads(call, r, halfway, (k_, v_))
        tensors = grad_, y_, den, q_, k_, v_, call.mask, call.biases, call.underflowed
        sizes = layout.B, layout.T, call.width, layout.heads, layout.C
        steps, precision = (tuple(strides(grad_, y_, q_, v_)), *strides(k_)), call.constants['PRECISION']
        repair.sources_kernel[repairs(k)](
            *(*tensors, dk, dv, *sizes, *steps), *strides(dv), PRECISION=precision, **REPAIR
        )
        if need_bias:
            for axis, weights in ((call.along_rows, call.rows), (call.along_columns, call.columns)):
                found = torch.empty_like(weights.grad_exp)
                repair_kernel[(triton.cdiv(axis.length, REPAIR['BT']) ** 2, layout.heads)](
                    *(*tensors, found, *sizes, axis, *steps), PRECISION=precision, **REPAIR
                )
                weights.grad_offsets += weights.sum_by_distance(found)
        biases = [x.bias_grad() if need_bias else k.new_empty(0) for x in (call.rows, call.columns)]
    return k.new_empty(0) if dq is None else dq, dk.sum(0).to(k.dtype), dv, *biases


def _is_paired(inputs: AxialInputs) -> bool:
    return max(inputs.grid) <= (PAIRED_INTERPRETED if interprets() else PAIRED)


def _as_conv(inputs: AxialInputs) -> ConvInputs:
    """Return AFT-conv with the same bias of all pairs of tokens: its square kernel is the sum over both axes."""
    (height, width), side = inputs.grid, max(inputs.grid)

    def spread(bias: Tensor, length: int) -> Tensor:
        # Relative to the largest on the grid, which cancels, so that the sum is as exact as its terms.
        wide = F.pad(bias.float(), [_margin(bias, inputs)] * 2)
        most = wide[:, side - length : side + length - 1].amax(1, keepdim=True)
        return wide - most.clamp_min(torch.finfo(torch.float32).min)

    kernel = spread(inputs.row_bias, height)[:, :, None] + spread(inputs.column_bias, width)[:, None]
    return ConvInputs(*inputs[:3], kernel, inputs.grid, inputs.mask, True)


def _sum_pairs(dkernel: Tensor, inputs: AxialInputs) -> list[Tensor]:
    # Gradients of both biases from that of the kernel.
    found = (inputs.row_bias, dkernel.sum(2)), (inputs.column_bias, dkernel.sum(1))
    return [F.pad(grad, [-_margin(bias, inputs)] * 2).to(bias.dtype) for bias, grad in found]


def _margin(bias: Tensor, inputs: AxialInputs) -> int:
    # What a bias lacks at both ends to all shifts of the kernel; negative if it has more.
    return max(inputs.grid) - (bias.shape[1] + 1) // 2


def _add_bias_grads(call: _Call, r: Tensor, halfway: Tensor, kv: tuple[Tensor | None, Tensor | None]) -> None:
    # r and halfway: gradients of the sums, and of the product along columns.
    layout, x, forward = call.layout, call.workspace(), call.workspace()
    tensors = *kv, call.mask, call.peak, call.tables.columns, x, forward
    call.run(columns_kernel, tensors, call.along_columns, *strides(*kv))
    for axis, weights, grads, sources in (
        (call.along_rows, call.rows, r, forward),
        (call.along_columns, call.columns, halfway, x),
    ):
        splits = max(1, min(layout.B * axis.lines, PROGRAMS // (layout.heads * axis.tiles**2)))
        shape = splits, layout.heads, axis.length, axis.length
        found = torch.empty(shape, dtype=torch.float32, device=r.device)
        # Parts are added in one order: the same every time.
        pairs_kernel[(splits * axis.tiles**2, layout.heads)](
            *(grads, sources, found, *call.sizes, splits, axis),
            BLOCK=axis.block,
            **(layout.constants | call.constants),
        )
        weights.grad_exp = found.sum(0)


def _padded(length: int) -> int:
    return max(SMALLEST, triton.next_power_of_2(length))
