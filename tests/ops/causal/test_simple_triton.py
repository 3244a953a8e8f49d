"""AFT-simple up to each token in Triton: chunks of a sequence, and that no token hears of later ones."""

from functools import partial

import pytest
import torch
from helpers import assert_matches_reference, make_inputs, make_nasty, make_qkv

from aft_vision import ops
from aft_vision.ops import reference

simple = partial(ops.aft_simple_causal, backend='triton')


def test_tokens_before_the_first_that_counts_are_zero(triton_device: str):
    mask = torch.rand(2, 18, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, :17], mask[1, :2] = False, False
    inputs = make_inputs('aft_simple_causal', 18, 2) | {'mask': mask}
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, device=triton_device)


@pytest.fixture
def cut(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The length of the chunks that sequences are cut into: a tile of the interpreter, the largest of a GPU."""
    from aft_vision.ops.causal import simple_triton as simple_causal

    length = 64 if torch.cuda.is_available() else 16
    monkeypatch.setattr(simple_causal, 'CHUNK', length)
    monkeypatch.setitem(simple_causal.SUMMARY, 'BT', min(length, simple_causal.SUMMARY['BT']))
    assert simple_causal._cut(torch.empty(1, 2 * length + 3, 2)) == (length, 3)
    assert simple_causal._cut(torch.empty(512, 2 * length + 3, 2)) == (3 * length, 1)
    return length


def test_chunks_of_a_sequence_equal_float64(cut: int, triton_device: str):
    T = 2 * cut + 3
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[0, : cut + 1], mask[1, 2 * cut :] = False, False
    inputs = make_inputs('aft_simple_causal', T, 2) | {'mask': mask}
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, device=triton_device)


@pytest.mark.parametrize('keys', ['plus_minus_1e4', 'last_at_200', 'climbing', 'falling'])
def test_chunks_survive_nasty_keys(keys: str, cut: int, triton_device: str):
    inputs = make_nasty(make_inputs('aft_simple_causal', 2 * cut + 3, 1, B=1), keys)
    assert_matches_reference(simple, reference.aft_simple_causal, inputs, nasty=True, device=triton_device)


def test_a_later_chunk_changes_no_bit_of_an_earlier_one(cut: int, triton_device: str):
    q, k, v = (x.float().to(triton_device) for x in make_qkv(B=1, T=3 * cut, D=2))
    before = simple(q, k, v)
    k[:, cut + 1 :] += 300.0
    assert torch.equal(simple(q, k, v)[:, : cut + 1], before[:, : cut + 1])


def test_a_later_token_changes_no_bit_of_an_earlier_one(triton_device: str):
    q, k, v = (x.float().to(triton_device) for x in make_qkv(B=1, T=19, D=2))
    before = simple(q, k, v)
    k[:, 12:] += 300.0
    v[:, 12:] = 5.0
    after = simple(q, k, v)
    assert torch.equal(after[:, :12], before[:, :12])
    assert not torch.equal(after[:, 12:], before[:, 12:])


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), None], ids=['NaN key', 'infinite key', 'infinite value'])
def test_a_source_that_is_not_finite_reaches_no_earlier_target(bad: float | None, cut: int, triton_device: str):
    q, k, v = (x.float().to(triton_device) for x in make_qkv(B=2, T=cut + 3, D=2))
    before = simple(q, k, v)
    (v if bad is None else k)[0, 7, 1] = float('inf') if bad is None else bad
    after = simple(q, k, v)
    assert not after[0, 7:, 1].isfinite().any()
    after[0, 7:, 1] = before[0, 7:, 1]
    assert torch.equal(after, before)


def test_sums_before_a_jump_lose_nothing(triton_device: str):
    k, v = torch.tensor([0.0, 60.0, 40.0, 168.0]), torch.tensor([0.0, 2.0, 1.0, 0.0])
    y = simple(None, *(x[None, :, None].to(triton_device) for x in (k, v)))
    torch.testing.assert_close(y.flatten().cpu(), torch.tensor([0.0, 2.0, 2.0, 0.0]))
