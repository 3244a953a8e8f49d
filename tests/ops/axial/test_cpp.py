"""The compiled AFT-axial: its values, where it runs, and what is done again by the torch form."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    assert_passes_opcheck,
    kernels_run,
    make_mask,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
    single,
    threads,
)

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.axial import eager

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

NAMES = {'aft_vision::axial_forward', 'aft_vision::axial_backward'}
# Channels that fill no vector, heads within a vector, across two and of several, rows longer than the registers hold.
CASES = [
    ((5, 7), 66, 66, (5, 7)),
    ((3, 30), 67, 67, (2, 9)),
    ((6, 5), 60, 10, (9, 2)),
    ((4, 3), 72, 3, (4, 3)),
    ((2, 9), 96, 6, (2, 9)),
    ((8, 2), 40, 20, (3, 1)),
    ((10, 9), 40, 1, (10, 9)),
]


def make_inputs(grid: tuple[int, int], D: int, heads: int, reach: tuple[int, int], B: int = 2) -> dict[str, object]:
    q, k, v = make_qkv(B=B, T=math.prod(grid), D=D, heads=heads)
    rows, columns = (randn(heads, 2 * s - 1, seed=7 + i) for i, s in enumerate(reach))
    return {'q': q, 'k': k, 'v': v, 'row_bias': rows, 'column_bias': columns, 'grid': grid}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('grid', 'D', 'heads', 'reach'), CASES)
def test_it_equals_float64(grid, D: int, heads: int, reach, masked: bool, dtype: torch.dtype):
    mask = make_mask(2, math.prod(grid)) if masked else None
    inputs = make_inputs(grid, D, heads, reach) | {'mask': mask}
    assert_matches_reference(ops.aft_axial, reference.aft_axial, inputs, dtype)


@pytest.mark.parametrize(('heads', 'count'), [(66, 3), (11, 3), (11, 1)])
def test_parts_of_a_batch_and_threads_equal_float64(heads: int, count: int):
    inputs = make_inputs((5, 7), 66, heads, (5, 3), B=5)
    with threads(count):
        assert_matches_reference(ops.aft_axial, reference.aft_axial, inputs)
        assert_matches_reference(ops.aft_axial, reference.aft_axial, inputs | {'q': None})


@pytest.mark.parametrize('heads', [66, 11])
@pytest.mark.parametrize('bias', list(nasty_biases(torch.zeros(1))))
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_it_survives_nasty_inputs(keys: str, bias: str, heads: int):
    inputs = make_inputs((6, 5), 66, heads, (6, 5))
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    inputs |= {name: nasty_biases(inputs[name])[bias] for name in ('row_bias', 'column_bias')}
    assert_matches_reference(ops.aft_axial, reference.aft_axial, inputs, nasty=True)


@pytest.mark.parametrize(('spread', 'again'), [(1.0, False), (60.0, True)])
def test_only_lost_denominators_cost_a_second_call(monkeypatch: pytest.MonkeyPatch, spread: float, again: bool):
    inputs, calls = single(make_inputs((6, 5), 66, 11, (6, 5))), []
    with torch.no_grad():
        for name in ('k', 'row_bias', 'column_bias'):
            inputs[name].mul_(spread)
    for name in ('axial_forward', 'axial_backward'):
        function = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *x, name=name, function=function: (calls.append(name), function(*x))[1])
    ops.aft_axial(**inputs).sum().backward()
    assert calls == (['axial_forward', 'axial_backward'] if again else [])


@pytest.mark.parametrize('heads', [60, 10])
def test_hidden_tokens_have_no_effect(heads: int):
    inputs = make_inputs((5, 3), 60, heads, (2, 9))
    assert_masked_tokens_have_no_effect(ops.aft_axial, inputs, make_mask(2, 15))
    assert_keys_of_minus_infinity_are_masked(ops.aft_axial, reference.aft_axial, inputs)


def test_parts_of_a_fused_projection_are_read_where_they_are():
    inputs = make_inputs((5, 7), 66, 11, (5, 7))
    low = single(inputs)
    parts = torch.cat([inputs[name] for name in 'qkv'], -1).float().split([66, 11, 66], -1)
    fused = low | dict(zip('qkv', parts, strict=True))
    expected = ops.aft_axial(**low)
    assert torch.equal(ops.aft_axial(**fused), expected)
    turned = fused | {name: fused[name].mT.contiguous().mT for name in 'qkv'}
    assert torch.equal(ops.aft_axial(**turned), expected)


def test_a_nan_stays_in_its_sequence_and_channel():
    inputs = single(make_inputs((5, 7), 66, 11, (5, 7)))
    with torch.no_grad():
        inputs['v'][0, 3, 5] = math.nan
    y = ops.aft_axial(**inputs)
    assert y[0, :, 5].isnan().all()
    assert y[0, :, :5].isfinite().all()
    assert y[1].isfinite().all()


def test_the_digits_of_a_large_image_are_kept():
    # As many tokens as 1024 px have, all of nearly the same weight.
    T = 64 * 64
    k, v = make_qkv(B=1, T=T, D=66, heads=11)[1:]
    inputs = make_inputs((64, 64), 66, 11, (14, 14), B=1) | {'k': k * 0.01, 'v': v + 1.0}
    low = single(inputs)
    high = single(inputs, torch.float64)
    y, expected = ops.aft_axial(**low), ops.aft_axial(**high, backend='eager')
    assert_close(y, expected, 5e-6)
    weight = randn(1, T, 66, seed=9).float()
    names = ('q', 'k', 'v', 'row_bias', 'column_bias')
    found = torch.autograd.grad(y, [low[name] for name in names], weight)
    wanted = torch.autograd.grad(expected, [high[name] for name in names], weight.double())
    for name, got, want in zip(names, found, wanted, strict=True):
        assert_close(got, want, 5e-5, name)


def test_it_passes_torch_opcheck():
    assert_passes_opcheck('aft_axial', make_inputs((5, 6), 66, 11, (5, 6)))


def test_it_runs_and_eager_can_be_asked_for():
    inputs = single(make_inputs((5, 7), 66, 11, (5, 7)))
    assert kernels_run(lambda: ops.aft_axial(**inputs).sum().backward()) == NAMES
    assert kernels_run(lambda: ops.aft_axial(**inputs, backend='eager').sum().backward()) == set()
