"""AFT-simple up to each token in Triton: its values, and that no token hears of later ones."""

import pytest
import torch
from helpers import assert_masked_tokens_have_no_effect, assert_matches_reference, make_qkv, nasty_keys
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.aft_simple_causal(q, k, v, mask, backend='triton')


def make_inputs(T: int, D: int, B: int = 1) -> dict[str, object]:
    return dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True))


# Tiles that the tokens and channels do not fill, several tiles.
@pytest.mark.parametrize(('T', 'D', 'dtype'), [(5, 4, torch.float16), (35, 5, torch.float32), (18, 3, torch.bfloat16)])
def test_it_equals_float64(T: int, D: int, dtype: torch.dtype, device: str):
    assert_matches_reference(simple, reference.aft_simple_causal, make_inputs(T, D), dtype, device=device)


def test_one_token_without_a_gate_gives_its_value(device: str):
    inputs = make_inputs(1, 3) | {'q': None}
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, nasty=True, device=device)


def test_tokens_before_the_first_that_counts_are_zero(device: str):
    mask = torch.rand(2, 18, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, :17], mask[1, :2] = False, False
    inputs = make_inputs(18, 2, B=2) | {'mask': mask}
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, device=device)


def test_masked_tokens_may_be_anything(device: str):
    mask = torch.tensor([[True, False, True] * 3, [False] * 9])
    assert_masked_tokens_have_no_effect(simple, make_inputs(9, 2, B=2), mask, device)


@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_it_survives_nasty_keys(keys: str, device: str):
    inputs = make_inputs(19, 2)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, nasty=True, device=device)


def test_a_later_token_changes_no_bit_of_an_earlier_one(device: str):
    q, k, v = (x.float().to(device) for x in make_qkv(B=1, T=19, D=2))
    before = simple(q, k, v)
    k[:, 12:] += 300.0
    v[:, 12:] = 5.0
    after = simple(q, k, v)
    assert torch.equal(after[:, :12], before[:, :12])
    assert not torch.equal(after[:, 12:], before[:, 12:])
