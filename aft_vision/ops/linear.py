"""The product of a linear layer by oneDNN, where that takes less time than `F.linear`.

torch multiplies float32 on a CPU by MKL, which takes twice the time of oneDNN on AMD's Zen 5.
"""

import functools
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from aft_vision.ops.operator import is_ordinary

# Multiply-adds from which oneDNN can be the faster one: its call takes 10 us longer.
LEAST_PRODUCT = 2**22


@torch.library.custom_op('aft_vision::linear', mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run `multiply_onednn` as one node of a graph."""
    return multiply_onednn(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def multiply_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of inputs that `can_run` accepts, computed by oneDNN, without gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


def can_run(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `multiply_onednn` takes x (..., K), weight (N, K) and bias (N,), and can be faster.

    oneDNN reads x and the bias as if they were contiguous. Subclasses, such as quantised weights, have other products.
    """
    if type(x) is not Tensor or not x.is_cpu or torch.is_autocast_enabled('cpu'):
        return False
    for each in (weight, bias):
        if each is not None and type(each) is not Parameter:
            return False
    for each in (x, weight, bias):
        if each is not None and each.dtype is not torch.float32:
            return False
    if not x.is_contiguous() or x.shape[-1] != weight.shape[1] or not (bias is None or bias.is_contiguous()):
        return False
    return x.numel() * weight.shape[0] >= LEAST_PRODUCT


def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies faster than `F.linear` here, by a twentieth or more; measured once, in 10 ms."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    # Not while a mode or a default device makes tensors without numbers.
    return is_ordinary((torch.empty(0, device='cpu'),)) and _is_faster()


@functools.cache
def _is_faster() -> bool:
    x, weight = torch.ones(256, 384, device='cpu'), torch.ones(384, 384, device='cpu')
    least = [math.inf, math.inf]
    for _ in range(10):
        for place, multiply in enumerate((F.linear, multiply_onednn)):
            start = time.perf_counter()
            multiply(x, weight)
            least[place] = min(least[place], time.perf_counter() - start)
    return least[0] > 1.05 * least[1]
