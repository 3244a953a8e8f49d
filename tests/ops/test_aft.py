"""The operations over whole sequences, against float64 in value and in every gradient.

Values are those of the torch forms; those of the kernels are in `common/test_kernels.py`, and in the folders.
"""

import functools
from typing import Any

import pytest
import torch
from helpers import (
    NASTY_BIASES,
    NASTY_KEYS,
    assert_close,
    assert_matches_reference,
    change,
    generator,
    make_inputs,
    make_mask,
    make_nasty,
    make_qkv,
    randn,
    single,
    threads,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.conv.onehot import CANCELLATION, _Sums
from aft_vision.ops.declaration import OPERATIONS
from tools.benchmark.meters import peak_memory

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = [name for name, operation in OPERATIONS.items() if not operation.causal]


def sizes_of(name: str) -> tuple[Any, ...]:
    """The arguments of `make_inputs` after the name."""
    return ((8, 5), 6, 3, 3) if OPERATIONS[name].has_grid else (40,)


def form_of(name: str, backend: str = 'eager') -> functools.partial[Tensor]:
    return functools.partial(getattr(ops, name), backend=backend)


# On a grid: h = d and h = 1 limits; biases that end within the grid and reach beyond it. Up to each token: some blocks.
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('others', ['', 'masked'])
@pytest.mark.parametrize(
    ('name', 'form', 'sizes'),
    [
        *((name, 'eager', (T,)) for name in ('aft_full', 'aft_simple') for T in (5, 70)),
        *(('aft_local', 'eager', (T, 6, s)) for T, s in ((5, 1), (5, 9), (70, 3), (70, 40), (70, 70))),
        *(('aft_onehot', 'eager', sizes) for sizes in (((3, 4), 8, 2), ((7, 5), 8, 2, 2))),
        *(
            ('aft_axial', form, sizes)
            for form in ('eager', 'aten')
            for sizes in (((3, 4), 8, (3, 4)), ((7, 5), 8, (3, 9), 2), ((5, 7), 6, (2, 3), 1))
        ),
        *((name, 'eager', (T,)) for name in ('aft_full_causal', 'aft_simple_causal') for T in (8, 70, 150)),
        *(
            ('aft_local_causal', 'eager', (T, 6, s))
            for T, s in ((8, 1), (8, 9), (70, 3), (70, 40), (150, 70), (150, 150))
        ),
    ],
    ids=str,
)
def test_an_operation_equals_float64(name: str, form: str, sizes, others: str, dtype: torch.dtype):
    inputs = change(name, make_inputs(name, *sizes), others)
    # A causal form in torch rounds, where the processor multiplies bfloat16, exponentials and their sums twice each for
    # y, and y; then denominators, rows, weights, sums and the result. The first targets see few sources, whose terms
    # cancel.
    roundings = 10 if dtype == torch.bfloat16 and OPERATIONS[name].causal else 0
    assert_matches_reference(form_of(name, form), getattr(reference, name), inputs, dtype, roundings=roundings)


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
@pytest.mark.parametrize('others', ['masked', 'window alone'])
@pytest.mark.parametrize(('grid', 'D', 'h', 's'), CONV_CASES)
def test_aft_conv_equals_float64(grid, D, h, s, others: str, dtype: torch.dtype):
    inputs = change('aft_conv', make_inputs('aft_conv', grid, D, s, h), others)
    assert_matches_reference(form_of('aft_conv'), reference.aft_conv, inputs, dtype)


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


@pytest.mark.parametrize(
    ('name', 'sizes'),
    [
        *((name, (40,)) for name in ('aft_full', 'aft_full_causal', 'aft_local', 'aft_local_causal')),
        ('aft_conv', ((6, 5), 6)),
        ('aft_axial', ((6, 5), 6, (6, 5))),
    ],
    ids=str,
)
def test_equal_keys_of_any_size_leave_the_biases_their_digits(name: str, sizes):
    # The tokens of small keys have the largest biases, so all denominators underflow; their weights are 0.
    inputs = make_inputs(name, *sizes)
    moving = [key for key in inputs if key in 'qkv' or key in ('bias', 'band', 'kernel', 'row_bias', 'column_bias')]
    large = inputs['k'] > 0
    found = []
    for size in (1e4, 1e17, 1e30):
        given = {key: x.clone().requires_grad_() if key in moving else x for key, x in inputs.items()}
        biases = {key: 400 * given[key] for key in moving if key not in 'qkv'}
        keys = torch.where(large, size, 0.0) + 0.0 * given['k']
        y = getattr(ops, name)(**given | biases | {'k': keys})
        grads = torch.autograd.grad(y, [given[key] for key in moving if key != 'k'] + [keys], randn(*y.shape, seed=3))
        found.append((y, *grads))
    for other in found[1:]:
        for x, expected in zip(other, found[0], strict=True):
            assert_close(x, expected, 1e-9)


@pytest.mark.parametrize('keys', NASTY_KEYS)
@pytest.mark.parametrize(
    ('name', 'form', 'sizes', 'bias', 'others'),
    [
        ('aft_simple', 'eager', (40,), 'ordinary', ''),
        ('aft_local', 'eager', (40, 6, 1), 'within_50', ''),
        ('aft_local', 'eager', (40, 6, 50), 'plus_minus_80', ''),
        *(
            (name, form, sizes, bias, others)
            for bias in NASTY_BIASES
            for name, form, sizes, others in (
                ('aft_full', 'eager', (40,), ''),
                ('aft_local', 'eager', (40,), ''),
                ('aft_conv', 'eager', ((6, 5), 6, 27, 2), ''),
                # Windows alone are compiled too; the tests of the compiled forms have the global context.
                ('aft_conv', 'auto', ((6, 5), 66), 'window alone'),
                ('aft_axial', 'eager', ((6, 5), 6, (6, 5), 3), ''),
                ('aft_axial', 'eager', ((6, 5), 6, (3, 7)), ''),
                ('aft_full_causal', 'auto', (70, 3), ''),
            )
        ),
        *(('aft_onehot', 'eager', ((6, 5), 6, 2, 3), x, '') for x in (0.0, -5.0, -50.0, -1e4, 50.0, 200.0)),
        *(('aft_onehot', 'aten', ((6, 5), 6, 2, 3), x, '') for x in (-50.0, 200.0)),
        # The tests of the compiled form have every bias.
        *(('aft_local_causal', 'auto', (70, 3, s), x, '') for s in (1, 5, 90) for x in ('within_50', 'plus_minus_80')),
        ('aft_simple_causal', 'auto', (70, 3), 'ordinary', ''),
        *(
            (name, 'eager', (70, 3, 40), 'ordinary', others)
            for name in ('aft_local_causal', 'aft_simple_causal')
            for others in ('', 'masked')
        ),
    ],
    ids=str,
)
def test_an_operation_survives_nasty_inputs(name: str, form: str, sizes, bias: str | float, others: str, keys: str):
    inputs = change(name, make_nasty(make_inputs(name, *sizes), keys, bias), others)
    assert_matches_reference(form_of(name, form), getattr(reference, name), inputs, nasty=True)


def test_aft_full_is_right_where_both_maxima_miss_each_other():
    # (max w - w) + (max k - k) is 140 at the one source and 140 at the other: each product underflows float32.
    q, _, v = make_qkv(B=1, T=2, D=1)
    k = torch.tensor([[[70.0], [0.0]]], dtype=torch.float64)
    bias = torch.tensor([[-70.0, 70.0], [-70.0, 70.0]], dtype=torch.float64)
    assert_matches_reference(ops.aft_full, reference.aft_full, {'q': q, 'k': k, 'v': v, 'bias': bias}, nasty=True)


def test_aft_local_equals_aft_full_when_the_window_covers_everything():
    inputs = make_inputs('aft_full', 40)
    bias = inputs.pop('bias')
    assert_close(ops.aft_local(**inputs, band=ops.local_bias(bias, 40)), ops.aft_full(**inputs, bias=bias), 1e-12)


@pytest.mark.usefixtures('either_form_of_conv')
@pytest.mark.parametrize(('D', 'h'), [(6, 6), (6, 1), (66, 66)])
def test_aft_conv_equals_aft_full_with_the_expanded_bias(D: int, h: int):
    inputs = make_inputs('aft_conv', (4, 5), D, 11, h)
    bias = reference.kernel_to_bias(inputs['kernel'], (4, 5))  # (T, T, h)
    q, k, v = inputs['q'], inputs['k'], inputs['v']
    c = D // h
    for i in range(h):
        part = slice(i * c, (i + 1) * c)
        expected = ops.aft_full(
            q[..., part], k[..., i : i + 1].expand(-1, -1, c), v[..., part], bias[..., i].contiguous()
        )
        assert_close(ops.aft_conv(**inputs)[..., part], expected, 1e-12)


def test_aft_onehot_equals_aft_conv_with_one_entry():
    inputs = make_inputs('aft_onehot', (6, 5), 6, 2, 3)
    kernel = torch.zeros(3, 5, 5, dtype=torch.float64)
    for i, (dy, dx) in enumerate(inputs['offset'].tolist()):
        kernel[i, 2 + dy, 2 + dx] = inputs['weight'][i]
    expected = ops.aft_conv(inputs['q'], inputs['k'], inputs['v'], kernel, (6, 5))
    assert_close(ops.aft_onehot(**inputs), expected, 1e-12)


def cancelled_sources(inputs: dict[str, object]) -> Tensor | None:
    """Which shifted sources aft_onehot leaves to its softmax in float32, (B, T, h); None for not one."""
    k, v, weight = (inputs[name].float() for name in ('k', 'v', 'weight'))
    return _Sums(k, v, weight, inputs.get('mask'), branch=True).cancelled


def cancelling_inputs(factor: float) -> dict[str, object]:
    """Inputs of one sequence whose denominators, at the largest key of each head, lose that factor to cancellation."""
    inputs = make_inputs('aft_onehot', (6, 5), 6, 2, 3)
    inputs |= {name: inputs[name][:1].clone() for name in 'qkv'}
    inputs['k'][:, 14] = 9.0
    total = torch.exp(inputs['k'] - 9).sum(1).squeeze(0)
    return inputs | {'weight': torch.log(total / factor - (total - 1))}


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize(('excess', 'cancelled'), [(0.97, False), (1.03, True)], ids=['below', 'above'])
def test_aft_onehot_equals_float64_on_either_side_of_its_bound_for_cancellation(excess, cancelled, dtype: torch.dtype):
    inputs = cancelling_inputs(excess * CANCELLATION)
    assert (cancelled_sources(inputs) is not None) is cancelled
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, dtype)


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
    inputs = make_inputs('aft_onehot', (6, 5), 6, 2, 3)
    inputs = make_nasty(inputs, keys, weight) | {'mask': make_mask(2, 30)}
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, nasty=True)


@pytest.mark.parametrize('offset', [[-6, 0], [6, 0], [0, 5], [0, -5], [-7, 9], [1 << 32, 0], [0, -(1 << 40)]])
def test_an_offset_outside_the_grid_makes_aft_onehot_a_global_mean(offset: list[int]):
    inputs = make_inputs('aft_onehot', (6, 5), 6, 2, 6) | {'offset': torch.tensor([offset] * 6)}
    assert_matches_reference(ops.aft_onehot, lambda q, k, v, **_: reference.aft_simple(q, k, v), inputs)


def test_the_toeplitz_form_is_the_same_in_groups_of_heads(monkeypatch: pytest.MonkeyPatch):
    inputs = make_inputs('aft_conv', (9, 7), 8, 5, 4)
    whole = ops.aft_conv(**inputs)
    monkeypatch.setattr('aft_vision.ops.conv.eager.TOEPLITZ_ELEMENTS', 63 * 63)
    monkeypatch.setattr('aft_vision.ops.conv.eager.prefers_depthwise', lambda k, kernel: False)
    assert_close(ops.aft_conv(**inputs), whole, 1e-12)
    assert_matches_reference(form_of('aft_conv'), reference.aft_conv, inputs)


@pytest.fixture
def without_branches(monkeypatch: pytest.MonkeyPatch):
    """In eager as on an accelerator: no branch on values, so no repair, and AFT-conv in its Toeplitz form."""
    for module in ('common.mixing', 'full.eager', 'conv.eager', 'causal.eager', 'conv.onehot'):
        monkeypatch.setattr(f'aft_vision.ops.{module}.may_branch', lambda x: False)


@pytest.mark.usefixtures('without_branches')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', OPERATIONS)
def test_without_branches_an_operation_equals_float64(name: str, dtype: torch.dtype):
    assert_matches_reference(form_of(name), getattr(reference, name), make_inputs(name, *sizes_of(name)), dtype)


@pytest.mark.usefixtures('without_branches')
@pytest.mark.parametrize('keys', NASTY_KEYS)
@pytest.mark.parametrize('name', OPERATIONS)
def test_without_branches_nasty_keys_stay_exact(name: str, keys: str):
    # The biases are ordinary, so one of the two spreads alone is beyond float32. Causal keys may jump by 129 nats.
    inputs = make_nasty(make_inputs(name, *sizes_of(name)), keys)
    if OPERATIONS[name].causal and keys in ('last_at_200', 'first_at_-120', 'plus_minus_1e4', 'normal_30', 'climbing'):
        inputs['k'] = inputs['k'].clamp(-50, 50)
    assert_matches_reference(form_of(name), getattr(reference, name), inputs, nasty=True)


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('name', OPERATIONS)
def test_on_a_cuda_device_an_operation_equals_float64(name: str, dtype: torch.dtype):
    assert_matches_reference(
        getattr(ops, name), getattr(reference, name), make_inputs(name, *sizes_of(name)), dtype, device='cuda'
    )


def test_batches_larger_than_a_chunk_equal_their_rows(monkeypatch: pytest.MonkeyPatch):
    inputs = make_inputs('aft_full', 12, B=5)
    monkeypatch.setattr('aft_vision.ops.full.eager.CHUNK_ELEMENTS', 2 * 2 * 12 * 6)
    assert_matches_reference(form_of('aft_full'), reference.aft_full, inputs)
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
    long = make_inputs(name, padded, s=4)
    short = {key: x[:T] if key == 'band' else x[:T, :T] if key == 'bias' else x[:, :T] for key, x in long.items()}
    mask = (torch.arange(padded) < T).expand(2, -1)
    assert_close(getattr(ops, name)(**long, mask=mask)[:, :T], getattr(ops, name)(**short), 1e-12)


@pytest.mark.parametrize('name', ['aft_conv', 'aft_axial'])
def test_padding_a_grid_behind_a_mask_changes_nothing(name: str):
    inputs = make_inputs(name, (6, 7), heads=3)
    inside = torch.zeros(6, 7, dtype=torch.bool)
    inside[:4, :5] = True
    mask = inside.flatten()
    part = {name: x[:, mask] if name in 'qkv' else x for name, x in inputs.items()} | {'grid': (4, 5)}
    got = getattr(ops, name)(**inputs, mask=mask.expand(2, -1))[:, mask]
    assert_close(got, getattr(ops, name)(**part), 1e-12)


def test_a_window_without_tokens_gives_zero_in_the_degenerate_variant():
    inputs = make_inputs('aft_conv', (1, 9), 6, 3, 3)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, :2] = True
    y = ops.aft_conv(**inputs, mask=mask, global_context=False)
    assert y[:, :3].any(-1).all()
    assert not y[:, 3:].any()


def largest_allocation(name: str, inputs: dict[str, object]) -> int:
    """Bytes that the largest event of forward and backward allocates, what it calls included."""
    low = single(inputs)
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


@pytest.mark.parametrize('backend', ['auto', 'eager', 'cpp', 'triton'])
@pytest.mark.parametrize(('B', 'D'), [(0, 6), (0, 128), (2, 0)])
@pytest.mark.parametrize('name', OPERATIONS)
@pytest.mark.filterwarnings('error')
def test_an_empty_batch_or_no_channels_give_an_empty_result_and_no_gradient(name: str, B: int, D: int, backend: str):
    inputs = make_inputs(name, (3, 4), D or 2, 3, 2, B)
    if not D:
        inputs |= {n: inputs[n][..., :0] for n in ('qv' if 'grid' in inputs else 'qkv')}
    inputs = single(inputs)
    leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
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
    ('name', 'sizes', 'others', 'bias'),
    [
        ('aft_full', (12,), {}, 'bias'),
        ('aft_local', (12, 6, 3), {}, 'band'),
        ('aft_local', (12, 6, 12), {}, 'band'),
        ('aft_conv', ((3, 4), 6, 3, 3), {}, 'kernel'),
        ('aft_conv', ((3, 4), 6, 3, 3), {'global_context': False}, 'kernel'),
        ('aft_conv', ((3, 4), 6, 11), {}, 'kernel'),
        ('aft_conv', ((6, 8), 80, 3), {}, 'kernel'),
        ('aft_axial', ((3, 4), 6, (3, 2), 3), {}, 'row_bias'),
        ('aft_axial', ((3, 4), 6, (3, 4), 3), {}, 'column_bias'),
        ('aft_onehot', ((3, 4), 6, 2, 3), {}, 'weight'),
        ('aft_onehot', ((1, 1), 6, 0, 3), {}, 'weight'),
    ],
)
def test_a_bias_of_minus_infinity_hides_a_source(name: str, sizes, others, bias: str, backend: str, masked: bool):
    inputs = make_inputs(name, *sizes) | others
    mask = make_mask(*inputs['v'].shape[:2]) if masked else None
    inputs = inputs | {bias: hidden_bias(inputs[bias].shape), 'mask': mask}
    assert_matches_reference(form_of(name, backend), getattr(reference, name), inputs, nasty=True)


@pytest.mark.parametrize('name', ['aft_full', 'aft_simple', 'aft_onehot', 'aft_axial'])
def test_a_result_computed_without_gradients_can_be_differentiated_when_captured(name: str):
    low = single(make_inputs(name, (3, 4), s=3, heads=3), torch.float64)
    y = getattr(torch.ops.aft_vision, name)(*low.values(), None, False, 'auto')[0]
    got = torch.autograd.grad(y.sum(), low['v'])[0]
    assert_close(got, torch.autograd.grad(getattr(ops, name)(**low).sum(), low['v'])[0], 1e-12)


# Of six tokens, 2 x 3, and three heads. The plain graphs refuse what the operators do.
REJECTED = [
    ('aft_full', {'bias': randn(5, 6)}, r'bias must have shape \(6, 6\)'),
    ('aft_full', {'q': randn(2, 6, 7)}, r'q must have the shape of v'),
    ('aft_full', {'k': randn(2, 4, 6)}, r'k must have shape \(2, 6, 6\)'),
    ('aft_full', {'mask': torch.ones(2, 4, dtype=torch.bool)}, r'mask must be a bool'),
    ('aft_full', {'mask': torch.ones(2, 6)}, r'mask must be a bool'),
    ('aft_full', {'backend': 'cuda'}, r"backend must be one of .* got 'cuda'"),
    ('aft_full', {'bias': randn(6, 1), 'backend': 'aten'}, r'bias must have shape \(6, 6\)'),
    ('aft_local', {'band': randn(6, 4)}, r'band must have shape \(6, 2 \* s - 1\)'),
    ('aft_local', {'band': randn(6, 4), 'backend': 'aten'}, r'band must have shape'),
    ('aft_conv', {'kernel': randn(3, 4, 4)}, r's odd'),
    ('aft_conv', {'kernel': randn(4, 3, 3)}, r'must divide the 6 channels'),
    ('aft_conv', {'kernel': randn(0, 3, 3)}, r'h of at least 1'),
    ('aft_conv', {'grid': (2, 4)}, r'grid must be \(H, W\)'),
    ('aft_conv', {'grid': (-2, -3)}, r'grid must be \(H, W\)'),
    ('aft_conv', {'grid': (3, 3), 'backend': 'aten'}, r'grid must be \(H, W\)'),
    ('aft_onehot', {'offset': torch.zeros(3, 2)}, r'offset must be int64'),
    ('aft_onehot', {'offset': torch.zeros(0, 2).long()}, r'h of at least 1'),
    ('aft_onehot', {'weight': randn(2)}, r'weight must have shape \(3,\)'),
    ('aft_onehot', {'weight': randn(1), 'backend': 'aten'}, r'weight must have'),
    ('aft_axial', {'row_bias': randn(3, 4)}, r'row_bias must have shape'),
    ('aft_axial', {'column_bias': randn(2, 5)}, r'the 3 heads of row'),
    ('aft_axial', {'row_bias': randn(0, 3)}, r'h of at least 1'),
    ('aft_axial', {'k': randn(2, 6, 2)}, r'k must have shape'),
    ('aft_axial', {'grid': (2, 4)}, r'grid must be \(H, W\)'),
    ('aft_simple', {'k': randn(2, 6, 6).float()}, 'must both be float64 or neither'),
    ('aft_simple', {'q': None, 'k': torch.ones(2, 6, 6).long(), 'v': torch.ones(2, 6, 6).long()}, 'floating-point'),
    ('aft_simple', {'v': randn(6, 6)}, r'v must have shape \(B, T, D\)'),
    ('aft_simple', {'k': randn(2, 6, 1), 'backend': 'aten'}, r'k must have shape'),
]


@pytest.mark.parametrize(('name', 'wrong', 'message'), REJECTED, ids=[x[-1] for x in REJECTED])
def test_a_wrong_input_is_named(name: str, wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(**make_inputs(name, (2, 3), s=3, heads=3) | wrong)


@pytest.mark.parametrize(('D', 'h'), [(6, 3), (66, 66)], ids=['several channels a head', 'a head per channel'])
def test_aft_onehot_keeps_the_gradient_of_a_weight_that_lets_one_source_dominate(D: int, h: int):
    inputs = make_inputs('aft_onehot', (3, 4), D, 2, h)
    inputs['weight'] = inputs['weight'] + 15.0
    assert_matches_reference(ops.aft_onehot, reference.aft_onehot, inputs, torch.float32)


def test_weights_are_keyword_only_and_scripted_and_compiled_calls_take_them_too():
    q, k, v = (x.float() for x in make_qkv(T=6))
    bias, kernel = torch.randn(6, 6), torch.randn(k.shape[2], 3, 3)
    full, conv = ops.bias_weights('aft_full', bias, v), ops.bias_weights('aft_conv', kernel, v)
    # As a caller of a version without weights wrote it.
    expected = ops.aft_full(q, k, v, bias, None, 'eager'), ops.aft_conv(q, k, v, kernel, (2, 3), None, True, 'eager')
    with pytest.raises(TypeError):
        ops.aft_full(q, k, v, bias, None, 'eager', full)
    with pytest.raises(TypeError):
        ops.aft_conv(q, k, v, kernel, (2, 3), None, True, 'eager', conv)
    scripted = torch.jit.script(ops.aft_full), torch.jit.script(ops.aft_conv)
    assert_close(scripted[0](q, k, v, bias, weights=full), expected[0], 1e-5)
    assert_close(scripted[1](q, k, v, kernel, (2, 3), weights=conv), expected[1], 1e-5)
    compiled = torch.compile(lambda *inputs: ops.aft_full(*inputs, weights=full), backend='eager', fullgraph=True)
    assert_close(compiled(q, k, v, bias), expected[0], 1e-5)
