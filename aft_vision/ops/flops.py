"""Floating-point operations of every operator, for `torch.utils.flop_counter` and for fvcore.

The count follows torch's for products and convolutions: two per multiply-add of the paper's algorithm, whichever form
runs. A target weights the values and keys of `window` sources individually. If all other sources count too
(AFT Eq. 4, 5, 6), all targets share one sum over e^k v:

    forward  = 2 B T (window (D + h) + D)
    backward = 2 B T (window (D + h) (1, with a gradient of the bias 2) + 2 D)

AFT-full and AFT-axial have only the first term, AFT-simple only the second. `window` is T for AFT-full, H + W for
AFT-axial, the taps s s for AFT-conv, 1 for AFT-onehot, and the width of the band for AFT-local, at most T. As in
torch's count of a padded convolution and of causal attention, sources beyond the edges and in the future are included.
Element-wise operations are not: exponentials, divisions, gates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]

# Sources that a target weights one by one, from the shapes of v and of what follows it, the bias first.
WINDOWS: dict[str, Callable[..., int]] = {
    'aft_full': lambda v, *_: v[1],
    'aft_simple': lambda v, *_: 0,
    'aft_local': lambda v, band, *_: min(v[1], band[1]),
    'aft_conv': lambda v, kernel, *_: kernel[1] * kernel[2],
    'aft_onehot': lambda v, *_: 1,
    'aft_axial': lambda v, row_bias, column_bias, grid, *_: grid[0] + grid[1],
    'aft_full_causal': lambda v, *_: v[1],
    'aft_local_causal': lambda v, band, *_: min(v[1], band[1]),
    'aft_simple_causal': lambda v, *_: 0,
}


def count_products(name: str, inputs: Sequence[Any]) -> tuple[int, int]:
    """Count the multiplications of an operator's forward.

    Args:
        name: name of the operator.
        inputs: its inputs in order, with shapes instead of tensors.

    Returns:
        The multiplications by weights of single sources, and those of the sum that all targets share.
    """
    k, v = inputs[1:3]
    batch, tokens, dim = v
    has_sum = inputs[6] if name == 'aft_conv' else not name.startswith(('aft_full', 'aft_axial'))
    each = WINDOWS[name](*inputs[2:]) * (dim + k[2])
    return batch * tokens * each, batch * tokens * dim * has_sum


def jit_handles() -> dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]:
    """Return handles for fvcore to count the operators, by their names in a traced graph.

    `FlopCountAnalysis(model, images).set_op_handle(**jit_handles())`. As in fvcore, a handle counts a multiply-add as
    one.
    """
    return {f'aft_vision::{name}': _jit_handle(name) for name in WINDOWS}


def _jit_handle(name: str) -> Callable[[Sequence[Any], Sequence[Any]], int]:
    def handle(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return sum(count_products(name, [x.type().sizes() if x.isCompleteTensor() else x.toIValue() for x in inputs]))

    return handle


def _register(name: str) -> None:
    @register_flop_formula(getattr(torch.ops.aft_vision, name))
    def forward(*inputs: Any, **_: Any) -> int:
        return 2 * sum(count_products(name, inputs))

    @register_flop_formula(getattr(torch.ops.aft_vision, f'{name}_backward'))
    def backward(grad: Shape, y: Shape, saved: Shape, *inputs: Any, **_: Any) -> int:
        each, total = count_products(name, inputs)
        need_bias = inputs[-2]
        return 2 * (each * (1 + need_bias) + 2 * total)


for _name in WINDOWS:
    _register(_name)
