"""Causal AFT-local in Triton: keys that jump, what is not finite, and repairs."""

from functools import partial

import pytest
import torch
from helpers import assert_close, assert_matches_reference, make_inputs, plain, randn

from aft_vision import ops
from aft_vision.ops import reference

local_causal = partial(ops.aft_local_causal, backend='triton')


@pytest.mark.parametrize('jump', [200.0, -200.0])
def test_a_jump_inside_a_block_is_exact(jump: float, triton_device: str):
    inputs = make_inputs('aft_local_causal', 45, 3, 9, B=1)
    inputs['k'][:, 35:, 0] += jump
    inputs['k'][:, 40, 2] += jump
    inputs['band'] *= 10
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=triton_device)


def test_a_later_token_changes_no_bit_of_earlier_outputs(triton_device: str):
    inputs = plain(make_inputs('aft_local_causal', 36, 3, 4), device=triton_device)
    before = local_causal(**inputs)
    k, v = inputs['k'].clone(), inputs['v'].clone()
    # The headroom counts from the largest key before the block of 16 or 32 targets.
    k[:, 34], v[:, 34] = k[:, :32].amax(1) + 59.0, 1e3
    after = local_causal(**inputs | {'k': k, 'v': v})
    assert torch.equal(after[:, :34], before[:, :34])
    assert not torch.equal(after[:, 34], before[:, 34])
    k[:, 34] += 200.0
    assert_close(local_causal(**inputs | {'k': k, 'v': v})[:, :34].cpu(), before[:, :34].double().cpu(), 5e-6)


def test_a_weight_that_underflows_under_a_key_above_its_reference_counts(triton_device: str):
    k, v = (torch.tensor(x)[None, :, None] for x in ([0.0, 60.0, -65.0], [0.0, 2.0, 1.0]))
    inputs = {'q': None, 'k': k, 'v': v, 'band': torch.full((3, 1), 120.0)}
    y = local_causal(**{name: None if x is None else x.to(triton_device) for name, x in inputs.items()})
    torch.testing.assert_close(y.flatten().cpu(), torch.tensor([0.0, 2.0, 1.9933]), rtol=0, atol=1e-4)
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=triton_device)


def test_the_gradient_of_a_band_with_tiny_weights_is_finite(triton_device: str):
    # The last target has e^-86 for the key 60 and 1 for its own: infinity is multiplied by that otherwise.
    k = torch.tensor([-1000.0, 60.0, -25.0])[None, :, None]
    inputs = {'q': None, 'k': k, 'v': torch.tensor([0.0, 300.0, -300.0])[None, :, None], 'band': torch.zeros(3, 2)}
    inputs['band'][2] = torch.tensor([-86.0, 0.0])
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=triton_device)


def test_references_that_jump_lose_nothing(triton_device: str):
    k = torch.full((1, 36, 1), -1000.0)
    v = torch.zeros(1, 36, 1)
    k[0, [0, 1, 32, 33], 0] = torch.tensor([0.0, 60.0, 40.0, 168.0])
    v[0, [1, 32], 0] = torch.tensor([2.0, 1.0])
    inputs = {'q': None, 'k': k, 'v': v, 'band': torch.zeros(36, 2)}
    y = local_causal(None, k.to(triton_device), v.to(triton_device), inputs['band'].to(triton_device))
    torch.testing.assert_close(y[0, 32].cpu(), torch.tensor([2.0]), rtol=0, atol=1e-5)
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=triton_device)


@pytest.mark.parametrize('jump', [90, 120])
def test_a_jump_after_sources_far_above_their_reference_loses_nothing(jump: int, triton_device: str):
    # Tokens 14 and 15 are e^60 above the reference of their block, later blocks e^jump above that.
    inputs = make_inputs('aft_local_causal', 64, 2, 20, B=1)
    inputs['k'][:, [14, 15, 20, 21, 22, 23]] += 60
    inputs['k'][:, 30:] += 60 + jump
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, device=triton_device)


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), None], ids=['NaN key', 'infinite key', 'infinite value'])
def test_a_source_that_is_not_finite_reaches_no_earlier_target(bad: float | None, triton_device: str):
    inputs = plain(make_inputs('aft_local_causal', 36, 3, 4), device=triton_device)
    before = local_causal(**inputs)
    changed = inputs['v' if bad is None else 'k']
    changed[0, 20, 1] = float('inf') if bad is None else bad
    after = local_causal(**inputs)
    assert not after[0, 20:, 1].isfinite().any()
    after[0, 20:, 1] = before[0, 20:, 1]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), None], ids=['NaN key', 'infinite key', 'infinite value'])
def test_targets_without_a_gradient_pass_nothing_on_after_a_source_that_is_not_finite(
    bad: float | None, triton_device: str
):
    inputs = plain(make_inputs('aft_local_causal', 36, 3, 4, B=1), device=triton_device)
    inputs['v' if bad is None else 'k'][0, 20, 1] = float('inf') if bad is None else bad
    grad = randn(1, 36, 3, seed=9).float().to(triton_device)
    grad[:, 20:, 1] = 0.0
    found = {}
    for backend in ('triton', 'eager'):
        leaves = [inputs[name].clone().requires_grad_() for name in 'qkv']
        y = ops.aft_local_causal(*leaves, inputs['band'], backend=backend)
        found[backend] = torch.autograd.grad(y, leaves, grad)
    for x, expected in zip(found['triton'], found['eager'], strict=True):
        assert expected.isfinite().all()
        assert_close(x, expected, 1e-4)


def test_a_repair_leaves_no_trace_in_other_elements(triton_device: str):
    inputs = plain(make_inputs('aft_local_causal', 9, 3, 3, B=1), device=triton_device)
    before = local_causal(**inputs)
    k, band = inputs['k'].clone(), inputs['band'].clone()
    # Its own key is the only one that the last target has a bias for.
    k[:, 8, 0], band[8, 2] = -150.0, 100.0
    after = local_causal(**inputs | {'k': k, 'band': band})
    assert torch.equal(after[:, :8], before[:, :8])


def test_a_row_of_minus_infinity_sees_nothing(triton_device: str):
    inputs = plain(make_inputs('aft_local_causal', 5, 3, B=1), device=triton_device)
    inputs['band'][3] = float('-inf')
    y = local_causal(**inputs)
    assert not y[:, 3].any()
    wanted = local_causal(**inputs | {'band': inputs['band'].nan_to_num(neginf=0.0)})
    assert torch.equal(y[:, [0, 1, 2, 4]], wanted[:, [0, 1, 2, 4]])
