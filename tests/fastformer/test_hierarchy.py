"""The encoders of texts and of users, against a loop over users, and with nothing to encode."""

import pytest
import torch
from helpers import assert_close, generator, randn
from torch import Tensor
from transformers import AutoModel, BartConfig, BertConfig, GPT2Config, PreTrainedConfig, T5Config

from aft_vision.fastformer import ENCODERS, reference
from aft_vision.fastformer.hierarchy import (
    FastformerHierarchyConfig,
    LanguageModelEncoder,
    UserEncoder,
    create_text_encoder,
    gather_vectors,
)

C, HEADS, VOCAB = 12, 3, 30
BARE = dict(use_output_proj=False, use_residual=False, use_layer_norm=False, use_ffn=False)


def make_config(**kwargs: object) -> FastformerHierarchyConfig:
    small = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=HEADS, max_position_embeddings=20)
    windows = dict(attention_window=4, num_global_tokens=2, num_random_tokens=2, block_size=2, linformer_dim=4)
    small |= dict(**windows, poolingformer_window=4, pooling_hidden_size=6, num_hidden_layers=1, max_behaviors=9)
    return FastformerHierarchyConfig(**{**small, 'initializer_range': 0.3, **kwargs})


def make_user_encoder(**kwargs: object) -> UserEncoder:
    torch.manual_seed(0)
    return UserEncoder(make_config(**kwargs)).double().eval()


def make_mask(B: int, M: int) -> Tensor:
    """Users with 0, 1, 2, ... behaviours."""
    return torch.arange(M) < torch.arange(B)[:, None]


def encode_one(encoder: UserEncoder, config: FastformerHierarchyConfig, x: Tensor) -> Tensor:
    """The vector (C,) of one user with behaviours x (M, C), term by term."""
    if encoder.embed_positions is not None:
        x = x + encoder.embed_positions.weight[: len(x)]
    everything = torch.ones(1, len(x), dtype=torch.bool)
    x = reference.normalize(config, encoder.norm, x)[None]
    return reference.pool_text(encoder.pooling, reference.encoder(config, encoder.encoder, x, everything), everything)[
        0
    ]


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
def test_behaviours_that_are_not_finite_change_nothing_where_they_do_not_count(mixer: str):
    # transformers' Longformer takes its softmax in float32.
    encoder, x, mask = make_user_encoder(encoder_mixer=mixer).float(), randn(4, 6, C).float(), make_mask(4, 6)
    broken = x.masked_fill(~mask[..., None], torch.nan)
    assert torch.equal(encoder(broken, mask), encoder(x, mask))


@pytest.mark.parametrize('around', [True, False], ids=['norm and positions', 'bare'])
def test_users_equal_a_loop_in_value_and_gradients(around: bool):
    switches = {**BARE, 'use_layer_norm': around, 'use_position_embeddings': around}
    encoder, config = make_user_encoder(**switches), make_config(**switches)
    x, mask = randn(4, 7, C, seed=1).requires_grad_(), make_mask(4, 7)
    leaves = {'x': x, **dict(encoder.named_parameters())}
    got = encoder(x, mask)
    expected = torch.stack(
        [encode_one(encoder, config, x[i, :i]) if i else torch.zeros(C, dtype=torch.float64) for i in range(4)]
    )
    assert_close(got, expected, 1e-12)
    weight = randn(4, C, seed=2)
    found = torch.autograd.grad(got, list(leaves.values()), weight)
    wanted = torch.autograd.grad(expected, list(leaves.values()), weight)
    for name, gradient, want in zip(leaves, found, wanted, strict=True):
        assert_close(gradient, want, 1e-10, name, floor=1e-6)


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
def test_no_behaviour_is_the_zero_vector_with_finite_gradients(mixer: str):
    # Not in float64, where the softmax of transformers' Longformer, which is float32, meets its lowest number.
    encoder = make_user_encoder(encoder_mixer=mixer).float()
    x = randn(3, 8, C).float().requires_grad_()
    users = encoder(x, make_mask(3, 8))
    users.square().sum().backward()
    assert not users[0].any()
    assert users[1:].any(1).all()
    assert all(torch.isfinite(p.grad).all() for p in [x, *encoder.parameters()])
    assert not x.grad[~make_mask(3, 8)].any()


def test_a_batch_without_any_behaviour_has_zero_users():
    assert make_user_encoder()(torch.zeros(2, 0, C).double()).shape == (2, C)


def test_without_positions_the_order_of_behaviours_is_of_no_account():
    x = randn(2, 6, C)
    bag, ordered = make_user_encoder(use_position_embeddings=False), make_user_encoder()
    assert_close(bag(x.flip(1)), bag(x), 1e-12)
    assert (ordered(x.flip(1)) - ordered(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ((torch.zeros(2, 10, C),), r'may have 9 behaviours \(max_behaviors\), got 10'),
        ((torch.zeros(2, 5, C), torch.ones(2, 4)), r'mask must have shape \(2, 5\), got \(2, 4\)'),
    ],
)
def test_behaviours_that_do_not_fit_are_refused(arguments: tuple[Tensor, ...], message: str):
    with pytest.raises(ValueError, match=message):
        make_user_encoder().float()(*arguments)


def test_a_history_needs_room():
    with pytest.raises(ValueError, match='max_behaviors must be at least 1, got 0'):
        make_config(max_behaviors=0)


@pytest.mark.parametrize('as_dict', [True, False])
def test_a_language_model_encodes_texts(as_dict: bool):
    bert = BertConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = make_config(text_config=bert.to_dict() if as_dict else bert)
    encoder = create_text_encoder(config).double().eval()
    assert isinstance(encoder, LanguageModelEncoder)
    ids = torch.randint(1, VOCAB, (3, 5), generator=generator())
    mask = make_mask(3, 5)
    got = encoder(ids, mask.long())
    assert got.shape == (3, C)
    # No token is pooled to zero, so the text is the projection's bias; the rest is the same alone.
    assert torch.equal(got[0], encoder.projection.bias)
    assert_close(encoder(ids[2:, :2]), got[2:], 1e-10)
    states = encoder.model(ids[2:, :2]).last_hidden_state[0]
    scores = (torch.tanh(encoder.pooling.hidden(states)) @ encoder.pooling.score.weight.T)[:, 0]
    assert_close(got[2], encoder.projection(scores.softmax(0) @ states), 1e-10)


LANGUAGE_MODELS = [
    T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2),
    BartConfig(
        **dict(vocab_size=VOCAB, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16),
        **dict(decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=9),
    ),
    GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=9),
]


@pytest.mark.parametrize('language_model', LANGUAGE_MODELS, ids=['t5', 'bart', 'gpt2'])
def test_encoders_of_encoder_decoders_and_decoders_encode_texts(tmp_path, language_model: PreTrainedConfig):
    torch.manual_seed(0)
    saved = AutoModel.from_config(language_model)
    saved.save_pretrained(tmp_path)
    encoder = create_text_encoder(make_config(text_config=language_model))
    encoder.load(tmp_path)
    ids = torch.randint(3, VOCAB, (3, 5), generator=generator())
    got = encoder.eval()(ids, make_mask(3, 5).long() | torch.tensor([1, 0, 0, 0, 0]))
    got.sum().backward()
    assert [name for name, p in encoder.named_parameters() if p.grad is None] == []
    part = saved.get_encoder() if language_model.is_encoder_decoder else saved
    states = part.eval()(ids[2:, :2]).last_hidden_state
    assert_close(got[2], encoder.projection(encoder.pooling(states))[0], 1e-5)
    assert encoder.get_input_embeddings().weight.shape == (VOCAB, 8)


def test_vectors_are_gathered_by_row_and_padding_is_zero():
    vectors = randn(4, C).requires_grad_()
    got, mask = gather_vectors(vectors, torch.tensor([[3, 0, -1], [3, -1, -1]]))
    assert mask.tolist() == [[True, True, False], [True, False, False]]
    assert torch.equal(got[0, :2], vectors[[3, 0]])
    assert not got[~mask].any()
    got.sum().backward()
    assert vectors.grad.sum(1).tolist() == [C, 0, 0, 2 * C]
    assert gather_vectors(vectors[:0], torch.full((2, 3), -1))[0].shape == (2, 3, C)
