"""Products of linear layers on a CPU, with weights packed once for the library that multiplies fastest here.

torch multiplies float32 by MKL and bfloat16 by oneDNN, and packs the weights at each call. On AMD's Zen 5 MKL takes
twice the time of oneDNN; on Intel's processors MKL is the fastest for most shapes.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from aft_vision.ops.common.choice import fastest
from aft_vision.ops.common.ordinary import is_ordinary

# Multiply-adds of a product from which another way than torch's can be the faster one, and those in a graph, where
# oneDNN's call takes 10 us longer.
MIN_PRODUCT = 2**18
MIN_GRAPH_PRODUCT = 2**22


@torch.library.custom_op('aft_vision::linear', mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run `multiply_onednn` as one node of a graph."""
    return multiply_onednn(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def multiply_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of inputs that `can_run` accepts, computed by oneDNN, without gradients.

    Args:
        weight: (N, K), or packed for oneDNN.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


def pack_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return the fastest product with a packed weight (N, K), for inputs of as many rows as x, without gradients.

    Which one it is was measured once for each shape. x, weight and bias are such as `can_run` accepts.
    """
    rows = math.prod(x.shape[:-1])
    packers: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {'torch': _use_torch, 'onednn': _pack_onednn}
    if x.dtype is torch.float32 and torch.backends.mkl.is_available():
        packers['mkl'] = _pack_mkl
    made: dict[str, Callable[[Tensor], Tensor]] = {}

    def multiply(way: str) -> Tensor:
        if way not in made:
            made[way] = packers[way](weight, bias, rows)
        return made[way](x)

    # A power of two stands for the numbers of rows up to it.
    shape = 1 << (rows - 1).bit_length(), *weight.shape, x.dtype
    chosen = fastest('linear', shape, {way: partial(multiply, way) for way in packers})
    return made.get(chosen) or packers[chosen](weight, bias, rows)


def can_run(x: Tensor, weight: Tensor, bias: Tensor | None, min_product: int = MIN_PRODUCT) -> bool:
    """Return whether other ways than torch's can multiply x (..., K), weight (N, K) and bias (N,), and be faster.

    oneDNN reads x and the bias as if they were contiguous. Subclasses, such as quantised weights, have other products.
    """
    if type(x) is not Tensor or not x.is_cpu or torch.is_autocast_enabled('cpu') or not supports_dtype(x.dtype):
        return False
    for each in (weight, bias):
        if each is not None and (type(each) is not Parameter or each.dtype is not x.dtype):
            return False
    if not x.is_contiguous() or x.shape[-1:] != weight.shape[1:] or not (bias is None or bias.is_contiguous()):
        return False
    return x.numel() * weight.shape[0] >= min_product


def supports_dtype(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies and convolves this type here."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies by an unpacked weight faster than `F.linear` here; measured once."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    # Not while a mode or a default device makes tensors without numbers.
    if not is_ordinary((torch.empty(0, device='cpu'),)):
        return False
    x, weight = torch.ones(256, 384, device='cpu'), torch.ones(384, 384, device='cpu')
    ways = {'torch': partial(F.linear, x, weight), 'onednn': partial(multiply_onednn, x, weight)}
    return fastest('linear in a graph', (256, 384, 384, torch.float32), ways) == 'onednn'


def _use_torch(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight, bias)


def _pack_onednn(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return lambda x: multiply_onednn(x, packed, bias)


def _pack_mkl(weight: Tensor, bias: Tensor | None, rows: int) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach(), rows)
    multiply = torch.ops.mkl._mkl_linear.default
    return lambda x: multiply(x, packed, weight, bias, rows)
