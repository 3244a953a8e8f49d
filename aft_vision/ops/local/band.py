"""Blocks of a banded matrix: a band stores w[t, t + first + j] at [t, j], a product needs it in its own column."""

import torch.nn.functional as F
from torch import Tensor


def block_length(window: int) -> int:
    """Return the number of targets per block: half the window of s sources, limited to efficient product sizes."""
    return max(32, min(128, window // 2))


def skew(band: Tensor) -> Tensor:
    """Map (..., C, n) to (..., C, n + C - 1): row i moves i places to the right, padded with zeros."""
    rows, width = band.shape[-2:]
    flat = F.pad(band, (0, rows)).flatten(-2)  # rows of n + C; read as rows of n + C - 1, each starts one place later
    return flat[..., : rows * (width + rows - 1)].unflatten(-1, (rows, width + rows - 1))


def unskew(matrix: Tensor) -> Tensor:
    """Map (..., C, n + C - 1) to (..., C, n), the inverse of `skew`; entries outside the band are dropped."""
    rows, width = matrix.shape[-2:]
    flat = F.pad(matrix.flatten(-2), (0, rows))
    return flat.unflatten(-1, (rows, width + 1))[..., : width + 1 - rows]
