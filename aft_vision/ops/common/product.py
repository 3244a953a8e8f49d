"""What the kernels around `product.h` share: where they run, and their weights as words."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.common.build import compiled, library
from aft_vision.ops.common.numerics import UNDERFLOW, accumulate_dtype, product_dtype
from aft_vision.ops.common.tensors import on_cpu

LEAST = UNDERFLOW[torch.float32]


def covers(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels are made for such inputs: a CPU, sums in float32."""
    single = accumulate_dtype(v) == torch.float32
    return single and on_cpu(q, k, v, bias, mask) and library() is not None


def multiplies_pairs(v: Tensor) -> bool:
    """Whether a word of an operand is a pair of bfloat16 terms, not a float32."""
    return product_dtype(v) == torch.bfloat16 and bool(compiled().aft_has_pairs())


@functools.cache
def lanes() -> int:
    """Floats of a vector."""
    return compiled().aft_lanes()


def whole_vectors(count: int) -> int:
    """At least so many floats."""
    return -(-count // lanes()) * lanes()


def pack_neighbours(weights: Tensor, pairs: bool) -> Tensor:
    """Weights (n, terms) as words: each of a term, or of a term and the next."""
    if not pairs:
        return weights.contiguous()
    following = F.pad(weights[:, 1:], (0, 1))
    return torch.stack([weights, following], -1).to(torch.bfloat16)
