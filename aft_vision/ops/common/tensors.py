"""Tensors as arguments of the C++ kernels."""

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function


class Tokens(ctypes.Structure):
    """A (B, T, D) float32 tensor with contiguous channels, and its strides over B and T; null for None."""

    _fields_ = [('data', ctypes.c_void_p), ('batch', ctypes.c_int64), ('token', ctypes.c_int64)]


def tokens(x: Tensor | None) -> Tokens:
    """Return the argument for a tensor, which must outlive the call."""
    return Tokens(None, 0, 0) if x is None else Tokens(x.data_ptr(), x.stride(0), x.stride(1))


class Stream(ctypes.Structure):
    """A (B, T, D) tensor of float32 or bfloat16, its strides over B and T, and its type."""

    _fields_ = [*Tokens._fields_, ('half', ctypes.c_int64)]


def stream(x: Tensor | None) -> Stream:
    """Return the argument for kernels that support both types; the tensor must outlive the call."""
    return Stream(None, 0, 0, 0) if x is None else Stream(x.data_ptr(), *x.stride()[:2], x.dtype == torch.bfloat16)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor, null for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Return an array of integers."""
    return (ctypes.c_int64 * len(values))(*values)


def number(value: float) -> ctypes.c_float:
    """Return a float32."""
    return ctypes.c_float(value)


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a context that a profile shows by name."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def neighbours(x: Tensor | None) -> Tensor | None:
    """Return the tensor in float32 with contiguous channels; a slice of a fused projection is not copied."""
    return None if x is None else _neighbours(x.float())


def narrow_neighbours(x: Tensor | None) -> Tensor | None:
    """Return the tensor in float32 or bfloat16 with contiguous channels."""
    return None if x is None else _neighbours(x if x.dtype == torch.bfloat16 else x.float())


def cast(found: Sequence[Tensor | None], like: Sequence[Tensor | None], k: Tensor) -> tuple[Tensor, ...]:
    """Return gradients in the dtypes of their inputs, an empty tensor for a missing gradient."""
    pairs = zip(found, like, strict=True)
    return tuple(k.new_empty(0) if x is None or y is None else x.to(y.dtype) for x, y in pairs)


def room(shape: Sequence[int]) -> Tensor:
    """Return an uninitialised float32 tensor on the CPU, independent of torch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device='cpu')


def float_output(x: Tensor) -> Tensor:
    """Return a float32 buffer for a result that is copied to x, or x itself if it is float32."""
    return x if x.dtype == torch.float32 else room(x.shape)


def narrow_output(x: Tensor) -> Tensor:
    """Return a float32 buffer for a result that is copied to x, or x itself if it is float32 or bfloat16."""
    return x if x.dtype == torch.bfloat16 else float_output(x)


def _neighbours(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
