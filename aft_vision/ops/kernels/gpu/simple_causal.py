"""AFT-simple up to each token in Triton (AFT Eq. 5, footnote 2)."""

import torch
import triton
from torch import Tensor

from aft_vision.ops.eager.numerics import empty_denominator, empty_output
from aft_vision.ops.kernels.gpu.device.common import FLOOR
from aft_vision.ops.kernels.gpu.device.simple_causal import GROUP, backward_kernel, forward_kernel, group_kernel
from aft_vision.ops.kernels.gpu.launch import as_bytes, launching, like, rows, strides

# Channels of a program that looks for the largest key of a group.
GROUP_CHANNELS = 64


def simple_causal_forward(
    q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """y and the denominators, each relative to the largest key up to its token (AFT Eq. 5, causal)."""
    y, den = empty_output(q, v), empty_denominator(k, v, save)
    (B, T, D), q, k, v = v.shape, rows(q), rows(k), rows(v)
    with launching('simple_causal_forward', v):
        forward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            q, k, v, as_bytes(mask), y, den if save else None, T, D, strides(q, k, v)
        )
    return y, den


def simple_causal_backward(
    grad: Tensor,
    y: Tensor,
    den: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    (B, T, D), grad, q, k, v, mask = v.shape, rows(grad), rows(q), rows(k), rows(v), as_bytes(mask)
    dq, dk, dv = None if q is None else like(q), like(k), like(v)
    groups = triton.cdiv(T, GROUP.value)
    peaks = torch.full((B, 1 + groups, D), FLOOR.value, dtype=torch.float32, device=k.device)
    with launching('simple_causal_backward', v):
        grid = (B * groups * triton.cdiv(D, GROUP_CHANNELS),)
        group_kernel[grid](k, mask, peaks, T, D, *strides(k), BD=GROUP_CHANNELS)
        backward_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](
            grad, y, den, q, k, v, mask, peaks.cummax(1).values, dq, dk, dv, T, D, strides(grad, q, k, v)
        )
    return k.new_empty(0) if dq is None else dq, dk, dv
