"""The compiled AFT-simple with the future masked: how it keeps digits, and that no token hears of later ones."""

import pytest
import torch
from helpers import assert_close, assert_matches_reference, make_inputs, plain, single
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


@pytest.mark.parametrize('size', [3e38, -3e38])
def test_it_survives_keys_at_the_end_of_float32(size: float):
    inputs = make_inputs('aft_simple_causal', 70, 9)
    inputs['k'][:, 3:60:7] = size
    assert_matches_reference(ops.aft_simple_causal, reference.aft_simple_causal, inputs, nasty=True)


@pytest.mark.parametrize('jump', [18.0, 21.0, 59.0, 105.0, 200.0, 1e4])
@pytest.mark.parametrize('t', [1, 70, 149])
def test_a_later_token_changes_no_bit_of_earlier_outputs(t: int, jump: float):
    inputs = plain(make_inputs('aft_simple_causal', 150, 19))
    before = ops.aft_simple_causal(**inputs)
    # Some channels alone: what raises one reference leaves the others as they are.
    inputs['k'][:, t, ::2] += jump
    inputs['v'][:, t] = 1e3
    after = ops.aft_simple_causal(**inputs)
    assert torch.equal(after[:, :t], before[:, :t])
    assert not torch.equal(after[:, t], before[:, t])


def test_the_digits_of_a_long_sequence_are_kept():
    # All of one weight that float32 rounds: a single running sum would lose 1e-4 of it.
    inputs = make_inputs('aft_simple_causal', 16384, 5, B=1)
    inputs['k'] = torch.full_like(inputs['k'], 0.3)
    inputs['k'][:, 0] = 1.0
    inputs['v'] += 1.0
    assert_matches_reference(ops.aft_simple_causal, prefix_means, inputs, bounds=(5e-6, 5e-5))


def test_rising_and_falling_keys_of_a_long_sequence():
    inputs = make_inputs('aft_simple_causal', 2000, 5, B=1)
    t = torch.arange(2000)[None, :, None]
    inputs['k'] += 200 * torch.sin(t / 150) + 0.05 * t
    assert_matches_reference(ops.aft_simple_causal, prefix_means, inputs, bounds=(5e-6, 5e-5))


def prefix_means(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operation by prefix sums in float64, which keys up to a few hundred nats apart do not overflow."""
    weight = torch.exp(k - k.detach().amax(1, keepdim=True))
    return torch.sigmoid(q) * (weight * v).cumsum(1) / weight.cumsum(1)


def test_a_small_gradient_keeps_its_digits_under_high_keys():
    inputs = make_inputs('aft_simple_causal', 150, 9)
    inputs['k'][:, 10:] += 19.0
    low = single(inputs)
    y = ops.aft_simple_causal(**low)
    whole = torch.autograd.grad(y.sum(), list(low.values()), retain_graph=True)
    small = torch.autograd.grad(y.sum() * 1e-20, list(low.values()))
    for one, other in zip(whole, small, strict=True):
        assert_close(other.double() * 1e20, one.double(), 1e-5)
