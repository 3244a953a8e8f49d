"""The plain graph of AFT-local (AFT Eq. 4)."""

from torch import Tensor

from aft_vision.ops.full.aten import aft_full
from aft_vision.ops.local.band import skew


def aft_local(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    """`ops.aft_local` in aten, through the whole (T, T) bias (AFT Eq. 4)."""
    return aft_full(q, k, v, unbanded(band), mask)


def unbanded(band: Tensor) -> Tensor:
    """The whole position bias of a band, 0 outside it.

    Args:
        band: (T, 2s - 1).

    Returns:
        (T, T).
    """
    tokens, width = band.shape
    return skew(band)[:, width // 2 : width // 2 + tokens]
