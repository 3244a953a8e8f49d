"""AFT-axial on a GPU: an AFT-conv whose kernel covers the grid."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_vision.ops.axial.eager import AxialInputs
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.triton import conv_backward, conv_forward


def axial_forward(inputs: AxialInputs, save: bool) -> tuple[Tensor, Tensor]:
    """Return y and the denominators."""
    return conv_forward(_as_conv(inputs), save)


def axial_backward(grad: Tensor, y: Tensor, den: Tensor, inputs: AxialInputs, need_bias: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and both biases."""
    # Products are in float32, as in the torch form: the gradient of a bias sums over a whole axis, where it cancels.
    *grads, dkernel = conv_backward(grad, y, den, _as_conv(inputs), need_bias, torch.float32)
    return *grads, *(_sum_pairs(dkernel, inputs) if need_bias else [dkernel, dkernel.clone()])


def _as_conv(inputs: AxialInputs) -> ConvInputs:
    """Return AFT-conv with the same bias of all pairs of tokens: its square kernel is the sum over both axes."""
    (height, width), side = inputs.grid, max(inputs.grid)

    def spread(bias: Tensor, length: int) -> Tensor:
        # Relative to the largest on the grid, which cancels, so that the sum is as exact as its terms.
        wide = F.pad(bias.float(), [_margin(bias, inputs)] * 2)
        most = wide[:, side - length : side + length - 1].amax(1, keepdim=True)
        return wide - most.clamp_min(torch.finfo(torch.float32).min)

    kernel = spread(inputs.row_bias, height)[:, :, None] + spread(inputs.column_bias, width)[:, None]
    return ConvInputs(*inputs[:3], kernel, inputs.grid, inputs.mask, True)


def _sum_pairs(dkernel: Tensor, inputs: AxialInputs) -> list[Tensor]:
    # Gradients of both biases from that of the kernel.
    found = (inputs.row_bias, dkernel.sum(2)), (inputs.column_bias, dkernel.sum(1))
    return [F.pad(grad, [-_margin(bias, inputs)] * 2).to(bias.dtype) for bias, grad in found]


def _margin(bias: Tensor, inputs: AxialInputs) -> int:
    # What a bias lacks at both ends to all shifts of the kernel; negative if it has more.
    return max(inputs.grid) - (bias.shape[1] + 1) // 2
