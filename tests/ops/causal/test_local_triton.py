"""Causal AFT-local in Triton: its values, keys that jump, where it runs, and what it keeps."""

import pytest
import torch
from helpers import (
    assert_close,
    assert_keys_of_minus_infinity_are_masked,
    assert_masked_tokens_have_no_effect,
    assert_matches_reference,
    assert_passes_opcheck,
    generator,
    make_qkv,
    nasty_keys,
    randn,
)
from torch import Tensor

from aft_vision import ops
from aft_vision.ops import reference


@pytest.fixture(autouse=True)
def device(triton_device: str) -> str:
    return triton_device


def local_causal(q: Tensor | None, k: Tensor, v: Tensor, band: Tensor, mask: Tensor | None = None) -> Tensor:
    return ops.aft_local_causal(q, k, v, band, mask, backend='triton')


def make_inputs(T: int, s: int, D: int = 3, B: int = 2) -> dict[str, object]:
    return {**dict(zip('qkv', make_qkv(B=B, T=T, D=D), strict=True)), 'band': randn(T, s, seed=7)}


# One block, several blocks with short and long windows, several tiles of channels.
CASES = [(5, 4, 3), (33, 1, 3), (33, 40, 3), (36, 4, 5), (36, 33, 17, 1)]


@pytest.mark.parametrize(
    ('case', 'dtype'),
    [*((case, torch.float32) for case in CASES), (CASES[-1], torch.bfloat16), (CASES[-2], torch.float16)],
    ids=str,
)
def test_it_equals_float64(case: tuple[int, ...], dtype: torch.dtype, device: str):
    assert_matches_reference(local_causal, reference.aft_local_causal, make_inputs(*case), dtype, device=device)


def test_one_token_is_its_own_value(device: str):
    # The gradients of keys and band are zero but for rounding.
    assert_matches_reference(local_causal, reference.aft_local_causal, make_inputs(1, 1), nasty=True, device=device)


def test_a_mask_hides_tokens_and_a_target_without_any_is_zero(device: str):
    mask = torch.rand(2, 40, generator=generator(3)) > 0.4
    mask[:, :2] = torch.tensor([False, True])
    mask[1] = False
    inputs = make_inputs(40, 4) | {'q': None, 'mask': mask}
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, device=device)


def test_a_sequence_of_keys_of_minus_infinity_is_one_without_tokens(device: str):
    assert_keys_of_minus_infinity_are_masked(
        local_causal, reference.aft_local_causal, make_inputs(18, 3), device=device
    )


@pytest.mark.parametrize('jump', [0.0, 200.0])
def test_masked_tokens_may_be_anything(jump: float, device: str):
    inputs = make_inputs(20, 3, D=1, B=1)
    inputs['k'][:, 9:] += jump
    mask = torch.tensor([[True, False, True, True] * 5])
    assert_masked_tokens_have_no_effect(local_causal, inputs, mask, device)


@pytest.mark.parametrize('keys', ['first_at_-120', 'plus_minus_1e4', 'climbing'])
def test_it_survives_nasty_keys(keys: str, device: str):
    inputs = make_inputs(40, 4, D=2, B=1)
    inputs['k'] = nasty_keys(inputs['k'])[keys]
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=device)


@pytest.mark.parametrize('jump', [200.0, -200.0])
def test_a_jump_inside_a_block_is_exact(jump: float, device: str):
    inputs = make_inputs(45, 9, B=1)
    inputs['k'][:, 35:, 0] += jump
    inputs['k'][:, 40, 2] += jump
    inputs['band'] *= 10
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=device)


def test_a_later_token_changes_no_bit_of_earlier_outputs(device: str):
    inputs = {name: x.float().to(device) for name, x in make_inputs(36, 4).items()}
    before = local_causal(**inputs)
    k, v = inputs['k'].clone(), inputs['v'].clone()
    # The headroom counts from the largest key before the block of 16 or 32 targets.
    k[:, 34], v[:, 34] = k[:, :32].amax(1) + 59.0, 1e3
    after = local_causal(**inputs | {'k': k, 'v': v})
    assert torch.equal(after[:, :34], before[:, :34])
    assert not torch.equal(after[:, 34], before[:, 34])
    k[:, 34] += 200.0
    assert_close(local_causal(**inputs | {'k': k, 'v': v})[:, :34].cpu(), before[:, :34].double().cpu(), 5e-6)


def test_a_weight_that_underflows_under_a_key_above_its_reference_counts(device: str):
    k, v = (torch.tensor(x)[None, :, None] for x in ([0.0, 60.0, -65.0], [0.0, 2.0, 1.0]))
    inputs = {'q': None, 'k': k, 'v': v, 'band': torch.full((3, 1), 120.0)}
    y = local_causal(**{name: None if x is None else x.to(device) for name, x in inputs.items()})
    torch.testing.assert_close(y.flatten().cpu(), torch.tensor([0.0, 2.0, 1.9933]), rtol=0, atol=1e-4)
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=device)


def test_the_gradient_of_a_band_with_tiny_weights_is_finite(device: str):
    # The last target has e^-86 for the key 60 and 1 for its own: infinity is multiplied by that otherwise.
    k = torch.tensor([-1000.0, 60.0, -25.0])[None, :, None]
    inputs = {'q': None, 'k': k, 'v': torch.tensor([0.0, 300.0, -300.0])[None, :, None], 'band': torch.zeros(3, 2)}
    inputs['band'][2] = torch.tensor([-86.0, 0.0])
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=device)


def test_references_that_jump_lose_nothing(device: str):
    k = torch.full((1, 36, 1), -1000.0)
    v = torch.zeros(1, 36, 1)
    k[0, [0, 1, 32, 33], 0] = torch.tensor([0.0, 60.0, 40.0, 168.0])
    v[0, [1, 32], 0] = torch.tensor([2.0, 1.0])
    inputs = {'q': None, 'k': k, 'v': v, 'band': torch.zeros(36, 2)}
    y = local_causal(None, k.to(device), v.to(device), inputs['band'].to(device))
    torch.testing.assert_close(y[0, 32].cpu(), torch.tensor([2.0]), rtol=0, atol=1e-5)
    assert_matches_reference(local_causal, reference.aft_local_causal, inputs, nasty=True, device=device)


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), None], ids=['NaN key', 'infinite key', 'infinite value'])
def test_a_source_that_is_not_finite_reaches_no_earlier_target(bad: float | None, device: str):
    inputs = {name: x.float().to(device) for name, x in make_inputs(36, 4).items()}
    before = local_causal(**inputs)
    changed = inputs['v' if bad is None else 'k']
    changed[0, 20, 1] = float('inf') if bad is None else bad
    after = local_causal(**inputs)
    assert not after[0, 20:, 1].isfinite().any()
    after[0, 20:, 1] = before[0, 20:, 1]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), None], ids=['NaN key', 'infinite key', 'infinite value'])
def test_targets_without_a_gradient_pass_nothing_on_after_a_source_that_is_not_finite(bad: float | None, device: str):
    inputs = {name: x.float().to(device) for name, x in make_inputs(36, 4, B=1).items()}
    inputs['v' if bad is None else 'k'][0, 20, 1] = float('inf') if bad is None else bad
    grad = randn(1, 36, 3, seed=9).float().to(device)
    grad[:, 20:, 1] = 0.0
    found = {}
    for backend in ('triton', 'eager'):
        leaves = [inputs[name].clone().requires_grad_() for name in 'qkv']
        y = ops.aft_local_causal(*leaves, inputs['band'], backend=backend)
        found[backend] = torch.autograd.grad(y, leaves, grad)
    for x, expected in zip(found['triton'], found['eager'], strict=True):
        assert expected.isfinite().all()
        assert_close(x, expected, 1e-4)


def test_a_repair_leaves_no_trace_in_other_elements(device: str):
    inputs = {name: x.float().to(device) for name, x in make_inputs(9, 3, B=1).items()}
    before = local_causal(**inputs)
    k, band = inputs['k'].clone(), inputs['band'].clone()
    # Its own key is the only one that the last target has a bias for.
    k[:, 8, 0], band[8, 2] = -150.0, 100.0
    after = local_causal(**inputs | {'k': k, 'band': band})
    assert torch.equal(after[:, :8], before[:, :8])


def test_a_row_of_minus_infinity_sees_nothing(device: str):
    inputs = {name: x.float().to(device) for name, x in make_inputs(5, 5, B=1).items()}
    inputs['band'][3] = float('-inf')
    y = local_causal(**inputs)
    assert not y[:, 3].any()
    wanted = local_causal(**inputs | {'band': inputs['band'].nan_to_num(neginf=0.0)})
    assert torch.equal(y[:, [0, 1, 2, 4]], wanted[:, [0, 1, 2, 4]])


def test_it_passes_torch_opcheck(device: str):
    assert_passes_opcheck('aft_local_causal', make_inputs(9, 4, B=1), backend='triton', device=device)


def test_parts_of_a_fused_projection_are_read_where_they_are(device: str):
    parts = randn(1, 9, 15, dtype=torch.float32).to(device).split(5, -1)
    band = randn(9, 4, dtype=torch.float32).to(device)
    assert torch.equal(local_causal(*parts, band), local_causal(*(x.contiguous() for x in parts), band))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_the_torch_form_at_full_size(dtype: torch.dtype):
    # The float64 reference forms (B, T, T, D) weights; the torch form is compared with it elsewhere.
    assert_matches_reference(local_causal, ops.aft_local_causal, make_inputs(3072, 256, 256), dtype, device='cuda')
