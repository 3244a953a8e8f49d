"""The plain graph of AFT-full (AFT Eq. 2)."""

import torch
from torch import Tensor

from aft_vision.ops.common.graph import finite, key_weights, ratio
from aft_vision.ops.common.numerics import accumulate_dtype, gated, masked_values


def aft_full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_full` in aten (AFT Eq. 2)."""
    return mix_full(q, k, v, full_weights(bias), mask)


def full_weights(bias: Tensor) -> Tensor:
    """The weights that `mix_full` takes, exp(w) relative to the largest of each row.

    Args:
        bias: (T, T) position bias w.

    Returns:
        (T, T).
    """
    bias = bias.to(accumulate_dtype(bias))
    return torch.exp(bias - finite(bias.amax(dim=1, keepdim=True)))


def mix_full(q: Tensor | None, k: Tensor, v: Tensor, weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """`aft_full` from its weights, (T, T)."""
    ek = key_weights(k, mask)
    weights = weights.to(ek.dtype)
    return gated(q, v, ratio(weights @ (ek * masked_values(v, mask)), weights @ ek))
