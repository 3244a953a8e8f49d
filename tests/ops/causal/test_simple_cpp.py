"""The compiled AFT-simple with the future masked: its values, and how it keeps digits."""

import pytest
import torch
from helpers import (
    assert_close,
    assert_matches_reference,
    assert_passes_opcheck,
    generator,
    make_qkv,
    nasty_keys,
    single,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


def make_inputs(T: int, D: int, B: int = 2) -> dict[str, Tensor]:
    return dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True))


@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_it_survives_nasty_keys(keys: str, masked: bool):
    inputs = make_inputs(140, 11)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    mask = torch.rand(2, 140, generator=generator(3)) > 0.4
    inputs |= {'mask': mask if masked else None}
    assert_matches_reference(ops.aft_simple_causal, reference.aft_simple_causal, inputs, nasty=True)


@pytest.mark.parametrize('size', [3e38, -3e38])
def test_it_survives_keys_at_the_end_of_float32(size: float):
    inputs = make_inputs(70, 9)
    inputs['k'][:, 3:60:7] = size
    assert_matches_reference(ops.aft_simple_causal, reference.aft_simple_causal, inputs, nasty=True)


@pytest.mark.parametrize('jump', [18.0, 21.0, 59.0, 105.0, 200.0, 1e4])
@pytest.mark.parametrize('t', [1, 70, 149])
def test_a_later_token_changes_no_bit_of_earlier_outputs(t: int, jump: float):
    inputs = {name: x.float() for name, x in make_inputs(150, 19).items()}
    before = ops.aft_simple_causal(**inputs)
    # Some channels alone: what raises one reference leaves the others as they are.
    inputs['k'][:, t, ::2] += jump
    inputs['v'][:, t] = 1e3
    after = ops.aft_simple_causal(**inputs)
    assert torch.equal(after[:, :t], before[:, :t])
    assert not torch.equal(after[:, t], before[:, t])


def test_the_digits_of_a_long_sequence_are_kept():
    # All of one weight that float32 rounds: a single running sum would lose 1e-4 of it.
    T = 16384
    inputs = make_inputs(T, 5, B=1)
    inputs['k'] = torch.full_like(inputs['k'], 0.3)
    inputs['k'][:, 0] = 1.0
    inputs['v'] += 1.0
    assert_causal_means(inputs)


def test_rising_and_falling_keys_of_a_long_sequence():
    inputs = make_inputs(2000, 5, B=1)
    t = torch.arange(2000)[None, :, None]
    inputs['k'] += 200 * torch.sin(t / 150) + 0.05 * t
    assert_causal_means(inputs)


def assert_causal_means(inputs: dict[str, Tensor]) -> None:
    """Values and gradients against prefix sums in float64, which such keys do not overflow."""
    low = single(inputs)
    high = single(low, torch.float64)
    peak = high['k'].detach().amax(1, keepdim=True)
    weight = torch.exp(high['k'] - peak)
    expected = torch.sigmoid(high['q']) * (weight * high['v']).cumsum(1) / weight.cumsum(1)
    y = ops.aft_simple_causal(**low)
    assert_close(y, expected, 5e-6)
    grad = make_qkv(B=1, T=y.shape[1], D=y.shape[2], seed=9)[0]
    found = torch.autograd.grad(y, list(low.values()), grad.float())
    wanted = torch.autograd.grad(expected, list(high.values()), grad)
    for name, got, want in zip(low, found, wanted, strict=True):
        assert_close(got, want, 5e-5, name)


def test_a_small_gradient_keeps_its_digits_under_high_keys():
    inputs = make_inputs(150, 9)
    inputs['k'][:, 10:] += 19.0
    low = single(inputs)
    y = ops.aft_simple_causal(**low)
    whole = torch.autograd.grad(y.sum(), list(low.values()), retain_graph=True)
    small = torch.autograd.grad(y.sum() * 1e-20, list(low.values()))
    for one, other in zip(whole, small, strict=True):
        assert_close(other.double() * 1e20, one.double(), 1e-5)


def test_it_passes_torch_opcheck():
    assert_passes_opcheck('aft_simple_causal', make_inputs(12, 9))
