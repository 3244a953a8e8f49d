"""The contract of every declared operation, and what an operation that is no mean of AFT declares."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from contract import CONTRACT
from helpers import assert_close, randn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from aft_vision import ops
from aft_vision.ops.declaration import OPERATIONS, Form, Operation


@pytest.mark.parametrize('name', OPERATIONS)
@pytest.mark.parametrize('promise', CONTRACT)
def test_an_operation_keeps(promise: str, name: str):
    CONTRACT[promise](name)


class GatedInputs(NamedTuple):
    q: Tensor | None
    k: Tensor
    v: Tensor
    decay: Tensor  # (B, T, D), another gate
    scale: Tensor  # (D,), for each channel
    mask: Tensor | None = None


def gated(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: Tensor, mask: Tensor | None = None) -> Tensor:
    return q * (k * v * decay).sum(1, keepdim=True) * scale


def gated_backward(grad: Tensor, y: Tensor, saved: Tensor, inputs: GatedInputs, need_bias: bool) -> list[Tensor]:
    q, k, v, decay, scale, _ = inputs
    total = (k * v * decay).sum(1, keepdim=True)
    flow = (grad * q * scale).sum(1, keepdim=True)
    slope = (grad * q * total).sum((0, 1)) if need_bias else scale.new_empty(0)
    return [grad * total * scale, flow * v * decay, flow * k * decay, slope, flow * k * v]


def declare(name: str, **others: Any) -> Any:
    declared: dict[str, Any] = dict(biases=('scale',), differentiable=('decay',)) | others
    count = 4 + len(declared['differentiable'])
    form = Form('eager', lambda inputs, save: (gated(*inputs), None), lambda *args: gated_backward(*args)[:count])
    return ops.register(Operation(name, GatedInputs, (form,), empty_saved=None, **declared))


@pytest.fixture(autouse=True)
def others_see_no_gated_operation() -> Iterator[None]:
    known = set(OPERATIONS)
    yield
    for name in set(OPERATIONS) - known:
        del OPERATIONS[name]


def draw_gated() -> list[Tensor]:
    return [randn(2, 5, 3, seed=i).requires_grad_() for i in range(4)] + [randn(3, seed=9).requires_grad_()]


def test_every_input_that_is_declared_differentiable_has_its_gradient():
    inputs = draw_gated()
    expected = torch.autograd.grad(gated(*inputs).square().sum(), inputs)
    y = declare('gated')(*inputs, None, 'auto')
    for got, wanted in zip(torch.autograd.grad(y.square().sum(), inputs, retain_graph=True), expected, strict=True):
        assert_close(got, wanted, 1e-12)
    # Compiled graphs call the operators.
    watched = torch.ops.aft_vision.gated(*inputs, None, True, 'auto')[0]
    for got, wanted in zip(torch.autograd.grad(watched.square().sum(), inputs), expected, strict=True):
        assert_close(got, wanted, 1e-12)


def test_a_gradient_of_an_input_that_is_not_declared_is_an_error():
    inputs, operation = draw_gated(), declare('gated_undeclared', differentiable=())
    with pytest.raises(
        ValueError, match=r"no gradient of its input decay.* declare Operation\(differentiable=\('decay',\)"
    ):
        operation(*inputs, None, 'auto')
    inputs[3] = inputs[3].detach()
    (slope,) = torch.autograd.grad(operation(*inputs, None, 'auto').sum(), inputs[4])
    assert_close(slope, torch.autograd.grad(gated(*inputs).sum(), inputs[4])[0], 1e-12)


def test_an_operation_has_forward_mode_and_transforms_if_it_declares_a_graph():
    inputs = [x.detach() for x in draw_gated()]
    tangents = [x.cos() for x in inputs]
    with_graph, without = declare('gated_graph', graph=gated), declare('gated_no_graph')
    calls = [lambda *x, f=f: f(*x, None, 'auto') for f in (with_graph, without)]
    expected = torch.func.jvp(gated, tuple(inputs), tuple(tangents))
    for got, wanted in zip(torch.func.jvp(calls[0], tuple(inputs), tuple(tangents)), expected, strict=True):
        assert_close(got, wanted, 1e-12)
    leaf = inputs[3].clone().requires_grad_()
    y = calls[1](*inputs[:3], leaf, inputs[4])
    for call in (
        lambda: torch.func.jvp(calls[1], tuple(inputs), tuple(tangents)),
        lambda: torch.vmap(lambda v: calls[1](*inputs[:2], v, *inputs[3:]))(inputs[2][None]),
        lambda: torch.autograd.grad(y.sum(), leaf, create_graph=True),
    ):
        with pytest.raises(
            RuntimeError, match=r'gated_no_graph has neither forward mode.*declare Operation\(graph=...\)'
        ):
            call()


def test_operations_are_counted_as_declared_and_never_guessed():
    inputs = [x.detach() for x in draw_gated()]
    counted, uncounted = declare('gated_counted', products=lambda x: (0, 3 * 30)), declare('gated_uncounted')
    with FlopCounterMode(display=False) as counter:
        counted(*inputs, None, 'auto')
    assert counter.get_total_flops() == 2 * 3 * 30
    with FlopCounterMode(display=False), pytest.raises(ValueError, match='gated_uncounted declares no floating-point'):
        uncounted(*inputs, None, 'auto')
