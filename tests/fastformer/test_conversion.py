"""The predictor of conversions, against a loop over users in float64, and what must not change it."""

import dataclasses

import pytest
import torch
from helpers import assert_close, generator
from torch import Tensor, nn
from torch.nn import functional as F

from aft_vision.fastformer import ENCODERS, FastformerConversionConfig, FastformerForConversion, reference

C, VOCAB, TYPES = 12, 30, ['search', 'page', 'ad']


def make_config(**kwargs: object) -> FastformerConversionConfig:
    small = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=3, max_position_embeddings=20, max_behaviors=9)
    small |= dict(pooling_hidden_size=6, num_hidden_layers=2, embedding_size=10, head_hidden_size=7)
    small |= dict(attention_window=4, num_global_tokens=2, num_random_tokens=2, block_size=2, linformer_dim=4)
    small |= dict(poolingformer_window=4, behavior_types=TYPES, initializer_range=0.3)
    return FastformerConversionConfig(**{**small, **kwargs})


def make_model(**kwargs: object) -> FastformerForConversion:
    torch.manual_seed(0)
    return FastformerForConversion(make_config(**kwargs)).double().eval()


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    """Users with 5, 0, 2 and 1 behaviours; texts of 6, 3, 1, 4, 2, 5 and 6 tokens."""
    draw = generator(seed)
    lengths = torch.tensor([6, 3, 1, 4, 2, 5, 6])
    mask = torch.arange(6) < lengths[:, None]
    behaviors = torch.tensor([[0, 3, 3, 5, 1], [-1] * 5, [6, 2, -1, -1, -1], [4, -1, -1, -1, -1]])
    return {
        'input_ids': torch.randint(1, VOCAB, (7, 6), generator=draw).masked_fill(~mask, 0),
        'attention_mask': mask.long(),
        'ad': torch.tensor([3, 4, 6, 0]),
        'behaviors': behaviors,
        'behavior_types': torch.randint(3, (4, 5), generator=draw),
        'labels': torch.tensor([1.0, 0.0, 0.0, 1.0]),
    }


def affine(linear: nn.Linear, x: Tensor) -> Tensor:
    y = x @ linear.weight.T
    return y if linear.bias is None else y + linear.bias


def pooled(config: FastformerConversionConfig, encoder: nn.Module, pooling: nn.Module, x: Tensor) -> Tensor:
    """The vector (C,) of one text or user (N, C) without padding."""
    everything = torch.ones(1, len(x), dtype=torch.bool)
    return reference.pool_text(pooling, reference.encoder(config, encoder, x[None], everything), everything)[0]


def text_vector(model: FastformerForConversion, ids: Tensor) -> Tensor:
    embeddings = model.text_encoder.embeddings
    x = affine(embeddings.projection, embeddings.embed_tokens.weight[ids])
    x = reference.normalize(model.config, embeddings.norm, x + embeddings.embed_positions.weight[: len(ids)])
    return pooled(model.config, model.text_encoder.encoder, model.text_encoder.pooling, x)


def user_vector(model: FastformerForConversion, texts: list[Tensor], types: Tensor) -> Tensor:
    if not texts:
        return torch.zeros(C, dtype=torch.float64)
    user = model.user_encoder
    x = torch.stack(texts) + model.embed_types.weight[types] + user.embed_positions.weight[: len(texts)]
    return pooled(model.config, user.encoder, user.pooling, reference.normalize(model.config, user.norm, x))


def restated_logits(model: FastformerForConversion, batch: dict[str, Tensor]) -> Tensor:
    texts = [
        text_vector(model, ids[: int(mask.sum())])
        for ids, mask in zip(batch['input_ids'], batch['attention_mask'], strict=True)
    ]
    logits = []
    for ad, behaviors, types in zip(batch['ad'], batch['behaviors'], batch['behavior_types'], strict=True):
        done = [texts[row] for row in behaviors.tolist() if row >= 0]
        user, shown = user_vector(model, done, types[: len(done)]), texts[int(ad)]
        hidden = F.gelu(affine(model.head.fc1, torch.cat([user, shown, user * shown])))
        logits.append(affine(model.head.fc2, hidden)[0])
    return torch.stack(logits)


def test_logits_loss_and_gradients_equal_a_loop_over_users():
    model, batch = make_model(), make_batch()
    found = model(**batch)
    expected = restated_logits(model, batch)
    probability = 1 / (1 + torch.exp(-expected))
    labels = batch['labels']
    loss = -(labels * probability.log() + (1 - labels) * (1 - probability).log()).mean()
    assert_close(found.logits, expected, 1e-12)
    assert_close(found.loss, loss, 1e-12)
    names, leaves = zip(*model.named_parameters(), strict=True)
    gradients = zip(torch.autograd.grad(found.loss, leaves), torch.autograd.grad(loss, leaves), strict=True)
    for name, (gradient, wanted) in zip(names, gradients, strict=True):
        assert_close(gradient, wanted, 1e-10, name, floor=1e-6)


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
def test_padding_and_the_rest_of_the_batch_change_nothing(mixer: str):
    model, batch = make_model(encoder_mixer=mixer), make_batch()
    whole = model(**batch).logits
    more = {
        **batch,
        'input_ids': F.pad(batch['input_ids'], (0, 3), value=7),
        'attention_mask': F.pad(batch['attention_mask'], (0, 3)),
        'behaviors': F.pad(batch['behaviors'], (0, 2), value=-1),
        'behavior_types': F.pad(batch['behavior_types'], (0, 2), value=2),
    }
    assert_close(model(**more).logits, whole, 1e-10)
    # Types of padding need not be types.
    types = batch['behavior_types'].masked_fill(batch['behaviors'] < 0, -1)
    assert torch.equal(model(**{**batch, 'behavior_types': types}).logits, whole)
    for row in range(4):
        known = int((batch['behaviors'][row] >= 0).sum())
        alone = {name: batch[name][row : row + 1] for name in ('ad', 'behaviors', 'behavior_types')}
        alone |= {name: alone[name][:, :known] for name in ('behaviors', 'behavior_types')}
        texts = {name: batch[name] for name in ('input_ids', 'attention_mask')}
        assert_close(model(**texts, **alone).logits, whole[row : row + 1], 1e-10, f'row {row}')


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
def test_users_without_behaviours_have_logits_and_finite_gradients(mixer: str):
    # Not in float64, where the softmax of transformers' Longformer, which is float32, meets its lowest number.
    model, batch = make_model(encoder_mixer=mixer).float(), make_batch()
    batch['behaviors'] = torch.full((4, 5), -1)
    found = model(**batch)
    found.loss.backward()
    assert torch.isfinite(found.logits).all()
    # Distributed training halts at a parameter that has no part in the loss.
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    ad = model.text_encoder(batch['input_ids'], batch['attention_mask'])[batch['ad']]
    assert torch.equal(found.logits, model.head(torch.zeros_like(ad), ad))


def test_several_ads_of_a_user_are_judged_as_one_by_one():
    model, batch = make_model(), make_batch()
    batch.pop('labels')
    ads = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]])
    together = model(**{**batch, 'ad': ads})
    assert together.loss is None
    for place in range(3):
        assert_close(together.logits[:, place], model(**{**batch, 'ad': ads[:, place]}).logits, 1e-12)


def test_a_place_without_an_ad_has_no_part_in_the_loss():
    model, batch = make_model(), make_batch()
    expected = model(**batch)
    ads = torch.stack([batch['ad'], torch.full((4,), -1)], 1)
    labels = torch.stack([batch['labels'], torch.full((4,), -1.0)], 1)
    found = model(**{**batch, 'ad': ads, 'labels': labels})
    assert_close(found.logits[:, 0], expected.logits, 1e-12)
    assert (found.logits[:, 1] == torch.finfo(torch.float64).min).all()
    assert_close(found.loss, expected.loss, 1e-12)
    leaves = list(model.parameters())
    for gradient, wanted in zip(*(torch.autograd.grad(out.loss, leaves) for out in (found, expected)), strict=True):
        assert_close(gradient, wanted, 1e-10, floor=1e-6)
    none = model(**{**batch, 'ad': torch.full((4,), -1)})
    assert none.loss == 0


def test_types_and_the_order_of_behaviours_count():
    model, batch = make_model(), make_batch()
    logits = model(**batch).logits
    others = model(**{**batch, 'behavior_types': (batch['behavior_types'] + 1) % 3}).logits
    turned = model(**{**batch, 'behaviors': batch['behaviors'].flip(1)[:1].expand(4, 5)}).logits
    assert abs(others[0] - logits[0]) > 1e-4
    assert others[1] == logits[1]
    assert abs(turned[0] - logits[0]) > 1e-4
    first = model(**{**batch, 'behavior_types': torch.zeros_like(batch['behavior_types'])}).logits
    batch.pop('behavior_types')
    assert torch.equal(model(**batch).logits, first)


def test_bfloat16_is_finite_and_near():
    model, batch = make_model(initializer_range=0.1), make_batch()
    wide = model(**batch)
    half = model.bfloat16()(**batch)
    assert half.loss.dtype == half.logits.dtype == torch.float32
    assert_close(half.logits, wide.logits, 5e-2, floor=0.1)


def test_a_hook_of_the_last_layer_is_called_in_half_precision_too():
    model, batch = make_model(initializer_range=0.1).bfloat16(), make_batch()
    before = model(**batch).logits
    model.head.fc2.register_forward_hook(lambda module, inputs, output: output + 100)
    shown = before > torch.finfo(torch.bfloat16).min
    assert (model(**batch).logits[shown] > 90).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_logits_under_autocast_are_near_and_float32(dtype: torch.dtype):
    model, batch = make_model(initializer_range=0.1).float(), make_batch()
    wide = model(**batch)
    with torch.autocast('cpu', dtype):
        half = model(**batch)
        logits = model.head(torch.zeros(50, C), torch.randn(50, C, generator=generator()))
    assert half.logits.dtype == half.loss.dtype == torch.float32
    assert_close(half.logits, wide.logits, 5e-2 if dtype is torch.bfloat16 else 1e-2, floor=0.1)
    # Numbers of the half format would equal themselves rounded to it.
    assert (logits != logits.to(dtype)).all()


def test_normalisation_and_positions_are_on_unless_they_are_switched_off():
    model, bare = make_model(), make_model(use_layer_norm=False, use_position_embeddings=False)
    assert isinstance(model.user_encoder.norm, nn.LayerNorm)
    assert model.user_encoder.embed_positions is not None
    assert not any('norm' in name or 'positions' in name for name, _ in bare.named_parameters())
    assert torch.isfinite(bare(**make_batch()).loss)


def test_defaults_complete_a_configuration():
    config = FastformerConversionConfig(hidden_size=32)
    assert (config.behavior_types, config.head_hidden_size, config.max_behaviors) == (['click'], 32, 50)
    assert config.use_layer_norm
    assert config.use_position_embeddings
    assert 'behavior_types' in {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize('types', [[], ['ad', 'ad']])
def test_types_that_are_no_names_are_an_error(types):
    with pytest.raises(ValueError, match='behavior_types must be one name or several that differ'):
        make_config(behavior_types=types)


def test_more_behaviours_than_the_model_takes_are_an_error():
    model, batch = make_model(), make_batch()
    with pytest.raises(ValueError, match='a user may have 9 behaviours'):
        model(**{**batch, 'behaviors': torch.zeros(4, 10, dtype=torch.long), 'behavior_types': None})
