"""AFT-axial in Triton: what is not finite, constants, and grids that it leaves to torch."""

import pytest
import torch
from helpers import assert_close, make_inputs, single

from aft_vision import ops
from aft_vision.ops import operator


def test_a_key_or_a_value_that_is_not_finite_stays_in_its_sequence_and_head(triton_device: str):
    inputs = make_inputs('aft_axial', (2, 3), 6, (2, 3), 2)
    inputs['k'][0, 3, 0], inputs['v'][1, 4, 5] = float('inf'), float('nan')
    found = ops.aft_axial(**single(inputs, device=triton_device), backend='triton').isnan()
    expected = torch.zeros_like(found)
    expected[0, :, :3] = expected[1, :, 5] = True
    assert torch.equal(found, expected)


@pytest.mark.parametrize('shifts', [(1e3, 1e3), (1e4, 0.0), (-1e30, 5.0)])
def test_a_constant_of_an_axis_changes_nothing(shifts: tuple[float, float], triton_device: str):
    inputs = single(make_inputs('aft_axial', (3, 4), 6, (3, 4), 2), device=triton_device)
    for name, shift in zip(('row_bias', 'column_bias'), shifts, strict=True):
        # What is left of the bias after the addition, without the constant and with it.
        inputs[name] = ((inputs[name] + shift) - shift).detach()
    shifted = inputs | {n: inputs[n] + shift for n, shift in zip(('row_bias', 'column_bias'), shifts, strict=True)}
    expected = ops.aft_axial(**{name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()})
    assert_close(ops.aft_axial(**shifted, backend='triton'), expected, 1e-6)


def test_a_long_grid_is_left_to_torch(triton_device: str):
    operator._warn_once.cache_clear()
    inputs = single(make_inputs('aft_axial', (2, 33), 6, (2, 3), 2), device=triton_device)
    with pytest.warns(UserWarning, match="aft_axial has no 'triton' form for these inputs"):
        y = ops.aft_axial(**inputs, backend='triton')
    assert torch.equal(y, ops.aft_axial(**inputs, backend='eager'))
