"""AFT-simple up to each token in Triton: its values, and that no token hears of later ones."""

import pytest
import torch
from helpers import (
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    make_qkv,
    nasty_keys,
)
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


def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(device: str):
    assert_keys_of_minus_infinity_are_masked(
        simple, reference.aft_simple_causal, make_inputs(18, 3, B=2), device=device
    )


def test_masked_tokens_may_be_anything(device: str):
    mask = torch.tensor([[True, False, True] * 3, [False] * 9])
    assert_masked_tokens_have_no_effect(simple, make_inputs(9, 2, B=2), mask, device)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> int:
    """The length of the parts that sequences are cut into: a tile of the interpreter, the largest of a GPU."""
    from aft_vision.ops.causal import simple_triton as simple_causal

    length = 64 if torch.cuda.is_available() else 16
    monkeypatch.setattr(simple_causal, 'PART', length)
    monkeypatch.setitem(simple_causal.SUMMARY, 'BT', min(length, simple_causal.SUMMARY['BT']))
    assert simple_causal._cut(torch.empty(1, 2 * length + 3, 2)) == (length, 3)
    assert simple_causal._cut(torch.empty(512, 2 * length + 3, 2)) == (3 * length, 1)
    return length


def test_parts_of_a_sequence_equal_float64(cut: int, device: str):
    T = 2 * cut + 3
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, : cut + 1], mask[1, 2 * cut :] = False, False
    inputs = make_inputs(T, 2, B=2) | {'mask': mask}
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, device=device)


@pytest.mark.parametrize('keys', ['plus_minus_1e4', 'last_at_200', 'climbing', 'falling'])
def test_parts_survive_nasty_keys(keys: str, cut: int, device: str):
    inputs = make_inputs(2 * cut + 3, 1)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, nasty=True, device=device)


def test_a_later_part_changes_no_bit_of_an_earlier_one(cut: int, device: str):
    q, k, v = (x.float().to(device) for x in make_qkv(B=1, T=3 * cut, D=2))
    before = simple(q, k, v)
    k[:, cut + 1 :] += 300.0
    assert torch.equal(simple(q, k, v)[:, : cut + 1], before[:, : cut + 1])


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


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), None], ids=['NaN key', 'infinite key', 'infinite value'])
def test_a_source_that_is_not_finite_reaches_no_earlier_target(bad: float | None, cut: int, device: str):
    q, k, v = (x.float().to(device) for x in make_qkv(B=2, T=cut + 3, D=2))
    before = simple(q, k, v)
    (v if bad is None else k)[0, 7, 1] = float('inf') if bad is None else bad
    after = simple(q, k, v)
    assert not after[0, 7:, 1].isfinite().any()
    after[0, 7:, 1] = before[0, 7:, 1]
    assert torch.equal(after, before)


def test_sums_before_a_jump_lose_nothing(device: str):
    k, v = torch.tensor([0.0, 60.0, 40.0, 168.0]), torch.tensor([0.0, 2.0, 1.0, 0.0])
    y = simple(None, *(x[None, :, None].to(device) for x in (k, v)))
    torch.testing.assert_close(y.flatten().cpu(), torch.tensor([0.0, 2.0, 2.0, 0.0]))
