"""The custom operators `torch.ops.aft_vision.*`, every form of each, and the one place that chooses what runs.

An operator is one node for autograd, `torch.compile`, `torch.export`, FX and TorchScript. Its forward returns the
result and what its backward reuses; the backward is an operator too. In a graph, which may run elsewhere, each chooses
its form. An ordinary call, which nothing watches, goes straight to its form, and its backward to the same one.
`transforms` has forward mode and `torch.func`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef
from torch.nn import Parameter

from aft_vision.ops import aten
from aft_vision.ops.common import tangent
from aft_vision.ops.common.inputs import (
    AxialInputs,
    ConvInputs,
    FullInputs,
    LocalInputs,
    OnehotInputs,
    Qkv,
    check_axial,
    check_conv,
    check_full,
    check_local,
    check_local_causal,
    check_onehot,
    check_qkv,
    empty_context,
    empty_denominator,
    empty_output,
)
from aft_vision.ops.common.numerics import without_autocast
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.tracing import fix_grid, keeps_sums
from aft_vision.ops.transforms import Rules, once_differentiable, register_transforms

BACKENDS = ('auto', 'eager', 'cpp', 'triton')
# Narrow heads have fewer channels than this, by the floats of a vector.
WIDE_CHANNELS = {8: 32, 16: 16}
# Inputs that receive a gradient, besides q, k, v: the position biases of each operator.
BIAS_NAMES = ('bias', 'band', 'kernel', 'weight', 'row_bias', 'column_bias')


@dataclass(eq=False)
class _Form:
    """One way to compute an operator.

    Attributes:
        backend: asks for it.
        module: below `aft_vision.ops`, with NAME_forward and NAME_backward; imported when first asked for.
        supports: returns whether it takes such inputs, and can run here.
        check: raises an error where it should run for such inputs, and something on this machine is broken.
        takes_weights: its forward takes those of `bias_weights`.
    """

    backend: str
    module: str
    name: str
    supports: Callable[[Any], bool] = lambda inputs: True
    check: Callable[[Any], None] = lambda inputs: None
    takes_weights: bool = False

    def forward(self, inputs: Any, save: bool, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return y and what the backward reuses; that may be None unless it is saved."""
        if weights is None or not self.takes_weights:
            return self._run('forward', inputs.v.device, inputs, save)
        return self._run('forward', inputs.v.device, inputs, save, weights)

    def backward(self, grad: Tensor, y: Tensor, saved: Tensor, inputs: Any, need_bias: bool) -> tuple[Tensor, ...]:
        return self._run('backward', grad.device, grad, y, saved, inputs, need_bias)

    def _run(self, direction: str, device: torch.device, *args: Any) -> Any:
        function = getattr(_module(self.module), f'{self.name}_{direction}')
        if not torch._C._is_any_autocast_enabled():
            return function(*args)
        with without_autocast(device.type):
            return function(*args)


@functools.cache
def _module(name: str) -> Any:
    # When it is first needed: a machine may lack what it imports.
    return importlib.import_module(f'aft_vision.ops.{name}')


def _runs_compiled(inputs: Any) -> bool:
    # On a CPU, with sums in float32, where the kernels have been built.
    for x in inputs:
        if isinstance(x, Tensor) and not x.is_cpu:
            return False
    return inputs.v.dtype != torch.float64 and _module('common.cpp').library() is not None


def _runs_compiled_local_causal(inputs: LocalInputs) -> bool:
    return inputs.band.dtype != torch.float64 and _runs_compiled(inputs)


def _runs_depthwise(inputs: ConvInputs | OnehotInputs) -> bool:
    # Many heads of one channel, which weights outside the window can be subtracted from.
    k = inputs.k
    if not (k.shape == inputs.v.shape and k.shape[2] > conv.TOEPLITZ_HEADS and getattr(inputs, 'global_context', True)):
        return False
    return _runs_compiled(inputs)


def _runs_wide(inputs: ConvInputs) -> bool:
    # Narrow heads, or one sequence with a kernel that is not larger than its grid (docs/reference/kernels.md).
    if not (inputs.global_context and _runs_compiled(inputs)):
        return False
    cpp = _module('common.cpp')
    narrow = inputs.channels < WIDE_CHANNELS[cpp.lanes()] and not cpp.multiplies_pairs(inputs.v)
    return narrow or (inputs.v.shape[0] == 1 and inputs.kernel.shape[1] <= max(inputs.grid))


def _triton(module: str, name: str) -> _Form:
    # It runs where Triton does, and where its kernels agree with the torch form.
    def supports(inputs: Any) -> bool:
        launch = _module('common.launch')
        if inputs.v.is_cpu and not launch.interprets():
            return False
        return launch.can_run(inputs) and _module('common.verify').failure(name, inputs) is None

    def check(inputs: Any) -> None:
        _module('common.launch').check(inputs)
        if _module('common.launch').can_run(inputs):
            _module('common.verify').check(name, inputs)

    return _Form('triton', module, name, supports, check)


# The forms of each operator: for a CPU, for a GPU, and last, in torch operations, for any inputs. Of two for one device
# the faster is first.
FORMS = {
    'aft_full': (
        _Form('cpp', 'full.cpp', 'full', _runs_compiled, takes_weights=True),
        _triton('full.triton', 'full'),
        _Form('eager', 'full.eager', 'full'),
    ),
    'aft_simple': (
        _triton('simple.triton', 'simple'),
        _Form('eager', 'simple.eager', 'simple'),
    ),
    'aft_local': (_Form('eager', 'local.eager', 'local'),),
    'aft_conv': (
        _Form('cpp', 'conv.window', 'depthwise', _runs_depthwise, takes_weights=True),
        _Form('cpp', 'conv.window', 'wide', _runs_wide, takes_weights=True),
        _Form('cpp', 'conv.cpp', 'conv', _runs_compiled),
        _triton('conv.triton', 'conv'),
        _Form('eager', 'conv.eager', 'conv'),
    ),
    'aft_onehot': (
        _Form('cpp', 'conv.window', 'onehot', _runs_depthwise),
        _triton('conv.onehot_triton', 'onehot'),
        _Form('eager', 'conv.onehot', 'onehot'),
    ),
    'aft_axial': (
        _Form('cpp', 'axial.cpp', 'axial', _runs_compiled),
        _triton('axial.triton', 'axial'),
        _Form('eager', 'axial.eager', 'axial'),
    ),
    'aft_full_causal': (_Form('eager', 'causal.eager', 'full_causal'),),
    'aft_local_causal': (
        _Form('cpp', 'causal.local_cpp', 'local_causal', _runs_compiled_local_causal),
        _triton('causal.local_triton', 'local_causal'),
        _Form('eager', 'causal.eager', 'local_causal'),
    ),
    'aft_simple_causal': (
        _Form('cpp', 'causal.simple_cpp', 'simple_causal', _runs_compiled),
        _triton('causal.simple_triton', 'simple_causal'),
        _Form('eager', 'causal.eager', 'simple_causal'),
    ),
}
# Graphs of plain operations, without a custom operator, for exporters: `backend='aten'` asks for them.
ATEN: dict[str, Callable[..., Tensor]] = {
    'aft_full': aten.aft_full,
    'aft_simple': aten.aft_simple,
    'aft_local': aten.aft_local,
    'aft_conv': aten.aft_conv,
    'aft_onehot': aten.aft_onehot,
    'aft_axial': aten.aft_axial,
}


# By name; `_Operator` enters itself.
OPERATORS: dict[str, '_Operator'] = {}


@functools.cache
def _warn_once(name: str, backend: str) -> None:
    warnings.warn(f'{name} has no {backend!r} form for these inputs on this machine; using eager', stacklevel=2)


def _is_watched(args: Sequence[Any]) -> bool:
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


class _Operator:
    """Bodies, fakes and derivatives of aft_vision::name and aft_vision::name_backward.

    The schema follows the inputs: (q, k, v, the operator's own inputs, mask, ..., save), then `backend`.

    Args:
        name: a key of `FORMS`.
        inputs: the NamedTuple of its inputs.
        check: raises a ValueError for shapes that do not match.
        empty_saved: allocates what the forward keeps for the backward; None if that is nothing.
        find_places: finds the bias of targets and sources, for forward mode; None for an operator without a bias.

    Attributes:
        names: of the inputs.
        gradients: the names that the backward returns gradients of, in its order: q, k, v, then the biases if any.
        places: of `gradients` in `names`.
        forward_operator, backward_operator: the two, from `register`.
        recorded: the `torch.autograd.Function` of an ordinary call (*inputs, save, form).
    """

    forward_operator: CustomOpDef
    backward_operator: CustomOpDef
    recorded: Any

    def __init__(
        self,
        name: str,
        inputs: Any,
        check: Callable[[Any], None],
        empty_saved: Callable[[Tensor, Tensor, bool], Tensor] | None = empty_denominator,
        find_places: tangent.FindPlaces | None = None,
    ) -> None:
        self.name, self.inputs, self.check, self.empty_saved = name, inputs, check, empty_saved
        self.forms, self.aten, self.find_places = FORMS[name], ATEN.get(name), find_places
        self.names = list(inputs._fields)
        self.biases = [field for field in self.names if field in BIAS_NAMES]
        if self.biases and find_places is None:
            raise ValueError(f'expected find_places for {name}, got None: forward mode would ignore {self.biases[0]}')
        self.gradients = ['q', 'k', 'v', *self.biases]
        self.places = [self.names.index(field) for field in self.gradients]
        self.register()
        OPERATORS[name] = self

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
        if _is_watched(args):
            return self.dispatch(*args)
        inputs = self.inputs._make(args[:-1])
        form = self.choose(backend, inputs)
        if weights is not None:
            _check_weights(self.name, inputs, weights)
        if torch.is_grad_enabled() and _needs_gradient(inputs):
            return self.recorded.apply(*inputs, True, form)[0]
        if not inputs.v.numel():
            return empty_output(inputs.q, inputs.v)
        return form.forward(inputs, False, weights)[0].contiguous()

    def dispatch(self, *args: Any) -> Tensor:
        """Call the operator with (*inputs, backend)."""
        inputs = list(args[:-1])
        if 'grid' in self.names:
            place = self.names.index('grid')
            inputs[1], inputs[place] = fix_grid(inputs[1], inputs[place])
        return getattr(torch.ops.aft_vision, self.name)(*inputs, keeps_sums(), args[-1])[0]

    def choose(self, backend: str, inputs: Any) -> _Form:
        """Check the inputs and choose the form that runs: 'auto' is the fastest one that supports them.

        A backend that was asked for and does not support them is replaced by 'eager', and one warning per operator
        says so.

        Raises:
            ValueError: shapes do not match, or there is no such backend.
            RuntimeError: 'triton' was asked for, is installed, and cannot compile.
        """
        self.check_backend(backend)
        self.check(inputs)
        if not inputs.v.numel():
            return self.forms[-1]
        for form in self.forms:
            if backend in ('auto', form.backend) and form.supports(inputs):
                return form
        for form in self.forms:
            if backend == form.backend:
                form.check(inputs)
        _warn_once(self.name, backend)
        return self.forms[-1]

    def check_backend(self, backend: str) -> None:
        """Raise a ValueError if there is no such backend."""
        if backend not in BACKENDS:
            names = BACKENDS if self.aten is None else (*BACKENDS, 'aten')
            raise ValueError(f'backend must be one of {", ".join(names)}, got {backend!r}')

    def run(self, form: _Form, inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        """Run a form, unless there is nothing to compute; in the layout that the fakes promise to the compiler."""
        if not inputs.v.numel():
            return self.empty(inputs, save)
        y, saved = form.forward(inputs, save)
        return y.contiguous(), self.empty_kept(inputs, save) if saved is None else saved.contiguous()

    def empty(self, inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        """Return buffers for the results."""
        return empty_output(inputs.q, inputs.v), self.empty_kept(inputs, save)

    def empty_kept(self, inputs: Any, save: bool) -> Tensor:
        """Return a buffer for what the backward reuses."""
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
        self, form: _Form, grad: Tensor, y: Tensor, saved: Tensor, inputs: Any, need_bias: bool
    ) -> tuple[Tensor, ...]:
        """Run the backward of a form; nothing to compute gives zeros."""
        if grad.numel():
            return tuple([x.contiguous() for x in form.backward(grad, y, saved, inputs, need_bias)])
        return tuple(x.zero_() for x in self.backward_fake(grad, y, saved, *inputs, need_bias, form.backend))

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
        q, k, v = inputs[:3]
        biases = [getattr(inputs, field) if need_bias else None for field in self.biases]
        return tuple(k.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, *biases))

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
        form, backend = (ctx.how, ctx.how.backend) if isinstance(ctx.how, _Form) else (None, ctx.how)
        # The call was captured while gradients were off.
        if self.empty_saved is not None and not saved.numel() and y.numel():
            _, saved = self.forward_operator(*inputs, True, backend)
        need_bias = any(ctx.needs_input_grad[place] for place in self.places[3:])
        # Hooks of saved tensors may give back others, which the operator refuses.
        if form is not None and _shapes(y, saved, *inputs) != ctx.shapes:
            form = None
        if form is None or torch.is_grad_enabled() or _is_watched((grad, y, saved, *inputs)):
            results = self.backward_operator(grad, y, saved, *inputs, need_bias, backend)
        else:
            results = self.run_backward(form, grad, y, saved, self.inputs._make(inputs), need_bias)
        for place, result in zip(self.places, results, strict=True):
            if ctx.needs_input_grad[place]:
                found[place] = result
        return tuple(found)

    def differentiate_forward(self, ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        inputs = self.inputs._make(_restored(ctx)[2])
        along = {field: tangents[place] for field, place in zip(self.gradients, self.places, strict=True)}
        with without_autocast(inputs.k.device.type):
            return tangent.forward_tangent(self.forward_operator, self.find_places, inputs, along, ctx.how), None


def _shapes(*values: Any) -> list[torch.Size | None]:
    return [x.shape if isinstance(x, Tensor) else None for x in values]


def _restored(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    # y, what the forward saved for the backward, and the inputs.
    y, saved, *kept = ctx.saved_tensors
    return y, saved, [x if x is not None else constant for x, constant in zip(kept, ctx.constants, strict=True)]


_SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', bool: 'bool'}


# The module that makes the weights of a bias, and the dimensions of the bias.
_WEIGHED = {'aft_full': ('full.cpp', 2), 'aft_conv': ('conv.window', 3)}


def bias_weights(name: str, bias: Tensor, v: Tensor) -> Tensor | None:
    """Compute what the kernels read of a position bias, once for all calls with a bias that does not change.

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
    if name not in _WEIGHED:
        raise ValueError(f'name must be one of {", ".join(_WEIGHED)}, got {name!r}')
    module, dimensions = _WEIGHED[name]
    if bias.ndim != dimensions or bias.shape[-1] != bias.shape[-2]:
        shape = '(T, T)' if dimensions == 2 else '(h, s, s)'
        raise ValueError(f'bias must have shape {shape} for {name}, got {tuple(bias.shape)}')
    # Kernels read the memory of plain tensors.
    if _is_watched((bias, v)):
        return None
    inputs: FullInputs | ConvInputs = FullInputs(None, v, v, bias, None)
    if name == 'aft_conv':
        # A grid that the kernel does not exceed: which one is not known.
        inputs = ConvInputs(None, v[..., : len(bias)], v, bias, bias.shape[1:], None, True)
    if not any(form.takes_weights and form.supports(inputs) for form in FORMS[name]):
        return None
    with without_autocast('cpu'):
        return _module(module).bias_weights(bias.detach(), v)


def _check_weights(name: str, inputs: FullInputs | ConvInputs, weights: Tensor) -> None:
    # Whichever form runs; without compiled kernels none has any.
    if name not in _WEIGHED or _module('common.cpp').library() is None:
        return
    bias = inputs.bias if isinstance(inputs, FullInputs) else inputs.kernel
    shape, dtype = _module(_WEIGHED[name][0]).weights_layout(bias, inputs.v)
    if weights.shape != shape or weights.dtype != dtype or not weights.is_contiguous():
        raise ValueError(
            f'weights must be those of `ops.bias_weights`, {shape} in {dtype}, got {tuple(weights.shape)} in '
            f'{weights.dtype}'
        )


def step_kernels(state: Sequence[Tensor], *inputs: Tensor | None) -> Any | None:
    """Return the module with the compiled steps of decoding, where they support the state and no graph is captured."""
    if torch.compiler.is_compiling() or state[0].device.type != 'cpu' or state[0].dtype != torch.float32:
        return None
    kernels = _module('decode.step_cpp')
    return kernels if kernels.supports_step(state, *inputs) else None


_Operator('aft_full', FullInputs, check_full, find_places=tangent.full_places)
_Operator('aft_simple', Qkv, check_qkv, empty_context)
_Operator('aft_local', LocalInputs, check_local, find_places=tangent.local_places)
_Operator('aft_conv', ConvInputs, check_conv, find_places=tangent.conv_places)
_Operator('aft_onehot', OnehotInputs, check_onehot, None, tangent.onehot_places)
_Operator('aft_axial', AxialInputs, check_axial, find_places=tangent.axial_places)
_Operator('aft_full_causal', FullInputs, check_full, find_places=tangent.full_causal_places)
_Operator('aft_local_causal', LocalInputs, check_local_causal, find_places=tangent.local_causal_places)
_Operator('aft_simple_causal', Qkv, check_qkv)
# A step on a CPU branches on values, which a compiled graph cannot: there it is one node.
torch.library.custom_op(
    'aft_vision::aft_local_step',
    decode.local_step,
    mutates_args=('reference', 'sums', 'ring', 'position', 'holds_keys'),
).register_fake(lambda k, *_: torch.empty_like(k))
