"""The mixers with constant position weights give what the mixers give."""

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import assert_close, randn
from torch import nn

from aft_vision.layers import AFTAxial, AFTConv, AFTFull, AFTLocal, AFTMixer, AFTSimple, CausalFull
from aft_vision.ops import aten, reference

GRID = (3, 4)
MAKERS: dict[str, Callable[[], AFTMixer]] = {
    'full': lambda: AFTFull(8, num_tokens=12, bias_dim=4, grid=GRID),
    'full_whole_bias': lambda: AFTFull(8, num_tokens=12, factorize_bias=False, grid=GRID),
    'local': lambda: AFTLocal(8, num_tokens=12, window_size=3, bias_dim=4, grid=GRID),
    'local_wide': lambda: AFTLocal(8, num_tokens=12, window_size=12, bias_dim=4, grid=GRID),
    'simple': lambda: AFTSimple(8),
    'conv': lambda: AFTConv(8, num_heads=2, kernel_size=5),
    'conv_small': lambda: AFTConv(8, num_heads=8, kernel_size=1),
    'conv_wide': lambda: AFTConv(8, num_heads=2, kernel_size=11),
    'conv_raw': lambda: AFTConv(8, num_heads=2, kernel_size=3, standardize_kernel=False),
    'conv_gumbel': lambda: AFTConv(8, num_heads=2, kernel_size=5, gumbel=True),
    'conv_window': lambda: AFTConv(8, num_heads=2, kernel_size=5, global_context=False),
    'conv_local': lambda: AFTConv(8, num_heads=2, kernel_size=5, local_conv=True),
    'axial': lambda: AFTAxial(8, num_heads=2, window_size=(3, 2)),
    'axial_resampled': lambda: AFTAxial(8, num_heads=2, window_size=7, resample_bias=True, local_conv=True),
    'conv_no_query': lambda: AFTConv(8, num_heads=2, kernel_size=5, query_gate=False),
}


def randomized(mixer: nn.Module) -> nn.Module:
    for i, p in enumerate(mixer.parameters()):
        p.data.copy_(randn(*p.shape, seed=i, scale=0.5))
    return mixer.eval()


@pytest.mark.parametrize('lowering', ['conv', 'matmul'])
@pytest.mark.parametrize('name', MAKERS)
@torch.no_grad()
def test_a_frozen_mixer_gives_the_same(name: str, lowering: str):
    mixer = randomized(MAKERS[name]()).double()
    frozen = mixer.freeze(GRID, lowering)
    x, mask = randn(2, 12, 8), torch.arange(12).expand(2, -1) < 7
    assert_close(frozen(x, GRID), mixer(x, GRID), 1e-12)
    assert_close(frozen(x, GRID, mask), mixer(x, GRID, mask), 1e-12)


@pytest.mark.parametrize('lowering', ['conv', 'matmul'])
@pytest.mark.parametrize('name', MAKERS)
@torch.no_grad()
def test_freezing_leaves_the_mixer_as_it_is(name: str, lowering: str):
    mixer, x = randomized(MAKERS[name]()), randn(2, 12, 8).float()
    expected, state = mixer(x, GRID), copy.deepcopy(mixer.state_dict())
    for parameter in mixer.freeze(GRID, lowering).parameters():
        parameter.zero_()
    for key, value in mixer.state_dict().items():
        assert value.dtype == state[key].dtype, key
        assert torch.equal(value, state[key]), key
    assert torch.equal(mixer(x, GRID), expected)
    assert not getattr(mixer, 'exportable', False)


def test_a_frozen_mixer_keeps_its_constants_in_float32():
    frozen = randomized(AFTConv(8, num_heads=2, kernel_size=5)).freeze(GRID)
    assert {x.dtype for x in frozen.state_dict().values()} == {torch.float32}
    assert [name for name in frozen.state_dict() if 'kernel' in name] == []


@pytest.mark.parametrize('name', ['conv', 'axial', 'axial_resampled'])
@torch.no_grad()
def test_a_form_for_every_grid_serves_another_one(name: str):
    mixer = randomized(MAKERS[name]()).double()
    frozen = mixer.freeze(GRID)
    assert_close(frozen(randn(2, 35, 8), (5, 7)), mixer(randn(2, 35, 8), (5, 7)), 1e-12)


def test_the_matrix_form_loses_no_digits_where_the_bias_is_very_negative():
    q, k, v = randn(1, 12, 4), randn(1, 12, 2), randn(1, 12, 4)
    # Each target's own source dominates by its key and is all but shut out by its bias.
    k[:, 5], kernel = 20.0, torch.full((2, 5, 5), -20.0, dtype=torch.float64)
    expected = reference.aft_conv(q, k, v, kernel, GRID)
    q, k, v, kernel = (x.float() for x in (q, k, v, kernel))
    assert_close(aten.mix_matmul(q, k, v, aten.conv_matrix(kernel, GRID)), expected, 1e-5)
    with pytest.raises(AssertionError):
        assert_close(aten.aft_conv(q, k, v, kernel, GRID), expected, 1e-5)


def test_what_cannot_be_frozen_is_rejected():
    with pytest.raises(ValueError, match="lowering must be one of conv, matmul, got 'fft'"):
        AFTConv(8).freeze(GRID, 'fft')
    with pytest.raises(ValueError, match="lowering='matmul' needs the token grid"):
        AFTConv(8).freeze(None, 'matmul')
    with pytest.raises(ValueError, match='got a causal CausalFull, which has no aten form'):
        CausalFull(8, num_tokens=12).freeze(None)
