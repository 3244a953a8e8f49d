"""AFT-simple in Triton: its values, where it runs, and what it keeps."""

import pytest
import torch
from helpers import (
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    make_qkv,
    nasty_keys,
    randn,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def simple(q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.aft_simple(q, k, v, mask, backend='triton')


def make_inputs(T: int, D: int, B: int = 2) -> dict[str, object]:
    return dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True))


# One token, tiles that the tokens and channels do not fill, several tiles.
@pytest.mark.parametrize(
    ('T', 'D', 'dtype'),
    [(1, 3, torch.float32), (5, 16, torch.float16), (18, 17, torch.float32), (18, 17, torch.bfloat16)],
)
def test_it_equals_float64(T: int, D: int, dtype: torch.dtype, device: str):
    assert_matches_reference(simple, reference.aft_simple, make_inputs(T, D), dtype, device=device)


def test_it_equals_float64_without_a_gate(device: str):
    assert_matches_reference(simple, reference.aft_simple, make_inputs(9, 5) | {'q': None}, device=device)


def test_a_mask_hides_tokens_and_a_sequence_without_any_is_zero(device: str):
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1] = False
    assert_matches_reference(simple, reference.aft_simple, make_inputs(9, 5, B=3) | {'mask': mask}, device=device)


def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(device: str):
    assert_keys_of_minus_infinity_are_masked(simple, reference.aft_simple, make_inputs(9, 5), device=device)


def test_masked_tokens_may_be_anything(device: str):
    mask = torch.tensor([[True, False, True] * 3, [False] * 9])
    assert_masked_tokens_have_no_effect(simple, make_inputs(9, 5), mask, device)


@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_it_survives_nasty_keys(keys: str, device: str):
    inputs = make_inputs(9, 5)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(simple, reference.aft_simple, inputs, nasty=True, device=device)


def test_parts_of_a_fused_projection_are_read_where_they_are(device: str):
    fused = randn(2, 9, 15, dtype=torch.float32).to(device)
    parts = fused.split(5, -1)
    assert torch.equal(simple(*parts), simple(*(x.contiguous() for x in parts)))
