"""Floating-point operations of every operator, for `torch.utils.flop_counter` and for fvcore.

The count follows torch's for products and convolutions: two per multiply-add of the paper's algorithm, whichever form
runs. Each operation declares its products; `mean_products` counts those of AFT. Element-wise operations are not
counted: exponentials, divisions, gates.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from aft_vision.ops.declaration import OPERATIONS, Operation


def mean_products(inputs: Any, window: int, shares_sum: bool) -> tuple[int, int]:
    """Count the multiplications of a weighted mean over the sources, for `Operation.products`.

    A target weights the values and keys of `window` sources individually. If all other sources count too
    (AFT Eq. 4, 5, 6), all targets share one sum over e^k v:

        forward  = 2 B T (window (D + h) + D)
        backward = 2 B T (window (D + h) (1, with a gradient of the bias 2) + 2 D)

    AFT-full and AFT-axial have no such sum. As in torch's count of a padded convolution and of causal attention,
    sources beyond the edges and in the future are included.

    Args:
        inputs: with shapes instead of tensors.

    Returns:
        The multiplications by weights of single sources, and those of the shared sum.
    """
    batch, tokens, dim = inputs.v
    return batch * tokens * window * (dim + inputs.k[2]), batch * tokens * dim * shares_sum


def count_products(operation: Operation, inputs: Sequence[Any]) -> tuple[int, int]:
    """Count the multiplications of an operation's forward.

    Args:
        inputs: its inputs in order, with shapes instead of tensors; more may follow.

    Returns:
        Those that a gradient of the biases repeats, and all others.

    Raises:
        ValueError: the operation declares none.
    """
    if operation.products is None:
        raise ValueError(
            f'{operation.name} declares no floating-point operations: give its Operation `products`, for a mean over '
            'all sources `products=lambda x: ops.mean_products(x, x.v[1], False)`'
        )
    return operation.products(operation.inputs._make(inputs[: len(operation.inputs._fields)]))


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
