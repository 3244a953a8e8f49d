"""The compiled AFT-conv with a kernel or one offset per channel: where it runs, and what is done without it."""

import logging
from functools import partial

import pytest
import torch
from helpers import (
    assert_close,
    assert_matches_reference,
    kernels_run,
    make_inputs,
    make_mask,
    make_qkv,
    randn,
    single,
)

from aft_vision import ops
from aft_vision.ops import operator, reference
from aft_vision.ops.common import build, cpp
from aft_vision.ops.conv import CONV, onehot
from aft_vision.ops.conv import eager as conv

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


@pytest.mark.parametrize(('keys', 'bias', 'again'), [(0.0, 0.0, False), (90.0, 0.0, False), (90.0, -50.0, True)])
def test_only_lost_digits_cost_a_second_call(monkeypatch: pytest.MonkeyPatch, keys: float, bias: float, again: bool):
    inputs, calls = single(make_inputs('aft_conv', (6, 5), 66, 3)), []
    with torch.no_grad():
        inputs['k'][:, 12] += keys
        inputs['kernel'].mul_(0.3).add_(bias)
    for name in ('conv_forward', 'conv_backward'):
        function = getattr(conv, name)
        monkeypatch.setattr(conv, name, lambda *x, name=name, function=function: (calls.append(name), function(*x))[1])
    ops.aft_conv(**inputs).sum().backward()
    assert calls == (['conv_forward', 'conv_backward'] if again else [])


@pytest.mark.parametrize('name', ['aft_conv', 'aft_onehot'])
def test_a_sequence_without_tokens_costs_no_second_call(monkeypatch: pytest.MonkeyPatch, name: str):
    for form in ('forward', 'backward'):
        monkeypatch.delattr(conv, f'conv_{form}')
        monkeypatch.delattr(onehot, f'onehot_{form}')
    op, expected = (partial(getattr(module, name), mask=make_mask(3, 30)) for module in (ops, reference))
    assert_matches_reference(op, expected, make_inputs(name, (6, 5), 66, 3, B=3))


@pytest.mark.parametrize('name', ['q', 'v', 'kernel', 'mask'])
def test_an_input_on_another_device_never_reaches_the_kernel(name: str):
    inputs = single(make_inputs('aft_conv', (5, 7), 66, 3)) | {'mask': make_mask(2, 35), 'global_context': True}
    elsewhere = conv.ConvInputs(**inputs | {name: inputs[name].to('meta')})
    assert CONV.choose('auto', conv.ConvInputs(**inputs)).backend == 'cpp'
    assert CONV.choose('auto', elsewhere).backend != 'cpp'


def test_offsets_far_outside_the_grid_add_nothing():
    inputs = make_inputs('aft_onehot', (5, 7), 66, 4)
    inputs['offset'][:3] = torch.tensor([[9, 0], [-9, 3], [0, -9]])
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs)
    expected = ops.aft_onehot(**single(inputs))
    inputs['offset'][:3] = torch.tensor([[2**63 - 1, 0], [-(2**63), 3], [0, -(2**63)]])
    assert torch.equal(ops.aft_onehot(**single(inputs)), expected)


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
    inputs = single(make_inputs('aft_conv', (5, 7), 66, 3) | other)
    names = {f'aft_vision::{forward}', 'aft_vision::conv_backward'}
    assert kernels_run(lambda: ops.aft_conv(**inputs).sum().backward()) == names


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
    inputs = single(make_inputs('aft_conv', (5, 7), 66, 3))
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
