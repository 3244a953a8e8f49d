"""The plain graph of AFT-axial."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.graph import finite, head_terms, mix_heads
from aft_vision.ops.common.numerics import accumulate_dtype


def aft_axial(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    row_bias: Tensor,
    column_bias: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    """`ops.aft_axial` in aten: one product along columns and one along rows, for every grid."""
    rows, columns = axis_weights(row_bias, grid[0]), axis_weights(column_bias, grid[1])
    # The heads first, so that no weights are repeated: OpenCV repeats constants wrongly.
    x = head_terms(k, v, row_bias.shape[0], mask).permute(2, 1, 0, 3)  # (h, T, B, c + 1)
    y = rows.to(x.dtype) @ x.unflatten(1, (grid[0], grid[1])).flatten(2)  # (h, H, W B (c + 1))
    y = columns.to(x.dtype) @ y.unflatten(2, (grid[1], -1)).transpose(1, 2).flatten(2)  # (h, W, H B (c + 1))
    y = y.unflatten(2, (grid[0], *x.shape[2:])).permute(3, 2, 1, 0, 4)  # (B, H, W, h, c + 1)
    return mix_heads(q, v, y.flatten(1, 2))


def axis_weights(bias: Tensor, length: int) -> Tensor:
    """The weights of `aft_axial` along one axis, relative to the largest of each target.

    Args:
        bias: (h, 2s - 1) position bias, 0 beyond.
        length: L, tokens along the axis.

    Returns:
        (h, L, L) of targets and sources.
    """
    reach = (bias.shape[1] + 1) // 2
    place = torch.arange(length, device=bias.device)
    # Two zeros around the bias stand for all that lies beyond, so that one graph serves every length.
    offset = (place - place.unsqueeze(1)).clamp(-reach, reach) + reach
    logits = F.pad(bias.to(accumulate_dtype(bias)), (1, 1))[:, offset]
    return torch.exp(logits - finite(logits.amax(dim=2, keepdim=True)))
