"""The declaration of an operation, from which operators, FLOP counts, derivatives, checks and tests are made.

`operator.register` makes its operators. The folders beside this file are examples, the shortest is `simple`.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from aft_vision.ops.common.inputs import check_qkv, empty_denominator
from aft_vision.ops.common.numerics import call_without_autocast


class Shape(NamedTuple):
    """The size of inputs for a test: sequences, a grid of tokens, channels, channels per head, and a window.

    `column_window` is that along columns where an operation has another one there; None leaves it to the operation.
    """

    B: int
    grid: tuple[int, int]
    D: int
    channels: int
    window: int
    column_window: int | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return self.D // self.channels


@dataclass(eq=False)
class Form:
    """One way to compute an operation.

    Attributes:
        backend: asks for the first of its forms that supports the inputs.
        forward: computes (inputs, save): y, and the tensor saved for the backward, or None.
        backward: computes (grad, y, saved, inputs, need_bias): gradients of q, k, v, the biases and the other
            differentiable inputs, by their formulas (autograd is off). An input that is None has an empty one, and so
            has a bias without need_bias.
        supports: returns whether it supports these inputs on this machine.
        check: raises an error where it should run for such inputs, and something on this machine is broken.
        name: asks for this form alone, as a backend does; that of its backend unless another is given.
        takes_weights: its forward takes those of `BiasWeights` as a third argument, or None.
        is_candidate: returns whether it can compute inputs that `supports` leaves to another form. It then runs if it
            is asked for by name, or is measured to be the fastest with a bias that does not change.
    """

    backend: str
    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., Sequence[Tensor]]
    supports: Callable[[Any], bool] = lambda inputs: True
    check: Callable[[Any], None] = lambda inputs: None
    name: str = ''
    takes_weights: bool = False
    is_candidate: Callable[[Any], bool] = lambda inputs: False

    def __post_init__(self) -> None:
        self.name = self.name or self.backend

    def run_forward(self, inputs: Any, save: bool, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the forward, without autocast."""
        given = (weights,) if weights is not None and self.takes_weights else ()
        return call_without_autocast(self.forward, inputs.v, inputs, save, *given)

    def run_backward(self, grad: Tensor, y: Tensor, saved: Tensor, inputs: Any, need_bias: bool) -> Sequence[Tensor]:
        """Compute the backward, without autocast."""
        return call_without_autocast(self.backward, grad, grad, y, saved, inputs, need_bias)


class BiasWeights(NamedTuple):
    """Weights of a position bias as the kernels read them, computed once for all calls if the bias does not change.

    Attributes:
        shape: names of the dimensions of the bias, of which the last two are equal.
        make: computes the weights from the bias and values of such a call.
        layout: returns their shape and type, from the same.
        inputs: returns inputs of such a call, to ask the forms whether they support it.
    """

    shape: tuple[str, ...]
    make: Callable[[Tensor, Tensor], Tensor]
    layout: Callable[[Tensor, Tensor], tuple[tuple[int, ...], torch.dtype]]
    inputs: Callable[[Tensor, Tensor], Any]


@dataclass(eq=False)
class Operation:
    """y = sigmoid(q) * (W (e^k v)) / (W e^k), with weights W = e^w of targets and sources by a position bias w.

    Attributes:
        name: of the operators aft_vision::NAME and aft_vision::NAME_backward.
        inputs: a NamedTuple: q, k, v, the operation's own inputs, mask, then flags. An input `grid` is (H, W) in
            tokens; with one, k has a channel for each head.
        forms: for a CPU, for a GPU, and last, in torch operations, for any inputs. Of two for one device the faster is
            first.
        check: raises a ValueError for inputs whose shapes do not match.
        causal: a target sees only the sources up to it.
        biases: names of the position biases, whose gradients are sums over the batch.
        differentiable: names of further inputs that have gradients besides q, k, v and the biases. A gradient of any
            other input is an error.
        empty_saved: allocates from (k, v, save) what the forward keeps for the backward; None if that is nothing.
        graph: computes it in plain differentiable operations, for transforms of `torch.func`, forward mode and second
            derivatives, in float64; and for exporters, unless causal: `backend='aten'` asks for it.
        weights: of its bias, if a form takes any.
        products: returns from inputs with shapes in place of tensors the multiplications of the forward, for FLOPs: a
            gradient of the biases repeats the first number, and the gradients of all other inputs together take twice
            the second and once the first; `flops.mean_products` counts a weighted mean. Without it counting fails.
        reference: computes it term by term, for tests.
        draw: returns the operation's own inputs of a shape, for tests, by name; takes a function that draws a tensor of
            given sizes.
        operator: computes (*inputs, backend), once it is registered.
    """

    name: str
    inputs: Any
    forms: tuple[Form, ...]
    check: Callable[[Any], None] = check_qkv
    causal: bool = False
    biases: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    empty_saved: Callable[[Tensor, Tensor, bool], Tensor] | None = empty_denominator
    graph: Callable[..., Tensor] | None = None
    weights: BiasWeights | None = None
    products: Callable[[Any], tuple[int, int]] | None = None
    reference: Callable[..., Tensor] | None = None
    draw: Callable[[Shape, Callable[..., Tensor]], dict[str, Any]] = lambda shape, draw: {}
    operator: Any = field(default=None, init=False)

    @property
    def has_grid(self) -> bool:
        """Return whether the tokens are on a grid, and k has a channel for each head."""
        return 'grid' in self.inputs._fields

    @functools.cached_property
    def flags(self) -> list[str]:
        """Return the names of its boolean inputs."""
        return [name for name, kind in get_type_hints(self.inputs).items() if kind is bool]

    def key_channels(self, shape: Shape) -> int:
        """Return the channels of k in inputs of a shape."""
        return shape.heads if self.has_grid else shape.D

    def form(self, backend: str) -> Form | None:
        """Return the first form of a backend, or None."""
        return next((form for form in self.forms if form.backend == backend), None)


# Those that are registered, by name.
OPERATIONS: dict[str, Operation] = {}


def lazy_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module below `aft_vision.ops` that is imported at its first call.

    A machine may lack what the module needs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_module(module), name)(*args, **kwargs)

    return call


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f'aft_vision.ops.{name}')
