"""Rules of the operators for dual tensors and the transforms of `torch.func`: forward mode, `grad`, `vmap`.

`torch.library` supports only reverse mode in ordinary calls. Under a transform, and for dual tensors, an operator runs
as a `torch.autograd.Function`, which has a rule for each. This costs an ordinary call one comparison.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.pyfunctorch import FunctionalizeInterpreter, retrieve_current_functorch_interpreter
from torch._library.autograd import make_autograd_impl
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.autograd import forward_ad
from torch.library import CustomOpDef, Library

from aft_vision.ops.declaration import OPERATIONS

# Kernels for the dispatch key that every call under a transform of torch.func uses first.
FRONT = 'FuncTorchDynamicLayerFrontMode'
# Keys of the kernels that compute.
DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
# Arguments whose first dimension is the batch.
PER_SEQUENCE = {'grad', 'y', 'saved', 'q', 'k', 'v', 'mask'}
LIBRARY = Library('aft_vision', 'FRAGMENT')


class Rules(NamedTuple):
    """The rules of one operator.

    Attributes:
        setup_context, backward, jvp: static methods of a `torch.autograd.Function`.
        body: computes the operator on the device of its tensors.
        record: computes it and records its gradient, where nothing watches; None leaves that to torch.
    """

    setup_context: Callable[..., None]
    backward: Callable[..., Any]
    jvp: Callable[..., Any]
    body: Callable[..., tuple[Tensor, ...]]
    record: Callable[..., tuple[Tensor, ...]] | None = None


def second_derivative_error(operator: CustomOpDef) -> RuntimeError:
    """Return the error for a second derivative, which names the form that supports it."""
    name = operator._name.removesuffix('_backward')
    remedy = (
        'take aft_vision.ops.aten.aft_full with the whole bias, minus infinity at sources that a target does not see'
        if OPERATIONS[name].graph is None
        else 'take the forms in aft_vision.ops.aten (models: exportable=True)'
    )
    return RuntimeError(
        f'aft_vision::{name} can be differentiated once, forward or in reverse, got a second derivative of it; '
        f'{remedy} for any number'
    )


def once_differentiable(operator: CustomOpDef, body: Callable[..., tuple[Tensor, ...]]) -> Rules:
    """Return the rules of an operator without a derivative, which raise an error instead of returning 0."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    def fail(ctx: Any, *tensors: Tensor | None) -> None:
        raise second_derivative_error(operator)

    return Rules(setup_context, fail, fail, body)


def register_transforms(
    operator: CustomOpDef, names: Sequence[str], sums_sequences: Callable[..., bool], rules: Rules
) -> None:
    """Register the rules of an operator for the transforms of torch.func and for dual tensors.

    Args:
        names: names of the operator's arguments.
        sums_sequences: returns for arguments whether a result is a sum over the batch, which vmap must not enlarge.
        rules: rules of its `torch.autograd.Function`.
    """

    def forward(*args: Any) -> tuple[Tensor, ...]:
        return operator(*args)

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        dims = [dim if isinstance(dim, int) else None for dim in in_dims]  # the sizes of a grid have a list
        batched = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
        if batched <= PER_SEQUENCE and not sums_sequences(*args):
            return _fold(operator, names, info.batch_size, dims, args)
        return _loop(operator, info.batch_size, dims, args)

    methods = {'setup_context': rules.setup_context, 'backward': rules.backward, 'jvp': rules.jvp}
    methods |= {'forward': forward, 'vmap': vmap}
    function: Any = type(operator._name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in methods.items()})
    reverse = make_autograd_impl(operator._opoverload, operator)

    def autograd_kernel(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            return function.apply(*args)
        if (keyset & torch._C._after_autograd_keyset).highestPriorityTypeId() in DEVICES:
            # Below autograd, no mode, fake tensor or compiler intercepts the call.
            if not torch.is_grad_enabled():
                with torch._C._AutoDispatchBelowAutograd():
                    return rules.body(*args)
            if rules.record is not None:
                return rules.record(*args)
        return reverse(keyset, *args)

    def front_kernel(keyset: Any, *args: Any) -> tuple[Tensor, ...]:
        kinds = [level.key() for level in get_interpreter_stack()]
        if kinds[-1] == TransformType.Functionalize:
            return _functionalize(operator, args)
        if kinds.count(TransformType.Jvp) > 1:
            # torch would drop the contribution of the inner derivative to the outer one.
            raise second_derivative_error(operator)
        return function.apply(*args)

    for device in DEVICES:
        # Without the checks of torch's wrapper, which `torch.library.opcheck` makes in the tests.
        LIBRARY.impl(operator._name, rules.body, device.name)
    with warnings.catch_warnings():
        # torch before 2.14 warns that a kernel is replaced, which is wanted.
        warnings.filterwarnings('ignore', message='Warning only once for all operators')
        # `LIBRARY.impl` replaces a kernel only since torch 2.8.
        library: Any = LIBRARY.m
        library.impl(operator._name, 'Autograd', autograd_kernel, True)
    LIBRARY.impl(operator._name, front_kernel, FRONT, with_keyset=True)


def _functionalize(operator: CustomOpDef, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    # An operator changes no argument and returns no view, so the inner call has nothing to replace.
    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, FunctionalizeInterpreter)
    level = FunctorchFunctionalizeAPI(interpreter)
    with level.redispatch_to_next():
        return level.wrap_tensors(operator(*level.unwrap_tensors(args)))


def _loop(operator: CustomOpDef, size: int, dims: list[int | None], args: tuple[Any, ...]) -> tuple[Any, Any]:
    # One call per slice: a shared or summed tensor, a bias or its gradient, belongs to only one call.
    if size == 0:  # one call on zeros gives the shapes
        args = tuple(
            x if dim is None else x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
            for x, dim in zip(args, dims, strict=True)
        )

    def call(i: int) -> tuple[Tensor, ...]:
        return operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True)))

    results = zip(*(call(i) for i in range(max(1, size))), strict=True)
    found = tuple(torch.stack(each)[:size] for each in results)
    return found, (0,) * len(found)


def _fold(
    operator: CustomOpDef, names: Sequence[str], size: int, dims: list[int | None], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    # One call for all: the new dimension is merged into the batch.
    folded, batch = list(args), 0
    for i, (name, dim, x) in enumerate(zip(names, dims, args, strict=True)):
        if name in PER_SEQUENCE and isinstance(x, Tensor) and x.ndim > 1:
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            folded[i], batch = x.flatten(0, 1), x.shape[1]
    results = operator(*folded)
    # Missing results, such as the gradient of q = None, are empty and have one dimension.
    whole = [x.ndim > 1 for x in results]
    found = tuple(x.unflatten(0, (size, batch)) if y else x for x, y in zip(results, whole, strict=True))
    return found, tuple(0 if y else None for y in whole)
