"""Activations that the backward pass computes again instead of keeping them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from aft_vision.ops.common.ordinary import is_ordinary


class _Kept(NamedTuple):
    # A tensor that is kept, with its count of writes.
    tensor: Tensor
    version: int


class _Recomputed(NamedTuple):
    # A layer norm, or a GELU by its approximation, of a tensor that its own gradient keeps too, in the shape of a view.
    source: _Kept
    layer: nn.LayerNorm | str
    shape: torch.Size


def recompute_cheap(x: Tensor, normalized: Tensor, norm: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which layers on a CPU keep neither GELUs nor the result of a layer norm for their gradients.

    Both are computed again from their inputs, which their own gradients keep. A linear layer next to them takes far
    longer; less so under autocast, where all tensors are kept. So they are where there are no gradients, where
    something traces or transforms the call, and where hooks handle saved tensors already, as in checkpointing.

    Args:
        x, normalized: input and output of the norm.
        norm: the result of one that is no LayerNorm is kept.
    """
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and is_ordinary((x,)) and x.is_cpu):
        return nullcontext()
    if torch.is_autocast_enabled('cpu') or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    # Its address, as the context outlives the call in each tensor that is kept.
    address = normalized.data_ptr()

    def pack(tensor: Tensor) -> _Kept | _Recomputed:
        base = tensor if tensor._base is None else tensor._base
        if tensor.numel() == base.numel() and tensor.is_contiguous() and base.is_contiguous():
            node: Any = base.grad_fn
            made_by = '' if node is None else node.name()
            if isinstance(norm, nn.LayerNorm) and base.data_ptr() == address and made_by == 'NativeLayerNormBackward0':
                return _Recomputed(_keep(x), norm, tensor.shape)
            if made_by == 'GeluBackward0':
                return _Recomputed(_keep(node._saved_self), node._saved_approximate, tensor.shape)
        return _keep(tensor)

    return saved_tensors_hooks(pack, _unpack)


def _keep(tensor: Tensor) -> _Kept:
    # Without its graph: a graph that keeps its own result is never freed.
    return _Kept(tensor.detach(), tensor._version)


@torch.no_grad()
def _unpack(packed: _Kept | _Recomputed) -> Tensor:
    tensor, version = packed if isinstance(packed, _Kept) else packed.source
    # As torch checks tensors without hooks.
    if tensor._version != version:
        raise RuntimeError(
            'expected a tensor that the backward pass needs to be unchanged since the forward pass, got one modified '
            'by an inplace operation; modify a copy of it'
        )
    if isinstance(packed, _Kept):
        return tensor
    layer = packed.layer
    if isinstance(layer, str):
        return F.gelu(tensor, approximate=layer).view(packed.shape)
    return F.layer_norm(tensor, layer.normalized_shape, layer.weight, layer.bias, layer.eps).view(packed.shape)
