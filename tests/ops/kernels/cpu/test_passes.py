"""The compiled passes around products: where they run, their values, and what torch repairs."""

import math
from typing import Any

import pytest
import timm
import torch
from helpers import (
    assert_close,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    generator,
    kernels_run,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
)
from torch import Tensor

import aft_vision
from aft_vision import ops
from aft_vision.ops import reference
from aft_vision.ops.eager.mixing import Passes

NAMES = {f'aft_vision::passes_{name}' for name in ('enter', 'leave', 'spread', 'collect')}
# Heads, channels and grid: less than a vector, more than one of tokens, of heads and of channels, and whole ones.
CASES = [(2, 6, (1, 5)), (7, 70, (3, 4)), (18, 36, (5, 7)), (16, 32, (4, 8))]


def full_inputs(T: int, D: int, masked: bool = False) -> dict[str, Any]:
    q, k, v = make_qkv(B=2, T=T, D=D)
    return {'q': q, 'k': k, 'v': v, 'bias': randn(T, T, seed=7), 'mask': make_mask(T) if masked else None}


def conv_inputs(heads: int, D: int, grid: tuple[int, int], masked: bool = False) -> dict[str, Any]:
    T = grid[0] * grid[1]
    q, k, v = make_qkv(B=2, T=T, D=D, heads=heads)
    mask = make_mask(T) if masked else None
    return {'q': q, 'k': k, 'v': v, 'kernel': randn(heads, 5, 5, seed=7), 'grid': grid, 'mask': mask}


def make_mask(T: int) -> Tensor:
    mask = torch.rand(2, T, generator=generator(3)) > 0.4
    mask[0] = False  # a sequence without tokens
    mask[1, 0] = True
    return mask


def single(inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    floats = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return inputs | {name: x.to(dtype).requires_grad_() for name, x in floats.items()}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('heads', 'D', 'grid'), CASES)
def test_aft_conv_equals_float64(heads: int, D: int, grid: tuple[int, int], masked: bool, dtype: torch.dtype):
    inputs = conv_inputs(heads, D, grid, masked)
    assert_matches_reference(ops.aft_conv, reference.aft_conv, inputs, dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('masked', [False, True], ids=['whole', 'masked'])
@pytest.mark.parametrize(('T', 'D'), [(8, 5), (20, 40), (17, 64)])
def test_aft_full_equals_float64(T: int, D: int, masked: bool, dtype: torch.dtype):
    assert_matches_reference(ops.aft_full, reference.aft_full, full_inputs(T, D, masked), dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(('heads', 'D', 'grid'), CASES)
def test_masked_tokens_have_no_effect(heads: int, D: int, grid: tuple[int, int], dtype: torch.dtype):
    T = grid[0] * grid[1]
    for op, inputs in ((ops.aft_conv, conv_inputs(heads, D, grid)), (ops.aft_full, full_inputs(T, D))):
        del inputs['mask']
        assert_masked_tokens_have_no_effect(op, inputs, make_mask(T), dtype=dtype)


def test_both_equal_float64_without_a_gate():
    assert_matches_reference(ops.aft_full, reference.aft_full, full_inputs(20, 40) | {'q': None})
    assert_matches_reference(ops.aft_conv, reference.aft_conv, conv_inputs(7, 70, (3, 4)) | {'q': None})


@pytest.mark.parametrize('bias', list(nasty_biases(torch.zeros(1))))
@pytest.mark.parametrize('keys', list(nasty_keys(torch.zeros(1, 3, 1))))
def test_what_underflows_is_repaired(keys: str, bias: str):
    full, conv = full_inputs(18, 5), conv_inputs(3, 6, (3, 6))
    full |= {'k': nasty_keys(full['k'])[keys], 'bias': nasty_biases(full['bias'])[bias]}
    conv |= {'k': nasty_keys(conv['k'])[keys], 'kernel': nasty_biases(conv['kernel'])[bias]}
    assert_matches_reference(ops.aft_full, reference.aft_full, full, nasty=True)
    assert_matches_reference(ops.aft_conv, reference.aft_conv, conv, nasty=True)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_they_run_by_themselves_and_never_in_eager(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    full, conv = single(full_inputs(20, 40), dtype), single(conv_inputs(7, 70, (3, 4)), dtype)
    with monkeypatch.context() as patch:
        # What torch is left with where digits are lost.
        for name in ('leave', 'backward'):
            patch.setattr(Passes, name, lambda *inputs: pytest.fail('expected the compiled passes alone'))
        assert kernels_run(lambda: ops.aft_full(**full).float().sum().backward()) == NAMES
        assert kernels_run(lambda: ops.aft_conv(**conv).float().sum().backward()) == NAMES
    assert kernels_run(lambda: ops.aft_full(**full, backend='eager').float().sum().backward()) == set()
    assert kernels_run(lambda: ops.aft_conv(**conv, backend='eager').float().sum().backward()) == set()


@pytest.mark.parametrize('name', ['aft_full_tiny', 'aft_conv_tiny_k11_h32'])
def test_registered_models_run_them_forward_and_backward(name: str):
    assert aft_vision.__version__
    model = timm.create_model(name, depth=1, num_classes=2)
    x = torch.randn(1, 3, 224, 224)
    assert kernels_run(lambda: model(x).sum().backward()) == NAMES


def test_a_lost_chunk_alone_goes_to_torch(monkeypatch: pytest.MonkeyPatch):
    from aft_vision.ops.eager import mixing

    repaired: list[int] = []
    repair = mixing._repair_forward
    monkeypatch.setattr(
        mixing, '_repair_forward', lambda ratio, *rest: repaired.append(len(ratio)) or repair(ratio, *rest)
    )
    monkeypatch.setattr('aft_vision.ops.eager.full.LEAST_ELEMENTS', 1)
    monkeypatch.setattr('aft_vision.ops.eager.full.THREAD_ELEMENTS', 1)  # a sequence at a time
    inputs = single(full_inputs(18, 5))
    inputs['bias'] = inputs['bias'].detach().clone()
    inputs['bias'][5, 0] = -200.0
    with torch.no_grad():
        before = ops.aft_full(**inputs)
        inputs['k'][1, 0] = 200.0  # the fifth target alone does not see it
        after = ops.aft_full(**inputs)
    assert repaired == [1]
    assert torch.equal(after[0], before[0])
    assert_close(after, reference.aft_full(**{n: None if x is None else x.double() for n, x in inputs.items()}), 1e-4)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_without_tokens_costs_torch_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    for name in ('leave', 'backward'):
        monkeypatch.setattr(Passes, name, lambda *inputs: pytest.fail('expected the compiled passes alone'))
    for op, inputs in ((ops.aft_full, full_inputs(20, 40, True)), (ops.aft_conv, conv_inputs(7, 70, (3, 4), True))):
        low = single(inputs, dtype)
        y = op(**low)
        assert not y[0].any()
        y.float().sum().backward()
        assert not any(low[name].grad[0].any() for name in 'qkv')
        assert all(low[name].grad[1].any() for name in 'qkv')


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
