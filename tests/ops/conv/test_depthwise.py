"""The compiled AFT-conv with a kernel or one offset per channel: where it runs, its values, what is done without it."""

import logging
import math

import pytest
import timm
import torch
from helpers import (
    assert_close,
    assert_matches_reference,
    assert_passes_opcheck,
    kernels_run,
    make_mask,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
    single,
    threads,
)

import aft_vision
from aft_vision import ops
from aft_vision.ops import operator, reference
from aft_vision.ops.common import build, cpp
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.conv import window

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

NAMES = {'aft_vision::depthwise_forward', 'aft_vision::depthwise_backward'}


def make_inputs(grid: tuple[int, int], D: int, s: int, B: int = 2) -> dict[str, object]:
    q, k, v = make_qkv(B=B, T=math.prod(grid), D=D)
    return {'q': q, 'k': k, 'v': v, 'kernel': randn(D, s, s, seed=8), 'grid': grid}


def make_onehot_inputs(grid: tuple[int, int], D: int, B: int = 2) -> dict[str, object]:
    inputs = make_inputs(grid, D, 3, B)
    # Some lead outside the grid from everywhere.
    offset = torch.randint(-4, 5, (D, 2), generator=torch.Generator().manual_seed(4))
    return {name: inputs[name] for name in 'qkv'} | {'offset': offset, 'weight': randn(D, seed=8), 'grid': grid}


# Channels that fill no vector, rows longer than the registers hold, kernels beyond the grid, one row, few tokens.
CASES = [((5, 7), 66, 3), ((3, 30), 67, 9), ((4, 3), 72, 15), ((1, 9), 130, 5), ((1, 6), 65, 3), ((10, 9), 80, 11)]


@pytest.mark.parametrize(
    ('dtype', 'masked'),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize(('grid', 'D', 's'), CASES)
def test_it_equals_float64(grid, D: int, s: int, masked: bool, dtype: torch.dtype):
    inputs = make_inputs(grid, D, s) | {'mask': make_mask(2, math.prod(grid)) if masked else None}
    assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs, dtype)


def test_several_threads_equal_float64():
    # A batch in several parts, whose sums for the kernel are added.
    with threads(3):
        assert_matches_reference(ops.aft_conv, reference.aft_conv, make_inputs((5, 7), 66, 3, B=5))
        assert_matches_reference(ops.aft_onehot, reference.aft_onehot, make_onehot_inputs((5, 7), 66, B=5))


def test_it_equals_float64_without_a_gate():
    assert_matches_reference(ops.aft_conv, reference.aft_conv, make_inputs((5, 7), 66, 3) | {'q': None})


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('grid', 'D'), [((5, 7), 66), ((1, 9), 130), ((10, 9), 80)])
def test_one_offset_a_channel_equals_float64(grid, D: int, masked: bool, dtype: torch.dtype):
    mask = make_mask(2, math.prod(grid)) if masked else None
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, make_onehot_inputs(grid, D) | {'mask': mask}, dtype)


@pytest.mark.parametrize('weight', [-50.0, -1e4, 200.0])
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_one_offset_survives_nasty_inputs(keys: str, weight: float):
    inputs = make_onehot_inputs((6, 5), 66)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'weight': torch.full((66,), weight, dtype=torch.float64)}
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, nasty=True)


def test_one_offset_a_channel_runs_compiled():
    inputs = single(make_onehot_inputs((5, 7), 66))
    assert kernels_run(lambda: ops.aft_onehot(**inputs).sum().backward()) == NAMES


@pytest.mark.parametrize('bias', list(nasty_biases(torch.zeros(1))))
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_lost_digits_are_found_and_the_call_is_done_again(keys: str, bias: str):
    inputs = make_inputs((6, 5), 66, 5)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'kernel': nasty_biases(inputs['kernel'])[bias]}
    assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs, nasty=True)


@pytest.mark.parametrize(('keys', 'bias', 'again'), [(0.0, 0.0, False), (90.0, 0.0, False), (90.0, -50.0, True)])
def test_only_lost_digits_cost_a_second_call(monkeypatch: pytest.MonkeyPatch, keys: float, bias: float, again: bool):
    inputs, calls = single(make_inputs((6, 5), 66, 3)), []
    with torch.no_grad():
        inputs['k'][:, 12] += keys
        inputs['kernel'].mul_(0.3).add_(bias)
    for name in ('conv_forward', 'conv_backward'):
        function = getattr(conv, name)
        monkeypatch.setattr(conv, name, lambda *x, name=name, function=function: (calls.append(name), function(*x))[1])
    ops.aft_conv(**inputs).sum().backward()
    assert calls == (['conv_forward', 'conv_backward'] if again else [])


def test_a_sequence_of_masked_tokens_gives_zero_and_zero_gradients():
    inputs = single(make_inputs((5, 7), 66, 3))
    mask = torch.ones(2, 35, dtype=torch.bool)
    mask[1] = False
    y = ops.aft_conv(**inputs, mask=mask)
    y.sum().backward()
    assert not y[1].any()
    assert not any(inputs[name].grad[1].any() for name in 'qkv')


def test_parts_of_a_fused_projection_are_read_where_they_are():
    inputs = make_inputs((5, 7), 66, 3)
    fused = torch.cat([inputs[name] for name in 'qkv'], -1).float()
    parts = dict(zip('qkv', fused.split(66, -1), strict=True))
    kernel = inputs['kernel'].float()
    expected = ops.aft_conv(**{name: x.contiguous() for name, x in parts.items()}, kernel=kernel, grid=(5, 7))
    assert torch.equal(ops.aft_conv(**parts, kernel=kernel, grid=(5, 7)), expected)
    turned = {name: x.mT.contiguous().mT for name, x in parts.items()}
    assert torch.equal(ops.aft_conv(**turned, kernel=kernel, grid=(5, 7)), expected)


def test_a_batch_cut_into_parts_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch):
    inputs = make_inputs((5, 7), 66, 3, B=5)
    monkeypatch.setattr(window, '_parts', lambda v: 3)
    assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs)


def test_the_digits_of_a_large_image_are_kept():
    # As many tokens as 1024 px have, all of nearly the same weight: one running sum would lose 2e-4 of the gradients.
    T = 64 * 64
    k = torch.zeros(1, T, 66, dtype=torch.float64)
    k[:, 7] = 1.0
    q, v = make_qkv(B=1, T=T, D=66)[::2]
    inputs = {'q': q, 'k': k, 'v': v + 1.0, 'kernel': randn(66, 3, 3, seed=8), 'grid': (64, 64)}
    low = single(inputs)
    high = single(inputs, torch.float64)
    y, expected = ops.aft_conv(**low), ops.aft_conv(**high)
    assert_close(y, expected, 5e-6)
    weight = randn(1, T, 66, seed=9).float()
    names = ('q', 'k', 'v', 'kernel')
    found = torch.autograd.grad(y, [low[name] for name in names], weight)
    wanted = torch.autograd.grad(expected, [high[name] for name in names], weight.double())
    for name, got, want in zip(names, found, wanted, strict=True):
        assert_close(got, want, 5e-5, name)


@pytest.mark.parametrize('name', ['q', 'v', 'kernel', 'mask'])
def test_an_input_on_another_device_never_reaches_the_kernel(name: str):
    inputs = single(make_inputs((5, 7), 66, 3)) | {'mask': make_mask(2, 35), 'global_context': True}
    elsewhere = conv.ConvInputs(**inputs | {name: inputs[name].to('meta')})
    assert operator.OPERATORS['aft_conv'].choose('auto', conv.ConvInputs(**inputs)).backend == 'cpp'
    assert operator.OPERATORS['aft_conv'].choose('auto', elsewhere).backend != 'cpp'


def test_offsets_far_outside_the_grid_add_nothing():
    inputs = make_onehot_inputs((5, 7), 66)
    inputs['offset'][:3] = torch.tensor([[9, 0], [-9, 3], [0, -9]])
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs)
    expected = ops.aft_onehot(**single(inputs))
    inputs['offset'][:3] = torch.tensor([[2**63 - 1, 0], [-(2**63), 3], [0, -(2**63)]])
    assert torch.equal(ops.aft_onehot(**single(inputs)), expected)


def test_a_nan_stays_one():
    inputs = single(make_inputs((5, 7), 66, 3))
    with torch.no_grad():
        inputs['v'][0, 3, 5] = math.nan
    y = ops.aft_conv(**inputs)
    assert y[0, :, 5].isnan().all()
    assert y[1].isfinite().all()


@pytest.mark.parametrize('heads', [66, 6])
def test_weights_made_once_serve_grids_of_every_size(heads: int):
    q, k, v = (x.float() for x in make_qkv(B=1, T=35, D=66, heads=heads))
    kernel = randn(heads, 5, 5, seed=8).float()
    weights = ops.bias_weights('aft_conv', kernel, v)
    # A small grid needs only the middle of the kernel.
    for grid in ((5, 7), (35, 1), (1, 1), (1, 2), (2, 2)):
        few = [x[:, : grid[0] * grid[1]] for x in (q, k, v)]
        expected = ops.aft_conv(*few, kernel, grid)
        assert torch.equal(ops.aft_conv(*few, kernel, grid, weights=weights), expected)
        assert torch.equal(ops.aft_conv(*few, torch.zeros_like(kernel), grid, weights=weights), expected)
    with pytest.raises(ValueError, match='weights must be those of'):
        ops.aft_conv(q, k, v, kernel, (5, 7), weights=ops.bias_weights('aft_conv', kernel[:, 1:4, 1:4], v))


def test_it_passes_torch_opcheck():
    assert_passes_opcheck('aft_conv', make_inputs((5, 6), 66, 5), [None, True])


def test_the_default_model_runs_it_forward_and_backward():
    assert aft_vision.__version__
    model = timm.create_model('aft_conv_small', depth=1, num_classes=2)
    x = torch.randn(1, 3, 224, 224)
    assert kernels_run(lambda: model(x).sum().backward()) == NAMES


FEW = {'k': randn(2, 35, 6), 'q': randn(2, 35, 6), 'v': randn(2, 35, 6), 'kernel': randn(6, 3, 3)}


@pytest.mark.parametrize(
    ('other', 'forward'),
    [
        ({'q': randn(2, 35, 132), 'v': randn(2, 35, 132)}, 'conv_wide_forward'),
        ({'global_context': False}, 'conv_forward'),
        (FEW, 'conv_wide_forward'),
    ],
    ids=['two channels a head', 'window alone', 'few heads'],
)
def test_other_inputs_take_the_kernels_for_several_channels(other: dict[str, object], forward: str):
    inputs = single(make_inputs((5, 7), 66, 3) | other)
    names = {f'aft_vision::{forward}', 'aft_vision::conv_backward'}
    assert kernels_run(lambda: ops.aft_conv(**inputs).sum().backward()) == names


def test_eager_can_be_asked_for():
    inputs = single(make_inputs((5, 7), 66, 3))
    assert kernels_run(lambda: ops.aft_conv(**inputs, backend='eager').sum().backward()) == set()
    assert_close(ops.aft_conv(**inputs, backend='eager'), ops.aft_conv(**inputs, backend='cpp').double(), 1e-5)


def test_asking_for_it_where_there_is_none_warns_once():
    operator._warn_once.cache_clear()
    q, k, v = (x.float() for x in make_qkv(T=12, D=6))
    with pytest.warns(UserWarning, match="aft_simple has no 'cpp' form for these inputs on this machine; using eager"):
        y = ops.aft_simple(q, k, v, backend='cpp')
    assert torch.equal(y, ops.aft_simple(q, k, v, backend='cpp'))


@pytest.mark.parametrize(
    ('variable', 'value', 'reason'),
    [
        ('CXX', 'no-such-compiler', 'expected a C++ compiler, got none by the name of no-such-compiler'),
        ('CXX', 'false', 'false failed'),
        ('TORCH_EXTENSIONS_DIR', '/dev/null', 'Not a directory'),
    ],
)
def test_without_a_compiler_the_torch_form_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog, variable: str, value: str, reason: str
):
    inputs = single(make_inputs((5, 7), 66, 3))
    expected = ops.aft_conv(**inputs)
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.setenv(variable, value)
    cpp.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert kernels_run(lambda: ops.aft_conv(**inputs)) == set()
            assert_close(ops.aft_conv(**inputs), expected.double(), 1e-5)
    finally:
        cpp.library.cache_clear()
    found = [record.getMessage() for record in caplog.records if record.name in (build.__name__, cpp.__name__)]
    assert len(found) == 1
    assert found[0].startswith('the C++ kernels cannot be built')
    assert reason in found[0]
    assert '\n' not in found[0]
