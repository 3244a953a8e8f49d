"""AFT-conv with one biased offset per head in Triton: offsets far outside, and weights that let one source dominate."""

from functools import partial

import torch
from helpers import assert_matches_reference, make_inputs, single

from aft_vision import ops
from aft_vision.ops import reference

onehot = partial(ops.aft_onehot, backend='triton')


def test_one_token_without_a_gate_gives_its_value(triton_device: str):
    inputs = make_inputs('aft_onehot', (1, 1), 3)
    inputs['offset'] = torch.tensor([[0, 0], [1, 0], [2**63 - 1, -(2**63)]])
    low = single(inputs, device=triton_device) | {'q': None}
    assert torch.equal(onehot(**low), low['v'])


def test_the_gradient_of_a_weight_that_lets_one_source_dominate_is_kept(triton_device: str):
    inputs = make_inputs('aft_onehot', (3, 4), 6, 3, 3)
    inputs['weight'] = inputs['weight'] + 15.0
    assert_matches_reference(onehot, reference.aft_onehot, inputs, device=triton_device)


def test_a_token_that_a_bias_of_minus_infinity_hides_from_itself_gives_0(triton_device: str):
    inputs = make_inputs('aft_onehot', (1, 1), 3)
    inputs |= {'offset': torch.zeros(3, 2, dtype=torch.int64), 'weight': torch.full((3,), float('-inf'))}
    low = single(inputs, device=triton_device)
    y = onehot(**low)
    y.sum().backward()
    for x in (y, *(low[name].grad for name in 'qkv')):
        assert not x.any()
