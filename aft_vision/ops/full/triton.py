"""AFT-full in Triton (AFT Eq. 2)."""

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from aft_vision.ops.common.inputs import FullInputs, empty_denominator, empty_output
from aft_vision.ops.common.kernels import FLOOR
from aft_vision.ops.common.launch import as_bytes, launching, like, product_type, products, rows, strides
from aft_vision.ops.full.kernels import backward_kernel, bias_kernel, column_kernel, forward_kernel

# The gradient of the bias is cut into parts, so that this many tiles of the size below run at once.
BIAS_TILES = 1024
BIAS_TILE = 64
# Rows of weights are padded to a multiple of this.
ROW_MULTIPLE = 16


def full_forward(inputs: FullInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators (AFT Eq. 2)."""
    q, k, v, bias, mask = inputs
    y, den = empty_output(q, v), empty_denominator(k, v, save)
    (B, T, D), q, k, v, bias = v.shape, rows(q), rows(k), rows(v), bias.contiguous()
    weights, constants = _weights(bias, v), products(v)
    with launching('full_forward', v):
        forward_kernel[lambda tile: (triton.cdiv(T, tile['BT']) * triton.cdiv(D, tile['BD']) * B,)](
            q,
            k,
            v,
            as_bytes(mask),
            weights,
            weights.stride(0),
            bias,
            y,
            den if save else None,
            T,
            D,
            strides(k, v, q),
            **constants,
        )
    return y, den


def full_backward(
    grad: Tensor, y: Tensor, den: Tensor, inputs: FullInputs, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and bias."""
    q, k, v, bias, mask = inputs
    (B, T, D), grad, q, k, v, bias = v.shape, rows(grad), rows(q), rows(k), rows(v), bias.contiguous()
    y, den = y.contiguous(), den.contiguous()
    dq, dk, dv = None if q is None else like(q), like(k), like(v)
    weights, constants, mask = _weights(bias, v), products(v), as_bytes(mask)
    peak, lowest = torch.empty((2, B, D), dtype=torch.float32, device=v.device)
    with launching('full_backward', v):
        column_kernel[lambda tile: (B * triton.cdiv(D, tile['BD']),)](k, mask, den, peak, lowest, T, D, *strides(k))
        tensors = (grad, y, den, q, k, v, mask, weights, weights.stride(0), bias, peak, lowest)
        steps = strides(k, v, grad, q)
        backward_kernel[lambda tile: (triton.cdiv(T, tile['BS']) * triton.cdiv(D, tile['BD']) * B,)](
            *tensors, dq, dk, dv, T, D, steps, **constants
        )
        dbias = _bias_grad(tensors, v, steps, constants).to(bias.dtype) if need_bias else bias.new_empty(0)
    return k.new_empty(0) if dq is None else dq, dk, dv, dbias


def _bias_grad(inputs: tuple[Any, ...], v: Tensor, steps: tuple[int, ...], constants: dict[str, Any]) -> Tensor:
    # (T, T) float32. Parts are added in one order: the same every time.
    B, T, D = v.shape
    pairs = B * triton.cdiv(D, BIAS_TILE)
    splits = max(1, min(BIAS_TILES // triton.cdiv(T, BIAS_TILE) ** 2, pairs))
    parts = torch.empty((splits, T, T), dtype=torch.float32, device=v.device)
    bias_kernel[lambda tile: (triton.cdiv(T, tile['BT']), triton.cdiv(T, tile['BS']), splits)](
        *inputs, parts, B, T, D, steps, **constants
    )
    return parts.sum(0)


def _weights(bias: Tensor, v: Tensor) -> Tensor:
    # exp(w - row maximum), (T, T padded), in the type of the products. Rows are aligned for vector loads.
    bias = bias.float()
    # A row of minus infinity sees no source.
    weights = (bias - bias.amax(dim=1, keepdim=True).clamp_min(FLOOR.value)).exp_().to(product_type(v))
    return F.pad(weights, (0, -len(bias) % ROW_MULTIPLE))
