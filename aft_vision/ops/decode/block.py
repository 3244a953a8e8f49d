"""The parameters and the mixer state of a block, as a compiled step reads them."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Dense(NamedTuple):
    """A linear layer, with an optional layer norm before it and an optional GELU after it.

    Attributes:
        weight: (n, C).
        bias: (n,).
        norm_weight, norm_bias: (C,), parameters of the layer norm.
        eps: added to the variance of the layer norm.
        gelu: whether there is a GELU.
    """

    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 0.0
    gelu: bool = False


class Block(NamedTuple):
    """A block of a decoder for one token.

    Attributes:
        qkv, proj, fc1, fc2: linear layers; proj may be missing.
        gated: whether the first layer computes queries in addition to keys and values.
        state: state of the mixer; updated in place.
        factors: (T, d') of the position bias, of targets and of sources; None if it is not factorised.
        mix: the mixer as a function from the output (B, n) of the first layer to (B, C), if it is not compiled.
    """

    qkv: Dense
    proj: Dense | None
    fc1: Dense
    fc2: Dense
    gated: bool
    state: tuple[Tensor, ...]
    factors: tuple[Tensor, Tensor] | None
    mix: Callable[[Tensor], Tensor]
