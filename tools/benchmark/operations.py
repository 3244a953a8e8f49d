"""Operations against attention on inputs of the same size, and against a depthwise convolution."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision import ops
from tools.benchmark.compare import PAPER_BASELINE, Candidate, Prepared, compare, materialised, with_backward
from tools.benchmark.times import Call
from tools.machine import PRECISIONS

CPU = torch.device('cpu')
KERNEL_SIZE = 11


def attention(qkv: list[Tensor], heads: int, causal: bool = False, written_out: bool = False) -> Prepared:
    """Attention of q, k and v (B, T, D), with the heads taken from the channels and put back.

    Args:
        written_out: It forms its weights.
    """

    def attend() -> Tensor:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    return Prepared(materialised(attend) if written_out else attend, qkv)


class Operation(NamedTuple):
    """An operation of AFT and causal or whole attention on inputs of the same size.

    Args:
        name: Of a function of `ops`.
        shape: (B, T, D) of q and v, and of k.
        heads: Of the attention.
        bias: Shape of the position bias, and for AFT-conv its grid.
        key_heads: Channels of AFT-conv's k; None is D.
    """

    name: str
    shape: tuple[int, int, int]
    heads: int
    bias: tuple[int, ...] | None = None
    grid: tuple[int, int] | None = None
    key_heads: int | None = None

    def own(
        self, dtype: torch.dtype = torch.float32, training: bool = False, device: torch.device | str = CPU
    ) -> Prepared:
        """The operation."""
        inputs = self._inputs(dtype, training, device, self.key_heads)
        if self.bias is not None:
            bias = 0.1 * torch.randn(self.bias, generator=torch.Generator().manual_seed(1))
            inputs.append(bias.to(device).requires_grad_(training))
        operate, rest = getattr(ops, self.name), [] if self.grid is None else [self.grid]
        return Prepared(lambda: operate(*inputs, *rest), inputs)

    def attention(
        self, dtype: torch.dtype = torch.float32, training: bool = False, device: torch.device | str = CPU
    ) -> Prepared:
        """Attention, with the heads taken from the channels and put back."""
        leaves = self._inputs(dtype, training, device)
        return attention(leaves, self.heads, self.name.endswith('causal'))

    def calls(
        self,
        dtype: torch.dtype = torch.float32,
        training: bool = False,
        device: torch.device | str = CPU,
        written_out: bool = True,
    ) -> tuple[Call, ...]:
        """Attention, the operation, and materialised attention: the forward, or forward and backward.

        Args:
            written_out: Without it there is no materialised attention, which making its backward would run once.
        """
        attention, own = self.attention(dtype, training, device), self.own(dtype, training, device)
        found = [attention, own]
        if written_out:
            found.append(Prepared(materialised(attention.forward), attention.leaves))
        if training:
            return tuple(with_backward(each.forward, each.leaves) for each in found)
        return tuple(torch.no_grad()(each.forward) for each in found)

    def _inputs(
        self, dtype: torch.dtype, training: bool, device: torch.device | str, key_heads: int | None = None
    ) -> list[Tensor]:
        batch, tokens, dim = self.shape
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(batch, tokens, width, generator=generator) for width in (dim, key_heads or dim, dim)]
        return [x.to(device, dtype).requires_grad_(training) for x in inputs]


class Group(NamedTuple):
    """Operations that one attention is compared with.

    Args:
        operations: By the name that is shown; the first one's shape is that of the attention.
        grid: (H, W) for a depthwise convolution beside them.
    """

    operations: dict[str, Operation]
    grid: tuple[int, int] | None = None


def make_groups(
    batch_size: int | None = None, dim: int = 384, grid: tuple[int, int] = (14, 14), tokens: int = 3072
) -> list[Group]:
    """The operations that are compared: whole, on a grid, and causal.

    Args:
        batch_size: B of all; None is 32, 8 and 2.
        dim: D; two thirds of it in the causal group.
        tokens: T of the causal group.
    """
    whole, planar = (batch_size or 32, grid[0] * grid[1] + 1, dim), (batch_size or 8, grid[0] * grid[1], dim)
    causal, heads, few = (batch_size or 2, tokens, dim * 2 // 3), dim // 64, dim // 24
    kernel, window = (KERNEL_SIZE, KERNEL_SIZE), min(256, tokens)
    return [
        Group({'AFT-full': Operation('aft_full', whole, heads, (whole[1], whole[1]))}),
        Group(
            {
                f'AFT-conv, h={few}': Operation('aft_conv', planar, heads, (few, *kernel), grid, few),
                f'AFT-conv, h=d={dim}': Operation('aft_conv', planar, heads, (dim, *kernel), grid),
                'AFT-simple': Operation('aft_simple', planar, heads),
            },
            grid,
        ),
        Group(
            {
                f'AFT-local causal, s={window}': Operation('aft_local_causal', causal, 2, (tokens, window)),
                'AFT-simple causal': Operation('aft_simple_causal', causal, 2),
            }
        ),
    ]


def measure_operations(
    groups: Sequence[Group],
    device: torch.device,
    dtype: str,
    rounds: int,
    compiled: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Compare the operations of each group with fused attention, forward and in training.

    Args:
        dtype: Key of PRECISIONS, of q, k and v.

    Returns:
        The rows of `compare` with the `shape` (B, T, D) of the group.
    """
    precision, rows = PRECISIONS[dtype] or torch.float32, []
    for group in groups:
        shape = next(iter(group.operations.values())).shape
        for row in compare(_candidates(group, precision, device), device, rounds, compiled=compiled, progress=progress):
            rows.append({'shape': shape, **row})
    return rows


def _candidates(group: Group, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    first = next(iter(group.operations.values()))

    def attend(training: bool) -> Prepared:
        return first.attention(dtype, training, device)

    def attend_materialised(training: bool) -> Prepared:
        attention = attend(training)
        return Prepared(materialised(attention.forward), attention.leaves)

    found = [
        Candidate('SDPA', attend),
        Candidate(f'SDPA math, {PAPER_BASELINE}', attend_materialised, compiles=False),
    ]
    for name, operation in group.operations.items():
        found.append(
            Candidate(name, lambda training, operation=operation: operation.own(dtype, training, device))  # type: ignore[misc]
        )
    if group.grid is not None:
        arguments = (first.shape, group.grid, dtype)
        title = f'conv2d, depthwise {KERNEL_SIZE} x {KERNEL_SIZE}'
        found.append(
            Candidate('AFT-conv, one offset a head, h=d', lambda training: one_offset(*arguments, training, device))
        )
        found.append(Candidate(title, lambda training: depthwise(*arguments, training, device)))
    return found


def one_offset(
    shape: tuple[int, int, int], grid: tuple[int, int], dtype: torch.dtype, training: bool, device: torch.device
) -> Prepared:
    """`ops.aft_onehot` with a head for each channel."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(training) for _ in 'qkv')
    offset = torch.randint(-(KERNEL_SIZE // 2), KERNEL_SIZE // 2 + 1, (shape[2], 2), generator=generator).to(device)
    weight = torch.randn(shape[2], generator=generator).to(device).requires_grad_(training)
    return Prepared(lambda: ops.aft_onehot(q, k, v, offset, weight, grid), [q, k, v, weight])


def depthwise(
    shape: tuple[int, int, int], grid: tuple[int, int], dtype: torch.dtype, training: bool, device: torch.device
) -> Prepared:
    """`F.conv2d` with a kernel for each channel on tokens (B, T, D), which are a channels-last map already."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    weight = torch.randn(shape[2], 1, KERNEL_SIZE, KERNEL_SIZE, generator=generator).to(device, dtype)
    leaves = [each.requires_grad_(training) for each in (x, weight)]

    def convolve() -> Tensor:
        maps = x.unflatten(1, grid).permute(0, 3, 1, 2)
        return F.conv2d(maps, weight, padding=KERNEL_SIZE // 2, groups=shape[2]).permute(0, 2, 3, 1).flatten(1, 2)

    return Prepared(convolve, leaves)
