"""The custom operators `torch.ops.aft_vision.*`, every form of each, and the one place that chooses what runs.

An operator is one node for autograd, `torch.compile`, `torch.export`, FX and TorchScript. Its forward returns the
result and what its backward reuses; the backward is an operator too. A call tests once which form supports its inputs,
and tells its backward. In a graph, which may run elsewhere, forward and backward are two calls.
`transforms` has forward mode and `torch.func`.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.library import CustomOpDef

from aft_vision.ops import aten
from aft_vision.ops.axial import eager as axial
from aft_vision.ops.causal import eager as causal
from aft_vision.ops.common import tangent
from aft_vision.ops.common.numerics import (
    Qkv,
    accumulate_dtype,
    check_qkv,
    empty_denominator,
    empty_output,
    without_autocast,
)
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import onehot
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.full import eager as full
from aft_vision.ops.local import eager as local
from aft_vision.ops.simple import eager as simple
from aft_vision.ops.transforms import Rules, once_differentiable, register_transforms

BACKENDS = ('auto', 'eager', 'cpp', 'triton')
# Inputs that receive a gradient, besides q, k, v: the position biases of each operator.
BIAS_NAMES = ('bias', 'band', 'kernel', 'weight', 'row_bias', 'column_bias')


class _Form:
    """One way to compute an operator.

    Attributes:
        backend: asks for it.
        module: below `aft_vision.ops`, with NAME_forward and NAME_backward; imported when first asked for.
        supports: returns whether it takes such inputs, and can run here.
        check: raises an error where it should run for such inputs, and something on this machine is broken.
        told: takes the place of the backend in the call of a backward whose forward ran in this form.
    """

    def __init__(
        self,
        backend: str,
        module: str,
        name: str,
        supports: Callable[[Any], bool] = lambda inputs: True,
        check: Callable[[Any], None] = lambda inputs: None,
    ) -> None:
        self.backend, self.module, self.name, self.supports, self.check = backend, module, name, supports, check
        self.told = f'form {module}'

    @functools.cached_property
    def _functions(self) -> Any:
        return importlib.import_module(f'aft_vision.ops.{self.module}')

    def forward(self, inputs: Any, save: bool) -> tuple[Tensor, Tensor]:
        return getattr(self._functions, f'{self.name}_forward')(inputs, save)

    def backward(self, grad: Tensor, y: Tensor, saved: Tensor, inputs: Any, need_bias: bool) -> tuple[Tensor, ...]:
        return getattr(self._functions, f'{self.name}_backward')(grad, y, saved, inputs, need_bias)


def _runs_compiled(inputs: Any) -> bool:
    # On a CPU, with sums in float32, where the kernels have been built.
    for x in inputs:
        if isinstance(x, Tensor) and x.device.type != 'cpu':
            return False
    return accumulate_dtype(inputs.v) == torch.float32 and _build().library() is not None


def _runs_compiled_local_causal(inputs: local.LocalInputs) -> bool:
    return inputs.band.dtype != torch.float64 and _runs_compiled(inputs)


def _runs_depthwise(inputs: conv.ConvInputs | onehot.OnehotInputs) -> bool:
    # Many heads of one channel, which weights outside the window can be subtracted from.
    k = inputs.k
    if not (k.shape == inputs.v.shape and k.shape[2] > conv.TOEPLITZ_HEADS and getattr(inputs, 'global_context', True)):
        return False
    return _runs_compiled(inputs)


@functools.cache
def _build() -> Any:
    return importlib.import_module('aft_vision.ops.common.build')


def _triton(module: str, name: str) -> _Form:
    # It runs where Triton does, and where its kernels agree with the torch form.
    def supports(inputs: Any) -> bool:
        return _launch().can_run(inputs) and _verify().failure(name, inputs) is None

    def check(inputs: Any) -> None:
        _launch().check(inputs)
        if _launch().can_run(inputs):
            _verify().check(name, inputs)

    return _Form('triton', module, name, supports, check)


@functools.cache
def _launch() -> Any:
    return importlib.import_module('aft_vision.ops.common.launch')


def _verify() -> Any:
    return importlib.import_module('aft_vision.ops.common.verify')


# The forms of each operator, the fastest first. The last one, in torch operations, takes any inputs.
FORMS = {
    'aft_full': (
        _triton('full.triton', 'full'),
        _Form('cpp', 'full.cpp', 'full', _runs_compiled),
        _Form('eager', 'full.eager', 'full'),
    ),
    'aft_simple': (
        _triton('simple.triton', 'simple'),
        _Form('eager', 'simple.eager', 'simple'),
    ),
    'aft_local': (_Form('eager', 'local.eager', 'local'),),
    'aft_conv': (
        _triton('conv.triton', 'conv'),
        _Form('cpp', 'conv.depthwise', 'conv', _runs_depthwise),
        _Form('cpp', 'conv.cpp', 'conv', _runs_compiled),
        _Form('eager', 'conv.eager', 'conv'),
    ),
    'aft_onehot': (
        _triton('conv.onehot_triton', 'onehot'),
        _Form('cpp', 'conv.depthwise', 'onehot', _runs_depthwise),
        _Form('eager', 'conv.onehot', 'onehot'),
    ),
    'aft_axial': (
        _Form('cpp', 'axial.cpp', 'axial', _runs_compiled),
        _Form('eager', 'axial.eager', 'axial'),
    ),
    'aft_full_causal': (_Form('eager', 'causal.eager', 'full_causal'),),
    'aft_local_causal': (
        _triton('causal.local_triton', 'local_causal'),
        _Form('cpp', 'causal.local_cpp', 'local_causal', _runs_compiled_local_causal),
        _Form('eager', 'causal.eager', 'local_causal'),
    ),
    'aft_simple_causal': (
        _triton('causal.simple_triton', 'simple_causal'),
        _Form('cpp', 'causal.simple_cpp', 'simple_causal', _runs_compiled),
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


@functools.cache
def _warn_once(name: str, backend: str) -> None:
    warnings.warn(f'{name} has no {backend!r} form for these inputs on this machine; using eager', stacklevel=2)


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
    """

    forward_operator: CustomOpDef
    backward_operator: CustomOpDef

    def __init__(
        self,
        name: str,
        inputs: Any,
        check: Callable[[Any], None],
        empty_saved: Callable[[Tensor, Tensor, bool], Tensor] | None = empty_denominator,
        find_places: tangent.FindPlaces | None = None,
    ) -> None:
        self.name, self.inputs, self.check, self.empty_saved = name, inputs, check, empty_saved
        self.forms, self.find_places = FORMS[name], find_places
        self.told = {form.told: form for form in self.forms}
        self.names = list(inputs._fields)
        self.biases = [field for field in self.names if field in BIAS_NAMES]
        self.gradients = ['q', 'k', 'v', *self.biases]
        self.places = [self.names.index(field) for field in self.gradients]
        self.register()

    def choose(self, backend: str, inputs: Any) -> _Form:
        """Choose the form that runs: 'auto' is the fastest one that supports the inputs.

        A backend that was asked for and does not support them is replaced by 'eager', and one warning per operator
        says so.

        Raises:
            ValueError: there is no such backend.
            RuntimeError: 'triton' was asked for, is installed, and cannot compile.
        """
        if backend in self.told:
            return self.told[backend]
        self.check_backend(backend)
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
        if backend not in BACKENDS and backend not in self.told:
            raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}')

    def tell(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a forward with the chosen form in the place of its backend."""
        inputs = self.inputs._make(args[:-2])
        self.check(inputs)
        return (*args[:-1], self.choose(args[-1], inputs).told) if inputs.v.numel() else args

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, save, backend = self.inputs._make(args[:-2]), args[-2], args[-1]
        self.check(inputs)
        if not inputs.v.numel():
            return self.forward_fake(*args)
        with without_autocast(inputs.k.device.type):
            return _contiguous(self.choose(backend, inputs).forward(inputs, save))

    def forward_fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        inputs, save, backend = self.inputs._make(args[:-2]), args[-2], args[-1]
        self.check_backend(backend)
        self.check(inputs)
        q, k, v = inputs[:3]
        return empty_output(q, v), k.new_empty(0) if self.empty_saved is None else self.empty_saved(k, v, save)

    def backward(self, *args: Any) -> tuple[Tensor, ...]:
        (grad, y, saved, *kept), need_bias, backend = args[:-2], args[-2], args[-1]
        if not grad.numel():
            return tuple(x.zero_() for x in self.backward_fake(*args))
        inputs = self.inputs._make(kept)
        with without_autocast(grad.device.type):
            return _contiguous(self.choose(backend, inputs).backward(grad, y, saved, inputs, need_bias))

    def backward_fake(self, grad: Tensor, y: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs, need_bias = self.inputs._make(args[:-2]), args[-2]
        q, k, v = inputs[:3]
        biases = [getattr(inputs, field) if need_bias else None for field in self.biases]
        return tuple(_fake_grad(x, k) for x in (q, k, v, *biases))

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
        rules = Rules(self.setup_both, self.differentiate, self.differentiate_forward, self.forward, self.tell)
        names = [*self.names, 'save', 'backend']
        register_transforms(_LIBRARY, self.forward_operator, names, lambda *_: False, rules)

        rules = once_differentiable(self.backward_operator, self.backward)
        self.backward_operator.register_autograd(rules.backward, setup_context=rules.setup_context)
        names = ['grad', 'y', 'saved', *self.names, 'need_bias', 'backend']
        register_transforms(_LIBRARY, self.backward_operator, names, lambda *args: args[-2], rules)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        kept = inputs[: len(self.names)]
        ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in kept))
        ctx.constants = [None if isinstance(x, Tensor) else x for x in kept]
        ctx.backend = inputs[-1]

    def setup_both(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        self.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output, *(x if isinstance(x, Tensor) else None for x in inputs[: len(self.names)]))
        ctx.mark_non_differentiable(output[1])

    def differentiate(self, ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * (len(self.names) + 2)
        if grad is None:
            return tuple(found)
        y, saved, inputs = _restored(ctx)
        if self.empty_saved is not None and not saved.numel() and y.numel():  # captured while gradients were off
            _, saved = self.forward_operator(*inputs, True, ctx.backend)
        need_bias = any(ctx.needs_input_grad[place] for place in self.places[3:])
        results = self.backward_operator(grad, y, saved, *inputs, need_bias, ctx.backend)
        for place, result in zip(self.places, results, strict=True):
            if ctx.needs_input_grad[place]:
                found[place] = result
        return tuple(found)

    def differentiate_forward(self, ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        inputs = self.inputs._make(_restored(ctx)[2])
        along = {field: tangents[place] for field, place in zip(self.gradients, self.places, strict=True)}
        with without_autocast(inputs.k.device.type):
            return tangent.forward_tangent(self.forward_operator, self.find_places, inputs, along, ctx.backend), None


def _restored(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    # y, what the forward saved for the backward, and the inputs.
    y, saved, *kept = ctx.saved_tensors
    return y, saved, [x if x is not None else constant for x, constant in zip(kept, ctx.constants, strict=True)]


_LIBRARY = torch.library.Library('aft_vision', 'FRAGMENT')
_SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', bool: 'bool'}


def _contiguous(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # In the layout that the fakes promise to the compiler.
    return tuple([x.contiguous() for x in outputs])


def _fake_grad(x: Tensor | None, k: Tensor) -> Tensor:
    return k.new_empty(0) if x is None else x.new_empty(x.shape)


def step_kernels(state: Sequence[Tensor], *inputs: Tensor | None) -> Any | None:
    """Return the module with the compiled steps of decoding, where they cover the state and no graph is captured."""
    if torch.compiler.is_compiling() or state[0].device.type != 'cpu' or state[0].dtype != torch.float32:
        return None
    kernels = _step_module()
    return kernels if kernels.covers_step(state, *inputs) else None


@functools.cache
def _step_module() -> Any:
    return importlib.import_module('aft_vision.ops.decode.step_cpp')


_Operator('aft_full', full.FullInputs, full.check_full, find_places=tangent.full_places)
_Operator('aft_simple', Qkv, check_qkv, simple.empty_context)
_Operator('aft_local', local.LocalInputs, local.check_local, find_places=tangent.local_places)
_Operator('aft_conv', conv.ConvInputs, conv.check_conv, find_places=tangent.conv_places)
_Operator('aft_onehot', onehot.OnehotInputs, onehot.check_onehot, None, tangent.onehot_places)
_Operator('aft_axial', axial.AxialInputs, axial.check_axial, find_places=tangent.axial_places)
_Operator('aft_full_causal', full.FullInputs, full.check_full, find_places=tangent.full_causal_places)
_Operator('aft_local_causal', local.LocalInputs, causal.check_local_causal, find_places=tangent.local_causal_places)
_Operator('aft_simple_causal', Qkv, check_qkv)
# A step on a CPU branches on values, which a compiled graph cannot: there it is one node.
torch.library.custom_op(
    'aft_vision::aft_local_step',
    decode.local_step,
    mutates_args=('reference', 'sums', 'ring', 'position', 'holds_keys'),
).register_fake(lambda k, *_: torch.empty_like(k))
