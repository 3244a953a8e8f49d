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
    x = head_terms(k, v, row_bias.shape[0], mask)  # (B, T, h, c + 1)
    maps = x.permute(0, 2, 3, 1).unflatten(3, (grid[0], grid[1]))  # (B, h, c + 1, H, W)
    rows, columns = (w.to(x.dtype).unsqueeze(1) for w in (rows, columns))
    y = rows @ (maps @ columns.transpose(2, 3))
    return mix_heads(q, v, y.flatten(3).permute(0, 3, 1, 2))


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
