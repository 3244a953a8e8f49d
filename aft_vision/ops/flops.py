"""Floating-point operations of every operator, for `torch.utils.flop_counter` and for fvcore.

The count follows torch's for products and convolutions: two per multiply-add of the paper's algorithm, whichever form
runs. A target weights the values and keys of `window` sources individually. If all other sources count too
(AFT Eq. 4, 5, 6), all targets share one sum over e^k v:

    forward  = 2 B T (window (D + h) + D)
    backward = 2 B T (window (D + h) (1, with a gradient of the bias 2) + 2 D)

Each operation declares its `window`, and whether it has the other terms: AFT-full and AFT-axial have none. As in
torch's count of a padded convolution and of causal attention, sources beyond the edges and in the future are included.
Element-wise operations are not: exponentials, divisions, gates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from aft_vision.ops.declaration import OPERATIONS, Operation


def count_products(operation: Operation, inputs: Sequence[Any]) -> tuple[int, int]:
    """Count the multiplications of an operation's forward.

    Args:
        inputs: its inputs in order, with shapes instead of tensors; more may follow.

    Returns:
        The multiplications by weights of single sources, and those of the sum that all targets share.
    """
    named = operation.inputs._make(inputs[: len(operation.inputs._fields)])
    batch, tokens, dim = named.v
    if operation.products is None:
        window, has_sum = (tokens, False) if operation.biases else (0, True)
    else:
        window, has_sum = operation.products(named)
    return batch * tokens * window * (dim + named.k[2]), batch * tokens * dim * has_sum


def jit_handles() -> dict[str, Callable[[Sequence[Any], Sequence[Any]], int]]:
    """Return handles for fvcore to count the operators, by their names in a traced graph.

    `FlopCountAnalysis(model, images).set_op_handle(**jit_handles())`. As in fvcore, a handle counts a multiply-add as
    one.
    """
    return {f'aft_vision::{name}': _jit_handle(operation) for name, operation in OPERATIONS.items()}


def _jit_handle(operation: Operation) -> Callable[[Sequence[Any], Sequence[Any]], int]:
    def handle(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        shapes = [x.type().sizes() if x.isCompleteTensor() else x.toIValue() for x in inputs]
        return sum(count_products(operation, shapes))

    return handle


def register(operation: Operation) -> None:
    """Register the counts of an operation's two operators with torch."""

    @register_flop_formula(getattr(torch.ops.aft_vision, operation.name))
    def forward(*inputs: Any, **_: Any) -> int:
        return 2 * sum(count_products(operation, inputs))

    @register_flop_formula(getattr(torch.ops.aft_vision, f'{operation.name}_backward'))
    def backward(grad: Any, y: Any, saved: Any, *inputs: Any, **_: Any) -> int:
        each, total = count_products(operation, inputs)
        need_bias = inputs[-2]
        return 2 * (each * (1 + need_bias) + 2 * total)
