"""AFT-axial in Triton: its values, where it runs, and what underflows."""

import math

import pytest
import timm
import torch
from helpers import (
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    assert_passes_opcheck,
    generator,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
)
from torch import Tensor

import aft_vision
from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


@pytest.fixture
def path(request: pytest.FixtureRequest, triton_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small grids as one tile, or as larger ones, with several tiles of a line."""
    if request.param == 'two launches':
        monkeypatch.setattr('aft_vision.ops.axial.triton.WHOLE', 0)
        monkeypatch.setattr('aft_vision.ops.axial.triton.LARGEST', 16)
    return request.param


PATHS = pytest.mark.parametrize('path', ['one tile', 'two launches'], indirect=True)


def axial(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    row_bias: Tensor,
    column_bias: Tensor,
    grid: tuple[int, int],
    **others: object,
) -> Tensor:
    return ops.aft_axial(q, k, v, row_bias, column_bias, grid, **others, backend='triton')


def make_inputs(grid: tuple[int, int], D: int, heads: int, reach: tuple[int, int], B: int = 2) -> dict[str, object]:
    q, k, v = make_qkv(B=B, T=math.prod(grid), D=D, heads=heads)
    rows, columns = (randn(heads, 2 * s - 1, seed=7 + i) for i, s in enumerate(reach))
    return {'q': q, 'k': k, 'v': v, 'row_bias': rows, 'column_bias': columns, 'grid': grid}


# Heads of several channels, a head per channel, two parts of a head, lines of two tiles, biases beyond the grid.
SEVERAL = (3, 7), 6, 2, (3, 4), 2
EACH = (3, 5), 2, 2, (9, 5), 6
PARTS = (4, 3), 40, 1, (2, 3), 1
ROWS_OF_TWO = (2, 18), 3, 1, (2, 18), 1
COLUMNS_OF_TWO = (17, 2), 3, 1, (4, 1), 1


@pytest.mark.parametrize(
    ('path', 'case', 'dtype'),
    [
        ('one tile', SEVERAL, torch.float32),
        ('one tile', EACH, torch.float16),
        ('one tile', PARTS, torch.float32),
        ('two launches', EACH, torch.float32),
        ('two launches', PARTS, torch.bfloat16),
        ('two launches', ROWS_OF_TWO, torch.float32),
        ('two launches', COLUMNS_OF_TWO, torch.float32),
    ],
    indirect=['path'],
    ids=str,
)
def test_it_equals_float64(
    path: str, case: tuple[tuple[int, int], int, int, tuple[int, int], int], dtype: torch.dtype, device: str
):
    assert_matches_reference(axial, reference.aft_axial, make_inputs(*case), dtype, device=device)


@pytest.mark.parametrize(
    ('path', 'grid'), [('one tile', (1, 1)), ('one tile', (6, 1)), ('two launches', (1, 9))], indirect=['path']
)
def test_the_bias_of_an_axis_of_one_token_is_inert(path: str, grid: tuple[int, int], device: str):
    # It cancels: its gradient is rounding noise, measured against that of v.
    inputs = make_inputs(grid, 4, 2, (2, 9))
    assert_matches_reference(axial, reference.aft_axial, inputs, nasty=True, device=device)


@PATHS
def test_a_mask_hides_tokens_and_a_sequence_without_any_is_zero(path: str, device: str):
    inputs = make_inputs((2, 5), 3, 1, (2, 4), B=3)
    mask = torch.rand(3, 10, generator=generator(3)) > 0.4
    mask[1] = False
    inputs |= {'q': None, 'mask': mask}
    assert_matches_reference(axial, reference.aft_axial, inputs, device=device)


@pytest.mark.parametrize(('path', 'heads'), [('one tile', 2), ('two launches', 4)], indirect=['path'])
def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(path: str, heads: int, device: str):
    inputs = make_inputs((2, 3), 4, heads, (2, 3))
    assert_keys_of_minus_infinity_are_masked(axial, reference.aft_axial, inputs, device=device)


@pytest.mark.parametrize(('path', 'bias'), [('one tile', 'plus_minus_80'), ('two launches', 'zero')], indirect=['path'])
def test_masked_tokens_may_be_anything(path: str, bias: str, device: str):
    inputs = make_inputs((2, 3), 2, 1, (2, 3), B=1)
    inputs |= {name: nasty_biases(inputs[name])[bias] for name in ('row_bias', 'column_bias')}
    assert_masked_tokens_have_no_effect(axial, inputs, torch.tensor([[True, False, True] * 2]), device)


@pytest.mark.parametrize('keys', ['one_at_90', 'plus_minus_1e4'])
def test_it_survives_nasty_keys(keys: str, device: str):
    inputs = make_inputs((2, 4), 4, 1, (2, 4), B=1)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(axial, reference.aft_axial, inputs, nasty=True, device=device)


@PATHS
def test_what_underflows_is_exact(path: str, device: str):
    # A third of the denominators do.
    inputs = make_inputs((2, 3), 2, 2, (3, 3))
    inputs |= {name: nasty_biases(inputs[name])['plus_minus_80'] for name in ('row_bias', 'column_bias')}
    assert_matches_reference(axial, reference.aft_axial, inputs, nasty=True, device=device)


@PATHS
def test_a_key_or_a_value_that_is_not_finite_stays_in_its_sequence_and_head(path: str, device: str):
    inputs = make_inputs((2, 3), 6, 2, (2, 3))
    inputs['k'][0, 3, 0], inputs['v'][1, 4, 5] = float('inf'), float('nan')
    low = {name: x.float().to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    found = axial(**low).isnan()
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
    from aft_vision.ops.axial.triton import _Call
    from aft_vision.ops.common.inputs import AxialInputs

    q, k, v = (torch.empty(B, math.prod(grid), n, device='meta') for n in (D, heads, D))
    bias = torch.empty(heads, 3, device='meta')
    tile = _Call(AxialInputs(q, k, v, bias, bias, grid, None), torch.float32).whole_tile()
    assert (tile and (tile['GROUP'], tile['BATCH'])) == expected


def test_transposed_biases_equal_float64(device: str):
    def turn(inputs: dict[str, object]) -> dict[str, object]:
        return inputs | {name: inputs[name].mT for name in ('row_bias', 'column_bias')}

    inputs = turn(make_inputs((2, 3), 4, 2, (2, 3)))
    inputs |= {name: inputs[name].contiguous() for name in ('row_bias', 'column_bias')}
    forms = [lambda op=op, **x: op(**turn(x)) for op in (axial, reference.aft_axial)]
    assert_matches_reference(*forms, inputs, device=device)


def test_it_passes_torch_opcheck(device: str):
    inputs = make_inputs((1, 2), 1, 1, (1, 2))
    assert_passes_opcheck('aft_axial', inputs, backend='triton', device=device)


def test_parts_of_a_fused_projection_are_read_where_they_are(device: str):
    rows, columns = (randn(1, 5, seed=i, dtype=torch.float32).to(device) for i in range(2))
    q, v, k = randn(2, 15, 25, dtype=torch.float32).to(device).split([12, 12, 1], -1)
    packed = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(axial(q, k, v, rows, columns, (3, 5)), axial(*packed, rows, columns, (3, 5)))


def test_a_registered_model_runs_it_forward_and_backward(device: str):
    assert aft_vision.__version__
    model = timm.create_model('aft_axial_tiny', embed_dim=24, num_heads=2, depth=1, img_size=32, num_classes=2)
    model = model.to(device)
    with torch.profiler.profile() as profile:
        model(torch.randn(2, 3, 32, 32, device=device)).sum().backward()
    assert {'aft_vision::axial_forward', 'aft_vision::axial_backward'} <= {event.name for event in profile.events()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(('grid', 'heads'), [((14, 14), 16), ((14, 14), 384), ((48, 64), 16)])
def test_it_equals_the_torch_form_at_full_size(grid: tuple[int, int], heads: int, dtype: torch.dtype):
    # The float64 reference forms (B, T, T, D) weights; the torch form is compared with it elsewhere.
    inputs = make_inputs(grid, 384, heads, grid)
    assert_matches_reference(axial, ops.aft_axial, inputs, dtype, device='cuda')
