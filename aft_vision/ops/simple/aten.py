"""The plain graph of AFT-simple (AFT Eq. 5)."""

from torch import Tensor

from aft_vision.ops.common.graph import key_weights, ratio
from aft_vision.ops.common.numerics import gated, masked_values


def aft_simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_simple` in aten (AFT Eq. 5)."""
    ek = key_weights(k, mask)
    num, den = (ek * masked_values(v, mask)).sum(1, keepdim=True), ek.sum(1, keepdim=True)
    mixed = gated(q, v, ratio(num, den))
    return mixed.expand_as(v).contiguous() if q is None else mixed
