"""The call of an operation: straight to a form where nothing watches, and one operator where something does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import assert_close, make_inputs, make_qkv, operands, randn, single
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from aft_vision import ops
from aft_vision.ops import operator, reference
from aft_vision.ops.common import choice
from aft_vision.ops.conv import CONV
from aft_vision.ops.declaration import OPERATIONS

each_name = pytest.mark.parametrize('name', OPERATIONS)


def inputs_of(name: str) -> list[Any]:
    """Inputs of an operation, of which the floating-point ones want gradients."""
    return list(operands(name, single(make_inputs(name, (3, 5), s=3, heads=3))))


def call_operator(name: str, inputs: list[Any], save: bool) -> Tensor:
    return getattr(torch.ops.aft_vision, name)(*inputs, save, 'auto')[0]


def leaves_of(inputs: list[Any]) -> list[Tensor]:
    return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]


@each_name
def test_a_call_has_the_bits_and_the_gradients_of_its_operator(name: str):
    inputs = inputs_of(name)
    y, expected = getattr(ops, name)(*inputs), call_operator(name, inputs, True)
    assert torch.equal(y, expected)
    grads = (torch.autograd.grad(x.square().sum(), leaves_of(inputs)) for x in (y, expected))
    for got, wanted in zip(*grads, strict=True):
        assert torch.equal(got, wanted)


@each_name
@pytest.mark.parametrize('context', [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_call_has_the_same_bits(name: str, context: Callable[[], Any]):
    inputs = inputs_of(name)
    with context():
        y = getattr(ops, name)(*inputs)
        assert not y.requires_grad
        assert torch.equal(y, call_operator(name, inputs, False))
    assert torch.equal(y, getattr(ops, name)(*inputs))


def name_of(function: Any) -> str:
    return getattr(function, '__name__', '').partition('.')[0]


class DispatchWatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(name_of(func))
        return func(*args, **(kwargs or {}))


class FunctionWatch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(name_of(func))
        return func(*args, **(kwargs or {}))


class Watched(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(name_of(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@each_name
def test_a_dispatch_mode_sees_one_operator_forward_and_one_backward(name: str):
    inputs = inputs_of(name)
    y = getattr(ops, name)(*inputs)
    with DispatchWatch() as watch:
        watched = getattr(ops, name)(*inputs)
        torch.autograd.grad(y, leaves_of(inputs), torch.ones_like(y))
    assert torch.equal(watched, y)
    assert [x for x in watch.seen if x.startswith('aft')] == [name, f'{name}_backward']


@each_name
def test_function_modes_subclasses_and_profiles_see_one_operator(name: str):
    inputs = inputs_of(name)
    expected = getattr(ops, name)(*inputs)
    with FunctionWatch() as watch:
        assert torch.equal(getattr(ops, name)(*inputs), expected)
    assert watch.seen.count(name) == 1
    Watched.seen.clear()
    y = getattr(ops, name)(inputs[0], inputs[1], inputs[2].as_subclass(Watched), *inputs[3:])
    assert isinstance(y, Watched)
    assert Watched.seen.count(name) == 1
    with torch.profiler.profile() as profile, torch.no_grad():
        getattr(ops, name)(*inputs)
    assert [event.name for event in profile.events()].count(f'aft_vision::{name}') == 1


@each_name
def test_a_tensor_whose_memory_has_other_signs_is_read_as_it_is(name: str):
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs_of(name)]
    expected = getattr(ops, name)(*inputs)
    v = torch.complex(torch.zeros_like(inputs[2]), -inputs[2]).conj().imag
    assert v.is_neg()
    assert torch.equal(getattr(ops, name)(inputs[0], inputs[1], v, *inputs[3:]), expected)


@each_name
def test_a_backward_through_the_operator_has_the_same_gradients_as_a_straight_one(name: str):
    inputs = inputs_of(name)
    y = getattr(ops, name)(*inputs)
    straight = torch.autograd.grad(y.sum(), leaves_of(inputs), retain_graph=True)
    with DispatchWatch():
        watched = torch.autograd.grad(y.sum(), leaves_of(inputs), retain_graph=True)
    through_graph = torch.autograd.grad(y.sum(), leaves_of(inputs), create_graph=True)
    assert all(map(torch.equal, watched, straight))
    # Computed by the plain graph, which can be differentiated again.
    for got, expected in zip(through_graph, straight, strict=True):
        assert got.requires_grad
        assert_close(got, expected.double(), 1e-5)


@pytest.mark.parametrize('backend', ['form full.cpp', 'cuda', ''])
def test_an_unknown_backend_reaches_no_form(backend: str):
    q, k, v, bias = (x.detach() for x in inputs_of('aft_full')[:4])
    message = r'backend must be one of auto, eager, cpp, triton, aten, got'
    y, saved = torch.ops.aft_vision.aft_full(q, k, v, bias, None, True, 'auto')
    for call in (
        lambda: ops.aft_full(q, k, v, bias, backend=backend),
        lambda: torch.ops.aft_vision.aft_full(q, k, v, bias, None, True, backend),
        lambda: torch.ops.aft_vision.aft_full_backward(y, y, saved, q, k, v, bias, None, True, backend),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@each_name
@pytest.mark.parametrize('wrong', ['grad', 'y', 'saved'])
def test_a_backward_refuses_results_of_other_shapes(name: str, wrong: str):
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs_of(name)]
    y, saved = getattr(torch.ops.aft_vision, name)(*inputs, True, 'auto')
    results = {'grad': torch.ones_like(y), 'y': y, 'saved': saved}
    results[wrong] = results[wrong].new_zeros(1, 2, 3)
    with pytest.raises(ValueError, match=f'{wrong} must have shape'):
        getattr(torch.ops.aft_vision, f'{name}_backward')(*results.values(), *inputs, True, 'auto')


@pytest.mark.parametrize('name', [name for name, operation in OPERATIONS.items() if operation.has_grid])
def test_a_grid_that_is_changed_after_the_call_does_not_change_the_gradients(name: str):
    inputs = inputs_of(name)
    expected = torch.autograd.grad(getattr(ops, name)(*inputs).square().sum(), leaves_of(inputs))
    place = OPERATIONS[name].inputs._fields.index('grid')
    inputs[place] = grid = list(inputs[place])
    y = getattr(ops, name)(*inputs)
    grid[:] = [30, 50]
    for got, wanted in zip(torch.autograd.grad(y.square().sum(), leaves_of(inputs)), expected, strict=True):
        assert torch.equal(got, wanted)


@each_name
def test_saved_tensors_of_another_shape_are_refused(name: str):
    inputs = inputs_of(name)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[:, :1] if x.dim() == 3 else x):
        y = getattr(ops, name)(*inputs)
    with pytest.raises(ValueError, match='must'):
        torch.autograd.grad(y, leaves_of(inputs), torch.ones_like(y))


@pytest.mark.cpp
@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize('backend', ['auto', 'cpp', 'eager'])
@pytest.mark.parametrize('name', ['aft_full', 'aft_conv'])
def test_every_form_refuses_weights_that_are_those_of_no_bias(name: str, backend: str):
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs_of(name)]
    weights = ops.bias_weights(name, inputs[3], inputs[2])
    assert weights is not None
    y = getattr(ops, name)(*inputs, backend=backend)
    assert torch.equal(getattr(ops, name)(*inputs, weights=weights, backend=backend), y)
    for wrong in (torch.zeros(3), weights.double(), weights.mT.contiguous().mT):
        with pytest.raises(ValueError, match='weights must be those of'):
            getattr(ops, name)(*inputs, weights=wrong, backend=backend)


def test_weights_of_an_operation_that_has_none_are_refused():
    with pytest.raises(ValueError, match="name must be one of aft_conv, aft_full, got 'aft_simple'"):
        ops.bias_weights('aft_simple', torch.zeros(15, 15), torch.zeros(2, 15, 6))


@pytest.mark.parametrize(('name', 'backend'), [('aft_simple', 'cpp'), ('aft_conv', 'depthwise')])
def test_asking_for_a_form_where_there_is_none_warns_once(name: str, backend: str):
    operator._warn_once.cache_clear()
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs_of(name)]
    with pytest.warns(UserWarning, match=f"{name} has no '{backend}' form for these inputs"):
        y = getattr(ops, name)(*inputs, backend=backend)
    assert torch.equal(y, getattr(ops, name)(*inputs, backend=backend))


@pytest.mark.cpp
@pytest.mark.usefixtures('compiled')
def test_no_weights_are_made_where_no_kernel_takes_them():
    bias, v = torch.zeros(5, 5), torch.zeros(1, 5, 3)
    assert ops.bias_weights('aft_full', bias, v) is not None
    assert ops.bias_weights('aft_full', bias, v.double()) is None
    assert ops.bias_weights('aft_full', bias.to('meta'), v.to('meta')) is None
    with pytest.raises(ValueError, match=r'bias must have shape \(T, T\)'):
        ops.bias_weights('aft_full', bias[:, 1:], v)
    with pytest.raises(ValueError, match=r'bias must have shape \(h, s, s\)'):
        ops.bias_weights('aft_conv', bias, v)


FUSED = (
    ('aft_full', 'cpp', {}),
    ('aft_full', 'eager', {}),
    ('aft_conv', 'wide', {'heads': 2}),
    ('aft_conv', 'conv', {'heads': 2}),
    ('aft_conv', 'depthwise', {'heads': 70}),
)


@pytest.mark.cpp
@pytest.mark.usefixtures('compiled')
@pytest.mark.parametrize(('name', 'form', 'sizes'), FUSED)
@pytest.mark.parametrize('masked', [False, True])
def test_with_constant_weights_the_fastest_form_runs(
    name: str, form: str, sizes: dict[str, int], masked: bool, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[object, ...]] = []

    def fastest(subject: str, shape: tuple[object, ...], ways: dict[str, Callable[[], object]]) -> str:
        asked.append((subject, shape, *ways))
        return form

    operation = OPERATIONS[name]
    monkeypatch.setattr('aft_vision.ops.constant_bias.fastest', fastest)
    monkeypatch.setattr(operation.operator, 'measured', {})
    heads = sizes.get('heads', 70)
    q, k, v = make_qkv(B=2, T=12, D=70, heads=heads)
    bias = randn(12, 12, seed=5) if name == 'aft_full' else randn(heads, 3, 3, seed=5)
    mask = torch.arange(24).view(2, 12) % 5 > 0 if masked else None
    rest = (bias, mask) if name == 'aft_full' else (bias, (3, 4), mask)
    expected = getattr(reference, name)(q, k, v, *rest)
    call, q, k, v = getattr(ops, name), q.float(), k.float(), v.float()
    rest = bias.float(), *rest[1:]
    weights = ops.bias_weights(name, rest[0], v)
    assert weights is not None
    ran: list[str] = []
    for each in operation.forms:
        run = each.forward
        monkeypatch.setattr(each, 'forward', lambda *a, n=each.name, r=run: ran.append(n) or r(*a))
    with torch.no_grad():
        assert_close(call(q, k, v, *rest, weights=weights), expected, 1e-5)
        assert ran == [form]
        call(q, k, v, *rest, weights=weights)
        # Of ten tokens or sixteen a measurement stands for the other.
        ((subject, shape, *ways),) = asked
        assert subject == name
        assert form in ways
        assert shape[:2] == ('B=2', 'T=16')
        # Asked for by name, or without constant weights, nothing is measured.
        call(q, k, v, *rest, backend='cpp', weights=weights)
        call(q, k, v, *rest)
    call(q.requires_grad_(), k, v, *rest, weights=weights).sum().backward()
    assert len(asked) == 1


@pytest.mark.cpp
@pytest.mark.usefixtures('compiled')
def test_the_fastest_form_is_measured_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.setattr('aft_vision.ops.constant_bias.fastest', choice.fastest)
    monkeypatch.setattr(CONV, 'measured', {})
    choice.choices_path.cache_clear()
    q, k, v = (x.float() for x in make_qkv(B=2, T=12, D=40, heads=2))
    kernel = randn(2, 3, 3).float()
    with torch.no_grad():
        ops.aft_conv(q, k, v, kernel, (3, 4), weights=ops.bias_weights('aft_conv', kernel, v))
    ((key, found),) = choice.recorded().items()
    choice.choices_path.cache_clear()
    assert CONV.measured
    # What was taken while nothing could be measured is not kept.
    choice.measure_choices(True)
    assert not CONV.measured
    assert key.startswith('aft_conv B=2 T=16 D=40 keys=2 s=3 torch.float32 q global_context,')
    assert set(found['ms']) == {'wide', 'conv'}
