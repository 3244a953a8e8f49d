"""AFT-conv in Triton: digits that its kernels might lose, repairs, memory and programs."""

from functools import partial

import pytest
import torch
from helpers import assert_matches_reference, count_launches, make_inputs, make_nasty, nasty_biases, plain

from aft_vision import ops
from aft_vision.ops import reference

pytestmark = pytest.mark.usefixtures('triton_device')
conv = partial(ops.aft_conv, backend='triton')


@pytest.mark.parametrize('grid', [(3, 5), (7, 5)], ids=['short', 'long'])
def test_a_very_negative_kernel_at_a_dominating_key_loses_no_digits(grid: tuple[int, int], triton_device: str):
    inputs = make_inputs('aft_conv', grid, 4, 3, 1)
    inputs['k'][:, 7], inputs['kernel'] = 20.0, inputs['kernel'] - 20.0
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=triton_device)


def test_what_underflows_in_one_of_many_heads_is_exact(triton_device: str):
    # The flags of 3 x 66 pairs are those of two programs, and each has a pair to repair.
    inputs = make_inputs('aft_conv', (1, 5), 66, 3, B=3)
    for sequence, head in ((0, 3), (2, 64)):
        inputs['k'][sequence, 2, head] = 90.0
        inputs['kernel'][head] = nasty_biases(inputs['kernel'])['within_50'][head]
    inputs['global_context'] = False
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=triton_device)


def test_what_repairs_the_gradient_of_v_is_rounded_once(triton_device: str, monkeypatch: pytest.MonkeyPatch):
    from aft_vision.ops.conv import triton as kernels

    # One tile of targets gives 1, and each of the two others what bfloat16 drops next to it.
    monkeypatch.setattr(kernels, 'REPAIR', {'BT': 16, 'BD': 16})
    kernel = torch.zeros(1, 95, 95, device=triton_device)
    kernel[:, 47, :48] = -200.0
    # The source that counts underflows for all targets.
    v = torch.ones(1, 48, 1, device=triton_device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.full_like(v, 2.0**-12)
    grad[:, :16] = 2.0**-4
    y = conv(None, torch.zeros_like(v), v, kernel, (1, 48), mask=(torch.arange(48, device=triton_device) == 0)[None])
    (found,) = torch.autograd.grad(y, v, grad)
    assert float(found[0, 0]) == 1.0 + 2.0**-7


def test_heads_one_at_a_time_give_what_all_of_them_do(triton_device: str, monkeypatch: pytest.MonkeyPatch):
    from aft_vision.ops.conv import triton as kernels

    monkeypatch.setattr(kernels, 'WEIGHTS', 1)
    inputs = make_inputs('aft_conv', (3, 3), 6, 3, 2)
    assert_matches_reference(conv, reference.aft_conv, inputs, device=triton_device)
    inputs['kernel'] = nasty_biases(inputs['kernel'])['within_50']
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=triton_device)


@pytest.mark.parametrize(('channels', 'sequences'), [(1, 5), (3, 5), (33, 1)])
def test_sequences_that_do_not_fill_a_tile_leave_no_trace(channels: int, sequences: int, triton_device: str):
    # The matrices of terms are padded to columns and rows of 8.
    inputs = make_inputs('aft_conv', (3, 3), 2 * channels, 3, 2, B=sequences)
    assert_matches_reference(conv, reference.aft_conv, inputs, device=triton_device)


@pytest.mark.parametrize('heads', [2, 4])
@pytest.mark.parametrize('global_context', [True, False])
def test_only_shifts_on_the_grid_count_for_the_largest_bias(global_context: bool, heads: int, triton_device: str):
    # All shifts are in the window, far below what would be outside of it; those beyond the grid are far above.
    inputs = make_inputs('aft_conv', (2, 3), 4, 7, heads) | {'global_context': global_context}
    kernel = inputs['kernel'] + 200.0
    kernel[:, 2:5, 1:6] -= 400.0
    inputs['kernel'] = kernel
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=triton_device)


@pytest.mark.parametrize('global_context', [True, False])
def test_whole_sequences_of_several_pieces_are_exact(global_context: bool, longer: str):
    # Sequences that a program takes in turn, one of which is masked whole.
    inputs = make_inputs('aft_conv', (3, 7), 10, 5, 2, B=5) | {'global_context': global_context}
    inputs['mask'] = torch.arange(21) % 5 != torch.arange(5)[:, None]
    inputs['mask'][3] = False
    inputs['k'][3], inputs['v'][0, 0] = float('nan'), float('inf')
    eager = partial(ops.aft_conv, backend='eager')
    assert_matches_reference(conv, lambda **x: eager(**x), inputs, device=longer)


@pytest.mark.parametrize('bias', ['within_50', 'plus_minus_80'])
def test_whole_sequences_repair_what_underflows(bias: str, longer: str):
    inputs = make_nasty(make_inputs('aft_conv', (3, 7), 10, 5, 2, B=3), 'one_at_90', bias)
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=True, device=longer)


@pytest.mark.parametrize('keeps', [True, False])
@pytest.mark.parametrize(
    ('grid', 'size', 'bias'),
    [((7, 5), 5, 'ordinary'), ((2, 17), 1, 'ordinary'), ((4, 5), 25, 'ordinary'), ((5, 4), 3, 'plus_minus_80')],
)
def test_long_grids_are_exact(
    grid: tuple[int, int],
    size: int,
    bias: str,
    keeps: bool,
    triton_device: str,
    monkeypatch: pytest.MonkeyPatch,
):
    # Lines above and below the window, lines that do not fill a block of targets, and a window beyond the grid.
    from aft_vision.ops.conv import triton as kernels

    monkeypatch.setattr(kernels, 'keeps_weights', lambda: keeps)
    nasty = bias != 'ordinary'
    inputs = make_inputs('aft_conv', grid, 8, size, 2, B=1 if nasty else 3)
    if nasty:
        inputs = make_nasty(inputs, 'one_at_90', bias)
    assert_matches_reference(conv, reference.aft_conv, inputs, nasty=nasty, device=triton_device)


@pytest.mark.parametrize('global_context', [True, False])
def test_a_mask_hides_tokens_of_a_long_grid(global_context: bool, triton_device: str):
    inputs = plain(make_inputs('aft_conv', (7, 5), 10, 3, 2, B=3), device=triton_device)
    inputs |= {'global_context': global_context, 'mask': torch.arange(35, device=triton_device).expand(3, 35) % 5 != 2}
    inputs['mask'][1] = False
    hidden = ~inputs['mask'][..., None]
    shown = inputs | {'v': inputs['v'].masked_fill(hidden, float('nan'))}
    torch.testing.assert_close(conv(**shown), ops.aft_conv(**inputs, backend='eager'))


def test_a_forward_on_a_long_grid_is_one_launch(keeper: torch.device):
    grid, dtype = ((7, 5), torch.float32) if keeper.type == 'cpu' else ((17, 17), torch.bfloat16)
    inputs = plain(make_inputs('aft_conv', grid, 10, 3, 2, B=3), dtype, str(keeper))
    assert count_launches(lambda: conv(**inputs)) == {'lines_kernel': 1}


def test_a_forward_of_short_sequences_is_one_launch_and_a_constant_kernel_is_expanded_once(keeper: torch.device):
    dtype = torch.float32 if keeper.type == 'cpu' else torch.bfloat16
    inputs = plain(make_inputs('aft_conv', (2, 4), 10, 3, 2, B=3), dtype, str(keeper))
    found = []
    launches = [count_launches(lambda: found.append(conv(**inputs))) for _ in range(3)]
    alone = {'stationary_kernel': 1}
    assert launches == [alone, alone | {'weights_kernel': 1}, alone]
    assert torch.equal(found[0], found[2])
    # The same numbers on another grid are another matrix.
    turned = inputs | {'grid': (4, 2)}
    torch.testing.assert_close(conv(**turned), ops.aft_conv(**turned, backend='eager'))
