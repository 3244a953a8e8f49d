"""The position biases as functions of their parameters."""

import math

import pytest
import torch
from helpers import assert_close, assert_matches_reference, make_qkv, randn

from aft_vision import ops
from aft_vision.ops import reference


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_standardized_kernel_equals_its_reference(dtype: torch.dtype):
    inputs = {'kernel': randn(3, 5, 5, scale=0.02), 'gamma': randn(3, seed=1), 'v': randn(3, seed=2)}

    def run(op):
        return lambda kernel, gamma, v: op(kernel, gamma, v)

    assert_matches_reference(run(ops.standardized_kernel), run(reference.standardized_kernel), inputs, dtype)


def test_standardized_kernel_ignores_scale_and_shift_of_the_raw_kernel():
    kernel, gamma, beta = randn(3, 5, 5), randn(3, seed=1), randn(3, seed=2)
    moved = ops.standardized_kernel(7 * kernel + 3, gamma, beta)
    assert_close(moved, ops.standardized_kernel(kernel, gamma, beta), 1e-7)


def test_standardized_kernel_of_a_single_entry_is_its_shift():
    beta = randn(3)
    assert torch.equal(ops.standardized_kernel(randn(3, 1, 1), randn(3), beta).flatten(), beta)


def test_a_fresh_standardized_kernel_gives_the_raw_kernel_no_gradient_but_gamma_one():
    kernel = randn(3, 5, 5).requires_grad_()
    gamma, beta = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (ops.standardized_kernel(kernel, gamma, beta) * randn(3, 5, 5, seed=4)).sum().backward()
    assert not kernel.grad.any()
    assert gamma.grad.all()


def test_factorized_bias_equals_its_reference():
    u, v = randn(9, 4), randn(9, 4, seed=1)
    assert_close(ops.factorized_bias(u, v), reference.factorized_bias(u, v), 1e-12)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize(('T', 's'), [(1, 1), (5, 3), (70, 5), (150, 40), (40, 70)])
def test_factorized_band_equals_the_band_of_the_whole(T: int, s: int, causal: bool):
    u, v = (randn(T, 4, seed=i).requires_grad_() for i in range(2))
    band, whole = ops.factorized_bias(u, v, s, causal), ops.local_bias(ops.factorized_bias(u, v), s, causal)
    assert_close(band, whole, 1e-12)
    weight = randn(*band.shape, seed=3)
    for got, want in zip(
        torch.autograd.grad(band, (u, v), weight), torch.autograd.grad(whole, (u, v), weight), strict=True
    ):
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize('causal', [False, True])
def test_local_bias_holds_the_window_and_nothing_outside_the_sequence(causal: bool):
    bias = randn(6, 6)
    band = ops.local_bias(bias, 3, causal)
    for t in range(6):
        for j in range(band.shape[1]):
            s = t + j - 2
            assert band[t, j] == (bias[t, s] if 0 <= s < 6 else 0.0)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_kernel_entropy_equals_its_reference(dtype: torch.dtype):
    def run(op):
        return lambda v: op(v)

    assert_matches_reference(run(ops.kernel_entropy), run(reference.kernel_entropy), {'v': randn(3, 5, 5)}, dtype)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32, torch.float64], ids=str)
def test_kernel_entropy_lies_between_one_offset_and_all(dtype: torch.dtype):
    kernel = torch.zeros(3, 5, 5, dtype=dtype)
    kernel[0, 2, 3] = 2e4
    kernel[1] = -3e4
    kernel[2, 0, :2] = 1e4
    kernel.requires_grad_()
    entropy = ops.kernel_entropy(kernel)
    assert entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert entropy.tolist() == pytest.approx([0.0, math.log(25), math.log(2)], abs=1e-6)
    assert torch.autograd.grad(entropy.sum(), kernel)[0].isfinite().all()


def gumbel_sample(kernel: torch.Tensor, tau: float) -> torch.Tensor:
    """The softmax of AFT Eq. 10 with the noise that torch draws next, entry by entry."""
    sample = torch.empty_like(kernel)
    noise = torch.empty_like(kernel.flatten(1)).exponential_().view_as(kernel)
    for head, w in enumerate(kernel.detach()):
        weight = torch.exp((w - torch.log(noise[head])) / tau)
        sample[head] = weight / weight.sum()
    return sample


@pytest.mark.parametrize('straight_through', [False, True])
def test_gumbel_kernel_and_its_gradient_equal_those_of_the_sample(straight_through: bool):
    tau, kernel, weight = 0.7, randn(3, 3, 3).requires_grad_(), randn(3, 3, 3, seed=1)
    torch.manual_seed(4)
    found = ops.gumbel_kernel(kernel, tau, straight_through)
    torch.manual_seed(4)
    soft = gumbel_sample(kernel, tau)
    used = (soft == soft.amax((1, 2), keepdim=True)).double() if straight_through else soft
    assert_close(found, kernel * used, 1e-12)
    (grad,) = torch.autograd.grad((found * weight).sum(), kernel)
    wanted = weight * used
    for head in range(3):
        p, upstream = soft[head].flatten().tolist(), (weight * kernel.detach())[head].flatten().tolist()
        for i in range(9):
            through = sum(upstream[j] * p[j] * ((i == j) - p[i]) / tau for j in range(9))
            wanted[head].view(-1)[i] += through
    assert_close(grad, wanted, 1e-11)


def test_onehot_kernel_points_at_the_entry_that_hard_kernel_keeps():
    kernel = randn(4, 5, 5)
    offset, weight = ops.onehot_kernel(kernel)
    hard = ops.hard_kernel(kernel)
    assert (hard != 0).flatten(1).sum(1).tolist() == [1] * 4
    for i, (dy, dx) in enumerate(offset.tolist()):
        assert hard[i, 2 + dy, 2 + dx] == weight[i] == kernel[i].max()
    q, k, v = make_qkv(T=12, D=8, heads=4)
    assert_close(ops.aft_onehot(q, k, v, offset, weight, (3, 4)), ops.aft_conv(q, k, v, hard, (3, 4)), 1e-12)


REJECTED = [
    (lambda: ops.local_bias(randn(3, 4), 2), 'bias must be square'),
    (lambda: ops.local_bias(randn(3, 3), 0), 'window must be at least 1'),
    (lambda: ops.factorized_bias(randn(3, 4), randn(4, 4)), r'must both have shape \(T, d\)'),
    (lambda: ops.standardized_kernel(randn(3, 5, 5), randn(2), randn(3)), 'must agree in h'),
    (lambda: ops.kernel_entropy(randn(3, 5)), r'kernel must have shape \(h, s, s\), got \[3, 5\]'),
    (lambda: ops.gumbel_kernel(randn(3, 5, 5), tau=0.0), 'tau must be positive, got 0.0'),
]


@pytest.mark.parametrize(('call', 'message'), REJECTED, ids=[message for _, message in REJECTED])
def test_a_wrong_input_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
