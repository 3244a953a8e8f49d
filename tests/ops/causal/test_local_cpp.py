"""The compiled AFT-local with the future masked: its values, and what torch repairs."""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from helpers import (
    BOUNDS,
    NASTY_KEYS,
    assert_close,
    assert_matches_reference,
    make_inputs,
    make_nasty,
    make_qkv,
    plain,
    randn,
    single,
)

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.common import cpp

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


# One block, a window of one, of more than the sequence, blocks of 32 and of 45 with a rest.
@pytest.mark.parametrize(('T', 's', 'D'), [(30, 4, 16), (100, 1, 9), (40, 60, 7), (150, 5, 37), (200, 91, 19)])
def test_bfloat16_equals_float64_where_the_cpu_does_not_multiply_it(
    T: int, s: int, D: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr('aft_vision.ops.common.numerics._cpu_multiplies_bfloat16', lambda: False)
    inputs = make_inputs('aft_local_causal', T, D, s)
    with cpp.multiply_bfloat16_as(cpp.SINGLE):
        assert_matches_reference(ops.aft_local_causal, reference.aft_local_causal, inputs, torch.bfloat16)


def test_tensors_may_differ_in_their_types():
    types = {'q': torch.float32, 'k': torch.bfloat16, 'v': torch.float16, 'band': torch.bfloat16}
    low = {name: x.to(types[name]).requires_grad_() for name, x in make_inputs('aft_local_causal', 70, 20, 9).items()}
    high = single(low, torch.float64)
    y, expected = ops.aft_local_causal(**low), reference.aft_local_causal(**high)
    assert y.dtype == torch.float32
    assert_close(y, expected, 1e-5)
    weight = randn(*expected.shape, seed=9)
    found = torch.autograd.grad(y, list(low.values()), weight.float())
    for name, got, want in zip(types, found, torch.autograd.grad(expected, list(high.values()), weight), strict=True):
        assert got.dtype == types[name]
        assert_close(got, want, 1e-4 if name == 'q' else 4e-3)


@pytest.fixture(params=['float32', 'bfloat16', 'pairs', 'tiles'])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Give a type of inputs, bfloat16 multiplied as this processor does the fastest, in pairs, and in tiles."""
    kind = {'pairs': cpp.PAIRS, 'tiles': cpp.TILES}.get(request.param)
    with nullcontext() if kind is None else cpp.multiply_bfloat16_as(kind):
        yield torch.float32 if request.param == 'float32' else torch.bfloat16


# In bfloat16 the CPU's products would take those weights for zero.
def test_a_small_weight_counts_where_the_key_is_large(dtype: torch.dtype):
    bound, grad_bound = BOUNDS[dtype]
    # Two keys e^59 above the reference of the second block, seen with e^-90: of a denominator of e^-30 each has half.
    k, band = torch.zeros(1, 40, 3), torch.zeros(40, 5)
    k[:, 33:] = torch.tensor([59.0, 59.0, *[-60.0] * 5])[:, None]
    band[36] = torch.tensor([0.0, -30.0, -30.0, 60.0, 60.0])
    inputs = {'q': None, 'k': k, 'v': make_qkv(B=1, T=40, D=3)[2], 'band': band}
    low = single(inputs, dtype)
    high = single(low, torch.float64)
    y, expected = ops.aft_local_causal(**low)[:, 36], reference.aft_local_causal(**high)[:, 36]
    assert_close(y, expected, bound)
    weight = randn(1, 3, seed=9).to(dtype)
    found = torch.autograd.grad(y, [low[name] for name in ('k', 'v', 'band')], weight)
    wanted = torch.autograd.grad(expected, [high[name] for name in ('k', 'v', 'band')], weight.double())
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, grad_bound)


@pytest.mark.parametrize('bias', ['within_50', 'plus_minus_80'])
@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_it_survives_nasty_inputs_over_many_blocks(keys: str, bias: str, dtype: torch.dtype):
    inputs = make_nasty(make_inputs('aft_local_causal', 110, 3, 20, B=1), keys, bias)
    assert_matches_reference(ops.aft_local_causal, reference.aft_local_causal, inputs, dtype, nasty=True)


# Blocks of 32; the reference moves by more than 8 nats in the second block, and by less.
@pytest.mark.parametrize(('key', 'value'), [(68.0, 2e9), (67.0, 1e10)])
def test_keys_leave_room_for_the_values(key: float, value: float):
    k, v = torch.zeros(1, 64, 3), make_qkv(B=1, T=64, D=3)[2]
    k[:, 32:], v[:, 32:] = key, value * (1 + v[:, 32:].abs())
    inputs = {'q': None, 'k': k, 'v': v, 'band': torch.zeros(64, 5)}
    low = single(inputs)
    high = single(low, torch.float64)
    y, expected = ops.aft_local_causal(**low), reference.aft_local_causal(**high)
    # Those of the first block have a norm of their own.
    for part in (slice(0, 32), slice(32, 64)):
        assert_close(y[:, part], expected[:, part], 1e-5)
    found = torch.autograd.grad(y.sum(), [low['k'], low['v']])
    for got, want in zip(found, torch.autograd.grad(expected.sum(), [high['k'], high['v']]), strict=True):
        assert_close(got, want, 1e-4)


def test_a_repaired_target_leaves_the_bits_of_the_others_alone():
    inputs = plain(make_inputs('aft_local_causal', 100))
    before = ops.aft_local_causal(**inputs)
    # A target whose denominator underflows: biases far above those of the keys that are there.
    k, band = inputs['k'].clone(), inputs['band'].clone()
    k[:, 77], band[80] = k[:, 77] - 150.0, torch.tensor([0.0, 100.0, 0.0, 0.0, 0.0])
    after = ops.aft_local_causal(**inputs | {'k': k, 'band': band})
    assert torch.equal(after[:, :77], before[:, :77])
    high = plain(inputs | {'k': k, 'band': band}, torch.float64)
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
def test_the_digits_of_a_wide_window_are_kept(dtype: torch.dtype):
    T = 4096
    v = (make_qkv(B=1, T=T, D=2)[2] + 1).to(dtype)
    k = torch.full_like(v, 0.3)
    k[:, 0] = 1.0
    y = ops.aft_local_causal(None, k, v, torch.zeros(T, T))
    weight = torch.exp(k.double() - 1)
    assert_close(y, (weight * v.double()).cumsum(1) / weight.cumsum(1), 5e-6 if dtype == torch.float32 else 4e-3)
