"""The custom operators `torch.ops.aft_vision.*` of declared operations, and the one place that chooses what runs.

An operator is one node for autograd, `torch.compile`, `torch.export`, FX and TorchScript. Its forward returns the
result and the tensors saved for its backward; the backward is an operator too. In a graph, which may run elsewhere,
each chooses its form. An ordinary call that does not need torch's dispatcher goes straight to its form, and its
backward to the same one. `transforms` has forward mode and `torch.func`.
"""

import functools
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef
from torch.nn import Parameter

from aft_vision.ops import flops
from aft_vision.ops.common import choice, cpp, launch, tangent
from aft_vision.ops.common.choice import fastest
from aft_vision.ops.common.inputs import empty_output
from aft_vision.ops.common.numerics import without_autocast
from aft_vision.ops.declaration import OPERATIONS, Form, Operation, Shape, lazy_function
from aft_vision.ops.tracing import grid_arguments, saves_for_backward
from aft_vision.ops.transforms import Rules, once_differentiable, register_transforms

BACKENDS = ('auto', 'eager', 'cpp', 'triton')
# Sizes of inputs for which an operator knows the fastest form by heart.
MAX_SIZES = 1000


def triton_form(operation: str, module: str, forward: str, backward: str, *shapes: Shape) -> Form:
    """Return a form that runs where Triton does, and where it agrees with the last form, in torch operations.

    Args:
        operation: its name.
        module, forward, backward: below `aft_vision.ops`, and its two functions, imported at the first call.
        shapes: further sizes at which they are compared.
    """

    def supports(inputs: Any) -> bool:
        if inputs.v.is_cpu and not launch.interprets():
            return False
        return launch.can_run(inputs) and _verify().failure(OPERATIONS[operation], inputs) is None

    def check(inputs: Any) -> None:
        launch.check(inputs)
        if launch.can_run(inputs):
            _verify().check(OPERATIONS[operation], inputs)

    lazy = partial(lazy_function, module)
    return Form('triton', lazy(forward), lazy(backward), supports, check, shapes=shapes)


@functools.cache
def _verify() -> Any:
    # Imports Triton.
    from aft_vision.ops.common import verify

    return verify


@functools.cache
def _warn_once(name: str, backend: str) -> None:
    warnings.warn(f'{name} has no {backend!r} form for these inputs on this machine; using eager', stacklevel=2)


def _needs_dispatcher(args: Sequence[Any]) -> bool:
    """Return whether a call must go through the dispatcher of torch, as one operator."""
    return not is_ordinary(args) or torch.autograd._profiler_enabled()


def is_ordinary(args: Sequence[Any]) -> bool:
    """Return whether a call, with gradients or without, has plain tensors, and nothing but a profile sees operators.

    Compilers, traces, transforms, forward mode, modes and subclasses see them. So do tensors whose memory holds other
    numbers than they have, such as negated views.
    """
    core = torch._C
    if (
        torch.compiler.is_compiling()
        or core._is_tracing()
        or core._are_functorch_transforms_active()
        or core._len_torch_dispatch_stack()
        or core._len_torch_function_stack()
        or forward_ad._current_level >= 0
    ):
        return False
    keys = core._dispatch_keys
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if keys(x).raw_repr() not in _PLAIN and not _learn_plain_keys(x):
                return False
        elif x is not None and kind not in _CONSTANTS:
            return False
    return True


def _needs_gradient(inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def _learn_plain_keys(x: Tensor) -> bool:
    """Return whether a tensor is a plain one of a kind of device that is first met here, and note that kind."""
    kind = x.device.type
    if kind in _PLAIN_KINDS or kind not in KINDS:
        return False
    _PLAIN_KINDS.add(kind)
    _PLAIN.update(_find_plain_keys(kind))
    return torch._C._dispatch_keys(x).raw_repr() in _PLAIN


def _find_plain_keys(kind: str) -> set[int]:
    # The dispatch keys of plain tensors: ordinary ones, and those of the inference mode.
    found = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.add(torch._C._dispatch_keys(torch.empty(0, device=kind)).raw_repr())
    return found


# Kinds of devices with forms of the operators, those met so far, and the dispatch keys of plain tensors on the latter.
KINDS = ('cpu', 'cuda')
_PLAIN_KINDS = {'cpu'}
_PLAIN = _find_plain_keys('cpu')
# Sizes of a grid, flags and names.
_CONSTANTS = (bool, str, tuple, list, torch.Size)


class Operator:
    """Bodies, fakes and derivatives of aft_vision::name and aft_vision::name_backward; from `register`.

    The schema follows the inputs: (q, k, v, the operation's own inputs, mask, flags, save), then `backend`.

    Attributes:
        names: of the inputs.
        measured: the forms that `fastest` found, by sizes of the inputs.
        gradients: the names that the backward returns gradients of, in its order: q, k, v, the biases, all others.
        gradient_indices: of `gradients` in `names`.
        candidates: the forms that a backend, or a name of a form, asks for.
        forward_operator, backward_operator: the two.
        recorded: the `torch.autograd.Function` of an ordinary call (*inputs, save, form).
    """

    forward_operator: CustomOpDef
    backward_operator: CustomOpDef
    recorded: Any

    def __init__(self, operation: Operation) -> None:
        self.operation, self.name, self.inputs = operation, operation.name, operation.inputs
        self.check, self.forms, self.empty_saved = operation.check, operation.forms, operation.empty_saved
        self.names = list(operation.inputs._fields)
        self.gradients = ['q', 'k', 'v', *operation.biases, *operation.differentiable]
        self.gradient_indices = [self.names.index(field) for field in self.gradients]
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
        if backend == 'aten' and self.operation.graph is not None:
            # A trace has no sizes to check, nor has a graph of torch.fx.
            if isinstance(args[2], Tensor) and not torch.jit.is_tracing():
                self.check(self.inputs(*args[:-1]))
            return self.operation.graph(*args[:-1])
        if _needs_dispatcher(args):
            if self.operation.graph is not None and torch.onnx.is_in_onnx_export():
                return self(*args[:-1], 'aten')
            return self.dispatch(*args)
        inputs = self.inputs._make(args[:-1])
        form = self.choose(backend, inputs)
        if weights is not None:
            _check_weights(self.operation, inputs, weights)
            if backend == 'auto' and inputs.v.is_cpu and inputs.v.numel() and not torch.is_grad_enabled():
                form = self.fastest(form, inputs, weights)
        return self.compute(form, inputs, weights)

    def fastest(self, default: Form, inputs: Any, weights: Tensor) -> Form:
        """Return the form measured to be the fastest on a CPU for such sizes, with weights of a constant bias.

        Args:
            default: what 'auto' chooses, which runs where nothing can be measured.
        """
        v, flags = inputs.v, [getattr(inputs, name) for name in self.operation.flags]
        given = inputs.q is not None, inputs.mask is not None, *flags
        key = v.shape, inputs.k.shape, weights.shape, v.dtype, given, torch.get_num_threads()
        found = self.measured.get(key)
        if found is None:
            if len(self.measured) >= MAX_SIZES:
                self.measured.clear()
            found = self.measured[key] = self._measure(default, inputs, weights, given)
        return found

    def _measure(self, default: Form, inputs: Any, weights: Tensor, given: tuple[bool, ...]) -> Form:
        # A power of two stands for the numbers of sequences and of tokens up to it.
        batch, tokens = (1 << (size - 1).bit_length() for size in inputs.v.shape[:2])
        sizes = {'B': batch, 'T': tokens, 'D': inputs.v.shape[2], 'keys': inputs.k.shape[2]}
        if self.operation.has_grid:
            sizes['s'] = inputs[self.gradient_indices[3]].shape[-1]
        present = [name for name, here in zip(('q', 'mask', *self.operation.flags), given, strict=True) if here]
        shape = *(f'{name}={size}' for name, size in sizes.items()), inputs.v.dtype, *present
        others = [form for form in self.forms if form is not default and self.is_sound(form)]
        forms = [default, *(form for form in others if form.is_candidate(inputs))]
        names = [form.name for form in forms]
        ways = [partial(form.run_forward, inputs, False, weights) for form in forms]
        return forms[names.index(fastest(self.name, shape, dict(zip(names, ways, strict=True))))]

    def compute(self, form: Form, inputs: Any, weights: Tensor | None = None) -> Tensor:
        """Compute the operation of plain tensors in a form that supports them, with a gradient if there is need."""
        if torch.is_grad_enabled() and _needs_gradient(inputs):
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
            names = self.candidates if self.operation.graph is None else (*self.candidates, 'aten')
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
        return self.run(self.choose(backend, inputs), inputs, save)

    def forward_fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        inputs, save, backend = self.inputs._make(args[:-2]), args[-2], args[-1]
        self.check_backend(backend)
        self.check(inputs)
        return self.empty(inputs, save)

    def record(self, *args: Any) -> tuple[Tensor, ...]:
        """Compute (*inputs, save, backend) while gradients are on and nothing but autograd watches."""
        inputs, save, backend = self.inputs._make(args[:-2]), args[-2], args[-1]
        form = self.choose(backend, inputs)
        if _needs_gradient(inputs):
            return self.recorded.apply(*inputs, save, form)
        return self.run(form, inputs, save)

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
        """Register both operators with their fakes and derivatives; the backward has an error for a second one."""
        hints = get_type_hints(self.inputs)
        tensors = ', '.join(f'{_SCHEMA_TYPES.get(hints[field], "SymInt[]")} {field}' for field in self.names)
        grads = ', '.join(['Tensor'] * len(self.gradients))
        self.forward_operator = torch.library.custom_op(
            f'aft_vision::{self.name}',
            self.forward,
            mutates_args=(),
            schema=f'({tensors}, bool save, str backend) -> (Tensor, Tensor)',
        )
        self.backward_operator = torch.library.custom_op(
            f'aft_vision::{self.name}_backward',
            self.backward,
            mutates_args=(),
            schema=f'(Tensor grad, Tensor y, Tensor saved, {tensors}, bool need_bias, str backend) -> ({grads})',
        )
        self.forward_operator.register_fake(self.forward_fake)
        self.backward_operator.register_fake(self.backward_fake)

        self.forward_operator.register_autograd(self.differentiate, setup_context=self.setup_context)
        methods = {'forward': staticmethod(self.record_forward), 'backward': staticmethod(self.differentiate)}
        self.recorded = type(self.name, (torch.autograd.Function,), methods)
        rules = Rules(self.setup_both, self.differentiate, self.differentiate_forward, self.forward, self.record)
        names = [*self.names, 'save', 'backend']
        register_transforms(self.forward_operator, names, lambda *_: False, rules)

        rules = once_differentiable(self.backward_operator, self.backward)
        self.backward_operator.register_autograd(rules.backward, setup_context=rules.setup_context)
        names = ['grad', 'y', 'saved', *self.names, 'need_bias', 'backend']
        register_transforms(self.backward_operator, names, lambda *args: args[-2], rules)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        kept = inputs[: len(self.names)]
        for name, needed in zip(self.names, ctx.needs_input_grad, strict=False):
            if needed and name not in self.gradients:
                raise ValueError(
                    f'{self.name} has no gradient of its input {name}, which requires one: '
                    f"declare Operation(differentiable=('{name}',)), or detach it"
                )
        ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in kept))
        # A copy: the caller may change a list.
        ctx.constants = [tuple(x) if isinstance(x, list) else None if isinstance(x, Tensor) else x for x in kept]
        ctx.how = inputs[-1]

    def setup_both(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        self.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output, *(x if isinstance(x, Tensor) else None for x in inputs[: len(self.names)]))
        ctx.mark_non_differentiable(output[1])

    def differentiate(self, ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * (len(self.names) + 2)
        if grad is None:
            return tuple(found)
        y, saved, inputs = _restored(ctx)
        # The form of an ordinary call, or the backend of one in a graph.
        form, backend = (ctx.how, ctx.how.name) if isinstance(ctx.how, Form) else (None, ctx.how)
        # The call was captured while gradients were off.
        if self.empty_saved is not None and not saved.numel() and y.numel():
            _, saved = self.forward_operator(*inputs, True, backend)
        need_bias = any(ctx.needs_input_grad[self.names.index(name)] for name in self.operation.biases)
        # Hooks of saved tensors may give back others, which the operator refuses.
        if form is not None and _shapes(y, saved, *inputs) != ctx.shapes:
            form = None
        if form is None or torch.is_grad_enabled() or _needs_dispatcher((grad, y, saved, *inputs)):
            results = self.backward_operator(grad, y, saved, *inputs, need_bias, backend)
        else:
            results = self.run_backward(form, grad, y, saved, self.inputs._make(inputs), need_bias)
        for place, result in zip(self.gradient_indices, results, strict=True):
            if ctx.needs_input_grad[place]:
                found[place] = result
        return tuple(found)

    def differentiate_forward(self, ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        inputs = self.inputs._make(_restored(ctx)[2])
        along = {field: tangents[place] for field, place in zip(self.gradients, self.gradient_indices, strict=True)}
        with without_autocast(inputs.k.device.type):
            return tangent.forward_tangent(self.forward_operator, self.operation, inputs, along, ctx.how), None


def _shapes(*values: Any) -> list[torch.Size | None]:
    return [x.shape if isinstance(x, Tensor) else None for x in values]


def _restored(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    # y, what the forward saved for the backward, and the inputs.
    y, saved, *kept = ctx.saved_tensors
    return y, saved, [x if x is not None else constant for x, constant in zip(kept, ctx.constants, strict=True)]


_SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', bool: 'bool'}


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
    if _needs_dispatcher((bias, v)):
        return None
    inputs = weights.inputs(bias, v)
    if not any(form.supports(inputs) or form.is_candidate(inputs) for form in _weighing_forms(operation)):
        return None
    with without_autocast('cpu'):
        return weights.make(bias.detach(), v)


def _weighing_forms(operation: Operation) -> list[Form]:
    return [form for form in operation.forms if form.takes_weights and operation.operator.is_sound(form)]


def _check_weights(operation: Operation, inputs: Any, weights: Tensor) -> None:
    # Whichever form runs; without a compiler none has any.
    if operation.weights is None or cpp.library() is None or (cpp.failures and not _weighing_forms(operation)):
        return
    shape, dtype = operation.weights.layout(getattr(inputs, operation.biases[0]), inputs.v)
    if weights.shape != shape or weights.dtype != dtype or not weights.is_contiguous():
        raise ValueError(
            f'weights must be those of `ops.bias_weights`, {shape} in {dtype}, got {tuple(weights.shape)} in '
            f'{weights.dtype}'
        )


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
