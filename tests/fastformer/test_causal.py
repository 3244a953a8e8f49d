"""A decoder's attentions: against loops, against the encoder on each prefix, step by step, in all precisions."""

from itertools import product

import numpy as np
import pytest
import torch
from helpers import BOUNDS, assert_close, generator, randn
from torch import Tensor, nn
from torch.nn import functional as F

from aft_vision.fastformer import FastformerConfig, reference
from aft_vision.fastformer.additive import FastformerAttention
from aft_vision.fastformer.causal import (
    AdditiveCrossAttention,
    AttentionState,
    CausalFastformerAttention,
    DotProductCrossAttention,
)

C, HEADS = 6, 3
SCORES = (('per_head', False), ('dense', False), ('per_head', True))
INTERACTIONS = ('multiply', 'add', 'concat')
CAUSAL = ('streaming', 'exact')


def make_attention(
    cls: type = CausalFastformerAttention, dtype: torch.dtype = torch.float64, **kwargs: object
) -> tuple[FastformerConfig, nn.Module]:
    """An attention whose weights are large enough for all terms to matter."""
    config = FastformerConfig(**{'hidden_size': C, 'num_attention_heads': HEADS, **kwargs})
    module = cls(config).double()
    for i, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(randn(*parameter.shape, seed=i, scale=0.6).bfloat16())
    return config, module.to(dtype)


def make_mask(B: int, N: int) -> Tensor:
    """A mask with holes; the second row begins with tokens that do not count, the last has none."""
    mask = torch.rand(B, N, generator=generator(3)) > 0.4
    mask[:, -2], mask[1, :2], mask[-1] = True, False, False
    return mask


def assert_gradients_equal(y: Tensor, expected: Tensor, leaves: dict[str, Tensor]) -> None:
    weight = randn(*y.shape, seed=60)
    found = torch.autograd.grad(y, list(leaves.values()), weight)
    wanted = torch.autograd.grad(expected, list(leaves.values()), weight)
    for name, got, want in zip(leaves, found, wanted, strict=True):
        assert_close(got, want, 1e-10, f'grad {name}', floor=1e-6)


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
@pytest.mark.parametrize('interaction', INTERACTIONS)
@pytest.mark.parametrize(('score', 'share_heads'), SCORES)
def test_streaming_equals_the_loops_in_value_and_gradients(score, share_heads, interaction, masked):
    switches = dict(score=score, share_heads=share_heads, interaction=interaction)
    config, module = make_attention(**switches, share_query_value=masked, use_output_proj=not masked)
    x, parameters = randn(3, 5, C, seed=50).requires_grad_(), dict(module.named_parameters())
    mask = make_mask(3, 5) if masked else None
    rows = torch.ones(3, 5, dtype=torch.bool) if mask is None else mask
    expected = torch.stack([reference.stream_one(config, parameters, *row) for row in zip(x, rows, strict=True)])
    y = module(x, mask)[0]
    assert_close(y, expected, 1e-12)
    assert_gradients_equal(y, expected, {'x': x, **parameters})


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
@pytest.mark.parametrize('interaction', INTERACTIONS)
@pytest.mark.parametrize(('score', 'share_heads'), SCORES)
def test_exact_equals_the_encoders_layer_on_every_prefix(score, share_heads, interaction, masked):
    config, module = make_attention(causal='exact', score=score, share_heads=share_heads, interaction=interaction)
    layer = FastformerAttention(config).double()
    layer.load_state_dict(module.state_dict())
    # Both ways of the encoder: prefixes shorter and longer than C.
    N = 2 * C
    x, mask = randn(3, N, C, seed=50).requires_grad_(), make_mask(3, N) if masked else None
    prefixes = [layer(x[:, :n], None if mask is None else mask[:, :n])[0][:, -1] for n in range(1, N + 1)]
    y, expected = module(x, mask)[0], torch.stack(prefixes, 1)
    assert_close(y[:, -1], prefixes[-1], 1e-10, 'last token')
    assert_close(y, expected, 1e-10)
    weight = randn(*y.shape, seed=60)
    found = torch.autograd.grad(y, [x, *module.parameters()], weight)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], weight)
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, 1e-9, floor=1e-6)


def test_streaming_differs_from_exact_behind_the_first_token():
    x = randn(1, 6, C)
    streaming, exact = (make_attention(causal=causal)[1](x)[0] for causal in CAUSAL)
    assert_close(streaming[:, 0], exact[:, 0], 1e-12)
    assert ((streaming - exact).norm(dim=-1) / exact.norm(dim=-1))[0, 1:].min() > 1e-3


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
@pytest.mark.parametrize(
    ('causal', 'score', 'interaction'), list(product(CAUSAL, ('per_head', 'dense'), ('multiply', 'concat')))
)
def test_steps_and_blocks_equal_the_whole(causal: str, score: str, interaction: str, masked: bool):
    module = make_attention(causal=causal, score=score, interaction=interaction)[1]
    x, mask = randn(3, 20, C), make_mask(3, 20) if masked else None
    expected = module(x, mask)[0]
    for ends in (range(1, 21), (3, 4, 18, 20)):
        start, state, found = 0, None, []
        for end in ends:
            y, state = module(x[:, start:end], None if mask is None else mask[:, :end], state)
            found.append(y)
            start = end
        assert_close(torch.cat(found, 1), expected, 1e-11)


@pytest.mark.parametrize(('causal', 'growth'), [('streaming', 0), ('exact', C)])
def test_a_state_keeps_nothing_of_a_token_but_its_exact_key(causal: str, growth: int):
    module, x = make_attention(causal=causal)[1], randn(1, 9, C)
    state, sizes = None, []
    for n in range(9):
        state = module(x[:, n : n + 1], None, state)[1]
        sizes.append(kept(state))
    assert np.diff(sizes).tolist() == [growth] * 8
    # Of a whole text, no more is kept in memory than of its tokens one by one.
    assert kept(module(x)[1]) == sizes[-1]


def kept(state: AttentionState) -> int:
    """Numbers that a state keeps in memory, whatever its tensors show of them."""
    return sum(part.untyped_storage().nbytes() // part.element_size() for part in state)


@pytest.mark.parametrize('score', ['per_head', 'dense'])
@pytest.mark.parametrize('causal', CAUSAL)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_in_a_lower_precision_is_near_float64(dtype: torch.dtype, causal: str, score: str):
    module = make_attention(causal=causal, score=score)[1]
    x, weight = (randn(3, 20, C, seed=seed).bfloat16().double() for seed in (0, 1))
    mask, wide, narrow = make_mask(3, 20), x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    y = module(wide, mask)[0]
    expected = [y, *torch.autograd.grad(y, [wide, *module.parameters()], weight)]
    y, state = module.to(dtype)(narrow, mask)
    assert y.dtype == dtype
    assert state.queries.dtype == torch.float32
    found = [y, *torch.autograd.grad(y, [narrow, *module.parameters()], weight.to(dtype))]
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert_close(got, want, BOUNDS[dtype][min(i, 1)], f'result {i}')


@pytest.mark.parametrize('causal', CAUSAL)
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_attention_under_autocast_is_near_float32(dtype: torch.dtype, causal: str):
    module = make_attention(dtype=torch.float32, causal=causal)[1]
    x = randn(3, 20, C, dtype=torch.float32).requires_grad_()
    expected = module(x)[0]
    with torch.autocast('cpu', dtype):
        y = module(x)[0]
        step = module(x[:, 19:], None, module(x[:, :19])[1])[0]
    assert_close(step, expected[:, 19:], BOUNDS[dtype][0])
    y.float().sum().backward()
    assert_close(y, expected, BOUNDS[dtype][0])
    assert all(torch.isfinite(p.grad).all() for p in [x, *module.parameters()])


@pytest.mark.parametrize('causal', CAUSAL)
def test_large_scores_leave_value_and_gradients_finite(causal: str):
    module = make_attention(dtype=torch.float32, causal=causal)[1]
    with torch.no_grad():
        module.query_score.mul_(1e4)
        module.key_score.mul_(1e4)
    x = randn(3, 40, C, dtype=torch.float32).requires_grad_()
    y = module(x, make_mask(3, 40))[0]
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(p.grad).all() for p in [x, *module.parameters()])


@pytest.mark.parametrize('masked', [False, True], ids=['all', 'masked'])
@pytest.mark.parametrize(('score', 'share_heads'), SCORES)
def test_additive_reading_equals_the_loops_in_value_and_gradients(score, share_heads, masked):
    config, module = make_attention(
        AdditiveCrossAttention, score=score, share_heads=share_heads, share_query_value=masked
    )
    x, source = randn(3, 4, C, seed=50).requires_grad_(), randn(3, 6, C, seed=51).requires_grad_()
    mask, source_mask = (make_mask(3, 4), make_mask(3, 6)) if masked else (None, None)
    rows = [
        torch.ones(y.shape[:2], dtype=torch.bool) if m is None else m for y, m in ((x, mask), (source, source_mask))
    ]
    parameters = dict(module.named_parameters())
    texts = zip(x, source, *rows, strict=True)
    expected = torch.stack([reference.read_one(config, parameters, *text) for text in texts])
    y = module(x, module.project(source), source_mask, mask)[0]
    assert_close(y, expected, 1e-12)
    assert_gradients_equal(y, expected, {'x': x, 'source': source, **parameters})


def test_dot_product_reading_is_multi_head_attention():
    module = make_attention(DotProductCrossAttention)[1]
    x, source, mask = randn(3, 4, C), randn(3, 6, C, seed=1), make_mask(3, 6)
    parts = (module.query, module.key, module.value)
    expected = F.multi_head_attention_forward(
        *(x.transpose(0, 1), source.transpose(0, 1), source.transpose(0, 1)),
        *(C, HEADS, torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])),
        *(None, None, False, 0.0, module.proj.weight, module.proj.bias),
        key_padding_mask=~mask,
        need_weights=False,
    )[0].transpose(0, 1)
    y = module(x, module.project(source), mask)[0]
    assert_close(y[:2], expected[:2], 1e-12)
    # A source without a token gives nothing.
    assert_close(y[2], module.proj.bias.expand(4, C), 1e-12)
