"""AFT-conv with one biased offset per head in Triton (AFT Eq. 10)."""

import torch
import triton
from torch import Tensor

from aft_vision.ops.common.inputs import empty_output
from aft_vision.ops.common.launch import as_bytes, launching, like, rows, strides
from aft_vision.ops.conv.onehot import OnehotInputs
from aft_vision.ops.conv.onehot_kernels import backward_kernel, forward_kernel


def onehot_forward(inputs: OnehotInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y, and nothing saved (AFT Eq. 10)."""
    q, k, v, offset, weight, grid, mask = inputs
    y = empty_output(q, v)
    (B, T, D), q, k, v = v.shape, rows(q), rows(k), rows(v)
    dy, dx = _offsets(offset, T)
    with launching('onehot_forward', v):
        forward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            q,
            k,
            v,
            as_bytes(mask),
            dy,
            dx,
            weight.float().contiguous(),
            y,
            T,
            D,
            *grid,
            D // k.shape[2],
            strides(k, v, q),
        )
    return y, k.new_empty(0)


def onehot_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: OnehotInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and weight."""
    q, k, v, offset, weight, grid, mask = inputs
    (B, T, D), grad, q, k, v = v.shape, rows(grad), rows(q), rows(k), rows(v)
    y, heads = y.contiguous(), k.shape[2]
    dq, dv = None if q is None else like(q), like(v)
    # Sum over the channels of a head.
    dk = like(k) if heads == D else torch.empty(v.shape, dtype=torch.float32, device=v.device)
    dw = torch.empty((B, D), dtype=torch.float32, device=v.device)
    dy, dx = _offsets(offset, T)
    tensors = (grad, y, q, k, v, as_bytes(mask), dy, dx, weight.float().contiguous())
    with launching('onehot_backward', v):
        backward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            *tensors, dq, dk, dv, dw, T, D, *grid, D // heads, strides(k, v, grad, q)
        )
    if heads != D:
        dk = dk.unflatten(2, (heads, -1)).sum(3).to(k.dtype)
    dweight = dw.view(B, heads, -1).sum((0, 2)).to(weight.dtype) if need_bias else weight.new_empty(0)
    return k.new_empty(0) if dq is None else dq, dk, dv, dweight


def _offsets(offset: Tensor, tokens: int) -> Tensor:
    # (2, h) int32: far outside the grid is as good as further.
    return offset.clamp(-tokens, tokens).int().t().contiguous()
