"""The causal operations and their one-step states, against float64 in value and in every gradient.

Values are those of the torch forms; those of the kernels are in `common/test_kernels.py`, and in the folders.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import (
    NASTY_KEYS,
    assert_close,
    assert_keys_of_minus_infinity_are_masked,
    assert_matches_reference,
    generator,
    make_inputs,
    make_nasty,
    make_qkv,
    plain,
    randn,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.decode import eager as decode

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = ['aft_full_causal', 'aft_local_causal', 'aft_simple_causal']


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('name', NAMES)
def test_targets_that_see_keys_of_minus_infinity_alone_are_zero(name: str, backend: str, dtype: torch.dtype):
    inputs = make_inputs(name, 70, s=20)
    # More than a block of targets, and after it keys that count.
    inputs['k'][0, :40, 1] = float('-inf')
    assert_keys_of_minus_infinity_are_masked(
        lambda **x: getattr(ops, name)(**x, backend=backend), getattr(reference, name), inputs, dtype
    )


def joint_mean(k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The means of the values (B, T, D) by weights e^(k + w - log of their sum), in float64; `bias` is (T, T)."""
    future = torch.ones_like(bias, dtype=torch.bool).triu(1)
    logits = (k.double().mT.unsqueeze(2) + bias.double()).masked_fill(future, float('-inf'))  # (B, D, T, T)
    return (torch.exp(logits - logits.logsumexp(3, keepdim=True)) @ v.double().mT.unsqueeze(3)).squeeze(3).mT


def run_form(form: str, inputs: dict[str, Tensor]) -> Tensor:
    """The causal mean of a form: a backend of the operator, or of decoding 'steps' or 'prefill' after two steps."""
    if form in ('steps', 'prefill'):
        tokens = inputs['v'].shape[1]
        # sigmoid(0) = 1 / 2
        gated = inputs | {'q': torch.zeros_like(inputs['v'])}
        return 2 * run_chunks(gated, [1] * tokens if form == 'steps' else [1, 1, tokens - 2], inputs['v'].dtype)
    bias = next((name for name in ('bias', 'band') if name in inputs), 'simple')
    name = {'bias': 'aft_full_causal', 'band': 'aft_local_causal', 'simple': 'aft_simple_causal'}[bias]
    return getattr(ops, name)(None, **inputs, backend=form)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[None, :, None]


FORMS = ['eager', 'auto', 'prefill', 'steps']


@pytest.mark.parametrize('form', FORMS)
def test_a_weight_that_vanishes_counts_under_a_key_far_above_the_others(form: str):
    inputs = {'k': column(0, 60, -65), 'v': column(0, 2, 1), 'band': torch.full((3, 1), 120.0)}
    # The second key weighs e^(60 - 0), the third e^(120 - 65).
    assert_close(run_form(form, inputs), column(0, 2, 2 - 1 / (1 + math.exp(5))), 1e-5)


@pytest.mark.parametrize('form', FORMS)
def test_sums_far_above_their_reference_count_under_a_later_key(form: str):
    k = torch.full((1, 64, 1), -1000.0)
    v = torch.zeros_like(k)
    k[0, [0, 1, 32, 33], 0], v[0, [1, 32], 0] = torch.tensor([0.0, 60.0, 40.0, 168.0]), torch.tensor([2.0, 1.0])
    expected = joint_mean(k, v, torch.zeros(64, 64))
    assert expected[0, 32, 0].item() == pytest.approx(2.0)
    for bias in ({'band': torch.zeros(64, 2)}, {}):
        assert_close(run_form(form, {'k': k, 'v': v} | bias), expected, 1e-5)
    # Of a chunk after two steps.
    simple = {'k': column(0, 60, 40, 168), 'v': column(0, 2, 1, 0)}
    assert_close(run_form(form, simple), column(0, 2, 2, 0), 1e-5)


@pytest.mark.parametrize('backend', ['eager', 'auto'])
def test_gradients_far_above_their_reference_count_under_a_later_key(backend: str):
    k, v = torch.full((1, 64, 1), -1000.0), randn(1, 64, 1).float().requires_grad_()
    k[0, [0, 1, 32, 33], 0] = torch.tensor([0.0, 60.0, 40.0, 168.0])
    k.requires_grad_()
    for bias in ({'band': torch.zeros(64, 2)}, {}):
        y = run_form(backend, {'k': k, 'v': v} | bias)
        found = torch.autograd.grad(y[0, 32, 0], [k, v])
        wanted = torch.autograd.grad(joint_mean(k, v, torch.zeros(64, 64))[0, 32, 0], [k, v])
        for got, want in zip(found, wanted, strict=True):
            assert_close(got, want, 1e-4, floor=wanted[1].norm().item())


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('s', [0, 1, 3, 40])
def test_biases_and_keys_far_apart_equal_a_joint_log_sum_exp(s: int, backend: str, dtype: torch.dtype):
    T = 70
    random = generator(s)
    inputs = {'k': torch.rand(2, T, 3, generator=random) * 320 - 160, 'v': torch.randn(2, T, 3, generator=random)}
    inputs['k'][1] = torch.tensor([0.0, 60.0, -65.0, 40.0, 168.0, -1000.0])[torch.randint(6, (T, 3), generator=random)]
    inputs['band' if s else 'bias'] = torch.rand(T, s or T, generator=random) * 240 - 120
    low = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    y = run_form(backend, low)
    bias = reference.band_to_bias(low['band'].double(), 1 - s) if s else low['bias'].double()
    expected = joint_mean(low['k'], low['v'], bias)
    bound = 1e-4 if dtype == torch.float32 else 1e-10
    assert_close(y, expected, bound)
    weight = torch.randn(2, T, 3, generator=random).to(dtype)
    found = torch.autograd.grad(y, list(low.values()), weight)
    wanted = torch.autograd.grad(expected, list(low.values()), weight.double())
    for name, got, want in zip(low, found, wanted, strict=True):
        assert_close(got, want, bound, name, floor=wanted[1].norm().item())
    if s and backend == 'auto':
        for form in ('steps', 'prefill'):
            assert_close(run_form(form, {name: x.detach() for name, x in low.items()}), expected.detach(), bound)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('name', NAMES[:2])
def test_a_bias_of_minus_infinity_hides_a_source(name: str, backend: str, dtype: torch.dtype):
    inputs = make_inputs(name, 70, s=20)
    bias = inputs['bias' if name == NAMES[0] else 'band']
    bias.masked_fill_(torch.rand(bias.shape, generator=generator(4)) < 0.3, float('-inf'))
    bias[[0, 5, 40, 69]] = float('-inf')
    operator, oracle = getattr(ops, name), getattr(reference, name)
    assert_matches_reference(lambda **x: operator(**x, backend=backend), oracle, inputs, dtype)
    low = plain(inputs)
    assert not operator(**low, backend=backend)[:, 0].any()
    if name == NAMES[1]:
        expected = oracle(**plain(low, torch.float64))
        for chunks in ([1] * 70, [1, 30, 1, 38]):
            assert_close(run_chunks(low, chunks, torch.float32), expected, 1e-5)


NOT_FINITE = {'key_nan': (math.nan, None), 'key_inf': (math.inf, None), 'value_nan': (None, math.nan)}
NOT_FINITE |= {'value_inf': (None, math.inf), 'token_nan': (math.nan, math.nan)}


@pytest.mark.parametrize('what', NOT_FINITE)
@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('name', NAMES)
def test_a_token_that_is_not_finite_leaves_the_past_alone(name: str, backend: str, what: str):
    inputs = plain(make_inputs(name, 70, s=20))
    key, value = NOT_FINITE[what]
    hidden, spoilt = ({key: x.clone() for key, x in inputs.items()} for _ in range(2))
    # In one channel: in the middle of a block, and after it.
    hidden['k'][1, 45:, 2], hidden['v'][1, 45:, 2] = float('-inf'), 0.0
    for t in (45, 66):
        for n, x in (('k', key), ('v', value), ('q', value if key is not None else None)):
            if x is not None:
                spoilt[n][1, t, 2] = x
    tainted = torch.zeros(2, 70, 6, dtype=torch.bool)
    tainted[1, 45:, 2] = True
    results = []
    for x in (hidden, spoilt):
        leaves = [leaf.requires_grad_() for leaf in x.values()]
        y = getattr(ops, name)(**x, backend=backend)
        weight = randn(2, 70, 6, seed=9).float().masked_fill(tainted, 0.0)
        results.append([y.detach().masked_fill(tainted, 0.0), *torch.autograd.grad(y, leaves, weight)])
    assert y[tainted].isnan().all()
    results[0][1] = results[0][1].masked_fill(tainted, 0.0)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    if name != NAMES[0]:
        chunk = run_chunks({key: x.detach() for key, x in spoilt.items()}, [1, 30, 39], torch.float32)
        assert not chunk[tainted].isfinite().any()
        assert_close(chunk.masked_fill(tainted, 0.0), results[0][0], 1e-5)


@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('name', NAMES)
def test_a_result_that_is_not_a_number_gives_no_finite_gradient(name: str, backend: str):
    inputs = plain(make_inputs(name, 40, s=5))
    inputs['k'][0, 30, 1] = math.nan
    leaves = {key: x.requires_grad_() for key, x in inputs.items()}
    grads = torch.autograd.grad(getattr(ops, name)(**leaves, backend=backend).sum(), list(leaves.values()))
    for grad in dict(zip(leaves, grads, strict=True)).values():
        assert grad.isnan().any()
    assert all(grad[1].isfinite().all() for grad in grads[:3])


@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('name', NAMES)
def test_a_key_of_minus_infinity_counts_for_nothing_whatever_its_value(name: str, backend: str):
    inputs = plain(make_inputs(name, 70, s=20))
    inputs['k'][:, [3, 40], 1] = -math.inf
    results = []
    for value in (0.0, math.nan):
        inputs['v'][:, [3, 40], 1] = value
        leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
        y = getattr(ops, name)(**leaves, backend=backend)
        results.append([y, *torch.autograd.grad(y, list(leaves.values()), randn(2, 70, 6, seed=9).float())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('name', NAMES[1:])
def test_a_step_with_a_key_of_minus_infinity_counts_for_nothing(name: str, backend: str):
    inputs = plain(make_inputs(name, 12, s=4))
    inputs['k'][:, [0, 3, 9], 1] = -math.inf
    expected = getattr(reference, name)(**plain(inputs, torch.float64))
    inputs['v'][:, [0, 3, 9], 1] = math.nan
    for chunks in ([1] * 12, [2, 5, 1, 4]):
        assert_close(run_chunks(inputs, chunks, torch.float32, backend=backend), expected, 1e-5)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('s', [0, 3])
def test_a_large_value_under_a_high_key_leaves_earlier_targets_alone(form: str, s: int):
    k, v = torch.zeros(1, 80, 2), randn(1, 80, 2).float()
    k[:, 10:], v[:, 10:] = 59.0, 1e13
    expected = joint_mean(k, v, torch.zeros(80, 80))
    found = run_form(form, {'k': k, 'v': v} | ({'band': torch.zeros(80, s)} if s else {}))
    assert_close(found[:, :10], expected[:, :10], 1e-5)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize('size', [1e-30, 1e-18, 1e8])
@pytest.mark.parametrize('large', [1.0, 1e13])
@pytest.mark.parametrize('backend', ['eager', 'auto'])
@pytest.mark.parametrize('s', [0, 3])
def test_gradients_keep_their_digits_however_large(s: int, backend: str, large: float, size: float):
    # One key so far above the others that denominators are nearly e^60.
    inputs = {'k': randn(1, 80, 2, seed=1).float(), 'v': randn(1, 80, 2, seed=2).float()}
    inputs |= {'band': randn(80, s, seed=3).float()} if s else {}
    inputs['k'][:, 10] += 57.0
    inputs['v'][:, 20, 1] = large
    inputs = {key: x.requires_grad_() for key, x in inputs.items()}
    grad = randn(1, 80, 2, seed=4) * size
    bias = reference.band_to_bias(inputs['band'].double(), 1 - s) if s else torch.zeros(80, 80)
    found = torch.autograd.grad(run_form(backend, inputs), list(inputs.values()), grad.float())
    wanted = torch.autograd.grad(joint_mean(inputs['k'], inputs['v'], bias), list(inputs.values()), grad)
    for name, got, want in zip(inputs, found, wanted, strict=True):
        assert_close(got / size, want / size, 2e-5, name)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(('batch', 'dim'), [(0, 6), (2, 0)])
def test_steps_and_chunks_of_nothing_give_nothing(batch: int, dim: int, dtype: torch.dtype):
    inputs = dict(zip('qkv', torch.zeros(3, batch, 9, dim, dtype=dtype), strict=True))
    for bias in ({'band': torch.zeros(9, 3, dtype=dtype)}, {}):
        assert run_chunks(inputs | bias, [1, 1, 4, 1, 1, 1], dtype).shape == (batch, 9, dim)


@pytest.mark.parametrize('jump', [18.0, 59.0])
@pytest.mark.parametrize('t', [1, 70, 149])
@pytest.mark.parametrize(('name', 'step'), [(NAMES[0], 128), (NAMES[1], 32), (NAMES[2], 64)])
def test_a_later_token_changes_no_bit_of_earlier_outputs(name: str, step: int, t: int, jump: float):
    inputs = plain(make_inputs(name, 150))
    before = getattr(ops, name)(**inputs)
    k, v = inputs['k'].clone(), inputs['v'].clone()
    # The headroom counts from the largest key before the token's block; the first block counts from its first key.
    k[:, t], v[:, t] = inputs['k'][:, : max(1, t // step * step)].amax(1) + jump, 1e3
    after = getattr(ops, name)(**inputs | {'k': k, 'v': v})
    assert torch.equal(after[:, :t], before[:, :t])
    assert not torch.equal(after[:, t], before[:, t])


@pytest.mark.parametrize('jump', [105.0, 200.0, 1e4])
@pytest.mark.parametrize('name', NAMES)
def test_a_huge_future_key_leaves_the_past_alone(name: str, jump: float):
    inputs = plain(make_inputs(name, 150))
    before = getattr(ops, name)(**inputs)
    inputs['k'][:, 100] += jump
    assert_close(getattr(ops, name)(**inputs)[:, :100], before[:, :100], 5e-6)


def test_causal_local_equals_causal_full_when_the_window_covers_everything():
    inputs = make_inputs('aft_full_causal', 70)
    bias = inputs.pop('bias')
    band = ops.local_bias(bias, 70, causal=True)
    assert_close(ops.aft_local_causal(**inputs, band=band), ops.aft_full_causal(**inputs, bias=bias), 1e-12)


def test_causal_simple_ends_at_the_whole_simple():
    inputs = make_inputs('aft_simple_causal', 70)
    assert_close(ops.aft_simple_causal(**inputs)[:, -1], ops.aft_simple(**inputs)[:, -1], 1e-12)


def run_chunks(
    inputs: dict[str, Tensor], chunks: list[int], dtype: torch.dtype = torch.float64, **options: Any
) -> Tensor:
    """Tokens a chunk at a time from the state of those before, or as a step with `options` where a chunk is 1."""
    batch, _, dim = inputs['v'].shape
    local = 'band' in inputs
    state = ops.aft_local_state(batch, dim, inputs['band'].shape[1], dtype) if local else None
    state = ops.aft_simple_state(batch, dim, dtype) if state is None else state
    name = 'aft_local' if local else 'aft_simple'
    rows, start = [], 0
    for chunk in chunks:
        place = start if chunk == 1 else slice(start, start + chunk)
        form = 'step' if chunk == 1 else 'prefill'
        bias = [inputs['band'][place]] if local else []
        function = partial(getattr(ops, f'{name}_{form}'), **(options if chunk == 1 else {}))
        y, state = function(*(inputs[n][:, place] for n in 'qkv'), *bias, state)
        rows.append(y.unsqueeze(1) if chunk == 1 else y)
        start += chunk
    return torch.cat(rows, 1)


# A window of one token and one longer than the sequence have no token that leaves it; AFT-simple has no biases.
@pytest.mark.parametrize('keys', ['ordinary', *NASTY_KEYS])
@pytest.mark.parametrize(
    ('name', 's', 'bias'),
    [
        *((NAMES[1], 33, bias) for bias in ('ordinary', 'within_50', 'plus_minus_80')),
        *((NAMES[1], s, 'plus_minus_80') for s in (1, 90)),
        (NAMES[2], 0, 'ordinary'),
    ],
)
def test_steps_and_chunks_survive_nasty_inputs(name: str, s: int, keys: str, bias: str):
    low = plain(make_nasty(make_inputs(name, 50, s=s, D=3), keys, bias))
    high = plain(low, torch.float64)
    expected = getattr(reference, name)(**high)
    for chunks in ([1] * 50, [50], [1, 7, 33, 1, 1, 3, 1, 3]):
        assert_close(run_chunks(high, chunks), expected, 1e-10)
        assert_close(run_chunks(low, chunks, torch.float32), expected, 5e-5)


def jumping_keys(k: Tensor, jump: float = 200.0) -> Tensor:
    """Keys whose level in every channel jumps up or down at random, by up to `jump`, for one token or for many."""
    batch, tokens, dim = k.shape
    random = generator(8)
    moves = torch.rand(batch, tokens, dim, generator=random) < 0.01
    levels = (torch.rand(batch, tokens, dim, generator=random) * 2 - 1) * jump
    last = torch.where(moves, torch.arange(tokens)[:, None], 0).cummax(1).values
    singles = (torch.rand(batch, tokens, dim, generator=random) < 0.003) * jump
    return (k + levels.gather(1, last) + singles).bfloat16().to(k)


def long_inputs(name: str, s: int, keys: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs that every dtype holds, of 3072 tokens, and their result as one softmax over all that a target sees."""
    inputs = {key: x.bfloat16().double() for key, x in make_inputs(name, 3072, s=s, D=1, B=1).items()}
    if keys == 'jumping':
        inputs['k'] = jumping_keys(inputs['k'])
    q, k, v = (inputs[n][0, :, 0] for n in 'qkv')
    # In the band of a target, the target is the last.
    place = torch.arange(3072) - torch.arange(3072)[:, None] + s - 1
    logits = k.expand(3072, -1)
    if 'band' in inputs:
        logits = logits + inputs['band'].gather(1, place.clamp(0, s - 1)).where(place >= 0, 0.0)
    weight = logits.masked_fill(torch.ones(3072, 3072, dtype=torch.bool).triu(1), float('-inf')).softmax(1)
    return inputs, (torch.sigmoid(q) * (weight @ v))[None, :, None]


# Keys that jump take the states to their limits, ordinary ones make the longest sums. The rule of the states in float64
# is tested over fewer tokens, and bfloat16, which is that of the inputs alone, in the tests of the decoders.
@pytest.mark.parametrize(
    ('name', 's', 'keys'),
    [(NAMES[1], 256, 'jumping'), (NAMES[1], 3072, 'ordinary'), (NAMES[2], 0, 'jumping'), (NAMES[2], 0, 'ordinary')],
)
def test_parallel_chunks_and_steps_agree_over_3072_tokens(name: str, s: int, keys: str):
    inputs, expected = long_inputs(name, s, keys)
    low, bound = plain(inputs), 5e-5
    assert_close(getattr(ops, name)(**low), expected, bound)
    assert_close(run_chunks(low, [1] * 3072, torch.float32), expected, bound)
    assert_close(run_chunks(low, [1000, 1, 2000, 1, 1, 69], torch.float32), expected, bound)
    if s == 3072:  # AFT-full, which decodes with a window of all tokens
        band = low.pop('band')
        bias = torch.stack([band[t].roll(t + 1) for t in range(3072)])
        assert_close(ops.aft_full_causal(**low, bias=bias), expected, bound)


@pytest.mark.parametrize('keys', ['ordinary', *NASTY_KEYS])
def test_a_step_without_branches_equals_the_step(keys: str):
    inputs = make_nasty(make_inputs('aft_local_causal', 70, s=33), keys)
    q, k, v, band = (inputs[n] for n in ('q', 'k', 'v', 'band'))
    state = ops.aft_local_state(2, 6, 33, torch.float64)
    # As on an accelerator.
    state.ring[..., 6:] = float('-inf')
    rows = [decode.local_step_static(k[:, t], v[:, t], band[t], *state[:-1]) for t in range(70)]
    assert_close(torch.sigmoid(q) * torch.stack(rows, 1), reference.aft_local_causal(**inputs), 1e-10)


def test_a_later_token_changes_no_bit_of_earlier_steps():
    inputs = plain(make_inputs('aft_local_causal', 70, s=33))
    before = run_chunks(inputs, [1] * 70, torch.float32)
    inputs['k'][:, 50] += 200.0
    assert torch.equal(run_chunks(inputs, [1] * 70, torch.float32)[:, :50], before[:, :50])


def test_a_ring_holds_keys_only_while_they_lie_too_far_apart():
    inputs = make_inputs('aft_local_causal', 30, s=4)
    inputs['k'][:, 10] -= 500.0
    state = ops.aft_local_state(2, 6, 4, torch.float64)
    held = []
    for t in range(30):
        _, state = ops.aft_local_step(*(inputs[n][:, t] for n in 'qkv'), inputs['band'][t], state)
        held.append(bool(state.holds_keys))
    # While the small key is in the window of four tokens.
    assert held == [False] * 10 + [True] * 4 + [False] * 16


@pytest.mark.parametrize('chunks', [[1] * 9, [4, 1, 1, 3], [9]])
@pytest.mark.parametrize('backend', ['eager', 'auto'])
def test_a_key_however_far_below_the_sums_counts_under_its_bias(backend: str, chunks: list[int]):
    k, v = column(0, 0, 0, -450, -900, 0, 0, 700, 1), column(1, 1, 1, 5, 7, 1, 2, 3, 4)
    band = torch.zeros(9, 2)
    band[3, 1], band[4, 0], band[5, 0], band[8, 1] = 500.0, 480.0, 950.0, 900.0
    inputs = {'q': torch.zeros_like(v), 'k': k, 'v': v, 'band': band}
    expected = joint_mean(k, v, reference.band_to_bias(band.double(), -1))
    assert expected.flatten().tolist() == pytest.approx([1, 1, 1, 5, 5, 7, 9 / 8, 3, 4], abs=1)
    assert_close(2 * run_chunks(inputs, chunks, torch.float32, backend=backend), expected, 1e-5)


def test_a_state_has_no_more_than_the_window_and_the_sums():
    state = ops.aft_local_state(2, 6, 5)
    assert sum(x.numel() for x in state) == 2 * 6 * (2 * 5 + 2 + 1) + 2
    assert sum(x.numel() for x in ops.aft_simple_state(2, 6)) == 2 * 6 * 3


def test_a_cloned_state_is_left_alone_by_steps():
    inputs = make_inputs('aft_local_causal', 8, s=3)
    state = ops.aft_local_state(2, 6, 3, torch.float64)
    _, state = ops.aft_local_prefill(*(inputs[n][:, :7] for n in 'qkv'), inputs['band'][:7], state)
    copy = ops.clone_state(state)
    arguments = [inputs[n][:, 7] for n in 'qkv']
    y, _ = ops.aft_local_step(*arguments, inputs['band'][7], state)
    again, _ = ops.aft_local_step(*arguments, inputs['band'][7], copy)
    assert torch.equal(again, y)
    assert int(copy.position) == int(state.position) == 8


def test_a_state_keeps_its_shapes_and_can_be_reordered():
    inputs = make_inputs('aft_local_causal', 8, s=3, B=3)
    state = ops.aft_local_state(3, 6, 3, torch.float64)
    shapes = [x.shape for x in state]
    for t in range(7):
        _, state = ops.aft_local_step(*(inputs[n][:, t] for n in 'qkv'), inputs['band'][t], state)
    assert [x.shape for x in state] == shapes
    index = torch.tensor([2, 2, 0])
    q, k, v = (inputs[n][:, 7] for n in 'qkv')
    reordered = ops.reorder_state(state, index)
    y, _ = ops.aft_local_step(q, k, v, inputs['band'][7], state)
    picked, _ = ops.aft_local_step(q[index], k[index], v[index], inputs['band'][7], reordered)
    assert torch.equal(picked, y[index])


def test_a_step_compiles_to_one_graph():
    inputs = plain(make_inputs('aft_local_causal', 6, s=3))
    counter = CompileCounter()
    step = torch.compile(ops.aft_local_step, backend=counter, fullgraph=True)
    state = ops.aft_local_state(2, 6, 3)
    for t in range(6):
        _, state = step(*(inputs[n][:, t] for n in 'qkv'), inputs['band'][t], state)
    assert counter.frame_count == 1


REJECTED = [
    (lambda: ops.aft_local_causal(*make_qkv(), randn(11, 3)), r'band must have shape \(12, s\)'),
    (lambda: ops.aft_full_causal(*make_qkv(), randn(12, 11)), r'bias must have shape \(12, 12\)'),
    (lambda: ops.aft_simple_causal(*make_qkv(), mask=torch.ones(2, 12)), r'mask must be a bool'),
    (lambda: ops.aft_local_state(2, 6, 0), r'window must be at least 1, got 0'),
    (lambda: ops.aft_simple_state(2, 6, torch.bfloat16), r'dtype must be torch.float32 or torch.float64'),
    (lambda: ops.aft_simple_step(*randn(3, 2, 7), ops.aft_simple_state(2, 6)), r'q must have shape \(2, 6\)'),
    (lambda: ops.aft_local_step(*randn(3, 2, 6), randn(4), ops.aft_local_state(2, 6, 3)), r'band_row must have shape'),
    (lambda: ops.aft_local_prefill(*randn(3, 2, 4, 6), randn(4, 2), ops.aft_local_state(2, 6, 3)), r'\(4, 3\)'),
    (lambda: ops.aft_simple_prefill(*randn(3, 2, 0, 6), ops.aft_simple_state(2, 6)), r'n of at least 1'),
    (lambda: ops.reorder_state(ops.aft_simple_state(2, 6), torch.tensor([[0]])), r'index must be one-dimensional'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_input_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def step_calls(state: ops.SimpleState | ops.LocalState) -> dict[str, Callable[[], object]]:
    """Calls that take a state of (2, 6), with a window of 3 where there is one."""
    x, chunk = randn(2, 6).to(state[0].dtype), randn(2, 2, 6).to(state[0].dtype)
    simple = isinstance(state, ops.SimpleState)
    if simple:
        return {
            'step': lambda: ops.aft_simple_step(x, x, x, state),
            'prefill': lambda: ops.aft_simple_prefill(chunk, chunk, chunk, state),
        }
    return {
        'step': lambda: ops.aft_local_step(x, x, x, randn(3).to(x), state),
        'prefill': lambda: ops.aft_local_prefill(chunk, chunk, chunk, randn(2, 3).to(x), state),
    }


@pytest.mark.parametrize('change', [Tensor.bfloat16, lambda x: x[None], lambda x: x.to('meta')])
@pytest.mark.parametrize('state', [ops.aft_simple_state(2, 6), ops.aft_local_state(2, 6, 3)], ids=['simple', 'local'])
def test_a_part_of_a_state_that_does_not_match_is_named(state: Any, change: Callable[[Tensor], Tensor]):
    for name, x in state._asdict().items():
        # Against a wrong reference it is another part that does not match.
        named = r'\w+' if name == 'reference' else name
        for call in step_calls(state._replace(**{name: change(x)})).values():
            with pytest.raises(ValueError, match=rf'state\.{named} must be .*, got '):
                call()


@pytest.mark.parametrize('name', ['aft_simple_step', 'aft_local_step'])
def test_a_state_of_the_other_operation_is_an_error(name: str):
    x, other = torch.zeros(2, 6), ops.aft_local_state(2, 6, 3)
    arguments = (x, x, x, other) if name == 'aft_simple_step' else (x, x, x, torch.zeros(3), ops.aft_simple_state(2, 6))
    with pytest.raises(ValueError, match=r'state must be of ops\.aft_'):
        getattr(ops, name)(*arguments)


@pytest.mark.parametrize('holds_keys', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_a_negative_position_is_an_error_and_changes_nothing(dtype: torch.dtype, holds_keys: bool):
    state = ops.aft_local_state(2, 6, 3, dtype)
    state.position.fill_(-2), state.holds_keys.fill_(holds_keys)
    before = ops.clone_state(state)
    for call in step_calls(state).values():
        with pytest.raises(ValueError, match=r'state\.position must be the number of tokens seen, at least 0, got -2'):
            call()
    assert all(map(torch.equal, before, state))
