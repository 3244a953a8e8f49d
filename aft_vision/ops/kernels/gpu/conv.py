"""AFT-conv in Triton (AFT Eq. 6): products by Toeplitz tiles that are built where they are used.

A tile of the (T, T) weights of a head is gathered from its (2H - 1, 2W - 1) weights by shift, which the caches hold:
the matrix itself is never in memory. A head per channel leaves two rows a sequence, so the batch fills the tiles: a
depthwise sum would need fewer products, but tensor cores do over ten in the time of one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from aft_vision.ops.eager.numerics import empty_denominator
from aft_vision.ops.kernels.gpu.device import conv_repair as repair
from aft_vision.ops.kernels.gpu.device.conv import forward_kernel, rows_kernel, sources_kernel, table_kernel
from aft_vision.ops.kernels.gpu.launch import as_bytes, launching, products, rows

# With fewer channels a head than this, pieces of (B, T, D) tensors are shorter than what memory gives at once.
NEIGHBOURS = 8
# Programs of `table_kernel`, about: some for each multiprocessor of a large GPU.
PROGRAMS = 512
# Tiles of tokens and channels of the repair.
REPAIR = {'BT': 32, 'BD': 32}


class _Shifts:
    """The bias (h, 2H - 1, 2W - 1) of every pair of tokens by their shift, at (H - 1 + dy, W - 1 + dx), and its exp."""

    def __init__(self, kernel: Tensor, grid: Sequence[int], global_context: bool, constants: dict[str, Any]) -> None:
        self.margins = [length - 1 - kernel.shape[-1] // 2 for length in (grid[1], grid[1], grid[0], grid[0])]
        # A negative margin takes off what no two tokens are apart.
        self.bias = F.pad(kernel.float().contiguous(), self.margins, value=0.0 if global_context else float('-inf'))
        self.exp = torch.exp(self.bias - self.bias.amax(dim=(1, 2), keepdim=True))
        self.weights = self.exp.to(torch.float32 if constants['PRODUCT'] is tl.float32 else torch.bfloat16)

    def kernel_grad(self, grad: Tensor) -> Tensor:
        """Gradient (h, s, s) of the kernel from that of the bias."""
        return F.pad(grad, [-margin for margin in self.margins])


class _Layout:
    """How the tensors of a call lie in memory, and how channels and sequences are tiled.

    group: rows of a sequence in a tile, of which the last is the key's: such that the fewest are computed in all.
    parts: groups of a head.
    constants: of the kernels that are tuned.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.B, self.T, self.heads = k.shape
        self.C = v.shape[2] // self.heads
        self.group = min((2, 4, 8, 16, 32), key=lambda group: (-(-self.C // (group - 1)) * group, -group))
        self.parts = -(-self.C // (self.group - 1))
        self.by_channel = self.C < NEIGHBOURS
        self.constants = {'GROUP': self.group, 'ROWS': min(128, max(32, triton.next_power_of_2(self.B * self.group)))}

    def arrange(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """(B, T, D) tensors with channels, or where a head has few of them tokens, as neighbours in memory."""
        if not self.by_channel:
            return [rows(x) for x in tensors]
        return [None if x is None else x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in tensors]

    def like(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for a result (B, T, D)."""
        order = (2, 0, 1) if self.by_channel else (0, 1, 2)
        room = torch.empty([x.shape[dim] for dim in order], dtype=dtype, device=x.device)
        return room.permute(1, 2, 0) if self.by_channel else room

    def programs(self, tile: dict[str, int]) -> tuple[int, int]:
        """Tiles of tokens and rows, heads."""
        rows = triton.cdiv(self.B, tile['BR'] // self.group) * self.parts
        return triton.cdiv(self.T, tile['BT']) * rows, self.heads

    def lost(self, x: Tensor) -> Tensor:
        """Room for whether a head of a sequence has targets that underflowed: none has."""
        return torch.zeros((self.B, self.heads), dtype=torch.int32, device=x.device)


def conv_forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    global_context: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """y and the denominators (AFT Eq. 6)."""
    layout, constants, den = _Layout(k, v), products(v), empty_denominator(k, v, save)
    y = layout.like(v, v.dtype if q is None else q.dtype)
    with launching('conv_forward', v):
        tensors, mask, lost = layout.arrange(q, k, v), as_bytes(mask), layout.lost(v)
        shifts = _Shifts(kernel, grid, global_context, constants)
        sizes, strides = (layout.B, layout.T, grid[1], layout.heads, layout.C), _strides(*tensors, y)
        forward_kernel[layout.programs](
            *(*tensors, mask, shifts.weights, y, den if save else None, lost),
            *sizes,
            *strides,
            **layout.constants,
            **constants,
        )
        repair.forward_kernel[(triton.cdiv(layout.T, REPAIR['BT']), layout.B, layout.heads)](
            *(*tensors, mask, shifts.bias, y, lost), *sizes, *strides, PRECISION=constants['PRECISION'], **REPAIR
        )
    return y, den


def conv_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: Sequence[int],
    mask: Tensor | None,
    global_context: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and kernel."""
    layout, constants = _Layout(k, v), products(v)
    dq, dv = None if q is None else layout.like(q, q.dtype), layout.like(v, v.dtype)
    dk = torch.empty((layout.parts, *k.shape), dtype=torch.float32, device=k.device)
    with launching('conv_backward', v):
        shifts, mask = _Shifts(kernel, grid, global_context, constants), as_bytes(mask)
        # Rows of whole 32 bytes.
        shape = layout.heads, layout.parts * layout.B * layout.group, triton.cdiv(layout.T, 16) * 16
        r = torch.empty(shape, dtype=shifts.weights.dtype, device=v.device)
        x = torch.empty_like(r) if need_bias else None
        grad_, y_, q_, k_, v_ = layout.arrange(grad, y, q, k, v)
        sizes, lost = (layout.B, layout.T, grid[1], layout.heads, layout.C), layout.lost(v)
        rows_kernel[layout.programs](
            *(grad_, y_, den, q_, k_, v_, mask, dq, r, x, lost),
            *(layout.B, layout.T, layout.heads, layout.C, shape[2]),
            *_strides(grad_, y_, q_, k_, v_, dq),
            **layout.constants,
        )
        sources_kernel[layout.programs](
            *(r, k_, v_, mask, shifts.weights, dk, dv),
            *(*sizes, shape[2]),
            *_strides(k_, v_, dv),
            **layout.constants,
            **constants,
        )
        inputs = grad_, y_, den, q_, k_, v_, mask, shifts.bias, lost
        steps = tuple(_strides(grad_, y_, q_, v_)), *_strides(k_)
        repair.sources_kernel[(triton.cdiv(layout.T, REPAIR['BT']), layout.B, layout.heads)](
            *(*inputs, dk, dv, *sizes, *steps), *_strides(dv), PRECISION=constants['PRECISION'], **REPAIR
        )
        dkernel = kernel.new_empty(0)
        if x is not None:
            lines = _Lines(kernel.shape[-1], grid, layout.constants['ROWS'])
            by_shift = lines.shifts_grad(lines.sums(r, x, constants)) * shifts.exp
            repaired = lines.empty(layout.heads, v)
            repair.table_kernel[(lines.count, lines.blocks, layout.heads)](
                *(*inputs, repaired, *sizes, lines.reach, *steps),
                PRECISION=constants['PRECISION'],
                BW=lines.wide,
                BD=REPAIR['BD'],
            )
            dkernel = shifts.kernel_grad(by_shift + lines.shifts_grad(repaired)).to(kernel.dtype)
    return k.new_empty(0) if dq is None else dq, dk.sum(0).to(k.dtype), dv, dkernel


class _Lines:
    """Sums over pairs of tokens by how many lines of the grid they are apart, as far as the window reaches.

    count: of such distances; wide, blocks: tiles of columns of the grid, and pairs of those.
    """

    def __init__(self, size: int, grid: Sequence[int], batch_rows: int) -> None:
        self.height, self.width = grid
        self.batch_rows = batch_rows
        self.reach = min(size // 2, self.height - 1)
        self.count = 2 * self.reach + 1
        self.wide = min(64, max(16, triton.next_power_of_2(self.width)))
        self.blocks = triton.cdiv(self.width, self.wide) ** 2

    def empty(self, heads: int, like: Tensor) -> Tensor:
        """Room for sums (h, distances, W targets, W sources)."""
        return torch.empty((heads, self.count, self.width, self.width), dtype=torch.float32, device=like.device)

    def sums(self, r: Tensor, x: Tensor, constants: dict[str, Any]) -> Tensor:
        """Of r (x) x, rows (h, N, T or more) of targets and of sources."""
        heads, rows, row_length = r.shape
        steps = triton.cdiv(self.count, 64 // self.wide)
        splits = max(1, min(triton.cdiv(rows, 64), PROGRAMS // (heads * steps * self.blocks)))
        found = self.empty(splits * heads, r)
        table_kernel[(steps * splits, self.blocks, heads)](
            *(r, x, found, self.height, self.width, heads, rows, triton.cdiv(rows, splits), self.reach, row_length),
            BW=self.wide,
            SHIFTS=64 // self.wide,
            ROWS=self.batch_rows,
            **constants,
        )
        return found.unflatten(0, (splits, heads)).sum(0)

    def shifts_grad(self, sums: Tensor) -> Tensor:
        """Sums (h, 2H - 1, 2W - 1) over all pairs of the same shift, zero outside the window."""
        # A line of targets sees windows into the line of shifts, that of the last target first.
        shape = [len(sums), self.count, 2 * self.width - 1]
        found = torch.ops.aten.unfold_backward(sums.flip(2), shape, 2, self.width, 1)
        return F.pad(found, [0, 0, self.height - 1 - self.reach, self.height - 1 - self.reach])


def _strides(*tensors: Tensor | None) -> list[tuple[int, ...]]:
    return [(0, 0, 0) if x is None else x.stride() for x in tensors]
