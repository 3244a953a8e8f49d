"""Weights packed as words, for the kernels that use `product.h`."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import UNDERFLOW, product_dtype

LEAST = UNDERFLOW[torch.float32]


def multiplies_pairs(v: Tensor) -> bool:
    """Return whether a word of an operand is a pair of bfloat16 terms instead of a float32."""
    return product_dtype(v) == torch.bfloat16 and bool(compiled().aft_has_pairs())


@functools.cache
def lanes() -> int:
    """Return the number of floats of a vector."""
    return compiled().aft_lanes()


def whole_vectors(count: int) -> int:
    """Round up to whole vectors."""
    return -(-count // lanes()) * lanes()


def pack_neighbours(weights: Tensor, pairs: bool) -> Tensor:
    """Return weights (n, terms) as words, each with one term, or with a term and the next."""
    if not pairs:
        return weights.contiguous()
    following = F.pad(weights[:, 1:], (0, 1))
    return torch.stack([weights, following], -1).to(torch.bfloat16)
