"""The compiled AFT-local and AFT-simple with the future masked: what holds for both, and for no other."""

from typing import Any

import pytest
import torch
from helpers import kernels_run, make_inputs, single, threads
from torch import Tensor

from aft_vision import ops

pytestmark = [
    pytest.mark.cpp,
    pytest.mark.usefixtures('compiled'),
    pytest.mark.parametrize('name', ['aft_local_causal', 'aft_simple_causal']),
]


def run(name: str, **inputs: Any) -> Tensor:
    return getattr(ops, name)(**inputs)


def test_a_row_is_the_same_bits_alone_and_in_a_batch(name: str):
    inputs = single(make_inputs(name, 150, 19, 40, B=3))
    row = {key: x[1:2] if key in 'qkv' else x for key, x in inputs.items()}
    assert torch.equal(run(name, **row), run(name, **inputs)[1:2])


def test_threads_share_the_channels(name: str):
    inputs = single(make_inputs(name, 70, 67, 20, B=1))
    found = []
    for count in (1, 3):
        with threads(count):
            y = run(name, **inputs)
            found.append([y, *torch.autograd.grad(y.square().sum(), list(inputs.values()))])
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


def test_float64_takes_the_torch_form(name: str):
    inputs = make_inputs(name, 12, 9)
    assert kernels_run(lambda: run(name, **inputs)) == set()
    if 'band' in inputs:
        assert kernels_run(lambda: run(name, **single(inputs) | {'band': inputs['band']})) == set()
