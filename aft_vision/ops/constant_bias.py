"""Calls with a position bias that does not change: its weights as kernels read them, and the fastest form."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from aft_vision.ops.common import cpp
from aft_vision.ops.common.choice import fastest
from aft_vision.ops.common.numerics import without_autocast
from aft_vision.ops.common.ordinary import is_ordinary
from aft_vision.ops.declaration import OPERATIONS, Form, Operation

# Sizes of inputs for which an operator knows the fastest form by heart.
MAX_SIZES = 1000


def bias_weights(name: str, bias: Tensor, v: Tensor) -> Tensor | None:
    """Compute what the compiled forms read of a position bias, once for all calls with a bias that does not change.

    Args:
        name: 'aft_full' or 'aft_conv'.
        bias: (T, T) of `aft_full`, or the kernel (h, s, s) of `aft_conv`.
        v: values of such a call, which decide by their device, type and shape.

    Returns:
        The argument `weights` of that operation; None where no form takes any, or a compiler, a transform, a mode or a
        subclass sees the call.

    Raises:
        ValueError: name is another one, or bias has another shape.
    """
    weighed = sorted(x.name for x in OPERATIONS.values() if x.weights is not None)
    if name not in weighed:
        raise ValueError(f'name must be one of {", ".join(weighed)}, got {name!r}')
    operation, weights = OPERATIONS[name], OPERATIONS[name].weights
    assert weights is not None
    if bias.ndim != len(weights.shape) or bias.shape[-1] != bias.shape[-2]:
        raise ValueError(f'bias must have shape ({", ".join(weights.shape)}) for {name}, got {tuple(bias.shape)}')
    # Compiled forms read the memory of plain tensors.
    if not is_ordinary((bias, v)):
        return None
    inputs = weights.inputs(bias, v)
    if not any(form.supports(inputs) or form.is_candidate(inputs) for form in _weighing_forms(operation)):
        return None
    with without_autocast('cpu'):
        return weights.make(bias.detach(), v)


def check_weights(operation: Operation, inputs: Any, weights: Tensor) -> None:
    """Raise a ValueError unless weights are those of a bias, whichever form runs; without a compiler none has any."""
    if operation.weights is None or cpp.library() is None or (cpp.failures and not _weighing_forms(operation)):
        return
    shape, dtype = operation.weights.layout(getattr(inputs, operation.biases[0]), inputs.v)
    if weights.shape != shape or weights.dtype != dtype or not weights.is_contiguous():
        raise ValueError(
            f'weights must be those of `ops.bias_weights`, {shape} in {dtype}, got {tuple(weights.shape)} in '
            f'{weights.dtype}'
        )


def fastest_form(operation: Operation, default: Form, inputs: Any, weights: Tensor) -> Form:
    """Return the form measured to be the fastest on a CPU for such sizes, with weights of a constant bias.

    Args:
        default: what 'auto' chooses, which runs where nothing can be measured.
    """
    measured = operation.operator.measured
    v, flags = inputs.v, [getattr(inputs, name) for name in operation.flags]
    given = inputs.q is not None, inputs.mask is not None, *flags
    key = v.shape, inputs.k.shape, weights.shape, v.dtype, given, torch.get_num_threads()
    found = measured.get(key)
    if found is None:
        if len(measured) >= MAX_SIZES:
            measured.clear()
        found = measured[key] = _measure(operation, default, inputs, weights, given)
    return found


def _measure(operation: Operation, default: Form, inputs: Any, weights: Tensor, given: tuple[bool, ...]) -> Form:
    # A power of two stands for the numbers of sequences and of tokens up to it.
    batch, tokens = (1 << (size - 1).bit_length() for size in inputs.v.shape[:2])
    sizes = {'B': batch, 'T': tokens, 'D': inputs.v.shape[2], 'keys': inputs.k.shape[2]}
    if operation.has_grid:
        sizes['s'] = getattr(inputs, operation.biases[0]).shape[-1]
    present = [name for name, here in zip(('q', 'mask', *operation.flags), given, strict=True) if here]
    shape = *(f'{name}={size}' for name, size in sizes.items()), inputs.v.dtype, *present
    others = [form for form in operation.forms if form is not default and operation.operator.is_sound(form)]
    forms = [default, *(form for form in others if form.is_candidate(inputs))]
    names = [form.name for form in forms]
    ways = [partial(form.run_forward, inputs, False, weights) for form in forms]
    return forms[names.index(fastest(operation.name, shape, dict(zip(names, ways, strict=True))))]


def _weighing_forms(operation: Operation) -> list[Form]:
    return [form for form in operation.forms if form.takes_weights and operation.operator.is_sound(form)]
