"""AFT-full in Triton: parts of a batch, and padding."""

from functools import partial

import pytest
from helpers import assert_matches_reference, make_inputs

from aft_vision import ops
from aft_vision.ops import reference

full = partial(ops.aft_full, backend='triton')


@pytest.mark.parametrize('tokens', [7, 8, 9])
def test_sequences_one_at_a_time_give_the_gradient_that_all_of_them_do(
    tokens: int, triton_device: str, monkeypatch: pytest.MonkeyPatch
):
    from aft_vision.ops.full import triton as kernels

    monkeypatch.setattr(kernels, 'GRADIENTS', 1)
    inputs = make_inputs('aft_full', (1, tokens), 5, B=3)
    assert_matches_reference(full, reference.aft_full, inputs, device=triton_device)
