"""Layers that `fuse()` puts in place of torch's: the same values and parameters, faster in evaluation.

They act in evaluation without gradients, where nothing traces, exports or transforms the call; else they are torch's.
"""

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from aft_vision.ops.linear import can_run, linear, multiply_onednn, onednn_is_faster
from aft_vision.ops.operator import is_ordinary


class InplaceGELU(nn.GELU):
    """A GELU that overwrites its input.

    The hidden values of an MLP are its largest tensors. With a second one, the allocator returns their memory to the
    system in every block and gets it back page by page.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.gelu(x, approximate=self.approximate)
        return self._evaluated(x)

    @torch.jit.unused
    def _evaluated(self, x: Tensor) -> Tensor:
        watched = type(x) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if watched or self.training or torch.is_grad_enabled():
            return F.gelu(x, approximate=self.approximate)
        return torch.ops.aten.gelu_(x, approximate=self.approximate)


class FusedLinear(nn.Linear):
    """A linear layer that multiplies by oneDNN, also in a graph of `torch.compile`."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        return self._evaluated(x)

    @torch.jit.unused
    def _evaluated(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.training or torch.is_grad_enabled() or torch.compiler.is_exporting():
            return F.linear(x, weight, bias)
        if torch.compiler.is_compiling():
            return linear(x, weight, bias) if can_run(x, weight, bias) else F.linear(x, weight, bias)
        if is_ordinary((x, weight, bias)) and can_run(x, weight, bias):
            return multiply_onednn(x, weight, bias)
        return F.linear(x, weight, bias)


def fuse_linear(module: nn.Module) -> None:
    """Make linear layers multiply by oneDNN in evaluation, if that is faster here than `F.linear`.

    Args:
        module: its layers, or itself, become a `FusedLinear` with the same parameters and hooks.
    """
    if not onednn_is_faster():
        return
    for each in module.modules():
        if type(each) is nn.Linear:
            each.__class__ = FusedLinear


def fuse_mlp(mlp: nn.Module) -> None:
    """Fuse the linear layers of an MLP, and let the GELU of one of timm's overwrite its input."""
    fuse_linear(mlp)
    if type(mlp) is Mlp and type(mlp.act) is nn.GELU:
        mlp.act = InplaceGELU(mlp.act.approximate).train(mlp.act.training)
