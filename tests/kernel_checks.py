"""The Triton kernels of an operation next to its torch form in float64, with every size of tiles."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from helpers import BOUNDS, NASTY_BOUND, assert_close
from torch import Tensor

from aft_vision.ops.declaration import OPERATIONS, Form, Operation, Shape

KERNELS = [name.removeprefix('aft_') for name, x in OPERATIONS.items() if x.form('triton')]
# A spread of keys and biases that underflows in float32 but not in float64.
WIDE = 30.0
# The result, and the gradients of q, k, v and the biases, of which AFT-axial has two.
PARTS = ('y', 'dq', 'dk', 'dv', 'dbias', 'dbias of columns')
# The types of q, k, v and the biases; one type if all are equal.
Types = tuple[torch.dtype, ...]
Result = TypeVar('Result')


def find_operation(name: str) -> tuple[Operation, Form]:
    """The operation of a name without its first part, and its form in Triton."""
    operation = OPERATIONS[f'aft_{name}']
    form = operation.form('triton')
    assert form is not None
    return operation, form


def run_each(function: Callable[[], Result], most: int | None = None) -> Iterator[Result]:
    """The results of a function with the i-th size of tiles of its tuners, or their last, for each i; nothing is timed.

    most: the largest number of results; None is one for each size of any tuner that runs.
    """
    from triton.runtime.errors import OutOfResources, PTXASError

    from aft_vision.ops.common.tuner import Tuner

    known, i = 1, 0

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal known
        known = max(known, len(self.configs))
        first, chosen = self.configs[0], self.configs[min(i, len(self.configs) - 1)]
        try:
            return self.fn.run(*args, **kwargs, **chosen.all_kwargs())
        except (OutOfResources, PTXASError):
            # A tuner leaves such a size out; while a graph is captured the first one must work.
            if chosen is first:
                raise
            return self.fn.run(*args, **kwargs, **first.all_kwargs())

    while i < known and i != most:
        with mock.patch.object(Tuner, 'run', run):
            result = function()
        yield result
        i += 1


def draw_inputs(operation: Operation, shape: Shape, types: Types, device: str, spread: float = 1.0) -> Any:
    """The NamedTuple of the inputs of an operation: random, with a mask; `spread` scales keys and biases."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    q, k, v = (draw(shape.B, shape.tokens, n) for n in (shape.D, operation.key_channels(shape), shape.D))
    inputs = {'q': q, 'k': spread * k, 'v': v, 'mask': (torch.arange(shape.tokens) % 7 != 3).repeat(shape.B, 1)}
    inputs |= operation.draw(shape, lambda *sizes: spread * draw(*sizes))
    inputs |= dict.fromkeys(operation.flags, spread == 1.0)
    remaining = itertools.cycle(types)

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, next(remaining)) if x.is_floating_point() else x.to(device)

    return operation.inputs(**{name: place(inputs[name]) for name in operation.inputs._fields})


def double(inputs: Any) -> Any:
    """The inputs in float64."""
    return inputs._make(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def run_form(form: Form, inputs: Any) -> tuple[Tensor, ...]:
    """The PARTS of an operation in one of its forms."""
    y, saved = form.forward(inputs, True)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(y)
    return y, *form.backward(grad, y, saved, inputs, True)


def assert_parts_agree(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], types: Types, spread: float) -> None:
    """Assert that what a form found in these types is within their bounds of the same in float64."""
    # If weights select one source, gradients of keys and biases are differences of terms as large as the gradients of
    # v.
    floor = 0.0 if spread == 1.0 else float(wanted[3].norm())
    for i, (name, x, expected) in enumerate(zip(PARTS, found, wanted, strict=False)):
        bound = max(*(BOUNDS[dtype][min(i, 1)] for dtype in types), 0.0 if spread == 1.0 else NASTY_BOUND)
        assert_close(x, expected, bound, name, floor if i else 0.0)


def assert_kernels_agree(name: str, types: Types, device: str, *shapes: Shape, most: int | None = None) -> None:
    """The kernels agree with the torch form, on ordinary inputs and on inputs that underflow.

    most: how many sizes of tiles at most; None is all.
    """
    operation, kernels = find_operation(name)
    for shape, spread in itertools.product(shapes, (1.0, WIDE)):
        inputs = draw_inputs(operation, shape, types, device, spread)
        wanted = run_form(operation.forms[-1], double(inputs))
        for found in run_each(partial(run_form, kernels, inputs), most):
            assert_parts_agree(found, wanted, types, spread)
