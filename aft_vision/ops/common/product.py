"""Sizes and numbers that the kernels around `product.h` share."""

import ctypes
import functools

import torch
from torch import Tensor

from aft_vision.ops.common.build import compiled
from aft_vision.ops.common.numerics import UNDERFLOW, product_dtype

# A denominator below this has lost digits.
LEAST = ctypes.c_float(UNDERFLOW[torch.float32])


def multiplies_pairs(v: Tensor) -> bool:
    """Return whether a word of an operand is a pair of bfloat16 terms instead of a float32."""
    return product_dtype(v) == torch.bfloat16 and bool(compiled().aft_has_pairs())


@functools.cache
def lanes() -> int:
    """Return the number of floats of a vector."""
    return compiled().aft_lanes()


@functools.cache
def rows() -> int:
    """Return the number of rows of a product."""
    return compiled().aft_rows()


def whole_vectors(count: int) -> int:
    """Round up to whole vectors."""
    return -(-count // lanes()) * lanes()
