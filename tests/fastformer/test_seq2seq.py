"""The encoder-decoder model: its loss, its cache, what it generates, files, precisions and refusals."""

import copy
import weakref
from contextlib import nullcontext
from functools import cache
from itertools import product

import pytest
import torch
from helpers import assert_close, generator, randn
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from aft_vision.fastformer import (
    ENCODERS,
    FastformerConfig,
    FastformerForConditionalGeneration,
    FastformerForSequenceClassification,
    FastformerModel,
)

VOCAB, C = 30, 12
# Every kind of state that a decoder keeps.
KINDS = [
    dict(causal=causal, cross_attention=cross, share_layers=shared)
    for causal, cross, shared in product(('streaming', 'exact'), ('dot_product', 'additive'), (True, False))
] + [dict(causal='exact', interaction='add'), dict(causal='streaming', interaction='concat', score='dense')]


def make_model(seed: int = 0, **kwargs: object) -> FastformerForConditionalGeneration:
    """A model in evaluation, with weights large enough for all terms to matter."""
    torch.manual_seed(seed)
    small = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=3, embedding_size=8, initializer_range=0.3)
    lengths = dict(num_hidden_layers=1, decoder_layers=2, max_position_embeddings=40)
    return FastformerForConditionalGeneration(FastformerConfig(**{**small, **lengths, **kwargs})).eval()


def make_ids(B: int, N: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (B, N), generator=generator(seed))


def make_sources() -> dict[str, Tensor]:
    """Three texts of 7, 4 and 2 tokens."""
    mask = torch.arange(7) < torch.tensor([7, 4, 2])[:, None]
    return dict(input_ids=make_ids(3, 7) * mask, attention_mask=mask.long())


@cache
def trained_model(causal: str) -> FastformerForConditionalGeneration:
    """A model that has begun to learn to copy the first three tokens."""
    model = make_model(causal=causal, hidden_size=24, hidden_dropout_prob=0.0, initializer_range=0.1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        ids = make_ids(16, 6, seed=step)
        labels = F.pad(ids[:, :3], (0, 1), value=model.config.eos_token_id)
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    return model.eval()


@pytest.mark.parametrize(
    ('cls', 'auto', 'mixer'),
    [(FastformerForSequenceClassification, True, 'fastformer'), (FastformerModel, False, 'transformer')],
)
def test_the_encoder_of_another_model_warm_starts_one(tmp_path, cls: type, auto: bool, mixer: str):
    made = make_model(encoder_mixer=mixer)
    saved = cls(made.config)
    saved.save_pretrained(tmp_path / 'saved')
    kind = AutoModelForSeq2SeqLM if auto else FastformerForConditionalGeneration
    model = kind.from_pretrained(tmp_path / 'saved', decoder_layers=3, initializer_range=0.1)
    source = saved.base_model.state_dict()
    assert len(model.encoder.state_dict()) > 20
    assert all(torch.equal(value, source[name]) for name, value in model.encoder.state_dict().items())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.decoder.depth == 3
    assert 0.05 < model.decoder.layers[0].mlp.fc1.weight.std() < 0.2
    # It is saved under the names that every summariser has.
    model.save_pretrained(tmp_path / 'summariser')
    with safe_open(tmp_path / 'summariser' / 'model.safetensors', 'pt') as file:
        assert {name.split('.')[0] for name in file.keys()} <= {'encoder', 'decoder', 'output_projection', 'lm_head'}  # noqa: SIM118
    again = kind.from_pretrained(tmp_path / 'summariser').state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())


def test_target_embeddings_that_are_not_finite_change_nothing_where_they_do_not_count():
    for kind in KINDS:
        model, embeds, mask = make_model(**kind), randn(2, 6, 8).float(), torch.ones(2, 6, dtype=torch.long)
        mask[0, :2] = 0
        broken = embeds.masked_fill(mask[..., None] == 0, torch.nan)
        found, expected = (
            model(make_ids(2, 4), decoder_inputs_embeds=x, decoder_attention_mask=mask).logits for x in (broken, embeds)
        )
        assert torch.equal(found, expected), kind


def test_the_loss_is_the_cross_entropy_of_the_labels_that_count():
    model, labels = make_model(), make_ids(3, 5, seed=1)
    labels[0, 3:] = -100
    out = model(**make_sources(), labels=labels)
    target = torch.cat([torch.ones(3, 1, dtype=torch.long), labels[:, :-1]], 1)
    target[0, 4] = 0
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), target)
    logits = model(**make_sources(), decoder_input_ids=target).logits
    assert torch.equal(out.logits, logits)
    assert out.cache is None
    chosen = logits.log_softmax(-1).gather(2, labels.clamp_min(0)[..., None])[..., 0][labels >= 0]
    assert len(chosen) == 13
    torch.testing.assert_close(out.loss, -chosen.mean())
    shared = model(**make_sources(), labels=labels, num_items_in_batch=26).loss
    torch.testing.assert_close(shared, -chosen.sum() / 26)


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_steps_with_a_cache_equal_the_whole_target(kind: dict[str, object]):
    model, target = make_model(**kind).double(), make_ids(3, 20, seed=1)
    # A text that begins later than the others, and one that ends earlier.
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :4], mask[2, 15:] = 0, 0
    for target_mask in (None, mask):
        expected = model(
            **make_sources(), decoder_input_ids=target, decoder_attention_mask=target_mask, use_cache=False
        ).logits
        start, past, found = 0, None, []
        for end in (1, 2, 3, 17, 19, 20):
            out = model(
                **make_sources(),
                decoder_input_ids=target[:, start:end],
                decoder_attention_mask=None if target_mask is None else target_mask[:, :end],
                cache=past,
            )
            start, past = end, out.cache
            found.append(out.logits)
        assert past.get_seq_length() == 20
        rows = torch.ones(3, 20, dtype=torch.bool) if target_mask is None else target_mask.bool()
        assert_close(torch.cat(found, 1)[rows], expected[rows], 1e-10)


@pytest.mark.parametrize('causal', ['streaming', 'exact'])
@pytest.mark.parametrize(
    'how',
    [dict(num_beams=5, num_return_sequences=3), dict(do_sample=True)],
    ids=['beams', 'sampling'],
)
def test_a_trained_model_generates_the_same_with_and_without_a_cache(causal: str, how: dict[str, object]):
    model, texts = trained_model(causal), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(model.generate(**make_sources(), max_new_tokens=8, use_cache=use_cache, **how))
    assert texts[0].shape[1] > 3
    assert len(texts[0].unique()) > 3
    assert torch.equal(*texts)


@pytest.mark.parametrize('kind', KINDS[::2], ids=str)
def test_a_text_in_a_batch_is_generated_as_alone(kind: dict[str, object]):
    model, sources = make_model(seed=3, **kind).double(), make_sources()
    how = dict(num_beams=3, max_new_tokens=6, min_new_tokens=6)
    together = model.generate(**sources, **how)
    assert len(together.unique(dim=0)) > 1
    for row, length in enumerate((7, 4, 2)):
        alone = model.generate(sources['input_ids'][row : row + 1, :length], **how)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize('causal', ['streaming', 'exact'])
def test_a_beginning_may_be_given_and_padded_at_the_left(causal: str):
    model, sources = make_model(causal=causal).double(), make_sources()
    begin = make_ids(1, 4, seed=1)
    begin[:, 0] = model.config.decoder_start_token_id
    padded = torch.cat([torch.full((1, 3), model.config.decoder_start_token_id), begin], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    first = {name: x[:1] for name, x in sources.items()}
    how = dict(num_beams=3, max_new_tokens=6, min_new_tokens=6)
    expected = model.generate(**first, decoder_input_ids=begin, **how)
    found = model.generate(**first, decoder_input_ids=padded, decoder_attention_mask=mask, **how)
    assert torch.equal(expected[:, :4], begin)
    assert torch.equal(found[:, 3:], expected)


@pytest.mark.parametrize('kind', KINDS[:4], ids=str)
@pytest.mark.parametrize(
    ('order', 'within'), [([1, 0, 3, 3, 4, 4], True), ([5, 0, 3, 3, 1, 2], False)], ids=['within texts', 'across']
)
def test_a_reordered_cache_goes_on_with_the_chosen_rows(kind: dict[str, object], order: list[int], within: bool):
    model = make_model(**kind).double()
    source = model.encoder(**make_sources())[0].repeat_interleave(2, 0)
    mask, target = make_sources()['attention_mask'].repeat_interleave(2, 0), make_ids(6, 5, seed=1)
    past = model(encoder_outputs=(source,), attention_mask=mask, decoder_input_ids=target[:, :4]).cache
    chosen = torch.tensor(order)
    kept = past.cross_attention_cache.layers[0].keys
    for _ in range(2):
        past.reorder_cache(chosen)
        source, mask, target = source[chosen], mask[chosen], target[chosen]
    # The source of a beam is that of its text: nothing is copied.
    assert (past.cross_attention_cache.layers[0].keys is kept) == within
    found = model(attention_mask=mask, decoder_input_ids=target[:, 4:], cache=past).logits
    expected = model(encoder_outputs=(source,), attention_mask=mask, decoder_input_ids=target).logits
    assert_close(found, expected[:, 4:], 1e-10)


@torch.no_grad()
@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_two_calls_go_on_from_one_past_by_a_copy_of_it(kind: dict[str, object]):
    model, target = make_model(**kind).double(), make_ids(3, 5, seed=1)
    past = model(**make_sources(), decoder_input_ids=target[:, :4]).cache
    rest = dict(attention_mask=make_sources()['attention_mask'], decoder_input_ids=target[:, 4:], use_cache=False)
    first = model(**rest, cache=copy.deepcopy(past))
    assert first.cache is None
    assert_close(first.logits, model(**make_sources(), decoder_input_ids=target).logits[:, 4:], 1e-10)
    assert past.get_seq_length() == 4
    assert torch.equal(model(**rest, cache=past).logits, first.logits)
    # As in transformers' models, the tokens are added where no cache is returned.
    assert past.get_seq_length() == 5


def test_a_cache_is_empty_again_after_a_reset():
    model, target = make_model(), make_ids(3, 3, seed=1)
    past = model(**make_sources(), decoder_input_ids=target).cache
    past.reset()
    assert past.get_seq_length() == 0
    again = model(**make_sources(), decoder_input_ids=target, cache=past)
    assert again.cache is past
    assert torch.equal(again.logits, model(**make_sources(), decoder_input_ids=target).logits)


def test_the_former_name_of_the_cache_is_still_taken():
    model = make_model()
    target = make_ids(3, 7)
    found = []
    for name, expected in (('cache', nullcontext()), ('past_key_values', pytest.warns(FutureWarning, match='cache'))):
        past = model(**make_sources(), decoder_input_ids=target[:, :4]).cache
        with expected:
            found.append(model(decoder_input_ids=target[:, 4:], **{name: past}).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize('name', sorted(ENCODERS))
def test_every_encoder_learns_and_generates(name: str):
    small = dict(attention_window=4, num_global_tokens=2, num_random_tokens=2, block_size=2, poolingformer_window=8)
    model = make_model(encoder_mixer=name, linformer_dim=4, **small)
    model(**make_sources(), labels=make_ids(3, 5, seed=1)).loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert without == []
    assert model.generate(**make_sources(), max_new_tokens=4, min_new_tokens=4).shape == (3, 5)


def test_tied_embeddings_of_another_width_stay_tied_when_resized():
    tied, untied = make_model(), make_model(tie_word_embeddings=False)
    assert isinstance(tied.output_projection, nn.Linear)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert untied.lm_head.weight.shape == (VOCAB, C)
    for model in (tied, untied):
        before = model(**make_sources(), decoder_input_ids=make_ids(3, 4)).logits
        model.resize_token_embeddings(VOCAB + 5)
        logits = model(**make_sources(), decoder_input_ids=make_ids(3, 4)).logits
        assert torch.equal(logits[..., :VOCAB], before)
        assert logits.shape[-1] == VOCAB + 5
        assert model(**make_sources(), labels=torch.full((3, 2), VOCAB + 4)).loss.isfinite()
    assert tied.lm_head.weight is tied.get_input_embeddings().weight


@pytest.mark.parametrize('autocast', [False, True], ids=['pure', 'autocast'])
@pytest.mark.parametrize('kind', KINDS[:4:2], ids=str)
@pytest.mark.parametrize(('dtype', 'bound'), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_half_precision_is_near_float32_and_generates(dtype: torch.dtype, bound: float, kind, autocast: bool):
    model, labels = make_model(**kind), make_ids(3, 20, seed=1)
    expected = model(**make_sources(), labels=labels).logits
    model = model if autocast else model.to(dtype)
    with torch.autocast('cpu', dtype, enabled=autocast):
        out = model(**make_sources(), labels=labels)
        texts = model.generate(**make_sources(), num_beams=2, max_new_tokens=4, min_new_tokens=4)
    out.loss.backward()
    # The bound of the operation, and half again in bfloat16 for three layers, seven norms and a head.
    assert_close(out.logits, expected, bound)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert texts.shape == (3, 5)


def test_states_embeddings_and_tuples_are_returned_where_asked():
    model, target = make_model(), make_ids(3, 5, seed=1)
    out = model(**make_sources(), decoder_input_ids=target, output_hidden_states=True, output_attentions=True)
    assert [tuple(x.shape) for x in out.decoder_hidden_states] == [(3, 5, C)] * 3
    assert [tuple(x.shape) for x in out.encoder_hidden_states] == [(3, 7, C)] * 2
    assert len(out.encoder_attentions) == 1
    embed = model.get_input_embeddings()
    sources = dict(inputs_embeds=embed(make_sources()['input_ids']), attention_mask=make_sources()['attention_mask'])
    again = model(**sources, decoder_inputs_embeds=embed(target), use_cache=False, return_dict=False)
    assert torch.equal(again[0], out.logits)
    assert model(**make_sources(), decoder_input_ids=target).decoder_hidden_states is None


@torch.inference_mode()
@pytest.mark.parametrize('mixer', ['fastformer', 'linear_transformer'])
def test_inference_keeps_no_state_of_an_earlier_layer(mixer: str):
    model = make_model(encoder_mixer=mixer, num_hidden_layers=4, decoder_layers=4, share_layers=False)
    made, kept = [], []

    def note(layer: nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
        kept.append(sum(state() is not None for state in made[:-1]))
        made.append(weakref.ref(output[0]))

    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_hook(note)
    model(**make_sources(), decoder_input_ids=make_ids(3, 5), use_cache=False)
    assert len(made) == 8
    # The decoder reads the last state of the encoder.
    assert max(kept) <= 1


def test_the_given_config_remains_that_of_other_models():
    config = FastformerConfig(vocab_size=VOCAB, hidden_size=C, num_attention_heads=3)
    model = FastformerForConditionalGeneration(config)
    assert model.config.is_encoder_decoder
    assert model.can_generate()
    assert not config.is_encoder_decoder
    assert model.generate(make_ids(1, 3), max_new_tokens=2, min_new_tokens=2).shape == (1, 3)


def test_a_source_without_a_token_leaves_loss_and_gradients_finite():
    for kind in KINDS[:4]:
        model, sources = make_model(**kind), make_sources()
        sources['attention_mask'][1] = 0
        model(**sources, labels=make_ids(3, 5, seed=1)).loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({}, 'decoder_input_ids, decoder_inputs_embeds or labels, got none'),
        (dict(decoder_input_ids=make_ids(3, 2), decoder_inputs_embeds=randn(3, 2, 8).float()), 'got both'),
        (dict(decoder_input_ids=make_ids(3, 41)), r'may have 40 tokens \(max_target_positions\).*got 41'),
        (dict(labels=make_ids(3, 2), decoder_attention_mask=torch.ones(3, 3)), r'shape \(3, 2\), got \(3, 3\)'),
    ],
)
def test_targets_that_do_not_fit_are_refused(arguments: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        make_model()(**make_sources(), **arguments)


def test_what_cannot_be_kept_or_dropped_is_refused():
    model = make_model()
    other = EncoderDecoderCache(DynamicCache(), DynamicCache())
    other.self_attention_cache.update(randn(3, 1, 2, 4), randn(3, 1, 2, 4), 0)
    with pytest.raises(ValueError, match='must be a FastformerCache'):
        model(**make_sources(), decoder_input_ids=make_ids(3, 1), cache=other)
    with pytest.raises(ValueError, match='leave cache_implementation'):
        model.generate(**make_sources(), cache_implementation='static', max_new_tokens=2)
    with pytest.raises(ValueError, match='stateful'):
        model.generate(**make_sources(), prompt_lookup_num_tokens=2, max_new_tokens=2)
    past = model(**make_sources(), decoder_input_ids=make_ids(3, 4)).cache
    with pytest.raises(ValueError, match='a cache or labels, which are of a whole target, got both'):
        model(**make_sources(), labels=make_ids(3, 2), cache=past)
    assert not past.is_croppable
