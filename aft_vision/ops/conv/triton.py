"""AFT-conv in Triton (AFT Eq. 6): products by Toeplitz tiles that are built where they are used.

A tile of the (T, T) weights of a head is gathered from its (2H - 1, 2W - 1) weights by shift, which fit into caches;
the matrix itself is never in memory. With one head per channel there are two rows per sequence, so the batch fills the
tiles. A depthwise sum would need fewer products, but tensor cores compute over ten in the time of one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from aft_vision.ops.common.inputs import ConvInputs, empty_denominator
from aft_vision.ops.common.kernels import FLOOR
from aft_vision.ops.common.launch import as_bytes, launching, products, rows
from aft_vision.ops.conv import repair_kernels as repair
from aft_vision.ops.conv.kernels import forward_kernel, rows_kernel, sources_kernel, table_kernel

# With fewer channels per head than this, contiguous pieces of (B, T, D) tensors are shorter than a memory transaction.
NEIGHBOURS = 8
# Numbers of rows in a group.
GROUPS = (2, 4, 8, 16, 32)
# Approximate number of programs of `table_kernel`: several per multiprocessor of a large GPU.
PROGRAMS = 512
# Tiles of tokens and channels of the repair.
REPAIR = {'BT': 32, 'BD': 32}


class _Shifts:
    """The bias (h, 2H - 1, 2W - 1) of every pair of tokens by their shift, at (H - 1 + dy, W - 1 + dx), and its exp."""

    def __init__(self, kernel: Tensor, grid: Sequence[int], global_context: bool, constants: dict[str, Any]) -> None:
        self.margins = [length - 1 - kernel.shape[-1] // 2 for length in (grid[1], grid[1], grid[0], grid[0])]
        # A negative margin removes shifts beyond the grid.
        self.bias = F.pad(kernel.float().contiguous(), self.margins, value=0.0 if global_context else float('-inf'))
        # If a head sees no source, all of them are minus infinity.
        self.exp = torch.exp(self.bias - self.bias.amax(dim=(1, 2), keepdim=True).clamp_min(FLOOR.value))
        self.weights = self.exp.to(torch.float32 if constants['PRODUCT'] is tl.float32 else torch.bfloat16)

    def window(self) -> Tensor:
        """Return the exponentials (h, s, s) of the kernel, 0 for shifts beyond the grid."""
        return F.pad(self.exp, [-margin for margin in self.margins])


class Layout:
    """The layout of a call's tensors in memory, and the tiles of channels and sequences.

    group: rows of a sequence in a tile, the last for the key. parts: groups per head. constants: constants of the tuned
    kernels.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.B, self.T, self.heads = k.shape
        self.C = v.shape[2] // self.heads
        self.parts, self.group = self.divide(self.C)
        self.by_channel = self.C < NEIGHBOURS
        self.constants = {'GROUP': self.group, 'ROWS': min(128, max(32, triton.next_power_of_2(self.B * self.group)))}

    @staticmethod
    def divide(channels: int, largest: int = GROUPS[-1]) -> tuple[int, int]:
        """Return the number of groups of a head and their rows, at most `largest`: the fewest rows in total."""
        choices = [(-(-channels // (group - 1)), group) for group in GROUPS if group <= largest]
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

    def programs(self, tile: dict[str, int]) -> tuple[int, int]:
        """Return the grid of programs: tiles of tokens and rows, heads."""
        rows = triton.cdiv(self.B, tile['BR'] // self.group) * self.parts
        return triton.cdiv(self.T, tile['BT']) * rows, self.heads

    def repairs(self, tile: dict[str, int]) -> tuple[int, int]:
        """Return the grid of programs that repair: heads of sequences, tiles of tokens."""
        return triton.cdiv(self.B * self.heads, repair.FLAGS.value), triton.cdiv(self.T, tile['BT'])

    def lost(self, x: Tensor) -> Tensor:
        """Return flags, all 0, for heads of sequences with underflowed targets."""
        return torch.zeros((self.B, self.heads), dtype=torch.int32, device=x.device)


def conv_forward(inputs: ConvInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 6)."""
    q, k, v, kernel, grid, mask, global_context = inputs
    layout, constants, den = Layout(k, v), products(v), empty_denominator(k, v, save)
    y = layout.like(v, v.dtype if q is None else q.dtype)
    with launching('conv_forward', v):
        tensors, mask, lost = layout.arrange(q, k, v), as_bytes(mask), layout.lost(v)
        shifts = _Shifts(kernel, grid, global_context, constants)
        sizes, steps = (layout.B, layout.T, grid[1], layout.heads, layout.C), strides(*tensors, y)
        forward_kernel[layout.programs](
            *(*tensors, mask, shifts.weights, y, den if save else None, lost),
            *sizes,
            *steps,
            **layout.constants,
            **constants,
        )
        repair.forward_kernel[layout.repairs](
            *(*tensors, mask, shifts.bias, y, lost), *sizes, *steps, PRECISION=constants['PRECISION'], **REPAIR
        )
    return y, den


def conv_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: ConvInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and kernel."""
    q, k, v, kernel, grid, mask, global_context = inputs
    layout, constants = Layout(k, v), products(v)
    dq, dv = None if q is None else layout.like(q, q.dtype), layout.like(v, v.dtype)
    dk = torch.empty((layout.parts, *k.shape), dtype=torch.float32, device=k.device)
    with launching('conv_backward', v):
        shifts, mask = _Shifts(kernel, grid, global_context, constants), as_bytes(mask)
        # Rows of whole 32 bytes.
        shape = layout.heads, layout.parts * layout.B * layout.group, triton.cdiv(layout.T, 16) * 16
        r = torch.empty(shape, dtype=shifts.weights.dtype, device=v.device)
        x = torch.empty_like(r) if need_bias else None
        den, (grad_, y_, q_, k_, v_) = den.contiguous(), layout.arrange(grad, y, q, k, v)
        sizes, lost = (layout.B, layout.T, grid[1], layout.heads, layout.C), layout.lost(v)
        rows_kernel[layout.programs](
            *(grad_, y_, den, q_, k_, v_, mask, dq, r, x, lost),
            *(layout.B, layout.T, layout.heads, layout.C, shape[2]),
            *strides(grad_, y_, q_, k_, v_, dq),
            **layout.constants,
        )
        sources_kernel[layout.programs](
            *(r, k_, v_, mask, shifts.weights, dk, dv),
            *(*sizes, shape[2]),
            *strides(k_, v_, dv),
            **layout.constants,
            **constants,
        )
        tensors = grad_, y_, den, q_, k_, v_, mask, shifts.bias, lost
        steps = tuple(strides(grad_, y_, q_, v_)), *strides(k_)
        repair.sources_kernel[layout.repairs](
            *(*tensors, dk, dv, *sizes, *steps), *strides(dv), PRECISION=constants['PRECISION'], **REPAIR
        )
        dkernel = kernel.new_empty(0)
        if x is not None:
            lines = _Lines(kernel.shape[-1], grid, layout.constants['ROWS'])
            repaired = lines.empty(layout.heads, v)
            repair.table_kernel[(lines.count * lines.pairs, layout.heads)](
                *(*tensors, repaired, *sizes, lines.reach_y, lines.reach_x, *steps),
                PRECISION=constants['PRECISION'],
                BW=lines.wide,
                BD=REPAIR['BD'],
            )
            found = lines.window_grad(lines.sums(r, x, constants)) * shifts.window() + lines.window_grad(repaired)
            dkernel = found.to(kernel.dtype)
    return k.new_empty(0) if dq is None else dq, dk.sum(0).to(k.dtype), dv, dkernel


class _Lines:
    """Sums over pairs of tokens by their distance in lines and columns of the grid, within the window.

    count: number of distances in lines; wide: columns in a tile; pairs: number of tile pairs with columns within reach.
    """

    def __init__(self, size: int, grid: Sequence[int], batch_rows: int) -> None:
        self.size, (self.height, self.width) = size, grid
        self.batch_rows = batch_rows
        self.reach_y, self.reach_x = min(size // 2, self.height - 1), min(size // 2, self.width - 1)
        self.count = 2 * self.reach_y + 1
        self.wide = min(64, max(16, triton.next_power_of_2(self.width)))
        tiles = triton.cdiv(self.width, self.wide)
        self.pairs = tiles * min(2 * triton.cdiv(self.reach_x, self.wide) + 1, tiles)

    def empty(self, heads: int, like: Tensor) -> Tensor:
        """Return a buffer for sums (h, distances in lines, W targets, distances in columns), 0 outside the grid."""
        shape = heads, self.count, self.width, 2 * self.reach_x + 1
        return torch.zeros(shape, dtype=torch.float32, device=like.device)

    def sums(self, r: Tensor, x: Tensor, constants: dict[str, Any]) -> Tensor:
        """Sum r (x) x over rows (h, N, T or more) of targets and of sources."""
        heads, rows, row_length = r.shape
        steps = triton.cdiv(self.count, 64 // self.wide)
        splits = max(1, min(triton.cdiv(rows, 64), PROGRAMS // (heads * steps * self.pairs)))
        found = self.empty(splits * heads, r)
        table_kernel[(splits * steps * self.pairs, heads)](
            *(r, x, found, self.height, self.width, heads, rows, triton.cdiv(rows, splits)),
            *(self.reach_y, self.reach_x, row_length),
            BW=self.wide,
            SHIFTS=64 // self.wide,
            ROWS=self.batch_rows,
            **constants,
        )
        return found.unflatten(0, (splits, heads)).sum(0)

    def window_grad(self, sums: Tensor) -> Tensor:
        """Return the sums (h, s, s) over all targets, 0 for shifts beyond the grid."""
        y, x = self.size // 2 - self.reach_y, self.size // 2 - self.reach_x
        return F.pad(sums.sum(2), [x, x, y, y])


def strides(*tensors: Tensor | None) -> list[tuple[int, ...]]:
    """Return the strides of each (B, T, D) tensor, in elements."""
    return [(0, 0, 0) if x is None else x.stride() for x in tensors]
