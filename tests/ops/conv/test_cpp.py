"""The compiled forms of AFT-conv, also with one offset per channel: where they run, and what torch does again."""

import math

import pytest
import torch
from helpers import (
    assert_close,
    assert_matches_reference,
    kernels_run,
    make_inputs,
    make_mask,
    make_qkv,
    plain,
    randn,
    single,
)

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.common import cpp
from aft_vision.ops.conv import CONV
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


@pytest.mark.parametrize(('form', 'heads'), [('depthwise', 66), ('wide', 6), ('conv', 66)])
def test_a_form_runs_by_its_name_also_in_a_graph(form: str, heads: int):
    inputs = single(make_inputs('aft_conv', (5, 7), 66, 3, heads, B=5))
    names = {'wide': ('conv_wide_forward', 'conv_backward')}.get(form, (f'{form}_forward', f'{form}_backward'))
    graph = torch.compile(ops.aft_conv, backend='aot_eager')
    assert kernels_run(lambda: graph(**inputs, backend=form).sum().backward()) == {f'aft_vision::{x}' for x in names}


@pytest.mark.parametrize(
    ('batch', 'heads', 'D', 'dtype', 'form'),
    [
        (1, 2, 90, torch.float32, 'wide'),
        (2, 2, 90, torch.float32, 'conv'),
        (2, 7, 42, torch.float32, 'wide'),
        (2, 66, 132, torch.float32, 'wide'),
        (2, 6, 6, torch.float32, 'wide'),
        (2, 66, 66, torch.float32, 'depthwise'),
        (1, 2, 90, torch.float64, 'eager'),
    ],
)
def test_many_heads_of_one_channel_one_sequence_and_narrow_heads_have_forms_of_their_own(
    batch: int, heads: int, D: int, dtype: torch.dtype, form: str
):
    q, k, v = (x.to(dtype) for x in make_qkv(B=batch, T=12, D=D, heads=heads))
    inputs = conv.ConvInputs(q, k, v, randn(heads, 3, 3).to(dtype), (3, 4), None, True)
    assert CONV.choose('auto', inputs).name == form
    window = inputs._replace(global_context=False)
    assert CONV.choose('auto', window).name == ('eager' if dtype == torch.float64 else 'conv')


def test_a_sequence_does_not_depend_on_the_others_in_its_batch():
    # A batch of 13 is cut otherwise than one of 1, and the columns of a sequence lie elsewhere in the strips.
    q, k, v = (x.float() for x in make_qkv(B=13, T=30, D=24, heads=4))
    kernel = randn(4, 5, 5, seed=7).float()
    whole = ops.aft_conv(q, k, v, kernel, grid=(5, 6))
    for i in range(13):
        assert_close(whole[i], ops.aft_conv(q[i : i + 1], k[i : i + 1], v[i : i + 1], kernel, grid=(5, 6))[0], 1e-6)


def test_a_gate_that_is_nearly_shut_keeps_large_values():
    # e^84 times 700 is beyond float32, what remains of 1e35 behind the gate is not.
    q, k, v = torch.full((1, 700, 2), -84.0), torch.zeros(1, 700, 1), torch.full((1, 700, 2), 1e35)
    y = ops.aft_conv(q, k, v, torch.zeros(1, 3, 3), (20, 35), backend='cpp')
    assert_close(y, v.double() / (1 + math.exp(84)), 1e-5)


@pytest.mark.parametrize('width', [7, 8])
def test_fewer_than_eight_columns_take_vectors_in_place_of_tiles(width: int):
    inputs, found = plain(make_inputs('aft_conv', (4, width), 70, 5, 7), torch.bfloat16), []
    for kind in (cpp.SINGLE, cpp.TILES, cpp.PAIRS):
        with cpp.multiply_bfloat16_as(kind):
            found.append(ops.aft_conv(**inputs, backend='conv'))
    assert torch.equal(*found[:2]) is (width < 8)
    assert not torch.equal(found[0], found[2])


def test_the_digits_of_a_kernel_as_large_as_its_image_are_kept():
    # One running sum over a window loses 9e-7.
    _, k, v = make_qkv(B=1, T=48 * 48, D=4, heads=2)
    inputs = k / 100, v.abs() + 1, randn(2, 95, 95, seed=7) / 100
    expected = ops.aft_conv(None, *inputs, (48, 48), backend='eager')
    assert_close(ops.aft_conv(None, *(x.float() for x in inputs), (48, 48)), expected, 4e-7)
