"""AFT-axial: what it equals, its limits, and inputs at the edge of the range."""

import functools

import pytest
import torch
from helpers import assert_close, assert_matches_reference, make_inputs, make_qkv
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference

GRID = (6, 5)
EAGER = functools.partial(ops.aft_axial, backend='eager')
make_axial = functools.partial(make_inputs, 'aft_axial')


@pytest.mark.parametrize(('heads', 'D', 'reach'), [(6, 6, (6, 5)), (2, 6, (3, 9)), (1, 6, (1, 1))])
def test_it_equals_aft_full_with_the_expanded_bias(heads: int, D: int, reach: tuple[int, int]):
    inputs = make_axial(GRID, D, reach, heads)
    bias = reference.axial_to_bias(inputs['row_bias'], inputs['column_bias'], GRID)  # (T, T, h)
    q, k, v = inputs['q'], inputs['k'], inputs['v']
    y, c = ops.aft_axial(**inputs), D // heads
    for i in range(heads):
        part = slice(i * c, (i + 1) * c)
        keys = k[..., i : i + 1].expand(-1, -1, c)
        assert_close(y[..., part], ops.aft_full(q[..., part], keys, v[..., part], bias[..., i].contiguous()), 1e-12)


def test_it_equals_aft_conv_where_the_kernel_covers_the_grid():
    inputs = make_axial(GRID, s=(6, 6), heads=3)
    kernel = inputs.pop('row_bias')[:, :, None] + inputs.pop('column_bias')[:, None, :]
    axial = ops.aft_axial(**make_axial(GRID, s=(6, 6), heads=3))
    assert_close(axial, ops.aft_conv(**inputs, kernel=kernel), 1e-12)


def test_a_shift_of_keys_or_of_a_bias_that_covers_the_grid_changes_nothing():
    inputs = make_axial(GRID, s=GRID, heads=3)
    shifted = {name: inputs[name] + 50.0 for name in ('k', 'row_bias', 'column_bias')}
    assert_close(ops.aft_axial(**inputs | shifted), ops.aft_axial(**inputs), 1e-11)


def test_a_transposed_grid_with_exchanged_biases_is_the_same():
    inputs = make_axial(GRID, s=GRID, heads=3)

    def turn(x: Tensor) -> Tensor:
        return x.unflatten(1, GRID).transpose(1, 2).flatten(1, 2)

    turned = {name: turn(inputs[name]) for name in 'qkv'} | {'grid': (5, 6)}
    turned |= {'row_bias': inputs['column_bias'], 'column_bias': inputs['row_bias']}
    assert_close(ops.aft_axial(**turned), turn(ops.aft_axial(**inputs)), 1e-12)


@pytest.mark.parametrize(('grid', 'reach'), [((1, 9), (4, 9)), ((8, 1), (2, 1))])
def test_the_bias_of_an_axis_of_one_token_is_inert(grid: tuple[int, int], reach: tuple[int, int]):
    # It cancels: its gradient is rounding noise, measured against that of v.
    inputs = make_axial(grid, s=reach, heads=3)
    for form in ('auto', 'eager', 'aten'):
        op = functools.partial(ops.aft_axial, backend=form)
        assert_matches_reference(op, reference.aft_axial, inputs, nasty=True)


def test_a_source_that_both_maxima_miss_is_found():
    # The largest key, the largest row and the largest column weight belong to three sources, each 70 nats below in
    # what it lacks: no product of their exponentials is in the range of float32.
    q, _, v = make_qkv(B=1, T=4, D=1)
    k = torch.tensor([[[140.0], [0.0], [0.0], [-140.0]]], dtype=torch.float64)
    bias = torch.tensor([[-70.0, 0.0, 70.0]], dtype=torch.float64)
    inputs = {'q': q, 'k': k, 'v': v, 'row_bias': bias, 'column_bias': bias.clone(), 'grid': (2, 2)}
    assert_matches_reference(EAGER, reference.aft_axial, inputs, nasty=True)


def test_chunks_of_a_batch_give_its_rows(monkeypatch: pytest.MonkeyPatch):
    inputs = make_axial(GRID, s=GRID, heads=3, B=5)
    monkeypatch.setattr('aft_vision.ops.axial.eager.AxialWeights.chunk_elements', 2 * 2 * 30 * 6)
    assert_matches_reference(EAGER, reference.aft_axial, inputs)


@pytest.mark.parametrize('name', ['row_bias', 'column_bias'])
def test_one_bias_alone_can_be_trained(name: str):
    inputs = make_axial(GRID, s=GRID, heads=3)
    leaf = inputs[name].requires_grad_()
    expected = torch.autograd.grad(reference.aft_axial(**inputs).square().sum(), leaf)
    (found,) = torch.autograd.grad(ops.aft_axial(**inputs).square().sum(), leaf)
    assert_close(found, *expected, 1e-9)
