"""Repair of underflowed elements: their indices, and their weights by a joint softmax."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import masked_keys

# Workspace of the repair, in elements.
REPAIR_ELEMENTS = 1 << 20


def underflowed_elements(underflowed: Tensor, elements_each: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield indices (batch, target, head) of the True elements, in chunks that fit the workspace.

    Args:
        underflowed: (B, T, h) bool.
        elements_each: workspace elements per underflowed element.
    """
    for index in underflowed.nonzero().split(max(1, REPAIR_ELEMENTS // elements_each)):
        yield index.unbind(1)


def joint_softmax(k: Tensor, mask: Tensor | None, batch: Tensor, head: Tensor, bias_rows: Tensor) -> Tensor:
    """Return the softmax over sources of k[batch, :, head] + bias_rows, (N, T) in float64.

    The joint form never underflows. A row without visible sources is zero.
    """
    keys = masked_keys(k, mask).double().transpose(1, 2)[batch, head]  # (N, T)
    return softmax_of_sums(keys, bias_rows.double())


def softmax_of_sums(keys: Tensor, rows: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return the softmax of keys + rows over their last dimension, 0 in a row without visible sources.

    Keys and biases are relative to those of the source with the largest weight: their sum would lose small differences
    of large values.

    Args:
        keys: (..., T), broadcast against rows, minus infinity for a masked source.
        rows: (..., T), the biases of some targets.
        seen: (..., T) bool, the sources that have a weight; None for all.
    """
    logits = keys + rows
    if seen is not None:
        logits = logits.masked_fill(~seen, float('-inf'))
    largest, index = logits.detach().max(-1, keepdim=True)
    hidden, empty = logits == float('-inf'), largest == float('-inf')
    key, bias = (x.detach().expand_as(logits).gather(-1, index).masked_fill(empty, 0.0) for x in (keys, rows))
    logits = ((keys - key) + (rows - bias)).masked_fill(hidden, float('-inf'))
    return torch.softmax(logits, -1).masked_fill(hidden, 0.0)
