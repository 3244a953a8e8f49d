"""Data types, input checks, the gate and the shifted exponentials, shared by all torch forms."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# A weighted sum of exponentials below this has lost precision by underflow; its row is recomputed by a joint softmax.
UNDERFLOW = {torch.float32: 1e-30, torch.float64: 1e-290}


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


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context without autocast; a null context for devices without it, such as meta."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of maxima, exponentials, divisions and sums: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the operands of a matrix product.

    bfloat16 is kept if the device multiplies it: a CPU without such instructions is over ten times slower in bfloat16
    than in float32. float16 is widened, because exp underflows in it.
    """
    if x.dtype == torch.bfloat16 and (x.device.type != 'cpu' or _cpu_multiplies_bfloat16()):
        return torch.bfloat16
    return accumulate_dtype(x)


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    # oneDNN reports support with AVX-512, but without AVX512_BF16 emulates it, slower than float32.
    emulated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulated


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


def check_grid(tokens: int, grid: Sequence[int]) -> None:
    """Raise ValueError unless grid is (H, W) with H * W tokens."""
    if len(grid) != 2 or grid[0] * grid[1] != tokens or grid[0] < 1:
        raise ValueError(f'grid must be (H, W) with H * W = {tokens} tokens, got {tuple(grid)}')


def masked_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """Return keys in the accumulation dtype, minus infinity where the mask is False."""
    k = k.to(accumulate_dtype(k))
    return k if mask is None else k.masked_fill(~mask[..., None], float('-inf'))


def masked_values(v: Tensor, mask: Tensor | None) -> Tensor:
    """Return values, 0 where the mask is False, so that even NaN there reaches no result or gradient."""
    return v if mask is None else v.masked_fill(~mask[..., None], 0.0)


def shifted_exp(k: Tensor, mask: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return exp(k - max over tokens), (B, T, h), also written to out; zero if all tokens are masked."""
    k = masked_keys(k, mask)
    # Finite: exp(-inf - finite) = 0.
    peak = k.amax(dim=1, keepdim=True).clamp_min(torch.finfo(k.dtype).min)
    if out is not None and out.dtype == k.dtype:
        return torch.sub(k, peak, out=out).exp_()
    ek = (k - peak).exp_()
    if out is not None:
        out.copy_(ek)
    return ek


def gate(q: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return sigmoid(q) in the given dtype; None without a query (Table 12)."""
    return None if q is None else torch.sigmoid(q.to(dtype))


def empty_output(q: Tensor | None, v: Tensor) -> Tensor:
    """Return a buffer for the result, (B, T, D) in the dtype of q, or of v without a query."""
    return torch.empty_like(v if q is None else q, memory_format=torch.contiguous_format)


def empty_denominator(k: Tensor, v: Tensor, save: bool) -> Tensor:
    """Return a buffer for the denominators (B, T, h) that the backward reuses, empty if they are not saved."""
    return k.new_empty(k.shape if save else 0, dtype=product_dtype(v))


def may_branch(x: Tensor) -> bool:
    """Return whether a branch on values is free: on an accelerator it would synchronise every layer."""
    return x.device.type == 'cpu'
