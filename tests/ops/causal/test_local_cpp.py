"""The compiled AFT-local with the future masked: where it runs, its values, and what torch repairs."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    assert_matches_reference,
    generator,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

NAMES = {'aft_vision::local_forward', 'aft_vision::local_backward'}


def make_inputs(T: int, s: int, D: int, B: int = 2) -> dict[str, Tensor]:
    return dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True)) | {'band': randn(T, s, seed=7)}


def single(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float().requires_grad_() for name, x in inputs.items()}


def events(function) -> set[str]:
    """The kernels that a call ran."""
    with torch.profiler.profile() as profile:
        function()
    return NAMES & {event.name for event in profile.events()}


# One token, one block, a window of one, of more than the sequence, blocks of 32 and of 45 with a rest.
CASES = [(1, 1, 5), (30, 4, 16), (100, 1, 9), (40, 60, 7), (150, 5, 37), (200, 91, 19)]


@pytest.mark.parametrize(
    ('dtype', 'masked'),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize(('T', 's', 'D'), CASES)
def test_it_equals_float64(T: int, s: int, D: int, masked: bool, dtype: torch.dtype):
    mask = torch.rand(2, T, generator=generator(3)) > 0.4
    mask[:, 0] = False  # the first targets see nothing
    inputs = make_inputs(T, s, D) | {'mask': mask if masked else None}
    nasty = T == 1 and dtype == torch.float32  # the gradient of a single key is what rounding leaves of zero
    if T > 1 or dtype == torch.float32:
        assert_matches_reference(ops.aft_local_causal, reference.aft_local_causal, inputs, dtype, nasty)


def test_it_equals_float64_without_a_gate():
    assert_matches_reference(ops.aft_local_causal, reference.aft_local_causal, make_inputs(70, 9, 9) | {'q': None})


@pytest.mark.parametrize(('T', 's', 'D'), CASES[1:])
def test_bfloat16_equals_float64_where_the_cpu_does_not_multiply_it(
    T: int, s: int, D: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr('aft_vision.ops.common.numerics._cpu_multiplies_bfloat16', lambda: False)
    assert_matches_reference(ops.aft_local_causal, reference.aft_local_causal, make_inputs(T, s, D), torch.bfloat16)


def test_tensors_may_differ_in_their_types():
    types = {'q': torch.float32, 'k': torch.bfloat16, 'v': torch.float16, 'band': torch.bfloat16}
    low = {name: x.to(types[name]).requires_grad_() for name, x in make_inputs(70, 9, 20).items()}
    high = {name: x.detach().double().requires_grad_() for name, x in low.items()}
    y, expected = ops.aft_local_causal(**low), reference.aft_local_causal(**high)
    assert y.dtype == torch.float32
    assert_close(y, expected, 1e-5)
    weight = randn(*expected.shape, seed=9)
    found = torch.autograd.grad(y, list(low.values()), weight.float())
    for name, got, want in zip(types, found, torch.autograd.grad(expected, list(high.values()), weight), strict=True):
        assert got.dtype == types[name]
        assert_close(got, want, 1e-4 if name == 'q' else 4e-3)


# In bfloat16 the CPU's products would take those weights for zero.
@pytest.mark.parametrize(('dtype', 'bound', 'grad_bound'), [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 2e-2, 2e-2)])
def test_a_small_weight_counts_where_the_key_is_large(dtype: torch.dtype, bound: float, grad_bound: float):
    # Two keys e^59 above the reference of the second block, seen with e^-90: of a denominator of e^-30 each has half.
    k, band = torch.zeros(1, 40, 3), torch.zeros(40, 5)
    k[:, 33:] = torch.tensor([59.0, 59.0, *[-60.0] * 5])[:, None]
    band[36] = torch.tensor([0.0, -30.0, -30.0, 60.0, 60.0])
    inputs = {'q': None, 'k': k, 'v': make_qkv(B=1, T=40, D=3)[2], 'band': band}
    low = {name: None if x is None else x.to(dtype).requires_grad_() for name, x in inputs.items()}
    high = {name: None if x is None else x.detach().double().requires_grad_() for name, x in low.items()}
    y, expected = ops.aft_local_causal(**low)[:, 36], reference.aft_local_causal(**high)[:, 36]
    assert_close(y, expected, bound)
    weight = randn(1, 3, seed=9).to(dtype)
    found = torch.autograd.grad(y, [low[name] for name in ('k', 'v', 'band')], weight)
    wanted = torch.autograd.grad(expected, [high[name] for name in ('k', 'v', 'band')], weight.double())
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, grad_bound)


@pytest.mark.parametrize(
    ('dtype', 'bound', 'bias'),
    [
        *((torch.float32, 1e-4, bias) for bias in nasty_biases(torch.zeros(1))),
        *((torch.bfloat16, 2e-2, bias) for bias in ('within_50', 'plus_minus_80')),
    ],
    ids=str,
)
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_it_survives_nasty_inputs_over_many_blocks(keys: str, bias: str, dtype: torch.dtype, bound: float):
    inputs = make_inputs(110, 20, 3, B=1)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'band': nasty_biases(inputs['band'])[bias]}
    with torch.no_grad():
        low = {name: x.to(dtype) for name, x in inputs.items()}
        expected = reference.aft_local_causal(**{name: x.double() for name, x in low.items()})
        assert_close(ops.aft_local_causal(**low), expected, bound)
    assert_matches_reference(ops.aft_local_causal, reference.aft_local_causal, inputs, dtype, nasty=True)


# Blocks of 32; the reference moves by more than 8 nats in the second block, and by less.
@pytest.mark.parametrize(('key', 'value'), [(68.0, 2e9), (67.0, 1e10)])
def test_keys_leave_room_for_the_values(key: float, value: float):
    k, v = torch.zeros(1, 64, 3), make_qkv(B=1, T=64, D=3)[2]
    k[:, 32:], v[:, 32:] = key, value * (1 + v[:, 32:].abs())
    inputs = {'q': None, 'k': k, 'v': v, 'band': torch.zeros(64, 5)}
    low = {name: None if x is None else x.float().requires_grad_() for name, x in inputs.items()}
    high = {name: None if x is None else x.detach().double().requires_grad_() for name, x in low.items()}
    y, expected = ops.aft_local_causal(**low), reference.aft_local_causal(**high)
    # Those of the first block have a norm of their own.
    for part in (slice(0, 32), slice(32, 64)):
        assert_close(y[:, part], expected[:, part], 1e-5)
    found = torch.autograd.grad(y.sum(), [low['k'], low['v']])
    for got, want in zip(found, torch.autograd.grad(expected.sum(), [high['k'], high['v']]), strict=True):
        assert_close(got, want, 1e-4)


def test_a_repaired_target_leaves_the_bits_of_the_others_alone():
    inputs = {name: x.float() for name, x in make_inputs(100, 5, 6).items()}
    before = ops.aft_local_causal(**inputs)
    # A target whose denominator underflows: biases far above those of the keys that are there.
    k, band = inputs['k'].clone(), inputs['band'].clone()
    k[:, 77], band[80] = k[:, 77] - 150.0, torch.tensor([0.0, 100.0, 0.0, 0.0, 0.0])
    after = ops.aft_local_causal(**inputs | {'k': k, 'band': band})
    assert torch.equal(after[:, :77], before[:, :77])
    high = {name: x.double() for name, x in (inputs | {'k': k, 'band': band}).items()}
    assert_close(after, reference.aft_local_causal(**high), 1e-5)


def test_a_denominator_that_rounds_to_the_limit_keeps_its_gradient(monkeypatch: pytest.MonkeyPatch):
    # Above 1e-30 in the forward, and the greatest bfloat16 below it in the backward.
    monkeypatch.setattr('aft_vision.ops.common.numerics._cpu_multiplies_bfloat16', lambda: True)
    k = torch.tensor([0.0, -200.0])[None, :, None].expand(1, 2, 3).contiguous()
    band = torch.tensor([[0.0, 0.0], [math.log(1.0001e-30), 0.0]])
    v = make_qkv(B=1, T=2, D=3)[2].to(torch.bfloat16).requires_grad_()
    y = ops.aft_local_causal(None, k, v, band, backend='cpp')
    (grad,) = torch.autograd.grad(y[:, 1].float().sum(), v)
    assert_close(grad[:, 0], torch.ones(1, 3), 2e-2)


def test_a_row_is_the_same_bits_alone_and_in_a_batch():
    inputs = {name: x.float() for name, x in make_inputs(150, 40, 19, B=3).items()}
    alone = ops.aft_local_causal(**{name: x[1:2] if name in 'qkv' else x for name, x in inputs.items()})
    assert torch.equal(alone, ops.aft_local_causal(**inputs)[1:2])


def test_threads_share_the_channels():
    inputs = single(make_inputs(70, 20, 67, B=1))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            y = ops.aft_local_causal(**inputs)
            found.append([y, *torch.autograd.grad(y.square().sum(), list(inputs.values()))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


def test_the_digits_of_a_long_sequence_are_kept():
    # All of one weight that float32 rounds: a single running sum would lose 1e-4 of it.
    T, s = 16384, 3
    q, k, v = (x.float() for x in make_qkv(B=1, T=T, D=3))
    k = torch.full_like(k, 0.3)
    k[:, 0] = 1.0
    y = ops.aft_local_causal(q, k, v + 1, torch.zeros(T, s))
    weight = torch.exp(k.double() - 1)
    expected = torch.sigmoid(q.double()) * (weight * (v + 1).double()).cumsum(1) / weight.cumsum(1)
    assert_close(y, expected, 5e-6)


# In bfloat16 what is added is rounded, and the result, but no sum.
@pytest.mark.parametrize(('dtype', 'bound'), [(torch.float32, 5e-6), (torch.bfloat16, 4e-3)], ids=str)
def test_the_digits_of_a_wide_window_are_kept(dtype: torch.dtype, bound: float):
    T = 4096
    v = (make_qkv(B=1, T=T, D=2)[2] + 1).to(dtype)
    k = torch.full_like(v, 0.3)
    k[:, 0] = 1.0
    y = ops.aft_local_causal(None, k, v, torch.zeros(T, T))
    weight = torch.exp(k.double() - 1)
    assert_close(y, (weight * v.double()).cumsum(1) / weight.cumsum(1), bound)


def test_a_masked_token_may_be_anything():
    inputs = {name: x.float() for name, x in make_inputs(40, 5, 9).items()}
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[:, 5] = False
    expected = ops.aft_local_causal(**inputs, mask=mask)
    inputs['k'][:, 5], inputs['v'][:, 5] = math.nan, math.inf
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    y = ops.aft_local_causal(**inputs, mask=mask)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs.values())


def test_a_nan_stays_one():
    inputs = single(make_inputs(40, 5, 9))
    with torch.no_grad():
        inputs['v'][0, 5, 2] = math.nan
    y = ops.aft_local_causal(**inputs)
    assert y[0, 5:, 2].isnan().all()
    assert y[1].isfinite().all()


def test_parts_of_a_fused_projection_are_read_where_they_are():
    inputs = make_inputs(70, 12, 9)
    band = inputs['band'].float()
    fused = torch.cat([inputs[name] for name in 'qkv'], -1).float()
    parts = dict(zip('qkv', fused.split(9, -1), strict=True))
    expected = ops.aft_local_causal(**{name: x.contiguous() for name, x in parts.items()}, band=band)
    assert torch.equal(ops.aft_local_causal(**parts, band=band), expected)
    turned = {name: x.mT.contiguous().mT for name, x in parts.items()}
    assert torch.equal(ops.aft_local_causal(**turned, band=band.t().contiguous().t()), expected)


def test_it_runs_unless_eager_is_asked_for():
    inputs = single(make_inputs(12, 5, 9))
    assert events(lambda: ops.aft_local_causal(**inputs).sum().backward()) == NAMES
    assert events(lambda: ops.aft_local_causal(**inputs, backend='eager').sum().backward()) == set()


def test_float64_takes_the_torch_form():
    inputs = make_inputs(12, 5, 9)
    assert events(lambda: ops.aft_local_causal(**inputs)) == set()
    single_tokens = {name: x.float() if name in 'qkv' else x for name, x in inputs.items()}
    assert events(lambda: ops.aft_local_causal(**single_tokens)) == set()
