"""The linear layers of a block for one token, which are compiled where they can be."""

from typing import Any, NamedTuple

from torch import Tensor

from aft_vision.ops import dispatch


class Dense(NamedTuple):
    """A linear layer with a layer norm before it and a GELU behind, if there are any.

    Attributes:
        weight: (n, C).
        bias: (n,).
        norm_weight, norm_bias: (C,), of the layer norm.
        eps: added to its variance.
        gelu: whether there is a GELU.
    """

    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 0.0
    gelu: bool = False


def dense_block(qkv: Dense, proj: Dense | None, fc1: Dense, fc2: Dense) -> Any | None:
    """The compiled form of the layers of a block, `project` before its mixer and `finish` behind; None without one.

    It has the addresses of the parameters, which must stay where they are.
    """
    kernels = dispatch.dense_kernels()
    return kernels.DenseBlock(qkv, proj, fc1, fc2) if kernels.covers_dense((qkv, proj, fc1, fc2)) else None
