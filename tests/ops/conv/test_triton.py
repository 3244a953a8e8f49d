"""AFT-conv in Triton: its values, where it runs, and what it keeps."""

import math

import pytest
import timm
import torch
from helpers import (
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    assert_passes_opcheck,
    generator,
    make_qkv,
    nasty_biases,
    nasty_keys,
    randn,
)
from torch import Tensor

import aft_vision
from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def conv(q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, grid: tuple[int, int], **others: object) -> Tensor:
    return ops.aft_conv(q, k, v, kernel, grid, **others, backend='triton')


def make_inputs(grid: tuple[int, int], D: int, heads: int, s: int, B: int = 2) -> dict[str, object]:
    q, k, v = make_qkv(B=B, T=math.prod(grid), D=D, heads=heads)
    return {'q': q, 'k': k, 'v': v, 'kernel': randn(heads, s, s, seed=8), 'grid': grid}


# Several tiles of tokens and of sequences, a head per channel, a row, a kernel beyond the grid, a column.
CASES = [
    ((5, 7), 2, 2, 3, 17),
    ((1, 9), 40, 1, 5, 2),
    ((4, 3), 16, 2, 15, 3),
    ((6, 1), 6, 2, 7, 2),
    # Four tiles of columns, of which three are near each other.
    ((1, 200), 1, 1, 3, 1),
]


@pytest.mark.parametrize(
    ('case', 'dtype'),
    [*((case, torch.float32) for case in CASES), (CASES[1], torch.bfloat16), (CASES[3], torch.float16)],
    ids=str,
)
def test_it_equals_float64(case: tuple[tuple[int, int], int, int, int, int], dtype: torch.dtype, device: str):
    assert_matches_reference(conv, reference.aft_conv, make_inputs(*case), dtype, device=device)


def test_a_transposed_kernel_that_covers_the_grid_equals_float64(device: str):
    inputs = make_inputs((2, 2), 4, 2, 3)
    assert_matches_reference(
        lambda **x: conv(**(x | {'kernel': x['kernel'].mT})),
        lambda **x: reference.aft_conv(**(x | {'kernel': x['kernel'].mT})),
        inputs,
        device=device,
    )


def test_one_token_is_its_own_value(device: str):
    # The gradients of keys and kernel are zero but for rounding.
    assert_matches_reference(conv, reference.aft_conv, make_inputs((1, 1), 3, 1, 3), nasty=True, device=device)


@pytest.mark.parametrize('global_context', [True, False], ids=['global', 'window alone'])
def test_a_mask_hides_tokens_and_a_sequence_without_any_is_zero(global_context: bool, device: str):
    inputs = make_inputs((3, 5), 12, 1, 3, B=3)
    mask = torch.rand(3, 15, generator=generator(3)) > 0.4
    mask[1] = False
    inputs |= {'q': None, 'mask': mask, 'global_context': global_context}
    assert_matches_reference(conv, reference.aft_conv, inputs, device=device)


@pytest.mark.parametrize('heads', [2, 4])
def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(heads: int, device: str):
    assert_keys_of_minus_infinity_are_masked(conv, reference.aft_conv, make_inputs((2, 3), 4, heads, 3), device=device)


@pytest.mark.parametrize('bias', ['zero', 'plus_minus_80'])
def test_masked_tokens_may_be_anything(bias: str, device: str):
    inputs = make_inputs((2, 3), 2, 1, 3, B=1)
    inputs |= {'kernel': nasty_biases(inputs['kernel'])[bias], 'global_context': False}
    assert_masked_tokens_have_no_effect(conv, inputs, torch.tensor([[True, False, True] * 2]), device)


@pytest.mark.parametrize('keys', ['one_at_90', 'all_at_-120', 'plus_minus_1e4', 'climbing'])
def test_it_survives_nasty_keys(keys: str, device: str):
    inputs = make_inputs((3, 5), 4, 1, 3)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=device)


def test_a_very_negative_kernel_at_a_dominating_key_loses_no_digits(device: str):
    inputs = make_inputs((3, 5), 4, 1, 3)
    inputs['k'][:, 7], inputs['kernel'] = 20.0, inputs['kernel'] - 20.0
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=device)


@pytest.mark.parametrize(('keys', 'bias'), [('ordinary', 'plus_minus_80'), ('one_at_90', 'within_50')])
def test_what_underflows_is_exact(keys: str, bias: str, device: str):
    inputs = make_inputs((3, 5), 4, 1, 3)
    inputs['k'] = nasty_keys(inputs['k']).get(keys, inputs['k'])
    inputs['kernel'] = nasty_biases(inputs['kernel'])[bias]
    inputs['global_context'] = False
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=device)


def test_what_underflows_in_one_of_many_heads_is_exact(device: str):
    # The flags of 3 x 66 pairs are those of two programs, and each has a pair to repair.
    inputs = make_inputs((3, 5), 66, 66, 3, B=3)
    for sequence, head in ((0, 3), (2, 64)):
        inputs['k'][sequence, 7, head] = 90.0
        inputs['kernel'][head] = nasty_biases(inputs['kernel'])['within_50'][head]
    inputs['global_context'] = False
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=device)


@pytest.mark.parametrize(('grid', 'size'), [((1, 16384), 11), ((64, 16384), 3), ((1, 16384), 999)])
def test_the_gradient_of_the_table_takes_memory_and_programs_in_proportion_to_the_width(
    grid: tuple[int, int], size: int
):
    from aft_vision.ops.conv.triton import _Lines

    lines = _Lines(size, grid, 64)
    found = lines.empty(2, torch.empty(0, device='meta'))
    assert found.numel() <= 2 * size * size * grid[1]
    assert lines.pairs <= (size // 64 + 3) * (grid[1] // 64)


def test_what_repairs_the_gradient_of_v_is_rounded_once(device: str, monkeypatch: pytest.MonkeyPatch):
    from aft_vision.ops.conv import triton as kernels

    # One tile of targets gives 1, and each of the two others what bfloat16 drops next to it.
    monkeypatch.setattr(kernels, 'REPAIR', {'BT': 16, 'BD': 16})
    kernel = torch.zeros(1, 95, 95, device=device)
    kernel[:, 47, :48] = -200.0
    # The source that counts underflows for all targets.
    v = torch.ones(1, 48, 1, device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.full_like(v, 2.0**-12)
    grad[:, :16] = 2.0**-4
    y = conv(None, torch.zeros_like(v), v, kernel, (1, 48), mask=(torch.arange(48, device=device) == 0)[None])
    (found,) = torch.autograd.grad(y, v, grad)
    assert float(found[0, 0]) == 1.0 + 2.0**-7


def test_many_parts_of_many_sequences_fit_a_grid():
    from aft_vision.ops.conv.triton import Layout

    k, v = torch.empty(65535, 9, 1, device='meta'), torch.empty(65535, 9, 768, device='meta')
    # A head of 768 channels in 25 parts of 31; only the first side of a grid is long.
    assert Layout(k, v).programs({'BR': 32, 'BT': 16}) == (65535 * 25, 1)


def test_it_passes_torch_opcheck(device: str):
    assert_passes_opcheck('aft_conv', make_inputs((2, 3), 3, 1, 3), [None, True], backend='triton', device=device)


def test_parts_of_a_fused_projection_are_read_where_they_are(device: str):
    kernel = randn(1, 3, 3, dtype=torch.float32).to(device)
    q, v, k = randn(2, 15, 25, dtype=torch.float32).to(device).split([12, 12, 1], -1)
    packed = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(conv(q, k, v, kernel, (3, 5)), conv(*packed, kernel, (3, 5)))


def test_a_registered_model_runs_it_forward_and_backward(device: str):
    assert aft_vision.__version__
    # Narrow heads have a form of their own on a CPU: fewer than 16 channels, on AVX2 fewer than 32.
    model = timm.create_model(
        'aft_conv_tiny_k11_h32', embed_dim=48, num_heads=1, kernel_size=3, depth=1, img_size=32, num_classes=2
    ).to(device)
    with torch.profiler.profile() as profile:
        model(torch.randn(2, 3, 32, 32, device=device)).sum().backward()
    names = {event.name for event in profile.events()}
    assert {'aft_vision::conv_forward', 'aft_vision::conv_backward'} <= names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('heads', [16, 384])
def test_it_equals_the_torch_form_at_full_size(heads: int, dtype: torch.dtype):
    # The float64 reference forms (B, T, T, D) weights; the torch form is compared with it elsewhere.
    inputs = make_inputs((14, 14), 384, heads, 11, B=8)
    assert_matches_reference(conv, ops.aft_conv, inputs, dtype, device='cuda')
