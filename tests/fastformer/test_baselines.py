import math

import pytest
import torch
from helpers import BOUNDS, assert_close, randn
from torch import Tensor
from transformers import BertConfig, BertModel, LongformerConfig, LongformerModel

from aft_vision.fastformer import FastformerConfig, FastformerForSequenceClassification, baselines
from aft_vision.fastformer.encoder import ENCODERS, create_encoder

BASELINES = ('bigbird', 'linear_transformer', 'linformer', 'longformer', 'poolingformer', 'transformer')
SIZES = dict(vocab_size=20, hidden_size=8, num_attention_heads=2)
WINDOWS = dict(attention_window=4, num_global_tokens=2, num_random_tokens=2, block_size=2, linformer_dim=3)
SMALL = SIZES | WINDOWS | dict(max_position_embeddings=64, poolingformer_window=4, poolingformer_second_window=16)
LENGTHS = (23, 6, 1)


def encoder(mixer: str, **more) -> torch.nn.Module:
    torch.manual_seed(0)
    model = create_encoder(FastformerConfig(encoder_mixer=mixer, **{**SMALL, **more}))
    return model.to(dtype_of(mixer)).eval()


def dtype_of(mixer: str) -> torch.dtype:
    """transformers' Longformer takes its softmax in float32, where the lowest float64 is minus infinity."""
    return torch.float32 if mixer == 'longformer' else torch.float64


def tokens(mixer: str, *shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, 8, seed=seed, dtype=dtype_of(mixer))


def padding(tokens: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


@pytest.fixture(params=BASELINES)
def mixer(request) -> str:
    return request.param


def test_every_baseline_of_table_4_is_registered():
    assert set(BASELINES) <= ENCODERS.keys()
    assert baselines.BaselineEncoder not in ENCODERS.values()


def test_a_row_of_a_batch_is_what_it_is_alone(mixer):
    model = encoder(mixer)
    x, mask = tokens(mixer, 3, 23), padding(23)
    together = model(x, mask).last_hidden_state
    for row, length in enumerate(LENGTHS):
        alone = model(x[row, None, :length]).last_hidden_state
        assert_close(together[row, None, :length], alone, BOUNDS[dtype_of(mixer)][0])


def test_a_full_mask_is_no_mask(mixer):
    model = encoder(mixer)
    x = tokens(mixer, 2, 24)
    everything = torch.ones(2, 24, dtype=torch.bool)
    assert_close(model(x, everything).last_hidden_state, model(x).last_hidden_state, BOUNDS[dtype_of(mixer)][0])


def test_gradients_reach_every_parameter_and_no_padding(mixer):
    model = encoder(mixer)
    x, mask = tokens(mixer, 3, 23).requires_grad_(), padding(23)
    y = model(x, mask).last_hidden_state
    (y * mask[..., None] * randn(*y.shape, seed=3)).sum().backward()
    assert not x.grad[~mask].any()
    assert (x.grad[mask] != 0).all()
    for name, parameter in model.named_parameters():
        # A bias of all keys adds the same to all scores of a query, but for the kernel of the Linear Transformer and
        # for sums of keys.
        idle = name.endswith('key.bias') or name.endswith('key_global.bias')
        assert parameter.grad is not None, name
        assert idle or parameter.grad.abs().max() > 1e-9, name


def test_information_crosses_the_row(mixer):
    # With two layers, a global token, a sum over all, or two levels of windows reach from the first to the last.
    model = encoder(mixer)
    x = tokens(mixer, 1, 23).requires_grad_()
    (model(x).last_hidden_state[0, -1] * randn(8, seed=3)).sum().backward()
    assert x.grad[0, 0].abs().max() > 1e-8


def test_the_hidden_states_are_those_of_all_layers_at_the_length_of_the_input(mixer):
    model = encoder(mixer, num_hidden_layers=3)
    x, mask = tokens(mixer, 3, 23), padding(23)
    output = model(x, mask, output_hidden_states=True)
    assert [state.shape for state in output.hidden_states] == [x.shape] * 4
    assert_close(output.hidden_states[0], x, 0)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


def test_a_row_without_tokens_is_finite_in_value_and_gradient(mixer):
    model = encoder(mixer).float()
    x, mask = randn(3, 23, 8, dtype=torch.float32).requires_grad_(), padding(23, (23, 4, 0))
    y = model(x, mask).last_hidden_state
    y[mask].sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert not x.grad[2].any()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_finite_and_near(mixer, dtype):
    model = encoder(mixer)
    x, mask = tokens(mixer, 3, 23), padding(23)
    expected = model(x, mask).last_hidden_state[mask]
    y = model.to(dtype)(x.to(dtype), mask).last_hidden_state[mask]
    assert_close(y, expected, 3e-2)  # of two layers, so more than the 2e-2 of one op


def test_the_transformer_is_bert_fused_or_with_its_weights():
    fused, eager = encoder('transformer'), encoder('transformer', attn_implementation='eager')
    config = BertConfig(**SIZES, num_hidden_layers=2, intermediate_size=8, attn_implementation='eager')
    bert = BertModel(config, add_pooling_layer=False).double().eval().encoder
    bert.load_state_dict(fused.state_dict())
    x, mask = randn(3, 23, 8), padding(23)
    low = torch.zeros(3, 1, 1, 23, dtype=torch.double).masked_fill(~mask[:, None, None], -1e300)
    expected = bert(x, attention_mask=low).last_hidden_state[mask]
    assert_close(fused(x, mask).last_hidden_state[mask], expected, 1e-10)
    output = eager(x, mask, output_attentions=True)
    assert_close(output.last_hidden_state[mask], expected, 1e-10)
    assert [weights.shape for weights in output.attentions] == [(3, 2, 23, 23)] * 2
    assert_close(output.attentions[0].sum(-1), torch.ones(3, 2, 23), 1e-10)
    assert not output.attentions[0][1, :, :, 6:].any()


def test_the_attention_of_the_transformer_can_be_chosen_later():
    torch.manual_seed(0)
    model = FastformerForSequenceClassification(FastformerConfig(encoder_mixer='transformer', **SMALL)).double().eval()
    ids = torch.randint(1, 20, (3, 23))
    fused = model(ids, attention_mask=padding(23).long()).logits
    with pytest.raises(ValueError, match='keeps no weights'):
        model(ids, output_attentions=True)
    model.set_attn_implementation('eager')
    output = model(ids, attention_mask=padding(23).long(), output_attentions=True)
    assert [weights.shape for weights in output.attentions] == [(3, 2, 23, 23)] * 2
    assert_close(output.logits, fused, 1e-10)
    model.set_attn_implementation('sdpa')
    assert torch.equal(model(ids, attention_mask=padding(23).long()).logits, fused)


def test_longformer_is_that_of_transformers_with_its_first_tokens_global():
    model = encoder('longformer')
    lengths = dict(attention_window=4, max_position_embeddings=64)
    config = LongformerConfig(**SIZES, num_hidden_layers=2, intermediate_size=8, **lengths)
    longformer = LongformerModel(config, add_pooling_layer=False).eval()
    longformer.encoder.load_state_dict(model.state_dict())
    longformer.embeddings.forward = lambda inputs_embeds=None, **_: inputs_embeds
    x, mask = tokens('longformer', 3, 24), padding(24)
    is_global = (torch.arange(24) < 2).expand(3, -1).long()
    expected = longformer(inputs_embeds=x, attention_mask=mask.long(), global_attention_mask=is_global)
    assert_close(model(x, mask).last_hidden_state[mask], expected.last_hidden_state[mask], 1e-5)


def naive_poolingformer(attention: torch.nn.Module, x: Tensor, mask: Tensor, config: FastformerConfig) -> Tensor:
    """The two levels of Poolingformer, one query at a time."""
    B, _, C = x.shape
    heads, half = config.num_attention_heads, config.poolingformer_window // 2
    kernel, stride = config.poolingformer_kernel, config.poolingformer_stride
    second_half = config.poolingformer_second_window // stride // 2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        weight = torch.softmax(torch.einsum('hd,jhd->hj', q, k) / math.sqrt(C // heads), -1)
        return torch.einsum('hj,jhd->hd', weight, v).flatten()

    result = torch.zeros_like(x)
    for b in range(B):
        row = x[b, mask[b]]
        length = len(row)
        first = torch.stack(
            [
                attend(attention.query(row[i]), attention.key(row[near]), attention.value(row[near]))
                for i in range(length)
                for near in [slice(max(i - half, 0), i + half + 1)]
            ]
        )
        pooled_k, pooled_v = (
            torch.stack([linear(first)[j : j + kernel].mean(0) for j in range(0, length, stride)])
            for linear in (attention.pooled_key, attention.pooled_value)
        )
        for i in range(length):
            group = i // stride
            near = slice(max(group - second_half, 0), group + second_half + 1)
            result[b, i] = first[i] + attend(attention.pooled_query(first[i]), pooled_k[near], pooled_v[near])
    return result


def test_poolingformer_is_its_two_levels_in_value_and_gradient():
    model = encoder('poolingformer', poolingformer_second_window=8)
    attention = model.layer[0].attention.self
    mask = padding(24)
    x = randn(3, 24, 8)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    found = attention(inputs[0], mask)[0] * mask[..., None]
    expected = naive_poolingformer(attention, inputs[1], mask, model.config)
    assert_close(found, expected, 1e-10)
    weight = randn(*x.shape, seed=4)
    leaves = [*attention.parameters()]
    got = torch.autograd.grad(found, [inputs[0], *leaves], weight)
    wanted = torch.autograd.grad(expected, [inputs[1], *leaves], weight)
    for g, w in zip(got, wanted, strict=True):
        # The biases of keys have no gradient, of which rounding leaves 1e-16.
        assert_close(g, w, 1e-9, floor=1e-3)


def test_a_text_longer_than_linformer_projects_is_an_error():
    with pytest.raises(ValueError, match=r'at most max_position_embeddings \(64\) tokens, got 65'):
        encoder('linformer')(randn(1, 65, 8))


@pytest.mark.parametrize(
    ('mixer', 'more', 'message'),
    [
        ('poolingformer', dict(poolingformer_window=5), 'got 5 and 16'),
        ('poolingformer', dict(poolingformer_second_window=12), 'multiple of 2 .* .8., got 4 and 12'),
    ],
)
def test_windows_that_cannot_be_halved_are_an_error(mixer, more, message):
    with pytest.raises(ValueError, match=message):
        encoder(mixer, **more)


def test_weights_that_nobody_keeps_are_an_error():
    with pytest.raises(ValueError, match='LinformerEncoder keeps no weights'):
        encoder('linformer')(randn(1, 4, 8), output_attentions=True)


@pytest.mark.parametrize(
    ('mixer', 'extra'),
    [('transformer', 0), ('longformer', 3), ('bigbird', 0), ('linear_transformer', 0), ('poolingformer', 3)],
)
def test_baselines_have_the_parameters_of_their_projections(mixer, extra):
    # Four projections, those beside, the feed-forward network and two norms.
    C = 8
    layer = (4 + extra) * (C * C + C) + 2 * (C * C + C) + 2 * 2 * C
    assert sum(p.numel() for p in encoder(mixer).parameters()) == 2 * layer
    assert sum(p.numel() for p in encoder('linformer').parameters()) == 2 * (6 * (C * C + C) + 4 * C + 2 * 3 * 64)
