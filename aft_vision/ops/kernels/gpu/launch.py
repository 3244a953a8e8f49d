"""Where the Triton kernels run, and how they are launched; imports Triton only when a kernel is at hand.

Triton is optional. Its kernels take tensors of one CUDA device, or, for tests and debugging, CPU tensors in Triton's
interpreter under TRITON_INTERPRET=1, which must be set before the first of them runs.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor
from torch.profiler import record_function

from aft_vision.ops.eager.numerics import UNDERFLOW

# Sums are float32 in all of them.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A denominator below this has lost digits to underflow, as in the torch forms.
LIMIT = UNDERFLOW[torch.float32]
# The oldest GPUs that Triton supports.
CAPABILITY = (8, 0)


def can_run(inputs: Sequence[Any]) -> bool:
    """Whether Triton runs where all tensors among the inputs are, in their floating-point types, and none is empty."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    device = tensors[0].device
    return (
        _runs_on(device)
        and all(x.device == device and x.numel() > 0 for x in tensors)
        and all(x.dtype in DTYPES for x in tensors if x.is_floating_point())
    )


def interprets() -> bool:
    """Whether kernels that are first used now run in Triton's interpreter. Read each time: tests set it for a while."""
    return os.environ.get('TRITON_INTERPRET') == '1'


def _runs_on(device: torch.device) -> bool:
    if device.type == 'cpu':
        return interprets() and _has_triton()
    return device.type == 'cuda' and _has_triton() and torch.cuda.get_device_capability(device) >= CAPABILITY


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec('triton') is not None


def tuned(key: list[str], interpreted: dict[str, int], *configs: tuple[dict[str, int], int]) -> Callable[[Any], Any]:
    """A decorator above `triton.jit`: the fastest configuration for each value of the key, measured once and kept.

    Args:
        key: arguments of the kernel.
        interpreted: the constants in the interpreter: tiles so small that little tests have several.
        configs: constants and number of warps.
    """
    import triton

    if interprets():
        configs = ((interpreted, 1),)
    return triton.autotune([triton.Config(constants, num_warps=warps) for constants, warps in configs], key=key)


@contextmanager
def launching(name: str, x: Tensor) -> Iterator[None]:
    """A context whose kernels run on the device of x and show in profiles as aft_vision::name."""
    device = torch.cuda.device(x.device) if x.is_cuda else nullcontext()
    with record_function(f'aft_vision::{name}'), device:
        yield


def product_type(v: Tensor) -> torch.dtype:
    """The type of the operands of `tl.dot`: bfloat16 stays, all else is float32. The interpreter knows no bfloat16."""
    return torch.bfloat16 if v.dtype == torch.bfloat16 and not interprets() else torch.float32


def products(v: Tensor) -> dict[str, Any]:
    """The constants PRODUCT, the type of the operands of `tl.dot`, and PRECISION, its input_precision.

    float32 is multiplied in three products of TF32, where there are tensor cores for it.
    """
    import triton.language as tl

    return {
        'PRODUCT': tl.bfloat16 if product_type(v) == torch.bfloat16 else tl.float32,
        'PRECISION': 'tf32x3' if v.is_cuda and torch.version.hip is None else 'ieee',
    }


@overload
def rows(x: Tensor) -> Tensor: ...
@overload
def rows(x: None) -> None: ...
def rows(x: Tensor | None) -> Tensor | None:
    """The tensor, copied only if its channels are no neighbours in memory: parts of a fused projection are not."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Of each (B, T, D) tensor the elements from one sequence to the next and from one token to the next."""
    return tuple(0 if x is None else x.stride(dim) for x in tensors for dim in (0, 1))


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """The (B, T) mask as contiguous bytes."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def like(x: Tensor) -> Tensor:
    """Room for the gradient of x: contiguous, in its type."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
