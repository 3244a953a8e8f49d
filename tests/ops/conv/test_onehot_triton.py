"""AFT-conv with one biased offset per head in Triton: its values."""

import math

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


def onehot(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    offset: Tensor,
    weight: Tensor,
    grid: tuple[int, int],
    mask: Tensor | None = None,
) -> Tensor:
    return ops.aft_onehot(q, k, v, offset, weight, grid, mask, backend='triton')


def make_inputs(grid: tuple[int, int], D: int, heads: int, B: int = 2) -> dict[str, object]:
    q, k, v = make_qkv(B=B, T=math.prod(grid), D=D, heads=heads)
    # Some lead outside the grid from everywhere.
    offset = torch.randint(-3, 4, (heads, 2), generator=torch.Generator().manual_seed(4))
    return {'q': q, 'k': k, 'v': v, 'offset': offset, 'weight': randn(heads, seed=8), 'grid': grid}


@pytest.mark.parametrize(
    ('grid', 'D', 'heads', 'dtype'),
    [((4, 5), 9, 9, torch.float32), ((3, 4), 12, 3, torch.float32), ((2, 3), 10, 5, torch.bfloat16)],
)
def test_it_equals_float64(grid: tuple[int, int], D: int, heads: int, dtype: torch.dtype, device: str):
    assert_matches_reference(onehot, reference.aft_onehot, make_inputs(grid, D, heads), dtype, device=device)


def test_weights_that_are_apart_in_memory_equal_float64(device: str):
    def apart(op, inputs):
        return op(**(inputs | {'weight': inputs['weight'].repeat_interleave(2)[::2]}))

    inputs = make_inputs((3, 4), 6, 3)
    assert_matches_reference(
        lambda **x: apart(onehot, x), lambda **x: apart(reference.aft_onehot, x), inputs, device=device
    )


def test_a_mask_hides_sources_and_a_sequence_without_any_is_zero(device: str):
    mask = torch.rand(3, 12, generator=torch.Generator().manual_seed(3)) > 0.4
    mask[1] = False
    inputs = make_inputs((3, 4), 6, 6, B=3) | {'mask': mask}
    assert_matches_reference(onehot, reference.aft_onehot, inputs, torch.float16, device=device)


@pytest.mark.parametrize('heads', [2, 6])
def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(heads: int, device: str):
    assert_keys_of_minus_infinity_are_masked(onehot, reference.aft_onehot, make_inputs((3, 4), 6, heads), device=device)


def test_masked_tokens_may_be_anything(device: str):
    mask = torch.tensor([[True, False, True] * 4, [False] * 12])
    assert_masked_tokens_have_no_effect(onehot, make_inputs((3, 4), 6, 3), mask, device)


def test_one_token_without_a_gate_gives_its_value(device: str):
    inputs = make_inputs((1, 1), 3, 3) | {'q': None}
    inputs['offset'] = torch.tensor([[0, 0], [1, 0], [2**63 - 1, -(2**63)]])
    y = onehot(
        *(x.float().to(device) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs.values())
    )
    assert torch.equal(y, inputs['v'].float().to(device))


@pytest.mark.parametrize('weight', [-5.0, -1e4, 200.0])
@pytest.mark.parametrize('keys', ['one_at_90', 'last_at_200', 'plus_minus_1e4', 'normal_30', 'all_equal'])
def test_it_survives_nasty_inputs(keys: str, weight: float, device: str):
    inputs = make_inputs((3, 4), 8, 8, B=1)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'weight': torch.full((8,), weight, dtype=torch.float64)}
    assert_matches_reference(onehot, reference.aft_onehot, inputs, nasty=True, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('heads', [16, 384])
def test_it_equals_the_torch_form_at_full_size(heads: int, dtype: torch.dtype):
    assert_matches_reference(onehot, ops.aft_onehot, make_inputs((14, 14), 384, heads, B=8), dtype, device='cuda')


def test_the_gradient_of_a_weight_that_lets_one_source_dominate_is_kept(device: str):
    inputs = make_inputs((3, 4), 6, 3)
    inputs['weight'] = inputs['weight'] + 15.0
    assert_matches_reference(onehot, reference.aft_onehot, inputs, torch.float32, device=device)
