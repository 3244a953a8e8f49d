"""AFT-axial: a position bias over rows and columns."""

from typing import Any

import torch
from torch import Tensor

from aft_vision.ops.axial import aten, cpp, eager
from aft_vision.ops.axial.eager import AxialInputs
from aft_vision.ops.common import cpp as compiled
from aft_vision.ops.common.inputs import check_heads
from aft_vision.ops.declaration import Form, Operation, Shape, lazy_function
from aft_vision.ops.flops import mean_products
from aft_vision.ops.operator import register, triton_form

# The longest side of a grid, in tokens, whose pairs of tokens a GPU multiplies.
LONGEST_SIDE = 32


def check_axial(inputs: AxialInputs) -> None:
    """Raise ValueError unless the shapes are those of `ops.aft_axial`."""
    heads = len(inputs.row_bias)
    for name, shape in (('row_bias', inputs.row_bias.shape), ('column_bias', inputs.column_bias.shape)):
        if len(shape) != 2 or shape[0] == 0 or shape[1] % 2 == 0:
            raise ValueError(f'{name} must have shape (h, 2 * s - 1) with h of at least 1, got {tuple(shape)}')
        if shape[0] != heads:
            raise ValueError(f'{name} must have the {heads} heads of row_bias, got {shape[0]}')
    check_heads(inputs, heads, 'row_bias')


def _draw(shape: Shape, draw: Any) -> dict[str, Any]:
    # Rows have a bias at the distances of the window, columns by default only at the smallest of them.
    reaches = {'row_bias': shape.window, 'column_bias': shape.column_window or shape.window // 4 + 1}
    return {name: draw(shape.heads, 2 * reach - 1) for name, reach in reaches.items()} | {'grid': shape.grid}


AXIAL = register(
    Operation(
        'aft_axial',
        AxialInputs,
        forms=(
            Form('cpp', cpp.axial_forward, cpp.axial_backward, compiled.supports),
            triton_form(
                *('axial.triton', 'axial_forward', 'axial_backward'), lambda inputs: max(inputs.grid) <= LONGEST_SIDE
            ),
            Form('eager', eager.axial_forward, eager.axial_backward),
        ),
        check=check_axial,
        biases=('row_bias', 'column_bias'),
        graph=aten.aft_axial,
        products=lambda x: mean_products(x, sum(x.grid), False),
        reference=lazy_function('reference', 'aft_axial'),
        draw=_draw,
    )
)
