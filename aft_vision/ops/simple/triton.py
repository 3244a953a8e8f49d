"""AFT-simple in Triton (AFT Eq. 5)."""

import triton
from torch import Tensor

from aft_vision.ops.common.inputs import Qkv, empty_context, empty_output
from aft_vision.ops.common.launch import as_bytes, launching, like, rows, strides
from aft_vision.ops.simple.kernels import backward_kernel, forward_kernel


def simple_forward(inputs: Qkv, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the context (B, 1, D) that every target shares (AFT Eq. 5)."""
    q, k, v, mask = inputs
    y, context = empty_output(q, v), empty_context(k, v, save)
    (B, T, D), q, k, v = v.shape, rows(q), rows(k), rows(v)
    with launching('simple_forward', v):
        forward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            q, k, v, as_bytes(mask), y, context if save else None, T, D, strides(q, k, v)
        )
    return y, context


def simple_backward(
    grad: Tensor, y: Tensor, context: Tensor, inputs: Qkv, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    q, k, v, mask = inputs
    (B, T, D), grad, q, k, v = v.shape, rows(grad), rows(q), rows(k), rows(v)
    dq, dk, dv = None if q is None else like(q), like(k), like(v)
    with launching('simple_backward', v):
        backward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            grad, context.contiguous(), q, k, v, as_bytes(mask), dq, dk, dv, T, D, strides(grad, q, k, v)
        )
    return k.new_empty(0) if dq is None else dq, dk, dv
