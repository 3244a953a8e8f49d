"""The compiled AFT-full: what is left to torch, its rounding, and weights made once."""

import math

import pytest
import torch
from helpers import assert_close, assert_matches_reference, kernels_run, make_inputs, plain, randn, single

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.full import eager as full

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


def test_a_gradient_of_the_bias_that_needs_too_much_room_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('aft_vision.ops.full.cpp.MAX_ELEMENTS', 100)
    assert_matches_reference(ops.aft_full, reference.aft_full, make_inputs('aft_full', 20, 40))
    inputs = single(make_inputs('aft_full', 20, 40))
    assert kernels_run(lambda: ops.aft_full(**inputs).sum().backward()) == {'aft_vision::full_forward'}


def test_a_call_with_an_underflowed_denominator_goes_to_torch(monkeypatch: pytest.MonkeyPatch):
    inputs = plain(make_inputs('aft_full', 18, 5))
    inputs['bias'][5, 0] = -200.0
    # Target 5 alone does not see it.
    inputs['k'][1, 0] = 200.0
    calls: list[int] = []
    eager = full.full_forward
    monkeypatch.setattr(full, 'full_forward', lambda *args: calls.append(1) or eager(*args))
    assert_close(ops.aft_full(**inputs), reference.aft_full(**plain(inputs, torch.float64)), 1e-4)
    assert calls == [1]


def test_a_gate_that_is_nearly_shut_keeps_large_values():
    # e^84 times 700 is beyond float32, what remains of 1e35 behind the gate is not.
    T = 700
    q, k, v = torch.full((1, T, 2), -84.0), torch.zeros(1, T, 2), torch.full((1, T, 2), 1e35)
    expected = v.double() / (1 + math.exp(84))
    assert_close(ops.aft_full(q, k, v, torch.zeros(T, T), backend='cpp'), expected, 1e-5)


def test_inputs_of_mixed_precision_are_rounded_as_torch_rounds():
    # One token: y is v, gated by exactly 1, so that the output is v rounded to the dtype of q.
    v = torch.cat(
        [randn(1, 1, 70, dtype=torch.float32), torch.tensor([[[1.00390625, 1.01171875, 3e38, 1e-40, -0.0]]])], -1
    )
    q = torch.full_like(v, 200.0, dtype=torch.bfloat16)
    y = ops.aft_full(q, torch.zeros_like(v), v, torch.zeros(1, 1), backend='cpp')
    assert torch.equal(y, v.to(torch.bfloat16))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_weights_made_once_give_the_same_and_replace_the_bias(dtype: torch.dtype):
    q, k, v, bias = plain(make_inputs('aft_full', 33, 20), dtype).values()
    expected, weights = ops.aft_full(q, k, v, bias), ops.bias_weights('aft_full', bias, v)
    assert torch.equal(ops.aft_full(q, k, v, bias, weights=weights), expected)
    assert torch.equal(ops.aft_full(q, k, v, torch.zeros_like(bias), weights=weights), expected)
    # A repair needs the bias itself.
    lost = k.index_fill(1, torch.tensor([3]), 200.0)
    assert torch.equal(ops.aft_full(q, lost, v, bias, weights=weights), ops.aft_full(q, lost, v, bias))
    for other in (bias, bias.double()):
        other_weights = ops.bias_weights('aft_full', other[:20, :20], v)
        with pytest.raises(ValueError, match='weights must be those of'):
            ops.aft_full(q, k, v, bias, weights=other_weights)


def test_gradients_do_not_use_weights_made_once():
    inputs = single(make_inputs('aft_full', 20, 16))
    plain = torch.autograd.grad(ops.aft_full(**inputs).sum(), [inputs['k'], inputs['bias']])
    weights = ops.bias_weights('aft_full', torch.zeros(20, 20), inputs['v'])
    found = torch.autograd.grad(ops.aft_full(**inputs, weights=weights).sum(), [inputs['k'], inputs['bias']])
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))
