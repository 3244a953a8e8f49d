"""Repair of underflowed elements: their indices, and their weights by a joint softmax."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import masked_keys

# Workspace of the repair, in elements.
REPAIR_ELEMENTS = 1 << 20


def lost_elements(lost: Tensor, elements_each: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield indices (batch, target, head) of the True elements of lost (B, T, h), in chunks that fit the workspace.

    Args:
        lost: (B, T, h) bool.
        elements_each: workspace elements per lost element.
    """
    for index in lost.nonzero().split(max(1, REPAIR_ELEMENTS // elements_each)):
        yield index.unbind(1)


def joint_softmax(k: Tensor, mask: Tensor | None, batch: Tensor, head: Tensor, bias_rows: Tensor) -> Tensor:
    """Return the softmax over sources of k[batch, :, head] + bias_rows, (N, T) in float64.

    The joint form never underflows. A row without visible sources is zero.
    """
    keys = masked_keys(k, mask).double().transpose(1, 2)[batch, head]  # (N, T)
    return torch.softmax(keys + bias_rows.double(), dim=1).nan_to_num_(nan=0.0)
