"""Additive attention against the loops of the reference, its parameter counts, masks and dtypes."""

import pytest
import torch
from helpers import BOUNDS, assert_close, generator, randn
from torch import Tensor, nn
from torch.nn import functional as F

from aft_vision.fastformer import FastformerConfig, reference
from aft_vision.fastformer.additive import AdditivePooling, FastformerAttention, additive_pool, masked_softmax

C, HEADS = 6, 3
SCORES = (('per_head', False), ('dense', False), ('per_head', True))
# Shorter and longer than C: token by token, and composed.
LENGTHS = (4, 7)


def make_attention(dtype: torch.dtype = torch.float64, **kwargs: object) -> tuple[FastformerConfig, nn.Module]:
    """An attention whose weights are large enough for all terms to matter."""
    config = FastformerConfig(**{'hidden_size': C, 'num_attention_heads': HEADS, **kwargs})
    module = FastformerAttention(config).double()
    for i, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(randn(*parameter.shape, seed=i, scale=0.6).bfloat16())
    return config, module.to(dtype)


def make_mask(B: int, N: int) -> Tensor:
    """A mask with holes; the last text has no token."""
    mask = torch.rand(B, N, generator=generator(3)) > 0.4
    mask[:, 1], mask[-1] = True, False
    return mask


@pytest.mark.parametrize(
    ('N', 'masked', 'share'),
    [(LENGTHS[0], True, True), (LENGTHS[0], False, False), (LENGTHS[1], True, False), (LENGTHS[1], False, True)],
)
@pytest.mark.parametrize('interaction', ['multiply', 'add', 'concat'])
@pytest.mark.parametrize(('score', 'share_heads'), SCORES)
def test_attention_equals_the_loops_in_value_and_gradients(score, share_heads, interaction, share, N, masked):
    switches = dict(score=score, share_heads=share_heads, interaction=interaction)
    config, module = make_attention(**switches, share_query_value=share, use_output_proj=share ^ masked)
    assert_equals_the_loops(config, module, N, masked)


@pytest.mark.parametrize('share', [True, False], ids=['qv', 'q_v'])
@pytest.mark.parametrize('interaction', ['multiply', 'add', 'concat'])
@pytest.mark.parametrize(('score', 'share_heads'), SCORES)
def test_attention_that_calls_its_linear_layers_equals_the_loops(score, share_heads, interaction, share):
    switches = dict(score=score, share_heads=share_heads, interaction=interaction)
    config, module = make_attention(**switches, share_query_value=share, use_output_proj=share)
    called = []
    module.key.register_forward_hook(lambda *_: called.append(1))
    assert_equals_the_loops(config, module, LENGTHS[1], masked=True)
    assert called == [1]


def assert_equals_the_loops(config: FastformerConfig, module: nn.Module, N: int, masked: bool) -> None:
    x = randn(3, N, C, seed=50).requires_grad_()
    mask = make_mask(3, N) if masked else None
    leaves = {'x': x, **dict(module.named_parameters())}
    y, expected = module(x, mask)[0], reference.attention(config, module, x, mask)
    assert_close(y, expected, 1e-12, 'output')
    weight = randn(*y.shape, seed=60)
    found = torch.autograd.grad(y, list(leaves.values()), weight)
    wanted = torch.autograd.grad(expected, list(leaves.values()), weight)
    for name, got, want in zip(leaves, found, wanted, strict=True):
        assert_close(got, want, 1e-10, f'grad {name}', floor=1e-6)


@pytest.mark.parametrize('N', LENGTHS)
def test_attention_returns_weights_that_sum_to_one_over_the_tokens_that_count(N: int):
    module = make_attention()[1]
    mask = make_mask(3, N)
    for weights in module(randn(3, N, C), mask)[1:]:
        assert weights.shape == (3, HEADS, N)
        assert_close(weights.sum(-1), mask.any(1, keepdim=True).expand(3, HEADS).double(), 1e-12)
        assert not weights.masked_select(~mask[:, None].expand_as(weights)).any()


@pytest.mark.parametrize(('N', 'hooked'), [(LENGTHS[0], False), (LENGTHS[1], False), (LENGTHS[1], True)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_in_a_lower_precision_is_near_float64(dtype: torch.dtype, N: int, hooked: bool):
    config, module = make_attention()
    if hooked:
        module.query.register_forward_hook(lambda *_: None)
    x, weight = (randn(3, N, C, seed=seed).bfloat16().double() for seed in (0, 1))
    mask, wide, narrow = make_mask(3, N), x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    y = reference.attention(config, module, wide, mask)
    expected = [y, *torch.autograd.grad(y, [wide, *module.parameters()], weight)]
    y = module.to(dtype)(narrow, mask)[0]
    assert y.dtype == dtype
    found = [y, *torch.autograd.grad(y, [narrow, *module.parameters()], weight.to(dtype))]
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert_close(got, want, BOUNDS[dtype][min(i, 1)], f'result {i}')


@pytest.mark.parametrize('N', LENGTHS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_scores_leave_value_and_gradients_finite(dtype: torch.dtype, N: int):
    module = make_attention(dtype)[1]
    with torch.no_grad():
        module.query_score.mul_(1e4)
    x = randn(2, N, C, dtype=dtype).requires_grad_()
    y = module(x, make_mask(2, N))[0]
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in [x, *module.parameters()])


@pytest.mark.parametrize(
    ('switches', 'count'),
    [
        ({}, 3 * 256**2 + 2 * 256),
        (dict(share_query_value=False), 4 * 256**2 + 2 * 256),
        (dict(score='dense'), 3 * 256**2 + 2 * 16 * 256),
        (dict(share_heads=True), 256**2 + 2 * 16 * 256 + 2 * 16),
        (dict(interaction='concat'), 3 * 256**2 + 2 * 256 + 2 * 16 * 16 * 32),
        (dict(use_output_proj=True), 4 * 256**2 + 2 * 256),
    ],
    ids=str,
)
def test_attention_has_the_stated_number_of_parameters(switches: dict[str, object], count: int):
    module = FastformerAttention(FastformerConfig(**{'use_output_proj': False, **switches}))
    assert sum(p.numel() for name, p in module.named_parameters() if not name.endswith('bias')) == count


class Recorded(nn.Module):
    """A linear layer behind dropout, as adapters have it, that keeps what it returned."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.returned = base, []

    def forward(self, x: Tensor) -> Tensor:
        self.returned.append(self.base(F.dropout(x, 0.5)))
        return self.returned[-1]


@pytest.mark.parametrize('N', LENGTHS)
def test_dropout_in_an_adapter_is_drawn_once_for_each_token(monkeypatch, N: int):
    config, module = make_attention()
    module.query, module.key = Recorded(module.query), Recorded(module.key)
    x, mask = randn(3, N, C).requires_grad_(), make_mask(3, N)
    torch.manual_seed(0)
    y = module(x, mask)[0]
    drawn = {name: getattr(module, name).returned for name in ('query', 'key')}
    assert [len(calls) for calls in drawn.values()] == [1, 1]
    rows = {name: iter(calls[0].unflatten(-1, (HEADS, -1))) for name, calls in drawn.items()}
    monkeypatch.setattr(reference, 'linear', lambda x, p, name, heads: next(rows[name]))
    expected = reference.attention(config, module, x, mask)
    assert_close(y, expected, 1e-12)
    (found,), (wanted,) = (torch.autograd.grad(z.square().sum(), x, retain_graph=True) for z in (y, expected))
    assert_close(found, wanted, 1e-10)


HOOKS = ('register_forward_pre_hook', 'register_forward_hook', 'register_full_backward_pre_hook')


@pytest.mark.parametrize('hook', [*HOOKS, 'register_full_backward_hook'])
@pytest.mark.parametrize('name', ['query', 'key', 'value', 'transform', 'proj'])
def test_a_hook_on_a_linear_layer_fires_once_and_changes_nothing(name: str, hook: str):
    module, x = make_attention(share_query_value=False)[1], randn(2, LENGTHS[1], C).requires_grad_()
    expected, fired = module(x)[0], []
    getattr(getattr(module, name), hook)(lambda *_: fired.append(name))
    y = module(x)[0]
    y.sum().backward()
    assert_close(y, expected, 1e-12)
    assert fired == [name]


def test_a_replaced_forward_of_a_linear_layer_is_called(monkeypatch):
    module, x = make_attention()[1], randn(2, LENGTHS[1], C)
    monkeypatch.setattr(module.key, 'forward', lambda x: torch.zeros_like(x))
    changed = module(x)[0]
    monkeypatch.undo()
    with torch.no_grad():
        module.key.weight.zero_()
        module.key.bias.zero_()
    assert_close(changed, module(x)[0], 1e-12)


def test_masked_softmax_of_nothing_is_zero_with_zero_gradients():
    scores = randn(2, 1, 4).requires_grad_()
    mask = torch.tensor([[True, False, True, False], [False] * 4])
    weights = masked_softmax(scores, mask)
    (grad,) = torch.autograd.grad(weights.square().sum(), scores)
    assert_close(weights[0, 0, [0, 2]], scores[0, 0, [0, 2]].softmax(0), 1e-12)
    assert not weights[1].any()
    assert not grad[1].any()
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(('dtype', 'large', 'gap'), [(torch.float16, 60000.0, 32.0), (torch.bfloat16, 1e38, 1e36)])
def test_masked_softmax_is_float32_and_finite_at_the_edge_of_half_precision(dtype, large: float, gap: float):
    scores = torch.tensor([[[large, large - gap, -large]]]).to(dtype)
    weights = masked_softmax(scores, torch.tensor([[True, True, False]]))
    assert weights.dtype == torch.float32
    assert_close(weights, torch.tensor([[[1.0, 0.0, 0.0]]]), 1e-6)


def test_additive_pool_is_the_weighted_mean():
    x, direction, mask = randn(2, 5, C), randn(2, HEADS, C, seed=1), make_mask(2, 5)
    weights, mean = additive_pool(x, direction, mask)
    for h in range(HEADS):
        alpha = reference.softmax(x[0] @ direction[0, h], mask[0])
        assert_close(weights[0, h], alpha, 1e-12)
        assert_close(mean[0, h], (alpha[:, None] * x[0]).sum(0), 1e-12)
    assert not mean[1].any()


def test_additive_pool_has_first_and_second_derivatives():
    inputs = (randn(2, 4, 3).requires_grad_(), randn(2, 2, 3, seed=1).requires_grad_(), make_mask(2, 4))
    assert torch.autograd.gradcheck(additive_pool, inputs)
    assert torch.autograd.gradgradcheck(additive_pool, inputs)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_a_long_text_keeps_its_states_and_two_weights_a_head_for_the_backward_pass(dtype: torch.dtype):
    module = make_attention(dtype)[1]
    kept = []
    for N in (100, 300):
        tensors: dict[int, int] = {}

        def keep(x: Tensor, tensors: dict[int, int] = tensors) -> Tensor:
            tensors[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = module(randn(2, N, C, dtype=dtype).requires_grad_())
        kept.append(sum(tensors.values()))
        del y
    assert kept[1] - kept[0] == 2 * 200 * (C * dtype.itemsize + 2 * HEADS * 4)


def test_pooling_equals_its_formula_and_is_zero_for_an_empty_text():
    pool = AdditivePooling(FastformerConfig(hidden_size=C, num_attention_heads=HEADS, pooling_hidden_size=7)).double()
    x, mask = randn(2, 5, C), make_mask(2, 5)
    y = pool(x, mask)
    scores = torch.tanh(x[0] @ pool.hidden.weight.T + pool.hidden.bias) @ pool.score.weight[0]
    assert_close(y[0], reference.softmax(scores, mask[0]) @ x[0], 1e-12)
    assert not y[1].any()
