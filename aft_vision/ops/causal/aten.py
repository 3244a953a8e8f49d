"""The causal operations as plain graphs, for transforms and derivatives of every order (footnote 2).

Keys are relative to the largest of the sequence, so in float64 a key of the future that is 345 nats above all others
hides the past.
"""

import torch
from torch import Tensor

from aft_vision.ops.full.aten import aft_full
from aft_vision.ops.local.band import skew


def aft_full_causal(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_full_causal` in aten (AFT Eq. 2, causal)."""
    future = torch.ones(bias.shape, dtype=torch.bool, device=bias.device).triu(1)
    return aft_full(q, k, v, bias.masked_fill(future, float('-inf')), mask)


def aft_local_causal(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_local_causal` in aten, through the whole (T, T) bias (AFT Eq. 4, causal)."""
    tokens, width = band.shape
    return aft_full_causal(q, k, v, skew(band)[:, width - 1 : width - 1 + tokens], mask)


def aft_simple_causal(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_simple_causal` in aten, with a (T, T) bias of 0 (AFT Eq. 5, causal)."""
    return aft_full_causal(q, k, v, k.new_zeros(k.shape[1], k.shape[1]), mask)
