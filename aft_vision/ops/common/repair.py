"""Repair of underflowed elements: which they are, and their weights without underflow."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import masked_keys

# Scratch of the repair path, in elements.
REPAIR_ELEMENTS = 1 << 20


def lost_elements(lost: Tensor, elements_each: int) -> Iterator[tuple[Tensor, ...]]:
    """Indices of the True elements of lost (B, T, h) as (batch, target, head), as many at a time as the scratch holds.

    Args:
        lost: (B, T, h) bool.
        elements_each: scratch elements that one of them takes.
    """
    for index in lost.nonzero().split(max(1, REPAIR_ELEMENTS // elements_each)):
        yield index.unbind(1)


def joint_softmax(k: Tensor, mask: Tensor | None, batch: Tensor, head: Tensor, bias_rows: Tensor) -> Tensor:
    """softmax over sources of k[batch, :, head] + bias_rows, (N, T) in float64.

    The joint form never underflows. A row that sees nothing is zero.
    """
    keys = masked_keys(k, mask).double().transpose(1, 2)[batch, head]  # (N, T)
    return torch.softmax(keys + bias_rows.double(), dim=1).nan_to_num_(nan=0.0)
