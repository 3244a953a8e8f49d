"""AFT-axial in Triton: what is not finite, and both ways to compute it."""

import pytest
import torch
from helpers import assert_close, make_inputs, single

from aft_vision import ops


@pytest.fixture(params=['pairs', 'lines'], autouse=True)
def path(request: pytest.FixtureRequest, triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute small grids in each way."""
    if request.param == 'lines':
        for limit in ('PAIRED', 'PAIRED_INTERPRETED'):
            monkeypatch.setattr(f'aft_vision.ops.axial.triton.{limit}', 0)
        monkeypatch.setattr('aft_vision.ops.axial.triton.LARGEST', 16)


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
