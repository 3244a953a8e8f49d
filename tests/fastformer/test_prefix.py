"""The means of prefixes against the quadratic form in float64: values, gradients, states, and scores at the edge."""

import pytest
import torch
from helpers import NASTY_BOUND, assert_close, generator, randn
from torch import Tensor
from torch.autograd import forward_ad

from aft_vision.fastformer import reference
from aft_vision.fastformer.prefix import CHUNK, prefix_softmax_mean

B, HEADS, WIDTH = 2, 3, 4
# One chunk, whole chunks, a part of one, and chunks of chunks.
LENGTHS = (1, CHUNK, CHUNK + 1, 3 * CHUNK, CHUNK**2 + 2 * CHUNK + 3)


def make_inputs(N: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return randn(B, HEADS, N, WIDTH, dtype=dtype), randn(B, HEADS, N, seed=1, scale=scale, dtype=dtype)


def make_mask(N: int) -> Tensor:
    """A mask with holes; the second row begins with tokens that do not count."""
    mask = torch.rand(B, N, generator=generator(3)) > 0.4
    mask[1, : N // 2] = False
    return mask


def quadratic(x: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """The means, from all pairs of tokens."""
    allowed = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()[None, None]
    if mask is not None:
        allowed = allowed & mask[:, None, None]
    pairs = scores[:, :, None].masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return pairs.softmax(-1).masked_fill(~allowed, 0.0) @ x


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
@pytest.mark.parametrize('N', LENGTHS)
def test_means_and_gradients_equal_the_quadratic_form(N: int, masked: bool):
    x, scores = (y.requires_grad_() for y in make_inputs(N, scale=5.0))
    mask = make_mask(N) if masked else None
    means, expected = prefix_softmax_mean(x, scores, mask)[0], quadratic(x, scores, mask)
    assert_close(means, expected, 1e-12)
    weight = randn(*means.shape, seed=9)
    found = torch.autograd.grad(means, [x, scores], weight)
    for got, want in zip(found, torch.autograd.grad(expected, [x, scores], weight), strict=True):
        assert_close(got, want, 1e-11, floor=1e-6)


def test_the_quadratic_form_equals_the_loops():
    x, scores = make_inputs(6)
    mask = make_mask(6)
    for b in range(B):
        for h in range(HEADS):
            expected = reference.prefix_means(x[b, h], scores[b, h], mask[b])
            assert_close(quadratic(x, scores, mask)[b, h], expected, 1e-12)


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
def test_steps_and_blocks_equal_the_parallel_form(masked: bool):
    N = 2 * CHUNK + 5
    x, scores = make_inputs(N, scale=10.0)
    mask = make_mask(N) if masked else None
    expected, last = prefix_softmax_mean(x, scores, mask)
    for ends in (range(1, N + 1), (1, 4, 4 + CHUNK, N - 1, N)):
        start, state, found = 0, None, []
        for end in ends:
            part = slice(start, end)
            new = None if mask is None else mask[:, part]
            means, state = prefix_softmax_mean(x[:, :, part], scores[:, :, part], new, state)
            found.append(means)
            start = end
        assert_close(torch.cat(found, 2), expected, 1e-12)
        assert_close(state, last, 1e-12)


@pytest.mark.parametrize('N', [1, 4])
def test_gradients_flow_through_a_state(N: int):
    x, scores = (y.requires_grad_() for y in make_inputs(N))
    state = randn(B, HEADS, 1, WIDTH + 1, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *inputs: prefix_softmax_mean(*inputs[:2], None, inputs[2]), (x, scores, state)
    )


@pytest.mark.parametrize('where', [0, CHUNK, 39], ids=['first', 'middle', 'last'])
@pytest.mark.parametrize('spike', [200.0, -200.0])
def test_a_spike_is_finite_and_right(spike: float, where: int):
    x, scores = make_inputs(40, dtype=torch.float32)
    scores[:, :, where] = spike
    low = [x.requires_grad_(), scores.requires_grad_()]
    high = [y.detach().double().requires_grad_() for y in low]
    means, expected = prefix_softmax_mean(*low)[0], quadratic(*high)
    assert_close(means, expected, NASTY_BOUND)
    weight = randn(*means.shape, seed=9).float()
    found = torch.autograd.grad(means, low, weight)
    wanted = torch.autograd.grad(expected, high, weight.double())
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, NASTY_BOUND, floor=wanted[0].norm().item())


@pytest.mark.parametrize('scale', [30.0, 1e4])
def test_scores_far_apart_are_finite_and_right(scale: float):
    x, scores = make_inputs(300, scale, torch.float32)
    expected = quadratic(x.double(), scores.double())
    # Scores of 1e4 are rounded by 5e-4, and the log of their sum with them.
    assert_close(prefix_softmax_mean(x, scores)[0], expected, NASTY_BOUND if scale < 100 else 1e-3)


@pytest.mark.parametrize('N', LENGTHS[1:])
def test_a_changed_future_leaves_the_past_bit_equal(N: int):
    x, scores = make_inputs(N, dtype=torch.float32)
    expected = prefix_softmax_mean(x, scores)[0]
    for first in (1, N // 2, N - 1):
        changed, spiked = x.clone(), scores.clone()
        changed[:, :, first:] *= 100
        spiked[:, :, first:] += 200
        means = prefix_softmax_mean(changed, spiked)[0]
        assert torch.equal(means[:, :, :first], expected[:, :, :first])
        assert not torch.equal(means[:, :, first:], expected[:, :, first:])


def test_a_prefix_without_a_token_is_zero_with_finite_gradients():
    x, scores = (y.requires_grad_() for y in make_inputs(3 * CHUNK))
    mask = torch.ones(B, 3 * CHUNK, dtype=torch.bool)
    mask[0], mask[1, : CHUNK + 2] = False, False
    means, state = prefix_softmax_mean(x, scores, mask)
    grads = torch.autograd.grad(means.square().sum(), [x, scores])
    assert not means[0].any()
    assert not means[1, :, : CHUNK + 2].any()
    assert torch.equal(means[1, :, CHUNK + 2], x[1, :, CHUNK + 2])
    assert all(torch.isfinite(grad).all() and not grad[0].any() and grad[1].any() for grad in grads)
    # The state of nothing is that of no tokens.
    more = prefix_softmax_mean(x[:1, :, :1], scores[:1, :, :1], None, state[:1])[0]
    assert torch.equal(more, x[:1, :, :1])


def test_what_is_kept_for_the_backward_pass_grows_linearly():
    kept = []
    for N in (CHUNK**2, 2 * CHUNK**2, 3 * CHUNK**2):
        sizes: dict[int, int] = {}

        def keep(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        x, scores = make_inputs(N)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            means = prefix_softmax_mean(x.requires_grad_(), scores)[0]
        kept.append(sum(sizes.values()))
        del means
    # Vectors, means, scores and the logs of their sums.
    assert kept[2] - kept[1] == kept[1] - kept[0] == B * HEADS * CHUNK**2 * (2 * WIDTH + 2) * 8


def products(function, x: Tensor, scores: Tensor, directions: tuple[Tensor, Tensor], nested) -> tuple[Tensor, Tensor]:
    """The products of the second derivatives of a sum of cubes and a direction."""

    def loss(x: Tensor, scores: Tensor) -> Tensor:
        return function(x, scores).pow(3).sum()

    first = torch.func.grad(loss, (0, 1))
    if nested == 'forward over reverse':
        return torch.func.jvp(first, (x, scores), directions)[1]
    if nested == 'reverse over reverse':
        return torch.func.grad(
            lambda *at: sum((g * d).sum() for g, d in zip(first(*at), directions, strict=True)), (0, 1)
        )(x, scores)
    at = [y.clone().requires_grad_() for y in (x, scores)]
    gradients = torch.autograd.grad(loss(*at), at, create_graph=True)
    return torch.autograd.grad(gradients, at, directions)


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
@pytest.mark.parametrize('N', [3, CHUNK**2 + 5])
def test_forward_mode_batches_and_second_derivatives_equal_the_quadratic_form(N: int, masked: bool):
    x, scores = make_inputs(N, scale=3.0)
    mask = make_mask(N) if masked else None
    directions = (randn(*x.shape, seed=7), randn(*scores.shape, seed=8))

    def means(x: Tensor, scores: Tensor) -> Tensor:
        return prefix_softmax_mean(x, scores, mask)[0]

    def expected(x: Tensor, scores: Tensor) -> Tensor:
        return quadratic(x, scores, mask)

    change = torch.func.jvp(expected, (x, scores), directions)[1]
    assert_close(torch.func.jvp(means, (x, scores), directions)[1], change, 1e-11)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(y, d) for y, d in zip((x, scores), directions, strict=True)]
        assert_close(forward_ad.unpack_dual(means(*duals)).tangent, change, 1e-11)
    for nested in ('forward over reverse', 'reverse over reverse', 'create_graph'):
        found, wanted = (products(f, x, scores, directions, nested) for f in (means, expected))
        for got, want in zip(found, wanted, strict=True):
            assert_close(got, want, 1e-10, nested, floor=1.0)


def test_a_batch_of_torch_func_equals_the_batch():
    x, scores = make_inputs(CHUNK + 3)
    one = torch.func.vmap(lambda x, scores: prefix_softmax_mean(x[None], scores[None])[0][0], (0, None))
    assert_close(one(x, scores[0]), quadratic(x, scores[:1].expand(B, -1, -1)), 1e-12)
