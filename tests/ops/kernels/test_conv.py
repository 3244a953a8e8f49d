"""AFT-conv in Triton: its values, where it runs, and what it keeps."""

import math

import pytest
import torch
from helpers import assert_matches_reference, generator, make_qkv, randn
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def conv(q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, grid: tuple[int, int], **others: object) -> Tensor:
    return ops.aft_conv(q, k, v, kernel, grid, **others, backend='triton')


def make_inputs(grid: tuple[int, int], D: int, heads: int, s: int, B: int = 2) -> dict[str, object]:
    q, k, v = make_qkv(B=B, T=math.prod(grid), D=D, heads=heads)
    return {'q': q, 'k': k, 'v': v, 'kernel': randn(heads, s, s, seed=8), 'grid': grid}


# Several tiles of tokens and of sequences, a head per channel, a row, a kernel beyond the grid, a column.
CASES = [
    ((5, 7), 2, 2, 3, 17),
    ((1, 9), 40, 1, 5, 2),
    ((4, 3), 16, 2, 15, 3),
    ((6, 1), 6, 2, 7, 2),
]


@pytest.mark.parametrize(
    ('case', 'dtype'),
    [*((case, torch.float32) for case in CASES), (CASES[0], torch.bfloat16), (CASES[2], torch.float16)],
    ids=str,
)
def test_it_equals_float64(case: tuple[tuple[int, int], int, int, int, int], dtype: torch.dtype, device: str):
    assert_matches_reference(conv, reference.aft_conv, make_inputs(*case), dtype, device=device)


def test_one_token_is_its_own_value(device: str):
    # The gradients of keys and kernel are zero but for rounding.
    assert_matches_reference(conv, reference.aft_conv, make_inputs((1, 1), 3, 1, 3), nasty=True, device=device)


@pytest.mark.parametrize('global_context', [True, False], ids=['global', 'window alone'])
def test_a_mask_hides_tokens_and_a_sequence_without_any_is_zero(global_context: bool, device: str):
    inputs = make_inputs((3, 5), 12, 1, 3, B=3)
    mask = torch.rand(3, 15, generator=generator(3)) > 0.4
    mask[1] = False
    inputs |= {'q': None, 'mask': mask, 'global_context': global_context}
    assert_matches_reference(conv, reference.aft_conv, inputs, device=device)
