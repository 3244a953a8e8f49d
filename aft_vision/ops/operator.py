"""The custom operators `torch.ops.aft_vision.*`, and the one place that picks what runs inside them.

An operator is one node for autograd, `torch.compile`, `torch.export`, FX and TorchScript. Its forward returns the
result and what its backward reuses; the backward is an operator too. `transforms` has forward mode and `torch.func`.
"""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from aft_vision.ops.causal import eager as causal
from aft_vision.ops.common import tangent
from aft_vision.ops.common.numerics import empty_denominator, empty_output, without_autocast
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import onehot
from aft_vision.ops.decode import eager as decode
from aft_vision.ops.full import eager as full
from aft_vision.ops.local import eager as local
from aft_vision.ops.transforms import Rules, once_differentiable, register_transforms

BACKENDS = ('auto', 'eager', 'cpp', 'triton')
# Inputs that receive a gradient, besides q, k, v: the position bias of each operator.
BIAS_NAMES = ('bias', 'band', 'kernel', 'weight')


class _Form(NamedTuple):
    """One way to compute an operator.

    covers: whether it is made for the inputs of the forward, and can run here; None for all of them.
    check: raises where it should run for such inputs, and something on this machine is broken.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]
    covers: Callable[..., bool] | None = None
    check: Callable[..., None] | None = None


def check_backend(backend: str) -> None:
    """Raise a ValueError if there is no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}')


def pick_form(name: str, forms: dict[str, _Form], backend: str, inputs: Sequence[Any]) -> _Form:
    """Pick the form that runs: 'auto' is the fastest one that covers the inputs.

    A backend that was asked for and does not cover them is replaced by 'eager', and one warning per operator says so.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: 'triton' was asked for, is installed, and cannot compile.
    """
    check_backend(backend)
    for choice in reversed(forms) if backend == 'auto' else [backend]:
        form = forms.get(choice)
        if form is not None and (form.covers is None or form.covers(*inputs)):
            return form
    asked = forms.get(backend)
    if asked is not None and asked.check is not None:
        asked.check(*inputs)
    _warn_once(name, backend)
    return forms['eager']


@functools.cache
def _warn_once(name: str, backend: str) -> None:
    warnings.warn(f'{name} has no {backend!r} form for these inputs on this machine; using eager', stacklevel=2)


class _Operator:
    """Bodies, fakes and derivatives of aft_vision::name and aft_vision::name_backward.

    Attributes:
        names: inputs of both operators, before `save` or `need_bias`, and `backend`.
        gradients: the names that the backward returns gradients of, in its order: q, k, v, then the bias if any.
        places: of `gradients` in `names`.
        forward_operator, backward_operator: the two, from `register`.
    """

    forward_operator: CustomOpDef
    backward_operator: CustomOpDef

    def __init__(
        self,
        name: str,
        check: Callable[..., None],
        empty_saved: Callable[[Tensor, Tensor, bool], Tensor] | None,
        forms: dict[str, _Form],
        find_places: tangent.FindPlaces | None,
    ) -> None:
        self.name, self.check, self.empty_saved = name, check, empty_saved
        self.forms, self.find_places = forms, find_places
        self.signature = inspect.signature(forms['eager'].forward)
        self.names = [parameter for parameter in self.signature.parameters if parameter != 'save']
        self.checked = [self.names.index(parameter) for parameter in inspect.signature(check).parameters]
        self.bias = next((parameter for parameter in self.names if parameter in BIAS_NAMES), None)
        self.gradients = ['q', 'k', 'v'] + ([self.bias] if self.bias else [])
        self.places = [self.names.index(parameter) for parameter in self.gradients]

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        *inputs, save, backend = args
        self.check(*(inputs[i] for i in self.checked))
        if not inputs[2].numel():
            return self.forward_fake(*args)
        with without_autocast(inputs[1].device.type):
            return _contiguous(pick_form(self.name, self.forms, backend, inputs).forward(*inputs, save))

    def forward_fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        *inputs, save, backend = args
        check_backend(backend)
        self.check(*(inputs[i] for i in self.checked))
        q, k, v = inputs[:3]
        return empty_output(q, v), k.new_empty(0) if self.empty_saved is None else self.empty_saved(k, v, save)

    def backward(self, *args: Any) -> tuple[Tensor, ...]:
        *inputs, backend = args
        if not inputs[0].numel():
            return tuple(x.zero_() for x in self.backward_fake(*args))
        with without_autocast(inputs[0].device.type):
            # (grad, y, saved), the inputs of the forward, need_bias.
            return _contiguous(pick_form(self.name, self.forms, backend, inputs[3:-1]).backward(*inputs))

    def backward_fake(self, grad: Tensor, y: Tensor, saved: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *inputs, need_bias, _ = args
        q, k, v = inputs[:3]
        found = (_fake_grad(q, k), _fake_grad(k, k), _fake_grad(v, k))
        if self.bias is None:
            return found
        return *found, _fake_grad(inputs[self.names.index(self.bias)] if need_bias else None, k)

    def register(self) -> None:
        """Register both operators with their fakes and derivatives; the backward has an error for a second one."""
        tensors = ', '.join(_schema_type(parameter, self.signature) for parameter in self.names)
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
        rules = Rules(self.setup_both, self.differentiate, self.differentiate_forward)
        names = [*self.names, 'save', 'backend']
        register_transforms(_LIBRARY, self.forward_operator, names, lambda *_: False, rules)

        rules = once_differentiable(self.backward_operator)
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
        need_bias = self.bias is not None and ctx.needs_input_grad[self.places[3]]
        results = self.backward_operator(grad, y, saved, *inputs, need_bias, ctx.backend)
        for place, result in zip(self.places, results, strict=True):
            if ctx.needs_input_grad[place]:
                found[place] = result
        return tuple(found)

    def differentiate_forward(self, ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None]:
        inputs = dict(zip(self.names, _restored(ctx)[2], strict=True))
        along = {parameter: tangents[place] for parameter, place in zip(self.gradients, self.places, strict=True)}
        with without_autocast(inputs['k'].device.type):
            return tangent.forward_tangent(self.forward_operator, self.find_places, inputs, along, ctx.backend), None


def _restored(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    # y, what the forward saved for the backward, and the inputs.
    y, saved, *kept = ctx.saved_tensors
    return y, saved, [x if x is not None else constant for x, constant in zip(kept, ctx.constants, strict=True)]


def _define(
    name: str,
    check: Callable[..., None],
    empty_saved: Callable[[Tensor, Tensor, bool], Tensor] | None,
    forms: dict[str, _Form],
    find_places: tangent.FindPlaces | None = None,
) -> None:
    """Register aft_vision::name and aft_vision::name_backward with their fakes and autograd formulas.

    The schema follows the eager forward: (q, k, v, the operator's own inputs, mask, ..., save), then `backend`.
    `empty_saved` allocates what the forward keeps for the backward; None if that is nothing. `find_places` says which
    entry of the bias weights which source, for forward mode; None if the operator has no bias.
    """
    _Operator(name, check, empty_saved, forms, find_places).register()


_LIBRARY = torch.library.Library('aft_vision', 'FRAGMENT')
_SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', bool: 'bool'}


def _schema_type(name: str, signature: inspect.Signature) -> str:
    return f'{_SCHEMA_TYPES.get(signature.parameters[name].annotation, "SymInt[]")} {name}'


def _contiguous(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # In the layout that the fakes promise to the compiler.
    return tuple(x.contiguous() for x in outputs)


def _fake_grad(x: Tensor | None, k: Tensor) -> Tensor:
    return k.new_empty(0) if x is None else x.new_empty(x.shape)


def _kernel(module: str, name: str) -> _Form:
    # NAME_forward, NAME_backward and covers_NAME of a module, which is imported when first asked for.
    def lazy(function: str) -> Callable[..., Any]:
        return lambda *inputs: getattr(importlib.import_module(f'aft_vision.ops.{module}'), function)(*inputs)

    return _Form(lazy(f'{name}_forward'), lazy(f'{name}_backward'), lazy(f'covers_{name}'))


def _triton(module: str, name: str) -> _Form:
    # The same of a module that needs Triton: it is imported where that runs and agrees, and has no covers_NAME.
    def covers(*inputs: Any) -> bool:
        from aft_vision.ops.common import launch

        if not launch.can_run(inputs):
            return False
        from aft_vision.ops.common import verify

        return verify.failure(name, inputs) is None

    def check(*inputs: Any) -> None:
        from aft_vision.ops.common import launch

        launch.check(inputs)
        if launch.can_run(inputs):
            from aft_vision.ops.common import verify

            verify.check(name, inputs)

    return _kernel(module, name)._replace(covers=covers, check=check)


def step_kernels(state: Sequence[Tensor], *inputs: Tensor | None) -> Any | None:
    """Return the module with the compiled steps of decoding, where they cover the state and no graph is captured."""
    if torch.compiler.is_compiling() or state[0].device.type != 'cpu' or state[0].dtype != torch.float32:
        return None
    kernels = _step_module()
    return kernels if kernels.covers_step(state, *inputs) else None


@functools.cache
def _step_module() -> Any:
    return importlib.import_module('aft_vision.ops.decode.step_cpp')


_define(
    'aft_full',
    full.check_full,
    empty_denominator,
    {
        'eager': _Form(full.full_forward, full.full_backward),
        'cpp': _kernel('full.cpp', 'full'),
        'triton': _triton('full.triton', 'full'),
    },
    tangent.full_places,
)
_define(
    'aft_simple',
    full.check_simple,
    full.empty_context,
    {
        'eager': _Form(full.simple_forward, full.simple_backward),
        'triton': _triton('simple.triton', 'simple'),
    },
)
_define(
    'aft_local',
    local.check_local,
    empty_denominator,
    {'eager': _Form(local.local_forward, local.local_backward)},
    tangent.local_places,
)
_define(
    'aft_conv',
    conv.check_conv,
    empty_denominator,
    {
        'eager': _Form(conv.conv_forward, conv.conv_backward),
        'cpp': _kernel('conv.cpp', 'conv'),
        'triton': _triton('conv.triton', 'conv'),
    },
    tangent.conv_places,
)
_define(
    'aft_onehot',
    onehot.check_onehot,
    None,
    {
        'eager': _Form(onehot.onehot_forward, onehot.onehot_backward),
        'cpp': _kernel('conv.depthwise', 'onehot'),
        'triton': _triton('conv.onehot_triton', 'onehot'),
    },
    tangent.onehot_places,
)
_define(
    'aft_full_causal',
    full.check_full,
    empty_denominator,
    {'eager': _Form(causal.full_causal_forward, causal.full_causal_backward)},
    tangent.full_causal_places,
)
_define(
    'aft_local_causal',
    causal.check_local_causal,
    empty_denominator,
    {
        'eager': _Form(causal.local_causal_forward, causal.local_causal_backward),
        'cpp': _kernel('causal.local_cpp', 'local_causal'),
        'triton': _triton('causal.local_triton', 'local_causal'),
    },
    tangent.local_causal_places,
)
_define(
    'aft_simple_causal',
    full.check_simple,
    empty_denominator,
    {
        'eager': _Form(causal.simple_causal_forward, causal.simple_causal_backward),
        'cpp': _kernel('causal.simple_cpp', 'simple_causal'),
        'triton': _triton('causal.simple_triton', 'simple_causal'),
    },
)
# A step on a CPU branches on values, which a compiled graph cannot: there it is one node.
torch.library.custom_op(
    'aft_vision::aft_local_step',
    decode.local_step,
    mutates_args=('reference', 'sums', 'ring', 'position', 'holds_keys'),
).register_fake(lambda k, *_: torch.empty_like(k))
