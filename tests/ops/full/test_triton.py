"""AFT-full in Triton: whole sequences, parts of a batch, and padding."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_matches_reference, count_launches, make_inputs, make_nasty, make_qkv, randn

from aft_vision import ops
from aft_vision.ops import reference

full = partial(ops.aft_full, backend='triton')


@pytest.mark.parametrize('tokens', [7, 8, 9])
def test_sequences_one_at_a_time_give_the_gradient_that_all_of_them_do(
    tokens: int, triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.full import triton as kernels

    monkeypatch.setattr(kernels, 'GRADIENTS', 1)
    inputs = make_inputs('aft_full', (1, tokens), 5, B=3)
    assert_matches_reference(full, reference.aft_full, inputs, device=triton_device)


@pytest.mark.parametrize('masked', [False, True])
def test_whole_sequences_of_several_pieces_are_exact(masked: bool, longer: str):
    # Two tiles of channels, three sequences that the programs take in turn, and one without a token.
    inputs = make_inputs('aft_full', (1, 21), 19, B=3)
    if masked:
        inputs['mask'] = torch.arange(21) % 5 != torch.tensor([1, 2, 3])[:, None]
        inputs['mask'][2] = False
        # What a mask hides is not read.
        inputs['k'][2], inputs['v'][0, 1] = float('nan'), float('inf')
    assert_matches_reference(full, reference.aft_full if not masked else by_eager, inputs, device=longer)


def by_eager(**inputs: Any) -> torch.Tensor:
    return ops.aft_full(**inputs, backend='eager')


@pytest.mark.parametrize(('keys', 'bias'), [('ordinary', 'within_50'), ('one_at_90', 'plus_minus_80')])
def test_whole_sequences_repair_what_underflows(keys: str, bias: str, longer: str):
    inputs = make_nasty(make_inputs('aft_full', (1, 21), 19, B=2), keys, bias)
    assert_matches_reference(full, reference.aft_full, inputs, nasty=True, device=longer)


def test_a_row_of_minus_infinity_sees_no_source(longer: str):
    q, k, v = (x.float().to(longer) for x in make_qkv(B=2, T=21, D=3))
    bias = randn(21, 21, seed=3).float().to(longer)
    bias[4] = float('-inf')
    y = full(q, k, v, bias)
    assert torch.equal(y[:, 4], torch.zeros_like(y[:, 4]))
    assert torch.isfinite(y).all()


def test_a_gate_beyond_the_range_of_the_exponential_is_0_or_1(longer: str):
    q, k, v = (x.float().to(longer) for x in make_qkv(B=1, T=5, D=4))
    bias = torch.zeros(5, 5, device=longer)
    q[..., 0], q[..., 1] = -200.0, 200.0
    y, ungated = full(q, k, v, bias), full(None, k, v, bias)
    assert torch.equal(y[..., 0], torch.zeros_like(y[..., 0]))
    assert torch.equal(y[..., 1], ungated[..., 1])


def single(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.to(device, torch.float32 if device.type == 'cpu' else torch.bfloat16)


def test_a_forward_of_a_whole_sequence_is_one_launch(keeper: torch.device):
    q, k, v = (single(x, keeper) for x in make_qkv(B=2, T=7, D=40))
    bias = single(randn(7, 7, seed=3), keeper)
    mask = torch.ones(2, 7, dtype=torch.bool, device=keeper)
    bias.requires_grad_()
    assert count_launches(lambda: full(q, k, v, bias, mask)) == {'stationary_kernel': 1}


def test_a_constant_bias_is_exponentiated_once_until_it_changes(keeper: torch.device):
    q, k, v = (single(x, keeper) for x in make_qkv(B=2, T=7, D=3))
    bias, other = (single(randn(7, 7, seed=seed), keeper) for seed in (3, 4))
    found = []
    launches = [count_launches(lambda: found.append(full(q, k, v, bias))) for _ in range(4)]
    alone = {'stationary_kernel': 1}
    assert launches == [alone, alone | {'weights_kernel': 1}, alone, alone]
    assert all(torch.equal(y, found[0]) for y in found)
    bias.copy_(other)
    assert torch.equal(full(q, k, v, bias), full(q, k, v, other.clone()))


def test_a_bias_in_the_memory_of_a_former_one_is_its_own(triton_device: str):
    q, k, v = (x.float().to(triton_device) for x in make_qkv(B=2, T=7, D=3))
    memory = torch.empty(7, 7, device=triton_device)
    for seed in (3, 4, 5):
        bias = memory.detach().view(7, 7)
        # Writes that the tensor does not count.
        bias.data.copy_(randn(7, 7, seed=seed))
        torch.testing.assert_close(full(q, k, v, bias), ops.aft_full(q, k, v, bias, backend='eager'))
        del bias
