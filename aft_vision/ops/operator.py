"""The custom operators `torch.ops.aft_vision.*` of declared operations, and the one place that chooses what runs.

An operator is one node for autograd, `torch.compile`, `torch.export`, FX and TorchScript. Its forward returns the
result and the tensors saved for its backward; the backward is an operator too. In a graph, which may run elsewhere,
each chooses its form. An ordinary call that does not need torch's dispatcher goes straight to its form, and its
backward to the same one. Transforms of `torch.func`, forward mode and second derivatives take the plain graph of the
operation instead, which torch can differentiate and batch.

Private names of torch 2.14 without a public equivalent: the level of forward mode, and whether a profiler is active.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from aft_vision.ops import flops
from aft_vision.ops.common import choice, cpp, launch
from aft_vision.ops.common.inputs import empty_output
from aft_vision.ops.common.ordinary import KINDS, is_ordinary, is_transformed
from aft_vision.ops.constant_bias import check_weights, fastest_form
from aft_vision.ops.declaration import OPERATIONS, Form, Operation, lazy_function
from aft_vision.ops.tracing import grid_arguments, saves_for_backward

BACKENDS = ('auto', 'eager', 'cpp', 'triton')


def triton_form(module: str, forward: str, backward: str, fits: Callable[[Any], bool] = lambda inputs: True) -> Form:
    """Return a form that runs where Triton does, by two functions of a module below `aft_vision.ops`, imported late.

    Args:
        fits: returns whether inputs are small enough.
    """

    def supports(inputs: Any) -> bool:
        return (not inputs.v.is_cpu or launch.interprets()) and fits(inputs) and launch.can_run(inputs)

    lazy = partial(lazy_function, module)
    return Form('triton', lazy(forward), lazy(backward), supports, launch.check)


@functools.cache
def _warn_once(name: str, backend: str) -> None:
    warnings.warn(f'{name} has no {backend!r} form for these inputs on this machine; using eager', stacklevel=2)


def _needs_dispatcher(args: Sequence[Any]) -> bool:
    return not is_ordinary(args) or torch.autograd._profiler_enabled()


class Operator:
    """Bodies, fakes and derivatives of aft_vision::name and aft_vision::name_backward; from `register`.

    The schema follows the inputs: (q, k, v, the operation's own inputs, mask, flags, save), then `backend`.

    Attributes:
        names: of the inputs.
        aten: the graph of backend='aten', if it takes that.
        measured: the forms that `fastest_form` found, by sizes of the inputs.
        gradients: the names that the backward returns gradients of, in its order: q, k, v, the biases, all others.
        gradient_indices, fixed_indices: of `gradients`, and of all others, in `names`.
        candidates: the forms that a backend, or a name of a form, asks for.
        forward_operator, backward_operator: the two.
        recorded: the `torch.autograd.Function` of an ordinary call (*inputs, save, form).
    """

    forward_operator: Any
    backward_operator: Any
    recorded: Any

    def __init__(self, operation: Operation) -> None:
        self.operation, self.name, self.inputs = operation, operation.name, operation.inputs
        self.check, self.forms, self.empty_saved = operation.check, operation.forms, operation.empty_saved
        self.names = list(operation.inputs._fields)
        # The graph of a causal operation is for derivatives only: in float32 a large key of the future hides the past.
        self.aten = None if operation.causal else operation.graph
        self.gradients = ['q', 'k', 'v', *operation.biases, *operation.differentiable]
        self.gradient_indices = [self.names.index(field) for field in self.gradients]
        self.fixed_indices = sorted({*range(len(self.names))} - {*self.gradient_indices})
        self.candidates = {
            name: [form for form in self.forms if name in ('auto', form.backend, form.name)]
            for name in (*BACKENDS, *(form.name for form in self.forms))
        }
        self.measured: dict[tuple[Any, ...], Form] = {}
        choice.on_change.append(lambda: self.measured.clear())
        self.register()

    def __call__(self, *args: Any, weights: Tensor | None = None) -> Tensor:
        """Compute the operation of (*inputs, backend): what a function of `ops` does outside TorchScript.

        Weights of the bias, from `bias_weights`, are used in an ordinary call without gradients.
        """
        backend = args[-1]
        if backend == 'aten' and self.aten is not None:
            # A trace has no sizes to check, nor has a graph of torch.fx.
            if isinstance(args[2], Tensor) and not torch.jit.is_tracing():
                self.check(self.inputs(*args[:-1]))
            return self.aten(*args[:-1])
        if _needs_dispatcher(args):
            if is_transformed():
                self.check_backend(backend)
                return self.derive(args[:-1])
            if self.aten is not None and torch.onnx.is_in_onnx_export():
                return self(*args[:-1], 'aten')
            return self.dispatch(*args)
        inputs = self.inputs._make(args[:-1])
        form = self.choose(backend, inputs)
        if weights is not None:
            check_weights(self.operation, inputs, weights)
            if backend == 'auto' and inputs.v.is_cpu and inputs.v.numel() and not torch.is_grad_enabled():
                form = fastest_form(self.operation, form, inputs, weights)
        return self.compute(form, inputs, weights)

    def derive(self, inputs: Sequence[Any]) -> Tensor:
        """Compute the operation in plain torch operations, of which every derivative and batch is defined.

        In float64, where the exponentials of any keys and biases in float32 that are in use stay in range.

        Raises:
            RuntimeError: the operation declares no graph.
        """
        if self.operation.graph is None:
            raise RuntimeError(
                f'{self.name} has neither forward mode, nor transforms of torch.func, nor second derivatives: declare '
                'Operation(graph=...), which computes it in differentiable torch operations'
            )
        named = self.inputs._make(inputs)
        self.check(named)
        own = named.v if named.q is None else named.q
        return self.operation.graph(*(_widen(x) for x in inputs)).to(own.dtype)

    def compute(self, form: Form, inputs: Any, weights: Tensor | None = None) -> Tensor:
        """Compute the operation of plain tensors in a form that supports them, with a gradient if there is need."""
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return self.recorded.apply(*inputs, True, form)[0]
        if not inputs.v.numel():
            return empty_output(inputs.q, inputs.v)
        return form.run_forward(inputs, False, weights)[0].contiguous()

    def dispatch(self, *args: Any) -> Tensor:
        """Call the operator with (*inputs, backend)."""
        inputs = list(args[:-1])
        if 'grid' in self.names:
            place = self.names.index('grid')
            inputs[1], inputs[place] = grid_arguments(inputs[1], inputs[place])
        return getattr(torch.ops.aft_vision, self.name)(*inputs, saves_for_backward(), args[-1])[0]

    def choose(self, backend: str, inputs: Any) -> Form:
        """Check the inputs and choose the form that runs: 'auto' is the fastest one that supports them.

        A backend, or a form by its name, that was asked for and does not support them is replaced by 'eager', and one
        warning per operator says so.

        Raises:
            ValueError: shapes do not match, or there is no such backend.
            RuntimeError: 'triton' was asked for, is installed, and cannot compile.
        """
        self.check_backend(backend)
        self.check(inputs)
        if not inputs.v.numel():
            return self.forms[-1]
        for form in self.candidates[backend]:
            runs = form.supports(inputs) or (form.name == backend and form.is_candidate(inputs))
            if runs and self.is_sound(form):
                return form
        for form in self.candidates[backend]:
            form.check(inputs)
        _warn_once(self.name, backend)
        return self.forms[-1]

    def is_sound(self, form: Form) -> bool:
        """Return whether a form has passed its trial on this processor, if it is a compiled one."""
        return not cpp.failures or (self.name, form.name, cpp.SINGLE) not in cpp.failures

    def check_backend(self, backend: str) -> None:
        """Raise a ValueError if there is no such backend."""
        if backend not in self.candidates:
            names = self.candidates if self.aten is None else (*self.candidates, 'aten')
            raise ValueError(f'backend must be one of {", ".join(names)}, got {backend!r}')

    def run(self, form: Form, inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        """Run a form, unless there is nothing to compute; in the layout that the fakes promise to the compiler."""
        if not inputs.v.numel():
            return self.empty(inputs, save)
        y, saved = form.run_forward(inputs, save)
        return y.contiguous(), self.empty_kept(inputs, save) if saved is None else saved.contiguous()

    def empty(self, inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        """Return buffers for the results."""
        return empty_output(inputs.q, inputs.v), self.empty_kept(inputs, save)

    def empty_kept(self, inputs: Any, save: bool) -> Tensor:
        """Return a buffer for the tensors saved for the backward."""
        k, v = inputs.k, inputs.v
        return k.new_empty(0) if self.empty_saved is None else self.empty_saved(k, v, save)

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, save, backend = self.inputs._make(args[:-2]), args[-2], args[-1]
        if forward_ad._current_level >= 0:
            # Below autograd the tangents are gone.
            raise RuntimeError(f'aft_vision::{self.name} in a graph has no forward mode; call the function of ops')
        return self.run(self.choose(backend, inputs), inputs, save)

    def forward_fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        inputs, save, backend = self.inputs._make(args[:-2]), args[-2], args[-1]
        self.check_backend(backend)
        self.check(inputs)
        return self.empty(inputs, save)

    def record_forward(self, ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        found = self.run(args[-1], self.inputs._make(args[:-2]), args[-2])
        self.setup_context(ctx, args, found)
        ctx.mark_non_differentiable(found[1])
        ctx.shapes = _shapes(*found, *args[: len(self.names)])
        return found

    def backward(self, *args: Any) -> tuple[Tensor, ...]:
        (grad, y, saved, *kept), need_bias, backend = args[:-2], args[-2], args[-1]
        inputs = self.inputs._make(kept)
        form = self.choose(backend, inputs)
        self.check_results(grad, y, saved, inputs)
        return self.run_backward(form, grad, y, saved, inputs, need_bias)

    def run_backward(
        self, form: Form, grad: Tensor, y: Tensor, saved: Tensor, inputs: Any, need_bias: bool
    ) -> tuple[Tensor, ...]:
        """Run the backward of a form; nothing to compute gives zeros."""
        if grad.numel():
            return tuple([x.contiguous() for x in form.run_backward(grad, y, saved, inputs, need_bias)])
        return tuple(x.zero_() for x in self.backward_fake(grad, y, saved, *inputs, need_bias, form.name))

    def check_results(self, grad: Tensor, y: Tensor, saved: Tensor, inputs: Any) -> None:
        """Raise a ValueError unless grad, y and saved are as the forward of these inputs gives them."""
        out, kept = self.empty(inputs._make(x.to('meta') if isinstance(x, Tensor) else x for x in inputs), True)
        for name, x, like in (('grad', grad, out), ('y', y, out), ('saved', saved, kept)):
            if x.shape != like.shape or x.device != inputs.v.device:
                raise ValueError(
                    f'{name} must have shape {tuple(like.shape)} on {inputs.v.device} to match the inputs, '
                    f'got {tuple(x.shape)} on {x.device}'
                )

    def backward_fake(self, grad: Tensor, y: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs, need_bias = self.inputs._make(args[:-2]), args[-2]
        left_out = () if need_bias else self.operation.biases
        tensors = [None if name in left_out else getattr(inputs, name) for name in self.gradients]
        return tuple(inputs.k.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)

    def register(self) -> None:
        """Register both operators with their fakes, and the gradient of the first."""
        hints = get_type_hints(self.inputs)
        tensors = ', '.join(f'{_SCHEMA_TYPES.get(hints[field], "SymInt[]")} {field}' for field in self.names)
        grads = ', '.join(['Tensor'] * len(self.gradients))
        gradients = f'(Tensor grad, Tensor y, Tensor saved, {tensors}, bool need_bias, str backend) -> ({grads})'
        for name, schema, body, fake in (
            (self.name, f'({tensors}, bool save, str backend) -> (Tensor, Tensor)', self.forward, self.forward_fake),
            (f'{self.name}_backward', gradients, self.backward, self.backward_fake),
        ):
            torch.library.define(f'aft_vision::{name}', schema, tags=torch.Tag.pt2_compliant_tag)
            torch.library.impl(f'aft_vision::{name}', 'default', body)
            torch.library.register_fake(f'aft_vision::{name}', fake)
        torch.library.register_autograd(
            f'aft_vision::{self.name}', self.differentiate, setup_context=self.setup_context
        )
        operators = torch.ops.aft_vision
        self.forward_operator = getattr(operators, self.name).default
        self.backward_operator = getattr(operators, f'{self.name}_backward').default
        methods = {'forward': staticmethod(self.record_forward), 'backward': staticmethod(self.differentiate)}
        self.recorded = type(self.name, (torch.autograd.Function,), methods)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        kept = inputs[: len(self.names)]
        needed = ctx.needs_input_grad
        for place in self.fixed_indices:
            if needed[place]:
                name = self.names[place]
                raise ValueError(
                    f'{self.name} has no gradient of its input {name}, which requires one: '
                    f"declare Operation(differentiable=('{name}',)), or detach it"
                )
        ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in kept))
        # A copy: the caller may change a list.
        ctx.constants = [tuple(x) if isinstance(x, list) else None if isinstance(x, Tensor) else x for x in kept]
        ctx.how = inputs[-1]

    def differentiate(self, ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * (len(self.names) + 2)
        if grad is None:
            return tuple(found)
        y, saved, *kept = ctx.saved_tensors
        inputs = [x if x is not None else constant for x, constant in zip(kept, ctx.constants, strict=True)]
        if torch.is_grad_enabled() or is_transformed():
            return (*self.differentiate_plainly(grad, inputs, ctx.needs_input_grad), None, None)
        # The form of an ordinary call, or the backend of one in a graph.
        form, backend = (ctx.how, ctx.how.name) if isinstance(ctx.how, Form) else (None, ctx.how)
        # The call was captured while gradients were off.
        if self.empty_saved is not None and not saved.numel() and y.numel():
            _, saved = self.forward_operator(*inputs, True, backend)
        need_bias = any(ctx.needs_input_grad[self.names.index(name)] for name in self.operation.biases)
        # Hooks of saved tensors may give back others, which the operator refuses.
        if form is None or _shapes(y, saved, *inputs) != ctx.shapes or _needs_dispatcher((grad, y, saved, *inputs)):
            results = self.backward_operator(grad, y, saved, *inputs, need_bias, backend)
        else:
            results = self.run_backward(form, grad, y, saved, self.inputs._make(inputs), need_bias)
        for place, result in zip(self.gradient_indices, results, strict=True):
            if ctx.needs_input_grad[place]:
                found[place] = result
        return tuple(found)

    def differentiate_plainly(self, grad: Tensor, inputs: list[Any], needed: Sequence[bool]) -> list[Tensor | None]:
        """Differentiate the plain graph: for a derivative of the gradient, or a batch of gradients."""
        with torch.enable_grad():
            # Views: one tensor may be several inputs.
            views = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
            y = self.derive(views)
        places = [place for place in range(len(inputs)) if needed[place]]
        wanted = [views[place] for place in places]
        options: Any = dict(create_graph=torch.is_grad_enabled(), materialize_grads=True)
        found = dict(zip(places, torch.autograd.grad(y, wanted, grad, **options), strict=True))
        return [found.get(place) for place in range(len(inputs))]


def _shapes(*values: Any) -> list[torch.Size | None]:
    return [x.shape if isinstance(x, Tensor) else None for x in values]


def _widen(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() and x.device.type in KINDS else x


_SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', bool: 'bool'}


def register(operation: Operation) -> Operator:
    """Register the operators of an operation, once in a process.

    Returns:
        A function of (*inputs, backend), which a public function calls outside TorchScript; inside it calls
        `torch.ops.aft_vision.NAME`.

    Raises:
        ValueError: there is an operation of this name.
    """
    if operation.name in OPERATIONS:
        raise ValueError(f'expected a new name, got {operation.name!r}, which is registered')
    operation.operator = Operator(operation)
    OPERATIONS[operation.name] = operation
    flops.register(operation)
    return operation.operator
