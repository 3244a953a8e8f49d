"""AFT-axial in Triton: what is not finite, and both ways to compute it."""

import pytest
import torch
from helpers import make_inputs, single

from aft_vision import ops

pytestmark = pytest.mark.usefixtures('triton_device')


@pytest.mark.parametrize('path', ['pairs', 'lines'])
def test_a_key_or_a_value_that_is_not_finite_stays_in_its_sequence_and_head(
    path: str, triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    if path == 'lines':
        monkeypatch.setattr('aft_vision.ops.axial.triton.FEW', 0)
        monkeypatch.setattr('aft_vision.ops.axial.triton.LARGEST', 16)
    inputs = make_inputs('aft_axial', (2, 3), 6, (2, 3), 2)
    inputs['k'][0, 3, 0], inputs['v'][1, 4, 5] = float('inf'), float('nan')
    found = ops.aft_axial(**single(inputs, device=triton_device), backend='triton').isnan()
    expected = torch.zeros_like(found)
    expected[0, :, :3] = expected[1, :, 5] = True
    assert torch.equal(found, expected)
