"""AFT-full in Triton: its values, and what it does where the products underflow."""

import pytest
import torch
from helpers import (
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def full(q: Tensor | None, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.aft_full(q, k, v, bias, mask, backend='triton')


def make_inputs(T: int, D: int, B: int = 2) -> dict[str, object]:
    return dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True)) | {'bias': randn(T, T, seed=8)}


# Tiles that the tokens and channels do not fill, several tiles.
@pytest.mark.parametrize(('T', 'D', 'dtype'), [(5, 16, torch.bfloat16), (18, 17, torch.float32)])
def test_it_equals_float64(T: int, D: int, dtype: torch.dtype, device: str):
    assert_matches_reference(full, reference.aft_full, make_inputs(T, D), dtype, device=device)


def test_one_token_without_a_gate_gives_its_value(device: str):
    assert_matches_reference(full, reference.aft_full, make_inputs(1, 3) | {'q': None}, nasty=True, device=device)


def test_a_mask_hides_tokens_and_a_sequence_without_any_is_zero(device: str):
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1] = False
    inputs = make_inputs(9, 5, B=3) | {'mask': mask}
    assert_matches_reference(full, reference.aft_full, inputs, torch.float16, device=device)


def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(device: str):
    assert_keys_of_minus_infinity_are_masked(full, reference.aft_full, make_inputs(9, 5), device=device)


@pytest.mark.parametrize('bias', ['zero', 'plus_minus_80'])
def test_masked_tokens_may_be_anything(bias: str, device: str):
    inputs = make_inputs(9, 5)
    inputs |= {'k': 20 * inputs['k'], 'bias': nasty_biases(inputs['bias'])[bias]}
    assert_masked_tokens_have_no_effect(full, inputs, torch.tensor([[True, False, True] * 3] * 2), device)


@pytest.mark.parametrize('keys', ['plus_minus_1e4', 'normal_30', 'climbing', 'last_at_200'])
@pytest.mark.parametrize('bias', ['plus_minus_80', 'within_50'])
def test_elements_that_underflow_are_computed_again(keys: str, bias: str, device: str):
    inputs = make_inputs(11, 3, B=1)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'bias': nasty_biases(inputs['bias'])[bias]}
    assert_matches_reference(full, reference.aft_full, inputs, nasty=True, device=device)
