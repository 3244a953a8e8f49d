"""Activations that the backward pass computes again instead of keeping them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    # A function of tensors that its own gradient keeps too, in the shape of a view.
    sources: list[_Kept]
    function: Callable[..., Tensor]
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
                # Those of the call: by the backward pass the module may have others.
                given = [node._saved_input, node._saved_weight, node._saved_bias]
                function = partial(_normalize, norm.normalized_shape, norm.eps)
                return _Recomputed([_keep(each) for each in given if each is not None], function, tensor.shape)
            if made_by == 'GeluBackward0':
                function = partial(F.gelu, approximate=node._saved_approximate)
                return _Recomputed([_keep(node._saved_self)], function, tensor.shape)
        return _keep(tensor)

    return saved_tensors_hooks(pack, _unpack)


def _keep(tensor: Tensor) -> _Kept:
    # Without its graph: a graph that keeps its own result is never freed.
    return _Kept(tensor.detach(), tensor._version)


def _normalize(
    shape: Sequence[int], eps: float, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _read(kept: _Kept) -> Tensor:
    # As torch checks tensors without hooks.
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            'expected a tensor that the backward pass needs to be unchanged since the forward pass, got one modified '
            'by an inplace operation; modify a copy of it'
        )
    return kept.tensor


@torch.no_grad()
def _unpack(packed: _Kept | _Recomputed) -> Tensor:
    if isinstance(packed, _Kept):
        return _read(packed)
    return packed.function(*map(_read, packed.sources)).view(packed.shape)
