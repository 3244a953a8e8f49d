"""Tensors as arguments of the C++ kernels.

A call gives its kernel one block of numbers and addresses, eight bytes each, in the order of a struct in C++.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function


class Tokens(ctypes.Structure):
    """A (B, T, D) float32 tensor with contiguous channels, and its strides over B and T; null for None."""

    _fields_ = [('data', ctypes.c_void_p), ('batch', ctypes.c_int64), ('token', ctypes.c_int64)]


def pack(*fields: int) -> bytes:
    """Pack the fields of a struct; every tensor whose address is among them must outlive the call."""
    return _layout(len(fields)).pack(*fields)


@functools.cache
def _layout(count: int) -> struct.Struct:
    return struct.Struct(f'{count}q')


def address(x: Tensor | None, held: list[Tensor]) -> int:
    """Return the address of a contiguous tensor, 0 without one; a copy is kept in `held`, for as long as the call."""
    if x is None:
        return 0
    if not x.is_contiguous():
        x = x.contiguous()
        held.append(x)
    return x.data_ptr()


def floats(x: Tensor, held: list[Tensor]) -> int:
    """Return the address of a contiguous tensor in float32, as `address` does."""
    if x.dtype is not torch.float32:
        x = x.float()
        held.append(x)
    return address(x, held)


def tokens(x: Tensor | None, held: list[Tensor]) -> tuple[int, int, int]:
    """Return the fields of `Tokens` for a tensor (B, T, D), zeros without one.

    It is read where it is if it is float32 and its channels are neighbours, as in a part of a fused projection; else a
    copy is kept in `held`, for as long as the call.
    """
    if x is None:
        return 0, 0, 0
    batch, token, channel = x.stride()
    if channel != 1 or x.dtype is not torch.float32:
        x = x.float().contiguous()
        held.append(x)
        batch, token, _ = x.stride()
    return x.data_ptr(), batch, token


def stream(x: Tensor | None, held: list[Tensor]) -> tuple[int, int, int, bool]:
    """Return the fields of `Stream`: those of `Tokens`, and whether the tensor is bfloat16, which is read as it is."""
    if x is None or x.dtype is not torch.bfloat16:
        return *tokens(x, held), False
    if x.stride()[2] != 1:
        x = x.contiguous()
        held.append(x)
    batch, token, _ = x.stride()
    return x.data_ptr(), batch, token, True


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


def cast(found: Sequence[Tensor | None], like: Sequence[Tensor | None], k: Tensor) -> tuple[Tensor, ...]:
    """Return gradients in the dtypes of their inputs, an empty tensor for a missing gradient."""
    pairs = zip(found, like, strict=True)
    return tuple(k.new_empty(0) if x is None or y is None else x.to(y.dtype) for x, y in pairs)


def float_buffer(shape: Sequence[int] | int) -> Tensor:
    """Return an uninitialised float32 tensor on the CPU, independent of torch's default type and device."""
    return torch.empty(shape, dtype=torch.float32, device='cpu')


def float_output(x: Tensor) -> Tensor:
    """Return a float32 buffer for a result that is copied to x, or x itself if it is float32."""
    return x if x.dtype == torch.float32 else float_buffer(x.shape)


def narrow_output(x: Tensor) -> Tensor:
    """Return a float32 buffer for a result that is copied to x, or x itself if it is float32 or bfloat16."""
    return x if x.dtype == torch.bfloat16 else float_output(x)


def narrow_like(x: Tensor | None) -> Tensor | None:
    """Return a contiguous buffer of the shape of x, in bfloat16 if x is and else in float32; None without one."""
    return None if x is None else narrow_output(x.new_empty(x.shape))
