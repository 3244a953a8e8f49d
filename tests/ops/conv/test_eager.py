"""The choice between the torch forms of AFT-conv."""

import pytest
import torch

from aft_vision.ops.conv.eager import prefers_depthwise


@pytest.mark.parametrize(
    ('heads', 'grid', 'size', 'depthwise'),
    [
        (64, (14, 14), 11, False),
        (65, (14, 14), 11, True),
        (192, (8, 8), 11, False),
        (192, (11, 11), 11, False),
        (192, (12, 11), 11, True),
        (16, (25, 25), 27, True),
    ],
)
def test_many_heads_or_elements_and_more_tokens_than_taps_take_the_depthwise_form(heads, grid, size, depthwise):
    k, kernel = torch.zeros(1, grid[0] * grid[1], heads), torch.zeros(heads, size, size)
    assert prefers_depthwise(k, kernel) is depthwise
