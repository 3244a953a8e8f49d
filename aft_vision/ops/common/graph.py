"""Parts of the plain graphs of the operations."""

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import accumulate_dtype, gated, masked_values

# The smallest denominators. In float64 the squares of their reciprocals, in second derivatives, are finite.
TINY = {torch.float32: 1e-30, torch.float64: 1e-150}


def key_weights(k: Tensor, mask: Tensor | None, grid: tuple[int, int] | None = None) -> Tensor:
    """Return e^k relative to the largest of each sequence and channel, 0 where the mask is False."""
    k = k.to(accumulate_dtype(k))
    if mask is not None:
        k = k.masked_fill(~mask.unsqueeze(-1), -1e30)
    # Along rows, then along columns: in onnxruntime ten times as fast for 64 x 64 tokens as over all tokens at once.
    largest = k.amax(dim=1) if grid is None else k.unflatten(1, (grid[0], grid[1])).amax(dim=2).amax(dim=1)
    ek = torch.exp(k - finite(largest.unsqueeze(1)))
    return ek if mask is None else ek * mask.unsqueeze(-1)


def head_terms(k: Tensor, v: Tensor, heads: int, mask: Tensor | None) -> Tensor:
    """Return e^k v and e^k of each head, (B, T, h, c + 1)."""
    ek = key_weights(k, mask).unsqueeze(-1)
    return torch.cat([ek * masked_values(v, mask).unflatten(2, (heads, -1)), ek], -1)


def mix_heads(q: Tensor | None, v: Tensor, y: Tensor) -> Tensor:
    """Return the gated result from sums (B, T, h, c + 1), the denominators last."""
    return gated(q, v, ratio(y[..., :-1], y[..., -1:]).flatten(2))


def ratio(num: Tensor, den: Tensor) -> Tensor:
    """Return num / den, finite where den has underflowed."""
    return num / at_least(den, TINY[den.dtype])


def finite(largest: Tensor) -> Tensor:
    """Return the largest exponents, finite where all are -inf: exp(-inf - finite) = 0."""
    return at_least(largest, torch.finfo(largest.dtype).min)


def at_least(x: Tensor, least: float) -> Tensor:
    """Return the larger of x and a number."""
    # Not clamp_min, for which pnnx writes a node that ncnn does not know.
    return x.clamp(least, torch.finfo(x.dtype).max)
