"""A block for one token, or the linear layers of one, which are compiled where they can be."""

from typing import Any, NamedTuple

from torch import Tensor

from aft_vision.ops import operator
from aft_vision.ops.decode.state import LocalState, SimpleState, check_local_state, check_simple_state


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
    kernels = operator.dense_kernels()
    return kernels.DenseBlock(qkv, proj, fc1, fc2) if kernels.covers_dense(qkv, proj, fc1, fc2) else None


def simple_block(block: Any, x: Tensor, gated: bool, state: SimpleState) -> Tensor | None:
    """A block with `aft_simple_step` between its layers, for a token; None where that is not compiled.

    Args:
        block: a `dense_block` that covers x.
        x: (B, C).
        gated: whether the layer before the mixer gives queries.
        state: of the tokens before it; updated in place.

    Returns:
        (B, C).

    Raises:
        ValueError: the parts of the state do not match one another.
    """
    check_simple_state(state)
    kernels = operator.step_kernels(state)
    if kernels is None or not _fits(block, x, gated, state):
        return None
    return kernels.simple_block(block, x, gated, state)


def local_block(block: Any, x: Tensor, gated: bool, bias_u: Tensor, bias_v: Tensor, state: LocalState) -> Tensor | None:
    """A block with `factorized_local_step` between its layers, for a token; None where that is not compiled.

    Args:
        block: a `dense_block` that covers x.
        x: (B, C).
        gated: whether the layer before the mixer gives queries.
        bias_u, bias_v: (T, d') factors of targets and of sources.
        state: of the tokens before it; updated in place.

    Returns:
        (B, C).

    Raises:
        ValueError: the parts of the state do not match one another, or its position is negative.
        IndexError: T tokens have been taken before.
    """
    check_local_state(state)
    kernels = operator.step_kernels(state)
    if kernels is None or not _fits(block, x, gated, state) or not kernels.covers_factors(bias_u, bias_v):
        return None
    # A wider window is an error, for `factorized_local_step` to raise.
    if bias_u.shape != bias_v.shape or state.ring.shape[1] > len(bias_v):
        return None
    return kernels.local_block(block, x, gated, bias_u, bias_v, state)


def _fits(block: Any, x: Tensor, gated: bool, state: SimpleState | LocalState) -> bool:
    # Whether the layer before the mixer gives the queries, keys and values of such a state.
    return x.shape == state.reference.shape and block.projected == (2 + gated) * x.shape[1]
