"""The compiled AFT-full, and both forms of AFT-conv for heads of several channels: values, repairs, where they run."""

import math
from functools import partial
from typing import Any

import pytest
import timm
import torch
from helpers import (
    assert_close,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    kernels_run,
    make_mask,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
    single,
    threads,
)
from torch import Tensor

import aft_vision
from aft_vision import ops
from aft_vision.ops import operator, reference
from aft_vision.ops.conv import cpp as conv_cpp
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.full import cpp as full_cpp
from aft_vision.ops.full import eager as full

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]

FULL = {'aft_vision::full_forward', 'aft_vision::full_backward'}
CONV = {'aft_vision::conv_forward', 'aft_vision::conv_backward'}
WIDE = {'aft_vision::conv_wide_forward', 'aft_vision::conv_backward'}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)]
# Heads, channels and grid: less than a vector, more than one of tokens, of heads and of channels, whole ones, a head
# wider than a strip, and a row that is more than one piece, of which a kernel of 5 covers a part.
CASES = [(2, 6, (1, 5)), (7, 70, (3, 4)), (18, 36, (5, 7)), (16, 32, (4, 8)), (2, 90, (6, 3)), (3, 12, (4, 43))]


def full_inputs(T: int, D: int, masked: bool = False) -> dict[str, Any]:
    mask = make_mask(2, T) if masked else None
    return dict(zip('qkv', make_qkv(T=T, D=D), strict=True)) | {'bias': randn(T, T, seed=7), 'mask': mask}


def conv_inputs(heads: int, D: int, grid: tuple[int, int], masked: bool = False) -> dict[str, Any]:
    T = grid[0] * grid[1]
    q, k, v = make_qkv(B=2, T=T, D=D, heads=heads)
    mask = make_mask(2, T) if masked else None
    return {'q': q, 'k': k, 'v': v, 'kernel': randn(heads, 5, 5, seed=7), 'grid': grid, 'mask': mask}


@pytest.fixture(params=['wide', 'conv'])
def conv_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one of the two forms for heads of several channels, whichever is the faster."""
    (wide,) = (form for form in operator.FORMS['aft_conv'] if form.name == 'wide')
    chosen = request.param == wide.name
    monkeypatch.setattr(wide, 'supports', lambda inputs: chosen and inputs.v.dtype != torch.float64)
    return request.param


@pytest.mark.parametrize(('dtype', 'masked'), PAIRS, ids=str)
@pytest.mark.parametrize(('heads', 'D', 'grid'), CASES)
def test_aft_conv_equals_float64(
    heads: int, D: int, grid: tuple[int, int], masked: bool, dtype: torch.dtype, conv_form: str
):
    inputs = conv_inputs(heads, D, grid, masked)
    assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs, dtype)


@pytest.mark.parametrize(('heads', 'D', 'grid'), CASES)
def test_pairs_of_bfloat16_equal_float64(heads: int, D: int, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    # Also on a processor that multiplies float32 faster.
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip('this processor cannot multiply pairs of bfloat16')
    for module in (full_cpp, conv_cpp):
        monkeypatch.setattr(module, 'multiplies_pairs', lambda v: v.dtype == torch.bfloat16)
    (wide,) = (form for form in operator.FORMS['aft_conv'] if form.name == 'wide')
    monkeypatch.setattr(wide, 'supports', lambda inputs: False)
    assert_matches_reference(ops.aft_conv, reference.aft_conv, conv_inputs(heads, D, grid, True), torch.bfloat16)
    tokens = grid[0] * grid[1]
    assert_matches_reference(ops.aft_full, reference.aft_full, full_inputs(tokens, D, True), torch.bfloat16)


@pytest.mark.parametrize(
    ('batch', 'heads', 'D', 'dtype', 'module'),
    [
        (1, 2, 90, torch.float32, 'conv.window'),
        (2, 2, 90, torch.float32, 'conv.cpp'),
        (2, 7, 42, torch.float32, 'conv.window'),
        (1, 2, 90, torch.float64, 'conv.eager'),
    ],
)
def test_one_sequence_and_narrow_heads_take_the_wide_form(
    batch: int, heads: int, D: int, dtype: torch.dtype, module: str
):
    q, k, v = (x.to(dtype) for x in make_qkv(B=batch, T=12, D=D, heads=heads))
    inputs = conv.ConvInputs(q, k, v, randn(heads, 3, 3).to(dtype), (3, 4), None, True)
    assert operator.OPERATORS['aft_conv'].choose('auto', inputs).module == module
    window = inputs._replace(global_context=False)
    assert operator.OPERATORS['aft_conv'].choose('auto', window).module != 'conv.window'


@pytest.mark.parametrize(('dtype', 'masked'), PAIRS, ids=str)
@pytest.mark.parametrize(('T', 'D'), [(8, 5), (20, 40), (17, 64), (61, 33)])
def test_aft_full_equals_float64(T: int, D: int, masked: bool, dtype: torch.dtype):
    assert_matches_reference(ops.aft_full, reference.aft_full, full_inputs(T, D, masked), dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(('heads', 'D', 'grid'), CASES)
def test_masked_tokens_have_no_effect(heads: int, D: int, grid: tuple[int, int], dtype: torch.dtype):
    T = grid[0] * grid[1]
    for op, inputs in ((ops.aft_conv, conv_inputs(heads, D, grid)), (ops.aft_full, full_inputs(T, D))):
        del inputs['mask']
        assert_masked_tokens_have_no_effect(op, inputs, make_mask(2, T), dtype=dtype)


def test_both_equal_float64_without_a_gate(conv_form: str):
    assert_matches_reference(ops.aft_full, reference.aft_full, full_inputs(20, 40) | {'q': None})
    assert_matches_reference(ops.aft_conv, reference.aft_conv, conv_inputs(7, 70, (3, 4)) | {'q': None})


@pytest.mark.parametrize('bias', list(nasty_biases(torch.zeros(1))))
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_what_underflows_is_repaired(keys: str, bias: str, conv_form: str):
    full, conv = full_inputs(18, 5), conv_inputs(3, 6, (3, 6))
    full |= {'k': nasty_keys(full['k'])[keys], 'bias': nasty_biases(full['bias'])[bias]}
    conv |= {'k': nasty_keys(conv['k'])[keys], 'kernel': nasty_biases(conv['kernel'])[bias]}
    assert_matches_reference(ops.aft_full, reference.aft_full, full, nasty=True)
    assert_matches_reference(ops.aft_conv, reference.aft_conv, conv, nasty=True)


def forbid_torch(patch: pytest.MonkeyPatch) -> None:
    """Return what is left to do where digits are lost."""
    for module, name in ((full, 'full'), (conv, 'conv')):
        for direction in ('forward', 'backward'):
            patch.setattr(module, f'{name}_{direction}', lambda *inputs: pytest.fail('expected the kernels alone'))


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_they_run_by_themselves_and_never_in_eager(dtype: torch.dtype, conv_form: str, monkeypatch: pytest.MonkeyPatch):
    full_, conv_ = single(full_inputs(20, 40), dtype), single(conv_inputs(7, 70, (3, 4)), dtype)
    with monkeypatch.context() as patch:
        forbid_torch(patch)
        assert kernels_run(lambda: ops.aft_full(**full_).float().sum().backward()) == FULL
        assert (
            kernels_run(lambda: ops.aft_conv(**conv_).float().sum().backward())
            == {'wide': WIDE, 'conv': CONV}[conv_form]
        )
    assert kernels_run(lambda: ops.aft_full(**full_, backend='eager').float().sum().backward()) == set()
    assert kernels_run(lambda: ops.aft_conv(**conv_, backend='eager').float().sum().backward()) == set()


@pytest.mark.parametrize(('name', 'kernels'), [('aft_full_tiny', FULL), ('aft_conv_tiny_k11_h32', WIDE)])
def test_registered_models_run_them_forward_and_backward(name: str, kernels: set[str]):
    assert aft_vision.__version__
    model = timm.create_model(name, depth=1, num_classes=2)
    x = torch.randn(1, 3, 224, 224)
    assert kernels_run(lambda: model(x).sum().backward()) == kernels


@pytest.mark.parametrize(
    ('global_context', 'conv_form'),
    [(True, 'wide'), (True, 'conv'), (False, 'conv')],
    indirect=['conv_form'],
)
@pytest.mark.parametrize(('grid', 's'), [((5, 7), 5), ((9, 40), 7), ((3, 4), 15), ((40, 2), 3)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_aft_conv_equals_float64_within_and_beyond_reach(
    grid, s: int, global_context: bool, dtype: torch.dtype, conv_form: str
):
    inputs = conv_inputs(3, 12, grid) | {'kernel': randn(3, s, s, seed=8), 'global_context': global_context}
    assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs, dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_several_threads_equal_float64(dtype: torch.dtype):
    # Batches that are cut into unequal parts, and the gradients of the weights that each thread sums.
    q, k, v = make_qkv(B=7, T=35, D=40)
    inputs = {'q': q, 'k': k, 'v': v, 'bias': randn(35, 35, seed=7)}
    with threads(3):
        assert_matches_reference(ops.aft_full, reference.aft_full, inputs, dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
def test_heads_that_are_worked_together_equal_float64(masked: bool, dtype: torch.dtype):
    # Groups of heads, and of sequences, of which the last are smaller.
    q, k, v = make_qkv(B=13, T=35, D=42, heads=7)
    inputs = {
        'q': q,
        'k': k,
        'v': v,
        'kernel': randn(7, 5, 5, seed=7),
        'grid': (5, 7),
        'mask': make_mask(13, 35) if masked else None,
    }
    for count in (1, 3):
        with threads(count):
            assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs, dtype)


def test_the_digits_of_many_tokens_are_kept():
    # Thousands of nearly equal terms of one sign. The torch forms in float64, which equal the reference elsewhere, need
    # no (T, T, D) weights.
    T = 2000
    full, conv = partial(ops.aft_full, backend='eager'), partial(ops.aft_conv, backend='eager')
    q, k, v = (x[..., :9] for x in make_qkv(B=1, T=T, D=9))
    inputs = {'q': q, 'k': k / 100, 'v': v.abs() + 1, 'bias': randn(T, T, seed=7) / 100}
    assert_matches_reference(ops.aft_full, full, inputs)
    inputs = {
        'q': q,
        'k': k[..., :3] / 100,
        'v': v.abs() + 1,
        'kernel': randn(3, 11, 11, seed=7) / 100,
        'grid': (40, 50),
    }
    assert_matches_reference(ops.aft_conv, conv, inputs)


@pytest.mark.parametrize('bias', [True, False], ids=['with bias', 'without'])
def test_the_gradients_of_parts_of_a_projection_are_those_of_whole_tensors(bias: bool):
    # Channels of neighbouring heads lie behind each other, and those of other tensors behind them.
    for op, extra, widths in (
        (ops.aft_full, {'bias': randn(12, 12, seed=7).float()}, (70, 70, 70)),
        (ops.aft_conv, {'kernel': randn(7, 5, 5, seed=7).float(), 'grid': (3, 4)}, (70, 7, 70)),
    ):
        found = []
        for name, x in extra.items():
            extra[name] = x.requires_grad_(bias) if isinstance(x, Tensor) else x
        for layout in ('parts', 'whole', 'columns'):
            projection = randn(2, 12, sum(widths), seed=5).float().requires_grad_()
            parts = projection.split(widths, -1)
            if layout == 'whole':
                parts = tuple(x.contiguous() for x in parts)
            elif layout == 'columns':
                parts = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts)
            y = op(*parts, **extra)
            weight = randn(*y.shape, seed=6).float()
            leaves = [projection, *(x for x in extra.values() if isinstance(x, Tensor) and bias)]
            found.append([y, *torch.autograd.grad((y * weight).sum(), leaves)])
        for each in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(each, found[0], strict=True))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_not_a_number_stays_in_its_head(dtype: torch.dtype):
    inputs = {
        name: x.detach() if isinstance(x, Tensor) else x
        for name, x in single(conv_inputs(7, 70, (3, 4)), dtype).items()
    }
    clean = ops.aft_conv(**inputs)
    inputs['v'][0, 3, 13] = float('nan')
    y = ops.aft_conv(**inputs)
    assert y[0, :, 13].isnan().all()
    others = [i for i in range(70) if i != 13]
    assert torch.equal(y[..., others], clean[..., others])


def test_a_sequence_does_not_depend_on_the_others_in_its_batch():
    # A batch of 13 is cut otherwise than one of 1, and the columns of a sequence lie elsewhere in the strips.
    q, k, v = (x.float() for x in make_qkv(B=13, T=30, D=24, heads=4))
    kernel = randn(4, 5, 5, seed=7).float()
    whole = ops.aft_conv(q, k, v, kernel, grid=(5, 6))
    for i in range(13):
        assert_close(whole[i], ops.aft_conv(q[i : i + 1], k[i : i + 1], v[i : i + 1], kernel, grid=(5, 6))[0], 1e-6)


def test_a_gradient_of_the_bias_that_needs_too_much_room_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('aft_vision.ops.full.cpp.MOST_ELEMENTS', 100)
    assert_matches_reference(ops.aft_full, reference.aft_full, full_inputs(20, 40))
    inputs = single(full_inputs(20, 40))
    assert kernels_run(lambda: ops.aft_full(**inputs).sum().backward()) == {'aft_vision::full_forward'}


def test_a_call_with_a_lost_denominator_goes_to_torch(monkeypatch: pytest.MonkeyPatch):
    inputs = single(full_inputs(18, 5))
    inputs['bias'] = inputs['bias'].detach().clone()
    inputs['bias'][5, 0] = -200.0
    inputs['k'] = inputs['k'].detach().clone()
    inputs['k'][1, 0] = 200.0  # target 5 alone does not see it
    calls: list[int] = []
    eager = full.full_forward
    monkeypatch.setattr(full, 'full_forward', lambda *args: calls.append(1) or eager(*args))
    expected = reference.aft_full(**{n: None if x is None else x.double() for n, x in inputs.items()})
    assert_close(ops.aft_full(**inputs), expected, 1e-4)
    assert calls == [1]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_without_tokens_costs_torch_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    forbid_torch(monkeypatch)
    for op, inputs in ((ops.aft_full, full_inputs(20, 40, True)), (ops.aft_conv, conv_inputs(7, 70, (3, 4), True))):
        low = single(inputs, dtype)
        y = op(**low)
        assert not y[1].any()
        y.float().sum().backward()
        assert not any(low[name].grad[1].any() for name in 'qkv')
        assert all(low[name].grad[0].any() for name in 'qkv')


def test_a_gate_that_is_nearly_shut_keeps_large_values():
    # e^84 times 700 is beyond float32, what remains of 1e35 behind the gate is not.
    T = 700
    q, k, v = torch.full((1, T, 2), -84.0), torch.zeros(1, T, 2), torch.full((1, T, 2), 1e35)
    expected = v.double() / (1 + math.exp(84))
    assert_close(ops.aft_full(q, k, v, torch.zeros(T, T), backend='cpp'), expected, 1e-5)
    kernel = torch.zeros(1, 3, 3)
    assert_close(ops.aft_conv(q, k[..., :1], v, kernel, grid=(20, 35), backend='cpp'), expected, 1e-5)


def test_channels_need_not_be_neighbours_nor_tokens_dense():
    q, k, v = (x.float() for x in make_qkv(B=2, T=18, D=20))
    bias = randn(18, 18, seed=7).float()
    expected = ops.aft_full(q, k, v, bias)
    parts = torch.cat([q, k, v], -1).split(20, -1)
    assert torch.equal(ops.aft_full(*parts, bias), expected)
    columns = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(ops.aft_full(*columns, bias), expected)


def test_inputs_of_mixed_precision_are_rounded_as_torch_rounds():
    # One token: y is v, gated by exactly 1, so that the output is v rounded to the dtype of q.
    v = torch.cat(
        [randn(1, 1, 70, dtype=torch.float32), torch.tensor([[[1.00390625, 1.01171875, 3e38, 1e-40, -0.0]]])], -1
    )
    q = torch.full_like(v, 200.0, dtype=torch.bfloat16)
    y = ops.aft_full(q, torch.zeros_like(v), v, torch.zeros(1, 1), backend='cpp')
    assert torch.equal(y, v.to(torch.bfloat16))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_not_a_number_stays_in_its_sequence(dtype: torch.dtype):
    inputs = {
        name: x.detach() if isinstance(x, Tensor) else x for name, x in single(full_inputs(20, 40), dtype).items()
    }
    clean = ops.aft_full(**inputs)
    inputs['v'][0, 3, 7] = float('nan')
    y = ops.aft_full(**inputs)
    assert y[0, :, 7].isnan().all()
    assert torch.equal(y[1], clean[1])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_weights_made_once_give_the_same_and_replace_the_bias(dtype: torch.dtype):
    inputs = single(full_inputs(33, 20), dtype)
    q, k, v, bias = (inputs[name].detach() for name in ('q', 'k', 'v', 'bias'))
    expected, weights = ops.aft_full(q, k, v, bias), ops.bias_weights('aft_full', bias, v)
    assert torch.equal(ops.aft_full(q, k, v, bias, weights=weights), expected)
    assert torch.equal(ops.aft_full(q, k, v, torch.zeros_like(bias), weights=weights), expected)
    # A repair needs the bias itself.
    lost = k.index_fill(1, torch.tensor([3]), 200.0)
    assert torch.equal(ops.aft_full(q, lost, v, bias, weights=weights), ops.aft_full(q, lost, v, bias))
    for other in (bias, bias.double()):
        other_weights = ops.bias_weights('aft_full', other[:20, :20], v)
        with pytest.raises(ValueError, match='weights must be those of'):
            ops.aft_full(q, k, v, bias, weights=other_weights)


def test_gradients_do_not_use_weights_made_once():
    inputs = single(full_inputs(20, 16))
    plain = torch.autograd.grad(ops.aft_full(**inputs).sum(), [inputs['k'], inputs['bias']])
    weights = ops.bias_weights('aft_full', torch.zeros(20, 20), inputs['v'])
    found = torch.autograd.grad(ops.aft_full(**inputs, weights=weights).sum(), [inputs['k'], inputs['bias']])
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))


def test_no_weights_are_made_where_no_kernel_takes_them():
    bias, v = torch.zeros(5, 5), torch.zeros(1, 5, 3)
    assert ops.bias_weights('aft_full', bias, v) is not None
    assert ops.bias_weights('aft_full', bias, v.double()) is None
    assert ops.bias_weights('aft_full', bias.to('meta'), v.to('meta')) is None
    with pytest.raises(ValueError, match=r'bias must have shape \(T, T\)'):
        ops.bias_weights('aft_full', bias[:, 1:], v)
    with pytest.raises(ValueError, match=r'bias must have shape \(h, s, s\)'):
        ops.bias_weights('aft_conv', bias, v)


def test_the_digits_of_a_kernel_as_large_as_its_image_are_kept():
    # One running sum over a window loses 9e-7.
    _, k, v = make_qkv(B=1, T=48 * 48, D=8, heads=4)
    inputs = k / 100, v.abs() + 1, randn(4, 95, 95, seed=7) / 100
    expected = ops.aft_conv(None, *inputs, (48, 48), backend='eager')
    assert_close(ops.aft_conv(None, *(x.float() for x in inputs), (48, 48)), expected, 4e-7)
