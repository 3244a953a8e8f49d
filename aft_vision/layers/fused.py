"""Layers that `fuse()` puts in place of torch's: the same values and parameters, faster in evaluation.

Each acts in an ordinary call without gradients; in training, graphs, traces and transforms it is torch's layer.
"""

import functools
import math
import time

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from aft_vision.ops.operator import is_ordinary

# Multiply-adds from which oneDNN's product can be the faster one: its call takes 10 us longer.
LEAST_PRODUCT = 2**22


class InplaceGELU(nn.GELU):
    """A GELU that overwrites its input.

    The hidden values of an MLP are its largest tensors. With a second one, the allocator returns their memory to the
    system in every block and gets it back page by page.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.gelu(x, approximate=self.approximate)
        return self._ordinary(x)

    @torch.jit.unused
    def _ordinary(self, x: Tensor) -> Tensor:
        watched = type(x) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if watched or self.training or torch.is_grad_enabled():
            return F.gelu(x, approximate=self.approximate)
        return torch.ops.aten.gelu_(x, approximate=self.approximate)


class FusedLinear(nn.Linear):
    """A linear layer that multiplies float32 on a CPU by oneDNN, where that takes less time than `F.linear`.

    torch multiplies by MKL, which takes twice the time of oneDNN on AMD's Zen 5. A graph of `torch.compile`, in which
    sizes may be open, has no least size.

    Attributes:
        onednn: oneDNN is faster here.
    """

    onednn: bool

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        return self._ordinary(x)

    @torch.jit.unused
    def _ordinary(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.training or not self.onednn or torch.is_grad_enabled() or torch.is_autocast_enabled('cpu'):
            return F.linear(x, weight, bias)
        # Subclasses, such as quantised weights, have their own products.
        plain = type(weight) is nn.Parameter and weight.dtype is torch.float32
        if not (plain and x.is_cpu and x.dtype is torch.float32 and x.is_contiguous()):
            return F.linear(x, weight, bias)
        if torch.compiler.is_compiling():
            return F.linear(x, weight, bias) if torch.compiler.is_exporting() else linear(x, weight, bias)
        if not is_ordinary((x, weight, bias)) or x.numel() * weight.shape[0] < LEAST_PRODUCT:
            return F.linear(x, weight, bias)
        return multiply_onednn(x, weight, bias)


def fuse_linear(module: nn.Module) -> None:
    """Make every linear layer of a module, or the module itself, a `FusedLinear` with the same parameters and hooks."""
    for each in module.modules():
        if type(each) is nn.Linear:
            each.__class__ = FusedLinear
            each.onednn = onednn_is_faster()  # type: ignore[assignment]


def fuse_mlp(mlp: nn.Module) -> None:
    """Fuse the linear layers of an MLP, and let the GELU of one of timm's overwrite its input."""
    fuse_linear(mlp)
    if type(mlp) is Mlp and type(mlp.act) is nn.GELU:
        mlp.act = InplaceGELU(mlp.act.approximate).train(mlp.act.training)


@torch.library.custom_op('aft_vision::linear', mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`multiply_onednn` as one node of a graph."""
    return multiply_onednn(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def multiply_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of float32 tensors, computed by oneDNN, without gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')


def onednn_is_faster() -> bool:
    """Return whether oneDNN multiplies faster than `F.linear` here, by a twentieth or more; measured once, in 10 ms."""
    return torch.backends.mkldnn.is_available() and is_ordinary((torch.empty(0, device='cpu'),)) and _is_faster()


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
