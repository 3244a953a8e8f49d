"""Causal AFT-local in Triton: its values, keys that jump, where it runs, and what it keeps."""

import pytest
import torch
from helpers import assert_matches_reference, make_qkv, randn
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def local_causal(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.aft_local_causal(q, k, v, band, mask, backend='triton')


def make_inputs(T: int, s: int, D: int = 3, B: int = 2) -> dict[str, object]:
    return {**dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True)), 'band': randn(T, s, seed=7)}


# One block, several blocks with short and long windows, several tiles of channels.
CASES = [(5, 4, 3), (33, 1, 3), (33, 40, 3), (70, 4, 5), (70, 33, 66)]


@pytest.mark.parametrize(
    ('case', 'dtype'),
    [*((case, torch.float32) for case in CASES), (CASES[-1], torch.bfloat16), (CASES[-2], torch.float16)],
    ids=str,
)
def test_it_equals_float64(case: tuple[int, int, int], dtype: torch.dtype, device: str):
    assert_matches_reference(local_causal, reference.aft_local_causal, make_inputs(*case), dtype, device=device)


def test_one_token_is_its_own_value(device: str):
    # The gradients of keys and band are zero but for rounding.
    assert_matches_reference(local_causal, reference.aft_local_causal, make_inputs(1, 1), nasty=True, device=device)
