"""Data types, the gate, the shifted exponentials and parts of a batch, shared by all torch forms."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar('T')
# A weighted sum of exponentials below this has lost precision by underflow; its row is recomputed by a joint softmax.
UNDERFLOW = {torch.float32: 1e-30, torch.float64: 1e-290}


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context without autocast; a null context for meta tensors, which have none."""
    if device_type != 'meta' and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def call_without_autocast(function: Callable[..., T], like: Tensor, *args: Any) -> T:
    """Call a function without autocast on the device of a tensor."""
    # A context costs as much as a form on a small image.
    if not (torch.is_autocast_enabled('cpu') or torch.is_autocast_enabled('cuda')):
        return function(*args)
    with without_autocast(like.device.type):
        return function(*args)


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


def gated(q: Tensor | None, v: Tensor, y: Tensor) -> Tensor:
    """Return sigmoid(q) y in the dtype of q, or y in that of v."""
    return y.to(v.dtype) if q is None else (torch.sigmoid(q.to(y.dtype)) * y).to(q.dtype)


def by_head(x: Tensor, heads: int) -> Tensor:
    """Return a view (B, T, h, D / h) of (B, T, D)."""
    return x.unflatten(2, (heads, -1))


def may_branch(x: Tensor) -> bool:
    """Return whether a branch on values is free: on an accelerator it would synchronise every layer."""
    return x.device.type == 'cpu'


def chunks(v: Tensor, elements: int) -> Iterator[slice]:
    """Return the parts of a batch (B, T, D) that hold so many elements at most, at least one sequence each."""
    step = max(1, elements // (v.shape[1] * v.shape[2])) if may_branch(v) else len(v)
    for start in range(0, len(v), step):
        yield slice(start, start + step)
