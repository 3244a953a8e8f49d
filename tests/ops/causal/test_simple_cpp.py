"""The compiled AFT-simple with the future masked: where it runs, its values, and how it keeps digits."""

import math

import pytest
import torch
from helpers import assert_close, assert_matches_reference, assert_passes_opcheck, generator, make_qkv, nasty_keys
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

NAMES = {'aft_vision::scan_forward', 'aft_vision::scan_backward'}


def make_inputs(T: int, D: int, B: int = 2) -> dict[str, Tensor]:
    return dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True))


def single(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float().requires_grad_() for name, x in inputs.items()}


def events(function) -> set[str]:
    """The kernels that a call ran."""
    with torch.profiler.profile() as profile:
        function()
    return NAMES & {event.name for event in profile.events()}


@pytest.mark.parametrize(
    ('dtype', 'masked'),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize(('T', 'D'), [(2, 5), (64, 8), (65, 37), (150, 16)])
def test_it_equals_float64(T: int, D: int, masked: bool, dtype: torch.dtype):
    mask = torch.rand(2, T, generator=generator(3)) > 0.4
    mask[:, 0] = False  # the first targets see nothing
    inputs = make_inputs(T, D) | {'mask': mask if masked else None}
    assert_matches_reference(ops.aft_simple_causal, reference.aft_simple_causal, inputs, dtype)


def test_one_token_gives_its_own_value():
    # The key has no gradient: what is left of it counts against that of the value.
    assert_matches_reference(ops.aft_simple_causal, reference.aft_simple_causal, make_inputs(1, 5), nasty=True)


def test_it_equals_float64_without_a_gate():
    assert_matches_reference(ops.aft_simple_causal, reference.aft_simple_causal, make_inputs(70, 9) | {'q': None})


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


def test_a_row_is_the_same_bits_alone_and_in_a_batch():
    inputs = {name: x.float() for name, x in make_inputs(150, 19, B=3).items()}
    alone = ops.aft_simple_causal(**{name: x[1:2] for name, x in inputs.items()})
    assert torch.equal(alone, ops.aft_simple_causal(**inputs)[1:2])


def test_threads_share_the_channels_of_a_sequence():
    inputs = single(make_inputs(70, 67, B=1))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            y = ops.aft_simple_causal(**inputs)
            found.append([y, *torch.autograd.grad(y.square().sum(), list(inputs.values()))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


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
    high = {name: x.detach().double().requires_grad_() for name, x in low.items()}
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


def test_a_masked_token_may_be_anything():
    inputs = {name: x.float() for name, x in make_inputs(12, 9).items()}
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, 5] = False
    expected = ops.aft_simple_causal(**inputs, mask=mask)
    inputs['k'][:, 5], inputs['v'][:, 5] = math.nan, math.inf
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    y = ops.aft_simple_causal(**inputs, mask=mask)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs.values())


def test_a_nan_stays_one():
    inputs = single(make_inputs(12, 9))
    with torch.no_grad():
        inputs['k'][0, 5, 2] = math.nan
    y = ops.aft_simple_causal(**inputs)
    assert y[0, 5:, 2].isnan().all()
    assert y[0, :5].isfinite().all()
    assert y[1].isfinite().all()


def test_parts_of_a_fused_projection_are_read_where_they_are():
    inputs = make_inputs(70, 9)
    fused = torch.cat([inputs[name] for name in 'qkv'], -1).float()
    parts = dict(zip('qkv', fused.split(9, -1), strict=True))
    expected = ops.aft_simple_causal(**{name: x.contiguous() for name, x in parts.items()})
    assert torch.equal(ops.aft_simple_causal(**parts), expected)
    turned = {name: x.mT.contiguous().mT for name, x in parts.items()}
    assert torch.equal(ops.aft_simple_causal(**turned), expected)


def test_it_passes_torch_opcheck():
    assert_passes_opcheck('aft_simple_causal', make_inputs(12, 9))


def test_it_runs_unless_eager_is_asked_for():
    inputs = single(make_inputs(12, 9))
    assert events(lambda: ops.aft_simple_causal(**inputs).sum().backward()) == NAMES
    assert events(lambda: ops.aft_simple_causal(**inputs, backend='eager').sum().backward()) == set()


def test_float64_takes_the_torch_form():
    assert events(lambda: ops.aft_simple_causal(**make_inputs(12, 9))) == set()
