"""AFT-simple in Triton (AFT Eq. 5)."""

import triton
from torch import Tensor

from aft_vision.ops.common.launch import as_bytes, launching, like, rows, strides
from aft_vision.ops.common.numerics import empty_output
from aft_vision.ops.full.eager import empty_context
from aft_vision.ops.simple.kernels import backward_kernel, forward_kernel


def simple_forward(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    """y and the context (B, 1, D) that every target shares (AFT Eq. 5)."""
    y, context = empty_output(q, v), empty_context(k, v, save)
    (B, T, D), q, k, v = v.shape, rows(q), rows(k), rows(v)
    with launching('simple_forward', v):
        forward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            q, k, v, as_bytes(mask), y, context if save else None, T, D, strides(q, k, v)
        )
    return y, context


def simple_backward(
    grad: Tensor,
    y: Tensor,
    context: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    (B, T, D), grad, q, k, v = v.shape, rows(grad), rows(q), rows(k), rows(v)
    dq, dk, dv = None if q is None else like(q), like(k), like(v)
    with launching('simple_backward', v):
        backward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            grad, context.contiguous(), q, k, v, as_bytes(mask), dq, dk, dv, T, D, strides(grad, q, k, v)
        )
    return k.new_empty(0) if dq is None else dq, dk, dv
