"""The inputs of each operator and their checks, and buffers for its results: what all of its forms agree on."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
    mask: Tensor | None


class FullInputs(NamedTuple):
    """Inputs of `ops.aft_full` and `ops.aft_full_causal`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None


class LocalInputs(NamedTuple):
    """Inputs of `ops.aft_local` and `ops.aft_local_causal`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    band: Tensor
    mask: Tensor | None


class ConvInputs(NamedTuple):
    """Inputs of `ops.aft_conv`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    kernel: Tensor
    grid: Sequence[int]
    mask: Tensor | None
    global_context: bool

    @property
    def channels(self) -> int:
        """Return the number of channels per head."""
        return self.v.shape[2] // self.k.shape[2]

    def part(self, head: slice) -> 'ConvInputs':
        """Return the inputs of some heads."""
        channel = slice(head.start * self.channels, head.stop * self.channels)
        q = None if self.q is None else self.q[..., channel]
        return self._replace(q=q, k=self.k[..., head], v=self.v[..., channel], kernel=self.kernel[head])


class OnehotInputs(NamedTuple):
    """Inputs of `ops.aft_onehot`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    offset: Tensor
    weight: Tensor
    grid: Sequence[int]
    mask: Tensor | None


class AxialInputs(NamedTuple):
    """Inputs of `ops.aft_axial`."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    row_bias: Tensor
    column_bias: Tensor
    grid: Sequence[int]
    mask: Tensor | None


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


def check_full(inputs: FullInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_full`."""
    check_qkv(inputs)
    bias, tokens = inputs.bias, inputs.v.shape[1]
    if bias.shape != (tokens, tokens):
        raise ValueError(f'bias must have shape {(tokens, tokens)} to match v, got {tuple(bias.shape)}')


def check_local(inputs: LocalInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_local`."""
    check_qkv(inputs)
    band, tokens = inputs.band, inputs.v.shape[1]
    if band.ndim != 2 or band.shape[0] != tokens or band.shape[1] % 2 == 0:
        raise ValueError(
            f'band must have shape ({tokens}, 2 * s - 1) for a window of s tokens, got {tuple(band.shape)}'
        )


def check_local_causal(inputs: LocalInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_local_causal`."""
    check_qkv(inputs)
    v, band = inputs.v, inputs.band
    if band.ndim != 2 or band.shape[0] != v.shape[1] or band.shape[1] == 0:
        raise ValueError(f'band must have shape ({v.shape[1]}, s) for a window of s tokens, got {tuple(band.shape)}')


def check_conv(inputs: ConvInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_conv`."""
    shape = inputs.kernel.shape
    if len(shape) != 3 or shape[0] == 0 or shape[1] != shape[2] or shape[1] % 2 == 0:
        raise ValueError(f'kernel must have shape (h, s, s) with h of at least 1 and s odd, got {tuple(shape)}')
    _check_heads(inputs, shape[0], 'kernel')


def check_onehot(inputs: OnehotInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_onehot`."""
    offset, weight = inputs.offset, inputs.weight
    if offset.ndim != 2 or len(offset) == 0 or offset.shape[1] != 2 or offset.dtype != torch.int64:
        raise ValueError(
            f'offset must be int64 of shape (h, 2) with h of at least 1, '
            f'got {offset.dtype} of shape {tuple(offset.shape)}'
        )
    heads = offset.shape[0]
    if tuple(weight.shape) != (heads,):
        raise ValueError(f'weight must have shape ({heads},) to match offset, got {tuple(weight.shape)}')
    _check_heads(inputs, heads, 'offset')


def check_axial(inputs: AxialInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_axial`."""
    heads = len(inputs.row_bias)
    for name, shape in (('row_bias', inputs.row_bias.shape), ('column_bias', inputs.column_bias.shape)):
        if len(shape) != 2 or shape[0] == 0 or shape[1] % 2 == 0:
            raise ValueError(f'{name} must have shape (h, 2 * s - 1) with h of at least 1, got {tuple(shape)}')
        if shape[0] != heads:
            raise ValueError(f'{name} must have the {heads} heads of row_bias, got {shape[0]}')
    _check_heads(inputs, heads, 'row_bias')


def _check_heads(inputs: ConvInputs | OnehotInputs | AxialInputs, heads: int, name: str) -> None:
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
    """Return a buffer for the denominators (B, T, h) that the backward reuses, empty if they are not saved."""
    return k.new_empty(k.shape if save else 0, dtype=product_dtype(v))


def empty_context(k: Tensor, v: Tensor, save: bool) -> Tensor:
    """Return a buffer for the context (B, 1, D) that the backward reuses; empty if it is not saved."""
    return torch.empty((v.shape[0], 1, v.shape[2]) if save else (0,), dtype=accumulate_dtype(v), device=v.device)
