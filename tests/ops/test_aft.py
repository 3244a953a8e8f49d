"""The operations over whole sequences, against float64 in value and in every gradient.

Values are those of the torch forms; the tests of the compiled forms are beside them, in the folder of the operation.
"""

import functools

import pytest
import torch
from helpers import (
    assert_close,
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    assert_passes_opcheck,
    generator,
    make_mask,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
    single,
    threads,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import aten, reference
from aft_vision.ops.conv.onehot import CANCELLATION, _Sums
from tools.benchmark.meters import peak_memory

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NASTY_KEYS = list(nasty_keys(torch.zeros(1, 3, 1)))
NASTY_BIASES = list(nasty_biases(torch.zeros(1)))


def torch_form(name: str) -> functools.partial[Tensor]:
    return functools.partial(getattr(ops, name), backend='eager')


# name -> (inputs for a sequence of T tokens and D channels)
def full_inputs(T: int, D: int = 6) -> dict[str, Tensor]:
    return dict(zip('qkv', make_qkv(T=T, D=D), strict=True)) | {'bias': randn(T, T, seed=7)}


def simple_inputs(T: int, D: int = 6) -> dict[str, Tensor]:
    return dict(zip('qkv', make_qkv(T=T, D=D), strict=True))


def local_inputs(T: int, s: int, D: int = 6) -> dict[str, Tensor]:
    return simple_inputs(T, D) | {'band': randn(T, 2 * s - 1, seed=7)}


def conv_inputs(grid: tuple[int, int], D: int, h: int, s: int) -> dict[str, object]:
    q, k, v = make_qkv(T=grid[0] * grid[1], D=D, heads=h)
    return {'q': q, 'k': k, 'v': v, 'kernel': randn(h, s, s, seed=8), 'grid': grid}


def onehot_inputs(grid: tuple[int, int], D: int, h: int) -> dict[str, object]:
    q, k, v = make_qkv(T=grid[0] * grid[1], D=D, heads=h)
    offset = torch.randint(-2, 3, (h, 2), generator=generator(4))
    return {'q': q, 'k': k, 'v': v, 'offset': offset, 'weight': randn(h, seed=8), 'grid': grid}


def axial_inputs(grid: tuple[int, int], D: int, h: int, s: tuple[int, int]) -> dict[str, object]:
    q, k, v = make_qkv(T=grid[0] * grid[1], D=D, heads=h)
    biases = {'row_bias': randn(h, 2 * s[0] - 1, seed=8), 'column_bias': randn(h, 2 * s[1] - 1, seed=9)}
    return {'q': q, 'k': k, 'v': v, **biases, 'grid': grid}


NAMES = ['aft_full', 'aft_simple', 'aft_local', 'aft_conv', 'aft_onehot', 'aft_axial']


def few_inputs(name: str, grid: tuple[int, int] = (3, 4)) -> dict[str, object]:
    """Inputs of an operator for a few tokens of six channels, of three heads in those on a grid."""
    T = grid[0] * grid[1]
    return {
        'aft_full': lambda: full_inputs(T),
        'aft_simple': lambda: simple_inputs(T),
        'aft_local': lambda: local_inputs(T, 3),
        'aft_conv': lambda: conv_inputs(grid, 6, 3, 5),
        'aft_onehot': lambda: onehot_inputs(grid, 6, 3),
        'aft_axial': lambda: axial_inputs(grid, 6, 3, (3, 2)),
    }[name]()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize('T', [5, 70])
def test_aft_full_equals_float64(T: int, masked: bool, dtype: torch.dtype):
    mask = make_mask(2, T) if masked else None
    assert_matches_reference(torch_form('aft_full'), reference.aft_full, full_inputs(T) | {'mask': mask}, dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize('T', [5, 70])
def test_aft_simple_equals_float64(T: int, masked: bool, dtype: torch.dtype):
    mask = make_mask(2, T) if masked else None
    assert_matches_reference(torch_form('aft_simple'), reference.aft_simple, simple_inputs(T) | {'mask': mask}, dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('T', 's'), [(5, 1), (5, 9), (70, 3), (70, 40), (70, 70)])
def test_aft_local_equals_float64(T: int, s: int, masked: bool, dtype: torch.dtype):
    mask = make_mask(2, T) if masked else None
    assert_matches_reference(ops.aft_local, reference.aft_local, local_inputs(T, s) | {'mask': mask}, dtype)


@pytest.fixture(params=['toeplitz', 'depthwise'])
def either_form_of_conv(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """AFT-conv in eager takes one of its torch forms, whichever it would choose."""
    depthwise = request.param == 'depthwise'
    monkeypatch.setattr('aft_vision.ops.conv.eager.prefers_depthwise', lambda k, kernel: depthwise)


# h = d and h = 1 limits, more than 64 heads, kernels larger than the grid.
CONV_CASES = [
    ((3, 4), 8, 8, 3),
    ((7, 5), 8, 2, 5),
    ((3, 4), 8, 1, 11),
    ((2, 9), 130, 65, 5),
    ((5, 3), 66, 66, 15),
]


@pytest.mark.usefixtures('either_form_of_conv')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('masked', 'global_context'), [(True, True), (False, False)], ids=['masked', 'window alone'])
@pytest.mark.parametrize(('grid', 'D', 'h', 's'), CONV_CASES)
def test_aft_conv_equals_float64(grid, D, h, s, masked: bool, global_context: bool, dtype: torch.dtype):
    extra = {'mask': make_mask(2, grid[0] * grid[1]) if masked else None, 'global_context': global_context}
    assert_matches_reference(torch_form('aft_conv'), reference.aft_conv, conv_inputs(grid, D, h, s) | extra, dtype)


# h = d and h = 1 limits; biases that end within the grid and reach beyond it.
AXIAL_CASES = [((3, 4), 8, 8, (3, 4)), ((7, 5), 8, 2, (3, 9)), ((5, 7), 6, 1, (2, 3))]


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('form', ['eager', 'aten'])
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('grid', 'D', 'h', 's'), AXIAL_CASES)
def test_aft_axial_equals_float64(grid, D: int, h: int, s, masked: bool, form: str, dtype: torch.dtype):
    mask = make_mask(2, grid[0] * grid[1]) if masked else None
    op = functools.partial(ops.aft_axial, backend=form)
    assert_matches_reference(op, reference.aft_axial, axial_inputs(grid, D, h, s) | {'mask': mask}, dtype)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('grid', 'D', 'h'), [((3, 4), 8, 8), ((7, 5), 8, 2)])
def test_aft_onehot_equals_float64(grid, D: int, h: int, masked: bool, dtype: torch.dtype):
    mask = make_mask(2, grid[0] * grid[1]) if masked else None
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, onehot_inputs(grid, D, h) | {'mask': mask}, dtype)


@pytest.mark.parametrize('form', ['eager', 'auto', 'aten'])
@pytest.mark.parametrize('name', NAMES)
def test_masked_tokens_may_be_anything(name: str, form: str):
    inputs = {
        'aft_full': full_inputs(15),
        'aft_simple': simple_inputs(15),
        'aft_local': local_inputs(15, 4),
        'aft_conv': conv_inputs((3, 5), 66, 66, 3),
        'aft_onehot': onehot_inputs((3, 5), 66, 66),
        'aft_axial': axial_inputs((3, 5), 6, 2, (2, 9)),
    }[name]
    op, others = getattr(ops, name), {'backend': form}
    assert_masked_tokens_have_no_effect(lambda **x: op(**x, **others), inputs, make_mask(2, 15))


@pytest.mark.parametrize(
    ('form', 'dtype'),
    [('eager', torch.float64), ('eager', torch.bfloat16), ('auto', torch.float32), ('aten', torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    ('name', 'inputs'),
    [
        ('aft_full', full_inputs(15)),
        ('aft_simple', simple_inputs(15)),
        ('aft_local', local_inputs(15, 4)),
        ('aft_conv', conv_inputs((3, 5), 6, 2, 3)),
        ('aft_conv', conv_inputs((3, 5), 66, 66, 3)),
        ('aft_onehot', onehot_inputs((3, 5), 6, 2)),
        ('aft_onehot', onehot_inputs((3, 5), 66, 66)),
        ('aft_axial', axial_inputs((3, 5), 6, 2, (2, 9))),
    ],
    ids=['full', 'simple', 'local', 'toeplitz', 'depthwise', 'onehot', 'onehot, a head per channel', 'axial'],
)
def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(name: str, inputs, form: str, dtype: torch.dtype):
    op, others = getattr(ops, name), {'backend': form}
    assert_keys_of_minus_infinity_are_masked(lambda **x: op(**x, **others), getattr(reference, name), inputs, dtype)


@pytest.mark.parametrize('form', ['eager', 'auto', 'aten'])
def test_a_target_whose_biases_are_minus_infinity_is_0(form: str):
    bias = torch.zeros(6, 6)
    bias[1] = float('-inf')
    q, k, v = (x.float() for x in make_qkv(T=6))
    y = ops.aft_full(q, k, v, bias, backend=form)
    expected = reference.aft_full(q, k, v, torch.zeros(6, 6))
    expected[:, 1] = 0.0
    assert_close(y, expected, 1e-5)
    kernel = torch.full((k.shape[2], 3, 3), float('-inf'))
    y = ops.aft_conv(q, k, v, kernel, (2, 3), None, False, backend=form)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize('w', [-15.0, -18.0, -30.0, float('-inf')])
def test_the_exported_form_stays_as_large_as_the_values_where_its_terms_cancel(w: float):
    k, v = randn(1, 25, 8, dtype=torch.float32), randn(1, 25, 8, dtype=torch.float32)
    y = ops.aft_conv(None, k, v, torch.full((8, 9, 9), w), (5, 5), backend='aten')
    assert y.abs().max() < 10 * v.abs().max()


def test_a_key_that_is_not_a_number_is_seen_beside_a_mask():
    q, k, v = make_qkv()
    mask = torch.ones(k.shape[:2], dtype=torch.bool)
    mask[:, 0] = False
    k[0, 3, 2] = float('nan')
    y = ops.aft_simple(q, k, v, mask)
    assert y[0, :, 2].isnan().all()
    assert y[1].isfinite().all()


def test_masked_tokens_may_be_anything_where_elements_underflow():
    inputs = full_inputs(15) | {'bias': nasty_biases(randn(15, 15, seed=7))['plus_minus_80']}
    inputs['k'] = nasty_keys(inputs['k'])['normal_30']
    assert_masked_tokens_have_no_effect(ops.aft_full, inputs, make_mask(2, 15))


@pytest.mark.parametrize('bias', NASTY_BIASES)
@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_aft_full_survives_nasty_inputs(keys: str, bias: str):
    inputs = full_inputs(40)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'bias': nasty_biases(inputs['bias'])[bias]}
    assert_matches_reference(torch_form('aft_full'), reference.aft_full, inputs, nasty=True)


@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_aft_simple_survives_nasty_inputs(keys: str):
    inputs = simple_inputs(40)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(ops.aft_simple, reference.aft_simple, inputs, nasty=True)


@pytest.mark.parametrize(
    ('s', 'bias'), [*((5, bias) for bias in NASTY_BIASES), (1, 'within_50'), (50, 'plus_minus_80')]
)
@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_aft_local_survives_nasty_inputs(keys: str, bias: str, s: int):
    inputs = local_inputs(40, s)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'band': nasty_biases(inputs['band'])[bias]}
    assert_matches_reference(ops.aft_local, reference.aft_local, inputs, nasty=True)


# Windows alone are compiled too; the tests of the compiled forms have the global context.
@pytest.mark.parametrize(
    ('D', 'h', 's', 'global_context', 'backend'), [(6, 2, 27, True, 'eager'), (66, 66, 5, False, 'auto')]
)
@pytest.mark.parametrize('bias', NASTY_BIASES)
@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_aft_conv_survives_nasty_inputs(
    keys: str, bias: str, D: int, h: int, s: int, global_context: bool, backend: str
):
    inputs = conv_inputs((6, 5), D, h, s)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'kernel': nasty_biases(inputs['kernel'])[bias]}
    inputs['global_context'] = global_context
    op = functools.partial(ops.aft_conv, backend=backend)
    assert_matches_reference(op, reference.aft_conv, inputs, nasty=True)


@pytest.mark.parametrize(
    ('form', 'weight'),
    [
        *((ops.aft_onehot, weight) for weight in (0.0, -5.0, -50.0, -1e4, 50.0, 200.0)),
        *((aten.aft_onehot, weight) for weight in (-50.0, 200.0)),
    ],
    ids=lambda value: value.__module__ if callable(value) else str(value),
)
@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_aft_onehot_survives_nasty_inputs(keys: str, weight: float, form):
    inputs = onehot_inputs((6, 5), 6, 3)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'weight': torch.full((3,), weight, dtype=torch.float64)}
    assert_matches_reference(form, reference.aft_onehot, inputs, nasty=True)


def test_aft_full_is_right_where_both_maxima_miss_each_other():
    # (max w - w) + (max k - k) is 140 at the one source and 140 at the other: each product underflows float32.
    q, _, v = make_qkv(B=1, T=2, D=1)
    k = torch.tensor([[[70.0], [0.0]]], dtype=torch.float64)
    bias = torch.tensor([[-70.0, 70.0], [-70.0, 70.0]], dtype=torch.float64)
    assert_matches_reference(ops.aft_full, reference.aft_full, {'q': q, 'k': k, 'v': v, 'bias': bias}, nasty=True)


@pytest.mark.parametrize('name', NAMES)
def test_one_token_returns_its_gated_value(name: str):
    inputs = few_inputs(name, (1, 1))
    q, v = inputs['q'], inputs['v']
    assert_close(getattr(ops, name)(**inputs), torch.sigmoid(q) * v, 1e-12)
    assert_matches_reference(getattr(ops, name), getattr(reference, name), inputs, nasty=True)


@pytest.mark.parametrize('name', NAMES)
def test_no_query_leaves_the_gate_out(name: str):
    inputs = few_inputs(name) | {'q': None}
    assert_matches_reference(getattr(ops, name), getattr(reference, name), inputs)


def test_aft_full_is_unchanged_by_a_key_shift_and_a_row_shift():
    inputs = full_inputs(16)
    shifted = inputs | {'k': inputs['k'] + 50.0, 'bias': inputs['bias'] + randn(16, 1, scale=10)}
    assert_close(ops.aft_full(**shifted), ops.aft_full(**inputs), 1e-12)


def test_aft_conv_is_unchanged_by_a_key_shift():
    inputs = conv_inputs((4, 4), 6, 3, 5)
    assert_close(ops.aft_conv(**inputs | {'k': inputs['k'] + 50.0}), ops.aft_conv(**inputs), 1e-12)


def test_aft_local_equals_aft_full_when_the_window_covers_everything():
    inputs = full_inputs(40)
    bias = inputs.pop('bias')
    assert_close(ops.aft_local(**inputs, band=ops.local_bias(bias, 40)), ops.aft_full(**inputs, bias=bias), 1e-12)


def test_aft_local_with_a_zero_band_is_aft_simple():
    inputs = local_inputs(40, 5)
    band = inputs.pop('band')
    assert_close(ops.aft_local(**inputs, band=torch.zeros_like(band)), ops.aft_simple(**inputs), 1e-12)


@pytest.mark.usefixtures('either_form_of_conv')
@pytest.mark.parametrize(('D', 'h'), [(6, 6), (6, 1), (66, 66)])
def test_aft_conv_equals_aft_full_with_the_expanded_bias(D: int, h: int):
    inputs = conv_inputs((4, 5), D, h, 11)
    bias = reference.kernel_to_bias(inputs['kernel'], (4, 5))  # (T, T, h)
    q, k, v = inputs['q'], inputs['k'], inputs['v']
    c = D // h
    for i in range(h):
        part = slice(i * c, (i + 1) * c)
        expected = ops.aft_full(
            q[..., part], k[..., i : i + 1].expand(-1, -1, c), v[..., part], bias[..., i].contiguous()
        )
        assert_close(ops.aft_conv(**inputs)[..., part], expected, 1e-12)


def test_aft_conv_with_a_zero_kernel_is_aft_simple():
    inputs = conv_inputs((4, 5), 6, 6, 3)
    inputs['kernel'] = torch.zeros_like(inputs['kernel'])
    assert_close(ops.aft_conv(**inputs), ops.aft_simple(inputs['q'], inputs['k'], inputs['v']), 1e-12)


def test_aft_onehot_equals_aft_conv_with_one_entry():
    inputs = onehot_inputs((6, 5), 6, 3)
    kernel = torch.zeros(3, 5, 5, dtype=torch.float64)
    for i, (dy, dx) in enumerate(inputs['offset'].tolist()):
        kernel[i, 2 + dy, 2 + dx] = inputs['weight'][i]
    expected = ops.aft_conv(inputs['q'], inputs['k'], inputs['v'], kernel, (6, 5))
    assert_close(ops.aft_onehot(**inputs), expected, 1e-12)


def lost_sources(inputs: dict[str, object]) -> Tensor | None:
    """Which shifted sources aft_onehot leaves to its softmax in float32, (B, T, h); None for not one."""
    k, v, weight = (inputs[name].float() for name in ('k', 'v', 'weight'))
    return _Sums(k, v, weight, inputs.get('mask'), branch=True).lost


def cancelling_inputs(factor: float) -> dict[str, object]:
    """Inputs of one sequence whose denominators, at the largest key of each head, lose that factor to cancellation."""
    inputs = onehot_inputs((6, 5), 6, 3)
    inputs |= {name: inputs[name][:1].clone() for name in 'qkv'}
    inputs['k'][:, 14] = 9.0
    total = torch.exp(inputs['k'] - 9).sum(1).squeeze(0)
    return inputs | {'weight': torch.log(total / factor - (total - 1))}


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('excess', 'lost'), [(0.97, False), (1.03, True)], ids=['below', 'above'])
def test_aft_onehot_equals_float64_on_either_side_of_its_bound_for_cancellation(excess, lost, dtype: torch.dtype):
    inputs = cancelling_inputs(excess * CANCELLATION)
    assert (lost_sources(inputs) is not None) is lost
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, dtype)


@pytest.mark.parametrize('weight', [-30.0, -2.0, 0.5, 55.0, 65.0])
def test_the_quick_and_the_exact_form_of_aft_onehot_agree(monkeypatch: pytest.MonkeyPatch, weight: float):
    inputs = onehot_inputs((6, 5), 6, 3) | {'weight': torch.full((3,), weight, dtype=torch.float64)}
    leaves = [inputs[name].requires_grad_() for name in ('q', 'k', 'v', 'weight')]
    assert lost_sources(inputs) is None
    quick = ops.aft_onehot(**inputs)
    grads = torch.autograd.grad(quick.sum(), leaves)
    # Every largest key is left to the softmax.
    monkeypatch.setattr('aft_vision.ops.conv.onehot.CANCELLATION', 0.0)
    monkeypatch.setattr('aft_vision.ops.conv.onehot.LARGEST_LOGIT', 64.0)
    assert torch.equal(lost_sources(inputs), inputs['k'] == inputs['k'].amax(1, keepdim=True))
    exact = ops.aft_onehot(**inputs)
    assert_close(quick, exact, 1e-12)
    floor = grads[2].norm().item()
    for got, expected in zip(grads, torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert_close(got, expected, 1e-11, floor=floor)


@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
def test_only_largest_keys_that_cancel_are_left_to_the_softmax(masked: bool):
    inputs = onehot_inputs((6, 5), 6, 3) | {'weight': torch.tensor([-50.0, 0.0, -50.0], dtype=torch.float64)}
    inputs['k'][:, 7, :2], inputs['k'][:, 8, 2] = 200.0, 2.5
    mask = torch.ones(2, 30, dtype=torch.bool)
    if masked:
        mask[0, 7] = False
    expected = torch.zeros(2, 30, 3, dtype=torch.bool)
    expected[int(masked) :, 7, 0] = True
    assert torch.equal(lost_sources(inputs | {'mask': mask}), expected)
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs | {'mask': mask}, nasty=True)


@pytest.mark.parametrize('weight', [-50.0, 3.0, 200.0])
def test_chunks_of_aft_onehot_equal_the_whole_batch(monkeypatch: pytest.MonkeyPatch, weight: float):
    q, k, v = make_qkv(B=5, T=12, D=6, heads=3)
    inputs = {'q': q, 'k': 5 * k, 'v': v, 'offset': torch.tensor([[0, 1], [-2, 0], [9, 9]])}
    inputs |= {'weight': torch.full((3,), weight, dtype=torch.float64), 'grid': (3, 4), 'mask': make_mask(5, 12)}
    whole = ops.aft_onehot(**inputs)
    monkeypatch.setattr('aft_vision.ops.conv.onehot.CHUNK_ELEMENTS', 2 * 12 * 6)
    assert torch.equal(ops.aft_onehot(**inputs), whole)
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, nasty=True)


@pytest.mark.usefixtures('without_branches')
@pytest.mark.parametrize('weight', [-1e4, 200.0])
@pytest.mark.parametrize('keys', NASTY_KEYS)
def test_without_branches_aft_onehot_survives_nasty_inputs(keys: str, weight: float):
    inputs = onehot_inputs((6, 5), 6, 3)
    inputs |= {'k': nasty_keys(inputs['k'])[keys], 'weight': torch.full((3,), weight, dtype=torch.float64)}
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs | {'mask': make_mask(2, 30)}, nasty=True)


@pytest.mark.parametrize('offset', [[-6, 0], [6, 0], [0, 5], [0, -5], [-7, 9], [1 << 32, 0], [0, -(1 << 40)]])
def test_an_offset_outside_the_grid_makes_aft_onehot_a_global_mean(offset: list[int]):
    inputs = onehot_inputs((6, 5), 6, 6) | {'offset': torch.tensor([offset] * 6)}
    assert_matches_reference(ops.aft_onehot, lambda q, k, v, **_: reference.aft_simple(q, k, v), inputs)


def test_the_toeplitz_and_depthwise_forms_agree(monkeypatch: pytest.MonkeyPatch):
    inputs = conv_inputs((9, 7), 8, 4, 5)
    toeplitz = ops.aft_conv(**inputs)
    monkeypatch.setattr('aft_vision.ops.conv.eager.prefers_depthwise', lambda k, kernel: True)
    assert_close(ops.aft_conv(**inputs), toeplitz, 1e-12)


def test_the_toeplitz_form_is_the_same_in_groups_of_heads(monkeypatch: pytest.MonkeyPatch):
    inputs = conv_inputs((9, 7), 8, 4, 5)
    whole = ops.aft_conv(**inputs)
    monkeypatch.setattr('aft_vision.ops.conv.eager.TOEPLITZ_ELEMENTS', 63 * 63)
    monkeypatch.setattr('aft_vision.ops.conv.eager.prefers_depthwise', lambda k, kernel: False)
    assert_close(ops.aft_conv(**inputs), whole, 1e-12)
    assert_matches_reference(torch_form('aft_conv'), reference.aft_conv, inputs)


OPERATIONS = {
    'aft_full': lambda: full_inputs(40),
    'aft_simple': lambda: simple_inputs(40),
    'aft_local': lambda: local_inputs(40, 5),
    'aft_conv': lambda: conv_inputs((8, 5), 66, 66, 5),
    'aft_onehot': lambda: onehot_inputs((8, 5), 6, 3),
    'aft_axial': lambda: axial_inputs((8, 5), 6, 3, (8, 4)),
    'aft_full_causal': lambda: full_inputs(40),
    'aft_simple_causal': lambda: simple_inputs(40),
    'aft_local_causal': lambda: simple_inputs(40) | {'band': randn(40, 5, seed=7)},
}


@pytest.fixture
def without_branches(monkeypatch: pytest.MonkeyPatch):
    """In eager as on an accelerator: no branch on values, so no repair, and AFT-conv in its Toeplitz form."""
    for module in ('common.mixing', 'full.eager', 'conv.eager', 'causal.eager', 'conv.onehot'):
        monkeypatch.setattr(f'aft_vision.ops.{module}.may_branch', lambda x: False)


@pytest.mark.usefixtures('without_branches')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', OPERATIONS)
def test_without_branches_an_operation_equals_float64(name: str, dtype: torch.dtype):
    assert_matches_reference(torch_form(name), getattr(reference, name), OPERATIONS[name](), dtype)


@pytest.mark.usefixtures('without_branches')
@pytest.mark.parametrize('keys', NASTY_KEYS)
@pytest.mark.parametrize('name', OPERATIONS)
def test_without_branches_nasty_keys_stay_exact(name: str, keys: str):
    # The biases are ordinary, so one of the two spreads alone is beyond float32. Causal keys may jump by 129 nats.
    inputs = OPERATIONS[name]()
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    if name.endswith('causal') and keys in ('last_at_200', 'first_at_-120', 'plus_minus_1e4', 'normal_30', 'climbing'):
        inputs['k'] = inputs['k'].clamp(-50, 50)
    assert_matches_reference(torch_form(name), getattr(reference, name), inputs, nasty=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('name', OPERATIONS)
def test_on_a_cuda_device_an_operation_equals_float64(name: str, dtype: torch.dtype):
    assert_matches_reference(getattr(ops, name), getattr(reference, name), OPERATIONS[name](), dtype, device='cuda')


def test_batches_larger_than_a_chunk_equal_their_rows(monkeypatch: pytest.MonkeyPatch):
    inputs = dict(zip('qkv', make_qkv(B=5, T=12, D=6), strict=True)) | {'bias': randn(12, 12, seed=7)}
    monkeypatch.setattr('aft_vision.ops.full.eager.CHUNK_ELEMENTS', 2 * 2 * 12 * 6)
    assert_matches_reference(torch_form('aft_full'), reference.aft_full, inputs)
    row = {name: x[3:4] if name in 'qkv' else x for name, x in inputs.items()}
    assert torch.equal(ops.aft_full(**inputs)[3:4], ops.aft_full(**row))


def test_the_peak_of_aft_full_on_a_batch_is_at_most_twice_its_result():
    q, k, v = torch.randn(3, 32, 197, 384)
    bias = torch.zeros(197, 197)
    with torch.no_grad():
        assert peak_memory(lambda: ops.aft_full(q, k, v, bias), v.device) < 2 * v.nbytes


@pytest.mark.parametrize('name', ['aft_full', 'aft_local', 'aft_simple'])
def test_padding_a_sequence_behind_a_mask_changes_nothing(name: str):
    T, padded = 9, 14
    long = {
        'aft_full': full_inputs(padded),
        'aft_local': local_inputs(padded, 4),
        'aft_simple': simple_inputs(padded),
    }[name]
    short = {key: x[:T] if key == 'band' else x[:T, :T] if key == 'bias' else x[:, :T] for key, x in long.items()}
    mask = (torch.arange(padded) < T).expand(2, -1)
    assert_close(getattr(ops, name)(**long, mask=mask)[:, :T], getattr(ops, name)(**short), 1e-12)


@pytest.mark.parametrize('name', ['aft_conv', 'aft_axial'])
def test_padding_a_grid_behind_a_mask_changes_nothing(name: str):
    inputs = conv_inputs((6, 7), 6, 3, 5) if name == 'aft_conv' else axial_inputs((6, 7), 6, 3, (6, 7))
    inside = torch.zeros(6, 7, dtype=torch.bool)
    inside[:4, :5] = True
    mask = inside.flatten()
    part = {name: x[:, mask] if name in 'qkv' else x for name, x in inputs.items()} | {'grid': (4, 5)}
    got = getattr(ops, name)(**inputs, mask=mask.expand(2, -1))[:, mask]
    assert_close(got, getattr(ops, name)(**part), 1e-12)


def test_a_row_with_nothing_to_attend_is_zero_with_zero_gradients():
    inputs = {name: x.float().requires_grad_() for name, x in full_inputs(7).items()}
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    y = ops.aft_full(**inputs, mask=mask)
    assert not y[1].any()
    grads = torch.autograd.grad(y[1].sum(), list(inputs.values()))
    assert not any(grad.any() for grad in grads)


def test_a_window_without_tokens_gives_zero_in_the_degenerate_variant():
    inputs = conv_inputs((1, 9), 6, 3, 3)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, :2] = True
    y = ops.aft_conv(**inputs, mask=mask, global_context=False)
    assert y[:, :3].any(-1).all()
    assert not y[:, 3:].any()


@pytest.mark.parametrize('name', NAMES)
def test_autocast_leaves_the_sums_in_float32(name: str):
    inputs = few_inputs(name)
    low = {key: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()}
    op = getattr(ops, name)
    with torch.autocast('cpu', torch.bfloat16):
        y = op(**low)
    assert torch.equal(y, op(**low))


@pytest.mark.parametrize('name', NAMES)
def test_an_operator_passes_torch_opcheck(name: str):
    assert_passes_opcheck(name, few_inputs(name))


def largest_allocation(name: str, inputs: dict[str, object]) -> int:
    """Bytes that the largest event of forward and backward allocates, what it calls included."""
    low = {key: x.float().requires_grad_() if key != 'grid' else x for key, x in inputs.items()}
    # Each thread has a gradient of the weights of its own.
    with threads(1), torch.profiler.profile(profile_memory=True) as profile:
        getattr(ops, name)(**low).sum().backward()
    return max(event.cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize('batch', [1, 6])
def test_no_tensor_of_the_size_of_the_weights_is_made(batch: int):
    T, D, grid = 256, 64, (16, 16)
    q, k, v = make_qkv(B=batch, T=T, D=D)
    workspace = 4 * 2 * batch * T * D
    bias = {'q': q, 'k': k, 'v': v, 'bias': randn(T, T)}
    assert largest_allocation('aft_full', bias) <= workspace + 4 * 2 * batch * T * T < 4 * T * T * D
    band = {'q': q, 'k': k, 'v': v, 'band': randn(T, 31)}
    assert largest_allocation('aft_local', band) <= 2 * workspace
    kernel = {'q': q, 'k': randn(batch, T, D), 'v': v, 'kernel': randn(D, 11, 11), 'grid': grid}
    assert largest_allocation('aft_conv', kernel) <= max(workspace, 4 * D * T * T)
    axial = {'q': q, 'k': randn(batch, T, D), 'v': v, 'row_bias': randn(D, 31), 'column_bias': randn(D, 31)}
    assert largest_allocation('aft_axial', axial | {'grid': grid}) <= 2 * workspace


def empty_inputs(name: str, B: int, D: int) -> dict[str, object]:
    """Inputs of any operator for 12 tokens; of two heads in those on a grid."""
    q, k, v = torch.zeros(3, B, 12, D)
    inputs: dict[str, object] = {'q': q, 'k': k, 'v': v}
    if name in ('aft_conv', 'aft_onehot', 'aft_axial'):
        inputs |= {'k': torch.zeros(B, 12, 2), 'grid': (3, 4)}
    biases = {
        'aft_full': {'bias': torch.zeros(12, 12)},
        'aft_local': {'band': torch.zeros(12, 5)},
        'aft_conv': {'kernel': torch.zeros(2, 3, 3)},
        'aft_onehot': {'offset': torch.zeros(2, 2, dtype=torch.int64), 'weight': torch.zeros(2)},
        'aft_axial': {'row_bias': torch.zeros(2, 5), 'column_bias': torch.zeros(2, 3)},
        'aft_full_causal': {'bias': torch.zeros(12, 12)},
        'aft_local_causal': {'band': torch.zeros(12, 3)},
    }
    return inputs | biases.get(name, {})


@pytest.mark.parametrize('backend', ['auto', 'eager', 'cpp', 'triton'])
@pytest.mark.parametrize(('B', 'D'), [(0, 6), (0, 128), (2, 0)])
@pytest.mark.parametrize('name', OPERATIONS)
@pytest.mark.filterwarnings('error')
def test_an_empty_batch_or_no_channels_give_an_empty_result_and_no_gradient(name: str, B: int, D: int, backend: str):
    inputs = empty_inputs(name, B, D)
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor) and x.is_floating_point()]
    y = getattr(ops, name)(**inputs, backend=backend)
    assert y.shape == (B, 12, D)
    for x, grad in zip(leaves, torch.autograd.grad(y.sum(), leaves), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


def hidden_bias(shape: tuple[int, ...]) -> Tensor:
    """A bias whose entries are minus infinity by three in ten, and all in some rows or heads."""
    bias = randn(*shape, seed=7).masked_fill(torch.rand(shape, generator=generator(4)) < 0.3, float('-inf'))
    bias[::3] = float('-inf')
    return bias


@pytest.mark.parametrize(('backend', 'masked'), [('eager', False), ('auto', True)], ids=['eager-whole', 'auto-masked'])
@pytest.mark.parametrize(
    ('name', 'inputs', 'bias'),
    [
        ('aft_full', full_inputs(12), 'bias'),
        ('aft_local', local_inputs(12, 3), 'band'),
        ('aft_local', local_inputs(12, 12), 'band'),
        ('aft_conv', conv_inputs((3, 4), 6, 3, 3), 'kernel'),
        ('aft_conv', conv_inputs((3, 4), 6, 3, 3) | {'global_context': False}, 'kernel'),
        ('aft_conv', conv_inputs((3, 4), 6, 6, 11), 'kernel'),
        ('aft_conv', conv_inputs((6, 8), 80, 80, 3), 'kernel'),
        ('aft_axial', axial_inputs((3, 4), 6, 3, (3, 2)), 'row_bias'),
        ('aft_axial', axial_inputs((3, 4), 6, 3, (3, 4)), 'column_bias'),
        ('aft_onehot', onehot_inputs((3, 4), 6, 3), 'weight'),
        ('aft_onehot', onehot_inputs((1, 1), 6, 3) | {'offset': torch.zeros(3, 2, dtype=torch.int64)}, 'weight'),
    ],
)
def test_a_bias_of_minus_infinity_hides_a_source(name: str, inputs, bias: str, backend: str, masked: bool):
    mask = make_mask(*inputs['v'].shape[:2]) if masked else None
    inputs = inputs | {bias: hidden_bias(inputs[bias].shape), 'mask': mask}
    operator = getattr(ops, name)
    assert_matches_reference(lambda **x: operator(**x, backend=backend), getattr(reference, name), inputs, nasty=True)


@pytest.mark.parametrize('name', ['aft_full', 'aft_simple', 'aft_onehot', 'aft_axial'])
def test_a_result_computed_without_gradients_can_be_differentiated_when_captured(name: str):
    low = single(few_inputs(name), torch.float64)
    y = getattr(torch.ops.aft_vision, name)(*low.values(), None, False, 'auto')[0]
    got = torch.autograd.grad(y.sum(), low['v'])[0]
    assert_close(got, torch.autograd.grad(getattr(ops, name)(**low).sum(), low['v'])[0], 1e-12)


REJECTED = [
    (lambda: ops.aft_full(**full_inputs(5) | {'bias': randn(4, 5)}), r'bias must have shape \(5, 5\)'),
    (lambda: ops.aft_full(**full_inputs(5) | {'q': randn(2, 5, 7)}), r'q must have the shape of v'),
    (lambda: ops.aft_full(**full_inputs(5) | {'k': randn(2, 4, 6)}), r'k must have shape \(2, 5, 6\)'),
    (lambda: ops.aft_full(**full_inputs(5), mask=torch.ones(2, 4, dtype=torch.bool)), r'mask must be a bool'),
    (lambda: ops.aft_full(**full_inputs(5), mask=torch.ones(2, 5)), r'mask must be a bool'),
    (lambda: ops.aft_full(**full_inputs(5), backend='cuda'), r"backend must be one of .* got 'cuda'"),
    (lambda: ops.aft_local(**local_inputs(5, 2) | {'band': randn(5, 4)}), r'band must have shape \(5, 2 \* s - 1\)'),
    (lambda: ops.aft_conv(**conv_inputs((2, 3), 6, 3, 3) | {'kernel': randn(3, 4, 4)}), r's odd'),
    (lambda: ops.aft_conv(**conv_inputs((2, 3), 6, 3, 3) | {'kernel': randn(4, 3, 3)}), r'must divide the 6 channels'),
    (lambda: ops.aft_conv(**conv_inputs((2, 3), 6, 3, 3) | {'grid': (2, 4)}), r'grid must be \(H, W\)'),
    (lambda: ops.aft_conv(**conv_inputs((2, 3), 6, 3, 3) | {'grid': (-2, -3)}), r'grid must be \(H, W\)'),
    (lambda: ops.aft_conv(**conv_inputs((2, 3), 6, 3, 3) | {'kernel': randn(0, 3, 3)}), r'h of at least 1'),
    (lambda: ops.aft_onehot(**onehot_inputs((2, 3), 6, 3) | {'offset': torch.zeros(3, 2)}), r'offset must be int64'),
    (lambda: ops.aft_onehot(**onehot_inputs((2, 3), 6, 3) | {'offset': torch.zeros(0, 2).long()}), r'h of at least 1'),
    (lambda: ops.aft_onehot(**onehot_inputs((2, 3), 6, 3) | {'weight': randn(2)}), r'weight must have shape \(3,\)'),
    (
        lambda: ops.aft_axial(**axial_inputs((2, 3), 6, 3, (2, 3)) | {'row_bias': randn(3, 4)}),
        r'row_bias must have shape',
    ),
    (lambda: ops.aft_axial(**axial_inputs((2, 3), 6, 3, (2, 3)) | {'column_bias': randn(2, 5)}), r'the 3 heads of row'),
    (lambda: ops.aft_axial(**axial_inputs((2, 3), 6, 3, (2, 3)) | {'row_bias': randn(0, 3)}), r'h of at least 1'),
    (lambda: ops.aft_axial(**axial_inputs((2, 3), 7, 1, (2, 3)) | {'k': randn(2, 6, 2)}), r'k must have shape'),
    (lambda: ops.aft_axial(**axial_inputs((2, 3), 6, 3, (2, 3)) | {'grid': (2, 4)}), r'grid must be \(H, W\)'),
    (lambda: ops.aft_simple(**simple_inputs(5) | {'k': randn(2, 5, 6).float()}), 'must both be float64 or neither'),
    (lambda: ops.aft_simple(None, *torch.ones(2, 2, 5, 6).long()), 'must be floating-point tensors'),
    (lambda: ops.aft_simple(**simple_inputs(5) | {'v': randn(5, 6)}), r'v must have shape \(B, T, D\)'),
]


# What the plain graphs refuse as the operators do.
REJECTED += [
    (lambda: ops.aft_full(**full_inputs(5) | {'bias': randn(5, 1)}, backend='aten'), r'bias must have shape \(5, 5\)'),
    (lambda: ops.aft_simple(**simple_inputs(5) | {'k': randn(2, 5, 1)}, backend='aten'), r'k must have shape'),
    (lambda: ops.aft_local(**local_inputs(5, 2) | {'band': randn(5, 4)}, backend='aten'), r'band must have shape'),
    (lambda: ops.aft_conv(**conv_inputs((2, 3), 6, 3, 3) | {'grid': (3, 3)}, backend='aten'), r'grid must be \(H, W\)'),
    (lambda: ops.aft_onehot(**onehot_inputs((2, 3), 6, 3) | {'weight': randn(1)}, backend='aten'), r'weight must have'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_input_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(('D', 'h'), [(6, 3), (66, 66)], ids=['several channels a head', 'a head per channel'])
def test_aft_onehot_keeps_the_gradient_of_a_weight_that_lets_one_source_dominate(D: int, h: int):
    inputs = onehot_inputs((3, 4), D, h)
    inputs['weight'] = inputs['weight'] + 15.0
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, torch.float32)
