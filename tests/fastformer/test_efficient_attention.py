import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_matches_reference, randn
from torch import Tensor
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

from aft_vision.fastformer import efficient_attention
from aft_vision.fastformer.efficient_attention import (
    block_attention,
    block_plan,
    full_mask,
    linear_attention,
    pool_tokens,
    projected_attention,
    window_attention,
)

LENGTHS = (24, 17, 5)


def heads(tokens: int = 24, keys: int | None = None, width: int = 4) -> dict[str, Tensor]:
    shapes = {'q': tokens, 'k': keys or tokens, 'v': keys or tokens}
    return {name: randn(3, 2, n, width, seed=seed) for seed, (name, n) in enumerate(shapes.items())}


def padding(tokens: int = 24, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention over the keys that each query may see, one query at a time; 0 where it may see none."""
    rows = []
    for i in range(q.shape[2]):
        score = (q[:, :, i, None] * k).sum(-1) / math.sqrt(q.shape[-1])
        weight = torch.exp(score - score.amax(-1, keepdim=True).detach()) * seen[:, :, i]
        rows.append((weight[..., None] * v).sum(2) / weight.sum(-1, keepdim=True).clamp(min=1e-30))
    return torch.stack(rows, 2)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_linear_attention_is_that_of_its_kernel_term_by_term(dtype):
    def reference(q, k, v, mask):
        q, k = (torch.where(x > 0, x + 1, torch.exp(x)) for x in (q, k))
        weight = torch.einsum('bhid,bhjd->bhij', q, k) * mask[:, None, None, :]
        return torch.einsum('bhij,bhjd->bhid', weight / weight.sum(-1, keepdim=True), v)

    assert_matches_reference(linear_attention, reference, {**heads(), 'mask': padding()}, dtype)


def test_projected_attention_sums_the_keys_and_values_that_count():
    def reference(q, k, v, project_k, project_v, mask):
        slots_k, slots_v = (
            sum(w[:, j, None] * (x[:, :, j] * mask[:, j, None, None])[:, :, None] for j in range(x.shape[2]))
            for w, x in ((project_k, k), (project_v, v))
        )
        return dense(q, slots_k, slots_v, torch.ones(1, 1, q.shape[2], 1))

    def op(q, k, v, project_k, project_v, mask):
        return projected_attention(q, k, v, lambda x: project_k @ x, lambda x: project_v @ x, mask)

    projections = {'project_k': randn(5, 24, seed=7), 'project_v': randn(5, 24, seed=8)}
    assert_matches_reference(op, reference, {**heads(), **projections, 'mask': padding()})


@pytest.mark.parametrize('stride', [1, 3])
def test_window_attention_sees_the_keys_within_half_a_window(stride):
    window = 4
    keys = 24 // stride
    mask = padding(keys, tuple(-(-length // stride) for length in LENGTHS))
    tokens = padding()[:, None, :, None]
    near = (torch.arange(24)[:, None] // stride - torch.arange(keys)).abs() <= window // 2

    def op(q, k, v, mask):
        return window_attention(q, k, v, window, stride, mask).masked_fill(~tokens, 0)

    def reference(q, k, v, mask):
        return dense(q, k, v, near & mask[:, None, None, :]) * tokens

    assert_matches_reference(op, reference, {**heads(keys=keys), 'mask': mask})
    inputs = heads(keys=keys)
    expected = dense(**inputs, seen=near.expand(3, 1, -1, -1))
    assert_close(window_attention(**inputs, window=window, stride=stride), expected, 1e-10)


@pytest.mark.parametrize(('kernel', 'stride'), [(5, 4), (4, 4), (2, 3)])
def test_pooled_tokens_are_the_means_of_what_counts(kernel, stride):
    x, mask = randn(3, 24, 4), padding()
    pooled, counts = pool_tokens(x, kernel, stride, mask)
    everything, none = pool_tokens(x, kernel, stride)
    assert none is None
    for row in range(3):
        for group in range(24 // stride):
            start = group * stride
            inside = x[row, start : start + kernel]
            assert_close(everything[row, group], inside.mean(0), 1e-12)
            inside = x[row, start : min(start + kernel, LENGTHS[row])]
            assert counts[row, group] == (len(inside) > 0)
            assert_close(pooled[row, group], inside.sum(0) / max(len(inside), 1), 1e-12)


def seen_in_blocks(mask: Tensor, size: int, num_global: int, num_random: int) -> Tensor:
    """(B, h, N, N): what each token of BigBird attends to."""
    B, N = mask.shape
    seen = torch.zeros(B, 2, N, N, dtype=torch.bool)
    lengths = torch.tensor([-(-int(row.sum()) // size) for row in mask])
    index, counts = block_plan(lengths, 2, N // size, num_global, num_random)
    for b in range(B):
        for h in range(2):
            for block in range(N // size):
                rows = slice(block * size, (block + 1) * size)
                chosen = index[b, h, block][counts[b, h, block]].tolist() if block >= num_global else range(N // size)
                for other in chosen:
                    seen[b, h, rows, other * size : (other + 1) * size] = True
    return seen & mask[:, None, None, :]


@pytest.mark.parametrize('num_random', [0, 2])
def test_block_attention_sees_the_blocks_of_its_plan(num_random):
    mask = padding(24)
    tokens = mask[:, None, :, None]
    seen = seen_in_blocks(mask, 2, 2, num_random)
    # Not everything: the test is of a sparse attention.
    assert seen[0].double().mean() < 0.8

    def op(q, k, v, mask):
        return block_attention(q, k, v, 2, 2, num_random, mask).masked_fill(~tokens, 0)

    def reference(q, k, v, mask):
        return dense(q, k, v, seen) * tokens

    assert_matches_reference(op, reference, {**heads(), 'mask': mask})


def test_a_plan_has_no_block_twice_and_is_the_same_whatever_the_padding():
    lengths = torch.tensor([40, 9])
    index, counts = block_plan(lengths, heads=4, blocks=40, num_global=2, num_random=3)
    for b, h, block in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(40)).tolist():
        chosen = index[b, h, block][counts[b, h, block]].tolist()
        assert len(chosen) == len(set(chosen))
        assert max(chosen, default=0) < lengths[b]
        if block < lengths[b]:
            assert {0, 1, block} <= set(chosen)
            assert {other for other in (block - 1, block + 1) if 0 <= other < lengths[b]} <= set(chosen)
    short, _ = block_plan(lengths[1:], heads=4, blocks=9, num_global=2, num_random=3)
    used = counts[1, :, :9]
    assert torch.equal(short[0][used], index[1, :, :9][used])


def test_random_blocks_are_spread_over_the_row_and_differ_between_heads_and_layers():
    lengths = torch.tensor([100])
    index, _ = block_plan(lengths, heads=4, blocks=100, num_global=0, num_random=2)
    random = index[..., -2:]
    share = torch.bincount(random.flatten(), minlength=100) / random.numel()
    assert share.max() < 0.02
    assert not torch.equal(random[0, 0], random[0, 1])
    other, _ = block_plan(lengths, heads=4, blocks=100, num_global=0, num_random=2, seed=1)
    assert not torch.equal(random, other[..., -2:])


def test_block_attention_is_that_of_transformers_for_the_same_blocks(monkeypatch):
    # There the first and the last block are global, so the second block of ours stands last: block p of theirs, 0 and
    # the last apart, is p + 1 of ours.
    size, blocks = 2, 10
    config = BigBirdConfig(hidden_size=8, num_attention_heads=2, block_size=size, num_random_blocks=1)
    theirs = BigBirdBlockSparseAttention(config).double()
    random = torch.arange(1, 9).roll(4)[:, None]  # far from the block itself

    def plan(lengths, heads, blocks, num_global, num_random, seed):
        index, counts = block_plan(lengths, heads, blocks, num_global, num_random, seed)
        index[:, :, num_global:, -1:], counts[:, :, num_global:, -1:] = random + 1, True
        return index, counts

    monkeypatch.setattr(theirs, '_bigbird_block_rand_mask_with_head', lambda **_: [random.numpy()] * 2)
    monkeypatch.setattr(efficient_attention, 'block_plan', plan)
    x = randn(3, size * blocks, 8)
    moved = torch.cat([x[:, :size], x[:, 2 * size :], x[:, size : 2 * size]], 1)
    mask = torch.ones(3, size * blocks, dtype=torch.double)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(mask, size)
    expected, _ = theirs(moved, band, rows, columns, blocked, blocked)
    expected = torch.cat([expected[:, :size], expected[:, -size:], expected[:, size:-size]], 1)
    q, k, v = (linear(x).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (theirs.query, theirs.key, theirs.value))
    assert_close(block_attention(q, k, v, size, 2, 1).transpose(1, 2).flatten(2), expected, 1e-10)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_without_tokens_is_finite_and_so_are_its_gradients(dtype):
    mask = padding(24, (24, 3, 0))
    weights = randn(5, 24).to(dtype)
    for attend in (
        linear_attention,
        lambda q, k, v, mask: window_attention(q, k, v, 4, 1, mask),
        lambda q, k, v, mask: block_attention(q, k, v, 2, 2, 2, mask),
        lambda q, k, v, mask: projected_attention(q, k, v, weights.matmul, weights.matmul, mask),
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, full_mask(mask)),
    ):
        inputs = {name: (30 * x).to(dtype).requires_grad_() for name, x in heads().items()}
        y = attend(**inputs, mask=mask)
        assert y.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.float().sum(), list(inputs.values())))
