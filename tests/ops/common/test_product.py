"""The compiled AFT-full and AFT-conv for heads of several channels: which form runs, repairs, weights made once."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import assert_close, assert_matches_reference, kernels_run, make_inputs, make_qkv, plain, randn, single

from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.common import choice
from aft_vision.ops.conv import CONV
from aft_vision.ops.conv import eager as conv
from aft_vision.ops.declaration import OPERATIONS
from aft_vision.ops.full import eager as full

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures('compiled')]


@pytest.mark.parametrize(
    ('batch', 'heads', 'D', 'dtype', 'form'),
    [
        (1, 2, 90, torch.float32, 'wide'),
        (2, 2, 90, torch.float32, 'conv'),
        (2, 7, 42, torch.float32, 'wide'),
        (1, 2, 90, torch.float64, ''),
    ],
)
def test_one_sequence_and_narrow_heads_take_the_wide_form(
    batch: int, heads: int, D: int, dtype: torch.dtype, form: str
):
    q, k, v = (x.to(dtype) for x in make_qkv(B=batch, T=12, D=D, heads=heads))
    inputs = conv.ConvInputs(q, k, v, randn(heads, 3, 3).to(dtype), (3, 4), None, True)
    assert CONV.choose('auto', inputs).name == form
    window = inputs._replace(global_context=False)
    assert CONV.choose('auto', window).name != 'wide'


def test_a_sequence_does_not_depend_on_the_others_in_its_batch():
    # A batch of 13 is cut otherwise than one of 1, and the columns of a sequence lie elsewhere in the strips.
    q, k, v = (x.float() for x in make_qkv(B=13, T=30, D=24, heads=4))
    kernel = randn(4, 5, 5, seed=7).float()
    whole = ops.aft_conv(q, k, v, kernel, grid=(5, 6))
    for i in range(13):
        assert_close(whole[i], ops.aft_conv(q[i : i + 1], k[i : i + 1], v[i : i + 1], kernel, grid=(5, 6))[0], 1e-6)


def test_a_gradient_of_the_bias_that_needs_too_much_room_is_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('aft_vision.ops.full.cpp.MAX_ELEMENTS', 100)
    assert_matches_reference(ops.aft_full, reference.aft_full, make_inputs('aft_full', 20, 40))
    inputs = single(make_inputs('aft_full', 20, 40))
    assert kernels_run(lambda: ops.aft_full(**inputs).sum().backward()) == {'aft_vision::full_forward'}


def test_a_call_with_an_underflowed_denominator_goes_to_torch(monkeypatch: pytest.MonkeyPatch):
    inputs = plain(make_inputs('aft_full', 18, 5))
    inputs['bias'][5, 0] = -200.0
    # Target 5 alone does not see it.
    inputs['k'][1, 0] = 200.0
    calls: list[int] = []
    eager = full.full_forward
    monkeypatch.setattr(full, 'full_forward', lambda *args: calls.append(1) or eager(*args))
    assert_close(ops.aft_full(**inputs), reference.aft_full(**plain(inputs, torch.float64)), 1e-4)
    assert calls == [1]


def test_a_gate_that_is_nearly_shut_keeps_large_values():
    # e^84 times 700 is beyond float32, what remains of 1e35 behind the gate is not.
    T = 700
    q, k, v = torch.full((1, T, 2), -84.0), torch.zeros(1, T, 2), torch.full((1, T, 2), 1e35)
    expected = v.double() / (1 + math.exp(84))
    assert_close(ops.aft_full(q, k, v, torch.zeros(T, T), backend='cpp'), expected, 1e-5)
    kernel = torch.zeros(1, 3, 3)
    assert_close(ops.aft_conv(q, k[..., :1], v, kernel, grid=(20, 35), backend='cpp'), expected, 1e-5)


def test_inputs_of_mixed_precision_are_rounded_as_torch_rounds():
    # One token: y is v, gated by exactly 1, so that the output is v rounded to the dtype of q.
    v = torch.cat(
        [randn(1, 1, 70, dtype=torch.float32), torch.tensor([[[1.00390625, 1.01171875, 3e38, 1e-40, -0.0]]])], -1
    )
    q = torch.full_like(v, 200.0, dtype=torch.bfloat16)
    y = ops.aft_full(q, torch.zeros_like(v), v, torch.zeros(1, 1), backend='cpp')
    assert torch.equal(y, v.to(torch.bfloat16))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_weights_made_once_give_the_same_and_replace_the_bias(dtype: torch.dtype):
    q, k, v, bias = plain(make_inputs('aft_full', 33, 20), dtype).values()
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
    inputs = single(make_inputs('aft_full', 20, 16))
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
    _, k, v = make_qkv(B=1, T=48 * 48, D=4, heads=2)
    inputs = k / 100, v.abs() + 1, randn(2, 95, 95, seed=7) / 100
    expected = ops.aft_conv(None, *inputs, (48, 48), backend='eager')
    assert_close(ops.aft_conv(None, *(x.float() for x in inputs), (48, 48)), expected, 4e-7)


FUSED = (
    ('aft_full', 'cpp', {}),
    ('aft_full', 'eager', {}),
    ('aft_conv', 'wide', {'heads': 2}),
    ('aft_conv', 'conv', {'heads': 2}),
    ('aft_conv', 'depthwise', {'heads': 70}),
)


@pytest.mark.parametrize(('name', 'form', 'sizes'), FUSED)
@pytest.mark.parametrize('masked', [False, True])
def test_with_constant_weights_the_fastest_form_runs(
    name: str, form: str, sizes: dict[str, int], masked: bool, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[object, ...]] = []

    def fastest(subject: str, shape: tuple[object, ...], ways: dict[str, Callable[[], object]]) -> str:
        asked.append((subject, shape, *ways))
        return form

    operation = OPERATIONS[name]
    monkeypatch.setattr('aft_vision.ops.operator.fastest', fastest)
    monkeypatch.setattr(operation.operator, 'measured', {})
    heads = sizes.get('heads', 70)
    q, k, v = make_qkv(B=2, T=12, D=70, heads=heads)
    bias = randn(12, 12, seed=5) if name == 'aft_full' else randn(heads, 3, 3, seed=5)
    mask = torch.arange(24).view(2, 12) % 5 > 0 if masked else None
    rest = (bias, mask) if name == 'aft_full' else (bias, (3, 4), mask)
    expected = getattr(reference, name)(q, k, v, *rest)
    call, q, k, v = getattr(ops, name), q.float(), k.float(), v.float()
    rest = bias.float(), *rest[1:]
    weights = ops.bias_weights(name, rest[0], v)
    assert weights is not None
    ran: list[str] = []
    for each in operation.forms:
        run = each.forward
        monkeypatch.setattr(each, 'forward', lambda *a, n=each.name or each.backend, r=run: ran.append(n) or r(*a))
    with torch.no_grad():
        assert_close(call(q, k, v, *rest, weights=weights), expected, 1e-5)
        assert ran == [form]
        call(q, k, v, *rest, weights=weights)
        # Of ten tokens or sixteen a measurement stands for the other.
        ((subject, shape, *ways),) = asked
        assert subject == name
        assert form in ways
        assert shape[:2] == ('B=2', 'T=16')
        # Asked for by name, or without constant weights, nothing is measured.
        call(q, k, v, *rest, backend='cpp', weights=weights)
        call(q, k, v, *rest)
    call(q.requires_grad_(), k, v, *rest, weights=weights).sum().backward()
    assert len(asked) == 1


def test_no_more_sizes_are_known_by_heart_than_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr('aft_vision.ops.operator.MAX_SIZES', 3)
    monkeypatch.setattr('aft_vision.ops.operator.fastest', lambda subject, shape, ways: next(iter(ways)))
    known: dict[object, object] = {}
    monkeypatch.setattr(CONV, 'measured', known)
    kernel = randn(2, 3, 3).float()
    for tokens in range(1, 9):
        q, k, v = (x.float() for x in make_qkv(B=1, T=tokens, D=6, heads=2))
        with torch.no_grad():
            ops.aft_conv(q, k, v, kernel, (1, tokens), weights=ops.bias_weights('aft_conv', kernel, v))
        assert 0 < len(known) <= 3


def test_the_fastest_form_is_measured_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv('TORCH_EXTENSIONS_DIR', str(tmp_path))
    monkeypatch.setattr('aft_vision.ops.operator.fastest', choice.fastest)
    monkeypatch.setattr(CONV, 'measured', {})
    choice.choices_path.cache_clear()
    q, k, v = (x.float() for x in make_qkv(B=2, T=12, D=40, heads=2))
    kernel = randn(2, 3, 3).float()
    with torch.no_grad():
        ops.aft_conv(q, k, v, kernel, (3, 4), weights=ops.bias_weights('aft_conv', kernel, v))
    ((key, found),) = choice.recorded().items()
    choice.choices_path.cache_clear()
    assert CONV.measured
    # What was taken while nothing could be measured is not kept.
    choice.measure_choices(True)
    assert not CONV.measured
    assert key.startswith('aft_conv B=2 T=16 D=40 keys=2 s=3 torch.float32 q global_context,')
    assert set(found['ms']) == {'wide', 'conv'}
