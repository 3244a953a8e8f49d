"""AFT-simple, not causal (AFT Eq. 5)."""

import torch
from torch import Tensor

from aft_vision.ops.common.inputs import Qkv, empty_context
from aft_vision.ops.common.numerics import gate, masked_keys, masked_values, may_branch


def simple_forward(inputs: Qkv, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the context (B, 1, D) that every target shares (AFT Eq. 5)."""
    q, k, v, mask = inputs
    context = (_token_softmax(k, mask) * masked_values(v, mask)).sum(1, keepdim=True)
    s = gate(q, context.dtype)
    y = context.expand(v.shape).clone() if s is None else s * context
    return y.to(v.dtype if q is None else q.dtype), context if save else empty_context(k, v, save)


def simple_backward(
    grad: Tensor, y: Tensor, context: Tensor, inputs: Qkv, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v, mask = inputs
    p = _token_softmax(k, mask)
    g = grad.to(p.dtype)
    s = gate(q, p.dtype)
    dq = k.new_empty(0) if q is None or s is None else (g * context * s * (1 - s)).to(q.dtype)
    dcontext = (g if s is None else g * s).sum(1, keepdim=True)
    dv = p * dcontext
    dk = dv * (masked_values(v, mask) - context)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _token_softmax(k: Tensor, mask: Tensor | None) -> Tensor:
    # (B, T, D): zero where every key is minus infinity or masked.
    keys = masked_keys(k, mask)
    p = torch.softmax(keys, dim=1)
    if may_branch(p) and not bool(p[:, 0].isnan().any()):
        return p
    return p.masked_fill(keys.amax(dim=1, keepdim=True) == float('-inf'), 0.0)
