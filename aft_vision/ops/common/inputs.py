"""The inputs that all operations have, their checks, and buffers for results: what all forms agree on."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aft_vision.ops.common.numerics import accumulate_dtype, product_dtype


class Inputs(Protocol):
    """The inputs of any operator: q, k, v and mask, and its own."""

    @property
    def q(self) -> Tensor | None: ...

    @property
    def k(self) -> Tensor: ...

    @property
    def v(self) -> Tensor: ...

    @property
    def mask(self) -> Tensor | None: ...


class Qkv(NamedTuple):
    """The inputs per token: all of `ops.aft_simple`, and a part of any operator's."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def check_qkv(inputs: Inputs, heads: int | None = None) -> None:
    """Raise ValueError unless q, v are (B, T, D), k is (B, T, heads or D) and mask is a boolean (B, T)."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    shape = v.shape
    if len(shape) != 3:
        raise ValueError(f'v must have shape (B, T, D), got {tuple(shape)}')
    batch, tokens, width = shape
    if q is not None and q.shape != shape:
        raise ValueError(f'q must have the shape of v, {tuple(shape)}, got {tuple(q.shape)}')
    width = width if heads is None else heads
    if k.shape != (batch, tokens, width):
        raise ValueError(f'k must have shape {(batch, tokens, width)} to match v, got {tuple(k.shape)}')
    if tokens == 0:
        raise ValueError(f'the sequence must not be empty, got v of shape {tuple(shape)}')
    dtype = v.dtype
    for name, x in (('k', k), ('q', q)):
        if x is not None and x.dtype != dtype and accumulate_dtype(x) != accumulate_dtype(v):
            raise ValueError(f'{name} and v must both be float64 or neither, got {x.dtype} and {dtype}')
    if not (v.is_floating_point() and k.is_floating_point()):
        raise ValueError(f'q, k and v must be floating-point tensors, got k {k.dtype} and v {v.dtype}')
    if mask is not None and (mask.shape != (batch, tokens) or mask.dtype != torch.bool):
        raise ValueError(
            f'mask must be a bool tensor of shape {(batch, tokens)}, True where a token counts, '
            f'got {mask.dtype} of shape {tuple(mask.shape)}'
        )


def check_heads(inputs: Any, heads: int, name: str) -> None:
    """Raise ValueError unless the tokens are on the grid, and v has a part for each head of the bias `name`."""
    v, grid = inputs.v, inputs.grid
    if v.ndim == 3 and v.shape[2] % heads != 0:
        raise ValueError(f'the {heads} heads of {name} must divide the {v.shape[2]} channels of v')
    check_qkv(inputs, heads=heads)
    tokens = v.shape[1]
    if len(grid) != 2 or grid[0] * grid[1] != tokens or grid[0] < 1:
        raise ValueError(f'grid must be (H, W) with H * W = {tokens} tokens, got {tuple(grid)}')


def empty_output(q: Tensor | None, v: Tensor) -> Tensor:
    """Return a buffer for the result, (B, T, D) in the dtype of q, or of v without a query."""
    return torch.empty_like(v if q is None else q, memory_format=torch.contiguous_format)


def empty_denominator(k: Tensor, v: Tensor, save: bool) -> Tensor:
    """Return a buffer for the denominators (B, T, h) saved for the backward, empty if they are not saved."""
    return k.new_empty(k.shape if save else 0, dtype=product_dtype(v))


def empty_context(k: Tensor, v: Tensor, save: bool) -> Tensor:
    """Return a buffer for the context (B, 1, D) saved for the backward; empty if it is not saved."""
    return torch.empty((v.shape[0], 1, v.shape[2]) if save else (0,), dtype=accumulate_dtype(v), device=v.device)
