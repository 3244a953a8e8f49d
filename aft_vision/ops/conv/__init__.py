"""AFT-conv (AFT Eq. 6), and its form with one learned offset per head (AFT Eq. 10)."""

from typing import Any

import torch
from torch import Tensor

from aft_vision.ops.common import cpp as compiled
from aft_vision.ops.common.inputs import check_heads
from aft_vision.ops.conv import aten, cpp, eager, onehot, window
from aft_vision.ops.conv.eager import ConvInputs
from aft_vision.ops.conv.onehot import OnehotInputs
from aft_vision.ops.declaration import BiasWeights, Form, Operation, Shape, lazy_function
from aft_vision.ops.flops import mean_products
from aft_vision.ops.operator import register, triton_form


def check_conv(inputs: ConvInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_conv`."""
    shape = inputs.kernel.shape
    if len(shape) != 3 or shape[0] == 0 or shape[1] != shape[2] or shape[1] % 2 == 0:
        raise ValueError(f'kernel must have shape (h, s, s) with h of at least 1 and s odd, got {tuple(shape)}')
    check_heads(inputs, shape[0], 'kernel')


def check_onehot(inputs: OnehotInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_onehot`."""
    offset, weight = inputs.offset, inputs.weight
    if offset.ndim != 2 or len(offset) == 0 or offset.shape[1] != 2 or offset.dtype != torch.int64:
        raise ValueError(
            f'offset must be int64 of shape (h, 2) with h of at least 1, '
            f'got {offset.dtype} of shape {tuple(offset.shape)}'
        )
    heads = offset.shape[0]
    if tuple(weight.shape) != (heads,):
        raise ValueError(f'weight must have shape ({heads},) to match offset, got {tuple(weight.shape)}')
    check_heads(inputs, heads, 'offset')


def _draw_conv(shape: Shape, draw: Any) -> dict[str, Any]:
    size = shape.window // 2 * 2 + 1
    return {'kernel': draw(shape.heads, size, size), 'grid': shape.grid}


def _draw_onehot(shape: Shape, draw: Any) -> dict[str, Any]:
    # Sources outside the grid for some targets.
    reach = min(shape.window, max(shape.grid) // 2)
    offset = torch.randint(-reach, reach + 1, (shape.heads, 2), generator=torch.Generator().manual_seed(4))
    return {'offset': offset, 'weight': draw(shape.heads), 'grid': shape.grid}


CONV = register(
    Operation(
        'aft_conv',
        ConvInputs,
        forms=(
            Form(
                'cpp',
                window.depthwise_forward,
                window.depthwise_backward,
                window.supports_depthwise,
                name='depthwise',
                takes_weights=True,
            ),
            Form(
                *('cpp', window.wide_forward, cpp.conv_backward, window.supports_wide),
                name='wide',
                takes_weights=True,
                is_candidate=window.is_wide_candidate,
            ),
            Form(
                *('cpp', cpp.conv_forward, cpp.conv_backward, compiled.supports),
                name='conv',
                is_candidate=window.is_wide_candidate,
            ),
            triton_form('conv.triton', 'conv_forward', 'conv_backward'),
            Form('eager', eager.conv_forward, eager.conv_backward),
        ),
        check=check_conv,
        biases=('kernel',),
        graph=aten.aft_conv,
        weights=BiasWeights(
            ('h', 's', 's'),
            window.bias_weights,
            window.weights_layout,
            # A grid that the kernel does not exceed: which one is not known.
            lambda kernel, v: ConvInputs(None, v[..., : len(kernel)], v, kernel, kernel.shape[1:]),
        ),
        products=lambda x: mean_products(x, x.kernel[1] * x.kernel[2], x.global_context),
        reference=lazy_function('reference', 'aft_conv'),
        draw=_draw_conv,
    )
)
ONEHOT = register(
    Operation(
        'aft_onehot',
        OnehotInputs,
        forms=(
            Form('cpp', window.onehot_forward, window.onehot_backward, window.supports_depthwise),
            Form('eager', onehot.onehot_forward, onehot.onehot_backward),
        ),
        check=check_onehot,
        biases=('weight',),
        empty_saved=None,
        graph=aten.aft_onehot,
        products=lambda x: mean_products(x, 1, True),
        reference=lazy_function('reference', 'aft_onehot'),
        draw=_draw_onehot,
    )
)
