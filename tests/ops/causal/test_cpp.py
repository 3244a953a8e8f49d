"""The compiled AFT-local and AFT-simple with the future masked: where they run, and what holds for both."""

import math
from typing import Any

import pytest
import torch
from helpers import assert_matches_reference, causal_inputs, generator, kernels_run, single, threads
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference

pytestmark = [
    pytest.mark.cpp,
    pytest.mark.usefixtures('compiled'),
    pytest.mark.parametrize('name', ['aft_local_causal', 'aft_simple_causal']),
]

KERNELS = {
    'aft_local_causal': {'aft_vision::local_forward', 'aft_vision::local_backward'},
    'aft_simple_causal': {'aft_vision::scan_forward', 'aft_vision::scan_backward'},
}
# Tokens, window and channels: whole blocks and a rest, a window of one token and of more than the sequence.
SIZES = [(30, 4, 16), (64, 3, 8), (65, 1, 37), (40, 60, 7), (150, 5, 37), (200, 91, 19)]


def run(name: str, **inputs: Any) -> Tensor:
    return getattr(ops, name)(**inputs)


@pytest.mark.parametrize(
    ('dtype', 'masked'),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize(('T', 's', 'D'), SIZES)
def test_it_equals_float64(name: str, T: int, s: int, D: int, masked: bool, dtype: torch.dtype):
    mask = torch.rand(2, T, generator=generator(3)) > 0.4
    mask[:, 0] = False  # the first targets see nothing
    inputs = causal_inputs(name, T, s, D) | {'mask': mask if masked else None}
    assert_matches_reference(getattr(ops, name), getattr(reference, name), inputs, dtype)


def test_one_token_gives_its_own_value(name: str):
    # The key has no gradient: what is left of it counts against that of the value.
    assert_matches_reference(getattr(ops, name), getattr(reference, name), causal_inputs(name, 1, 1), nasty=True)


def test_it_equals_float64_without_a_gate(name: str):
    inputs = causal_inputs(name, 70, 9, 9) | {'q': None}
    assert_matches_reference(getattr(ops, name), getattr(reference, name), inputs)


def test_a_row_is_the_same_bits_alone_and_in_a_batch(name: str):
    inputs = single(causal_inputs(name, 150, 40, 19, B=3))
    row = {key: x[1:2] if key in 'qkv' else x for key, x in inputs.items()}
    assert torch.equal(run(name, **row), run(name, **inputs)[1:2])


def test_threads_share_the_channels(name: str):
    inputs = single(causal_inputs(name, 70, 20, 67, B=1))
    found = []
    for count in (1, 3):
        with threads(count):
            y = run(name, **inputs)
            found.append([y, *torch.autograd.grad(y.square().sum(), list(inputs.values()))])
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


def test_a_masked_token_may_be_anything(name: str):
    inputs, mask = single(causal_inputs(name, 40, 5, 9)), torch.ones(2, 40, dtype=torch.bool)
    mask[:, 5] = False
    expected = run(name, **inputs, mask=mask)
    with torch.no_grad():
        inputs['k'][:, 5], inputs['v'][:, 5] = math.nan, math.inf
    y = run(name, **inputs, mask=mask)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs.values())


@pytest.mark.parametrize('part', ['k', 'v'])
def test_a_nan_stays_one(name: str, part: str):
    inputs = single(causal_inputs(name, 40, 5, 9))
    with torch.no_grad():
        inputs[part][0, 5, 2] = math.nan
    y = run(name, **inputs)
    assert y[0, 5:, 2].isnan().all()
    assert y[0, :5].isfinite().all()
    assert y[1].isfinite().all()


def test_parts_of_a_fused_projection_are_read_where_they_are(name: str):
    inputs = {key: x.float() for key, x in causal_inputs(name, 70, 12, 9).items()}
    fused = torch.cat([inputs[key] for key in 'qkv'], -1)
    parts = inputs | dict(zip('qkv', fused.split(9, -1), strict=True))
    expected = run(name, **inputs)
    assert torch.equal(run(name, **parts), expected)
    assert torch.equal(run(name, **{key: x.mT.contiguous().mT for key, x in parts.items()}), expected)


def test_it_runs_unless_eager_is_asked_for(name: str):
    inputs = single(causal_inputs(name, 12, 5, 9))
    assert kernels_run(lambda: run(name, **inputs).sum().backward()) == KERNELS[name]
    assert kernels_run(lambda: run(name, **inputs, backend='eager').sum().backward()) == set()


def test_float64_takes_the_torch_form(name: str):
    inputs = causal_inputs(name, 12, 5, 9)
    assert kernels_run(lambda: run(name, **inputs)) == set()
    if 'band' in inputs:
        assert kernels_run(lambda: run(name, **single(inputs) | {'band': inputs['band']})) == set()
