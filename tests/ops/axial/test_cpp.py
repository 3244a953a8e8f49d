"""The compiled AFT-axial: what is done again by the torch form."""

import pytest
import torch
from helpers import make_inputs, single

from aft_vision import ops
from aft_vision.ops.axial import eager

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


@pytest.mark.parametrize(('spread', 'again'), [(1.0, False), (60.0, True)])
def test_only_underflowed_denominators_cost_a_second_call(monkeypatch: pytest.MonkeyPatch, spread: float, again: bool):
    inputs, calls = single(make_inputs('aft_axial', (6, 5), 66, (6, 5), 11)), []
    with torch.no_grad():
        for name in ('k', 'row_bias', 'column_bias'):
            inputs[name].mul_(spread)
    for name in ('axial_forward', 'axial_backward'):
        function = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *x, name=name, function=function: (calls.append(name), function(*x))[1])
    ops.aft_axial(**inputs).sum().backward()
    assert calls == (['axial_forward', 'axial_backward'] if again else [])
