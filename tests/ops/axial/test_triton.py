"""AFT-axial in Triton: what is not finite, and how a tile is chosen."""

import math

import pytest
import torch
from helpers import make_inputs, single

from aft_vision import ops

pytestmark = pytest.mark.usefixtures('triton_device')


@pytest.mark.parametrize('path', ['one tile', 'two launches'])
def test_a_key_or_a_value_that_is_not_finite_stays_in_its_sequence_and_head(
    path: str, triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    if path == 'two launches':
        monkeypatch.setattr('aft_vision.ops.axial.triton.WHOLE', 0)
        monkeypatch.setattr('aft_vision.ops.axial.triton.LARGEST', 16)
    inputs = make_inputs('aft_axial', (2, 3), 6, (2, 3), 2)
    inputs['k'][0, 3, 0], inputs['v'][1, 4, 5] = float('inf'), float('nan')
    found = ops.aft_axial(**single(inputs, device=triton_device), backend='triton').isnan()
    expected = torch.zeros_like(found)
    expected[0, :, :3] = expected[1, :, 5] = True
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ('B', 'grid', 'D', 'heads', 'expected'),
    [
        (8, (14, 14), 384, 16, (16, 1)),
        (8, (14, 14), 384, 384, (2, 8)),
        (8, (32, 24), 384, 16, (8, 1)),
        (1, (64, 64), 384, 384, (2, 1)),
        (1, (64, 64), 384, 16, None),
        (1, (4, 300), 16, 1, None),
    ],
    ids=str,
)
def test_a_tile_has_a_whole_grid_if_it_has_no_more_columns(
    B: int, grid: tuple[int, int], D: int, heads: int, expected: tuple[int, int] | None
):
    from aft_vision.ops.axial.triton import Layout

    k, v = (torch.empty(B, math.prod(grid), n, device='meta') for n in (heads, D))
    tile = Layout(k, v).whole_tile(*grid)
    assert (tile and (tile['GROUP'], tile['BATCH'])) == expected
