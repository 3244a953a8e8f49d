"""How tensors are given to the C++ kernels."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


class Tokens(ctypes.Structure):
    """A (B, T, D) float32 tensor whose channels are neighbours, and its strides over B and T; null without one."""

    _fields_ = [('data', ctypes.c_void_p), ('batch', ctypes.c_int64), ('token', ctypes.c_int64)]


def tokens(x: Tensor | None) -> Tokens:
    """A tensor as the kernels take it, which must outlive the call."""
    return Tokens(None, 0, 0) if x is None else Tokens(x.data_ptr(), x.stride(0), x.stride(1))


class Stream(ctypes.Structure):
    """The same of float32 or bfloat16, and which of them it is."""

    _fields_ = [*Tokens._fields_, ('half', ctypes.c_int64)]


def stream(x: Tensor | None) -> Stream:
    """A tensor as the kernels take it that know both types; it must outlive the call."""
    return Stream(None, 0, 0, 0) if x is None else Stream(x.data_ptr(), *x.stride()[:2], x.dtype == torch.bfloat16)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """The elements of a contiguous tensor."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """An array of them."""
    return (ctypes.c_int64 * len(values))(*values)


def number(value: float) -> ctypes.c_float:
    """A float32."""
    return ctypes.c_float(value)


def neighbours(x: Tensor | None) -> Tensor | None:
    """float32 whose channels are neighbours in memory, as a part of a fused projection has them."""
    return None if x is None else _neighbours(x.float())


def narrow_neighbours(x: Tensor | None) -> Tensor | None:
    """The same, but bfloat16 stays."""
    return None if x is None else _neighbours(x if x.dtype == torch.bfloat16 else x.float())


def on_cpu(*inputs: Tensor | None) -> bool:
    """Whether all of them are there."""
    return all(x is None or x.device.type == 'cpu' for x in inputs)


def cast(found: Sequence[Tensor | None], like: Sequence[Tensor | None], k: Tensor) -> tuple[Tensor, ...]:
    """Gradients in the dtypes of what they belong to; an empty one stands for one that there is not."""
    pairs = zip(found, like, strict=True)
    return tuple(k.new_empty(0) if x is None or y is None else x.to(y.dtype) for x, y in pairs)


def room(shape: Sequence[int]) -> Tensor:
    """An uninitialised float32 tensor on the CPU, whatever torch's default type and device are."""
    return torch.empty(shape, dtype=torch.float32, device='cpu')


def float_output(x: Tensor) -> Tensor:
    """Room for a result that is to be copied to x; x itself where it is float32."""
    return x if x.dtype == torch.float32 else room(x.shape)


def narrow_output(x: Tensor) -> Tensor:
    """The same, but bfloat16 stays."""
    return x if x.dtype == torch.bfloat16 else float_output(x)


def _neighbours(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
