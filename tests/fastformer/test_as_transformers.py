"""Every text model under the calls of transformers, peft, torchao and torch.func."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_close, generator, randn
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    PreTrainedModel,
)

from aft_vision.fastformer import (
    ENCODERS,
    FastformerConfig,
    FastformerConversionConfig,
    FastformerForConditionalGeneration,
    FastformerForConversion,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerModel,
    FastformerNewsConfig,
)

VOCAB, C = 40, 16
LAYERS = ('FastformerLayer', 'BaselineLayer', 'FastformerDecoderLayer', 'BertLayer')
SIZES: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=2, max_position_embeddings=32)
WINDOWS: dict[str, Any] = dict(attention_window=4, num_global_tokens=2, num_random_tokens=2, block_size=2)
SMALL: dict[str, Any] = dict(**SIZES, **WINDOWS, linformer_dim=4, poolingformer_window=8, hidden_dropout_prob=0.0)
BERT: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=C, num_hidden_layers=1, num_attention_heads=2)
BERT |= dict(intermediate_size=C, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def classifier(**fields: object) -> FastformerForSequenceClassification:
    return FastformerForSequenceClassification(FastformerConfig(**SMALL, **fields))


def writer(**fields: object) -> FastformerForConditionalGeneration:
    return FastformerForConditionalGeneration(FastformerConfig(**SMALL, **fields))


# A model of each task and encoder, and of each form of the layers that reads weights.
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{mixer: lambda mixer=mixer: classifier(encoder_mixer=mixer) for mixer in sorted(ENCODERS)},
    'concat': lambda: classifier(interaction='concat', score='dense', share_query_value=False, embedding_size=8),
    'writer': writer,
    'writer, exact': lambda: writer(causal='exact', cross_attention='additive', share_layers=False, embedding_size=8),
    'writer, concat': lambda: writer(causal='exact', interaction='concat', tie_word_embeddings=False),
    'recommender': lambda: FastformerForNewsRecommendation(FastformerNewsConfig(**SMALL, max_behaviors=5)),
    'recommender of BERT': lambda: FastformerForNewsRecommendation(
        FastformerNewsConfig(**SMALL, max_behaviors=5, text_config=BertConfig(**BERT))
    ),
    'conversion': lambda: FastformerForConversion(FastformerConversionConfig(**SMALL, max_behaviors=5)),
}
every_model = pytest.mark.parametrize('name', MODELS)


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def make_batch(model: PreTrainedModel) -> dict[str, Tensor]:
    """Three texts, one padded and longer than the model is wide, and what the model predicts for them."""
    ids = torch.randint(3, VOCAB, (3, C + 4), generator=generator())
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    batch = dict(input_ids=ids, attention_mask=mask)
    rows = torch.tensor([[0, 2, 1], [1, -1, -1]])
    if model.config.is_encoder_decoder:
        return batch | dict(labels=ids[:, :6].contiguous())
    if isinstance(model, FastformerForNewsRecommendation):
        return batch | dict(history=rows, candidates=rows[:, [1, 0]], labels=torch.tensor([0, 1]))
    if isinstance(model, FastformerForConversion):
        return batch | dict(ad=torch.tensor([2, 0]), behaviors=rows, labels=torch.tensor([1.0, 0.0]))
    return batch | dict(labels=torch.tensor([0, 1, 1]))


def predict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The logits or scores, and the loss."""
    out = model(**batch)
    logits = out.scores if 'scores' in out else out.logits
    lowest = torch.finfo(logits.dtype).min
    return torch.cat([logits.masked_fill(logits == lowest, 0.0).flatten(), out.loss[None]])


class Wrapped(nn.Module):
    """A module that can be called and nothing else, such as one with an adapter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def leaves(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if next(child.children(), None) is None and next(child.parameters(), None) is not None:
                yield parent, name, child


@every_model
def test_every_module_may_be_replaced_by_one_that_can_only_be_called(name: str):
    model = make_model(name)
    batch = make_batch(model)
    expected = predict(model, batch)
    for parent, child, module in leaves(model):
        setattr(parent, child, Wrapped(module))
    assert_close(predict(model, batch), expected, 1e-5)


@every_model
def test_a_saved_model_loads_onto_the_disk(tmp_path, name: str):
    model = make_model(name)
    batch = make_batch(model)
    model.save_pretrained(tmp_path / 'saved')
    again = type(model).from_pretrained(tmp_path / 'saved', device_map={'': 'disk'}, offload_folder=tmp_path / 'disk')
    assert any(p.device.type == 'meta' for p in again.parameters())
    assert_close(predict(again, batch), predict(model, batch), 1e-5)


@every_model
def test_checkpointing_computes_each_layer_again_and_changes_no_gradient(name: str):
    gradients, computed = [], []
    for checkpointing in (False, True):
        model = make_model(name).train()
        if checkpointing:
            # The stricter form: inputs given by name would have no gradient.
            model.gradient_checkpointing_enable({'use_reentrant': True})
        for layer in model.modules():
            if type(layer).__name__ in LAYERS:
                next(layer.children()).register_forward_hook(lambda *_, again=checkpointing: computed.append(again))
        model(**make_batch(model)).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert computed.count(True) == 2 * computed.count(False) > 0
    assert gradients[0].keys() == gradients[1].keys()
    floor = 1e-4 * max(want.norm().item() for want in gradients[0].values())
    for n, expected in gradients[0].items():
        assert_close(gradients[1][n], expected, 1e-5, n, floor)


@every_model
def test_resized_embeddings_are_saved_and_loaded(tmp_path, name: str):
    model = make_model(name)
    batch = make_batch(model)
    before = model.get_input_embeddings().weight.clone()
    model.resize_token_embeddings(VOCAB + 3)
    assert torch.equal(model.get_input_embeddings().weight[:VOCAB], before)
    batch['input_ids'][0, 0] = VOCAB + 2
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert_close(predict(again, batch), predict(model, batch), 1e-6)


@every_model
def test_a_model_loads_in_half_precision(tmp_path, name: str):
    model = make_model(name)
    batch = make_batch(model)
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    if 'conversion' in name:
        batch['labels'] = batch['labels'].bfloat16()
    found = predict(half, batch)
    # Eight bits of each weight and state, in a few layers.
    assert_close(found.float(), predict(model, batch), 5e-2)


@every_model
def test_torch_func_differentiates_a_model(name: str):
    model = make_model(name)
    batch = make_batch(model)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (), batch).loss

    model(**batch).loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = grad(loss)(parameters)
    # Some gradients are zero, apart from rounding.
    floor = 1e-4 * max(want.norm().item() for want in expected.values())
    for n, want in expected.items():
        assert_close(found[n], want, 1e-4, n, floor)
    direction = {n: randn(*p.shape, seed=i).float() for i, (n, p) in enumerate(parameters.items())}
    # torch's fused attention on a CPU has no forward mode.
    with sdpa_kernel(SDPBackend.MATH):
        _, change = jvp(loss, (parameters,), (direction,))
    assert_close(change, sum((found[n] * direction[n]).sum() for n in found), 1e-4)


# Forms whose masks do not depend on the values of the batch, which vmap does not allow.
@pytest.mark.parametrize('name', ['fastformer', 'linear_transformer', 'poolingformer', 'writer', 'writer, exact'])
def test_torch_func_gives_the_gradient_of_each_text(name: str):
    model = make_model(name)
    batch = make_batch(model)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], text: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (), {n: x[None] for n, x in text.items()}).loss

    with sdpa_kernel(SDPBackend.MATH):
        found = vmap(grad(loss), (None, 0))(parameters, batch)
    wanted = [grad(loss)(parameters, {n: x[i] for n, x in batch.items()}) for i in range(3)]
    # Some gradients are zero, apart from rounding.
    floor = 1e-3 * max(want.norm().item() for want in wanted[0].values())
    for n in found:
        assert_close(found[n], torch.stack([want[n] for want in wanted]), 1e-4, n, floor)


# Each form of attention; dynamo takes seconds for a model. transformers' Longformer does not compile.
@pytest.mark.parametrize('name', ['fastformer', 'linformer', 'concat', 'writer, exact', 'conversion'])
def test_a_model_quantised_by_torchao_compiles(name: str):
    quantization = pytest.importorskip('torchao.quantization', reason='torchao, which quantises layers, is not there')
    model = make_model(name)
    batch = make_batch(model)
    expected = predict(model, batch)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        found = predict(model, batch)
        torch.compiler.reset()
        compiled = predict(torch.compile(model, backend='eager'), batch)
    # Eight bits a weight, each off by up to 1/254 of its row's largest, in a dozen layers.
    assert_close(found, expected, 5e-2)
    assert not torch.equal(found, expected)
    assert_close(compiled, found, 1e-5)


LORA = {
    'linear layers': dict(target_modules='all-linear'),
    'embeddings': dict(
        target_modules=r'.*(embed_tokens|embed_positions|position_embeddings|embed_types|word_embeddings|shared)'
    ),
    'scores': dict(target_modules=[], target_parameters=['query_score', 'key_score']),
}


@every_model
@pytest.mark.parametrize('kind', LORA)
def test_adapters_of_peft_fit_every_kind_of_module(name: str, kind: str):
    peft = pytest.importorskip('peft', reason='peft, which has adapters, is not there')
    model = make_model(name)
    batch = make_batch(model)
    expected = predict(model, batch)
    has = [n for n, _ in model.named_parameters()]
    if kind == 'scores' and not any(n.endswith('query_score') for n in has):
        pytest.skip('the model has no score vectors')
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **LORA[kind]))
    assert_close(predict(adapted, batch), expected, 1e-5)
    torch.manual_seed(1)
    trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    for p in trained.values():
        nn.init.normal_(p, std=0.3)
    predict(adapted, batch)[-1].backward()
    assert all(p.grad is not None and p.grad.any() for p in trained.values())
    found = predict(adapted, batch)
    assert (found - expected).abs().max() > 1e-4
    if kind == 'embeddings' and model.config.is_encoder_decoder:
        # Merged, the adapter would also be that of the tied head.
        return
    merged = adapted.merge_and_unload()
    assert_close(predict(merged, batch), found, 1e-4)


@pytest.mark.parametrize('mixer', ['fastformer', 'longformer'])
@pytest.mark.parametrize('kind', [AutoModel, AutoModelForSequenceClassification])
def test_a_saved_writer_keeps_its_encoder_under_another_head(tmp_path, kind: Any, mixer: str):
    model = writer(encoder_mixer=mixer, share_layers=False).eval()
    model.save_pretrained(tmp_path / 'writer')
    loaded, info = kind.from_pretrained(tmp_path / 'writer', output_loading_info=True)
    ids = make_batch(model)['input_ids']
    expected = model.encoder(ids).last_hidden_state
    assert torch.equal(loaded.base_model(ids).last_hidden_state, expected)
    assert not loaded.config.is_encoder_decoder
    # Only the pooling and the head are new.
    assert {n.removeprefix('model.').split('.')[0] for n in info['missing_keys']} <= {'pooling', 'classifier'}
    loaded.save_pretrained(tmp_path / 'again')
    again, info = kind.from_pretrained(tmp_path / 'again', output_loading_info=True)
    assert not info['missing_keys']
    assert not info['unexpected_keys']
    assert torch.equal(again.base_model(ids).last_hidden_state, expected)
    # And back.
    back = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / 'again')
    assert torch.equal(back.encoder(ids).last_hidden_state, expected)


def test_a_recommender_takes_the_encoder_of_a_saved_writer(tmp_path):
    model = writer().eval()
    model.save_pretrained(tmp_path)
    made = FastformerForNewsRecommendation.from_text_model(tmp_path, **SMALL)
    ids = make_batch(model)['input_ids']
    expected = model.encoder(ids).last_hidden_state
    assert torch.equal(made.eval().text_encoder.model(ids).last_hidden_state, expected)


def test_an_encoder_with_a_part_named_encoder_keeps_its_names(tmp_path, monkeypatch):
    class Nested(nn.Module):
        def __init__(self, config: FastformerConfig) -> None:
            super().__init__()
            self.encoder = ENCODERS['fastformer'](config)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.encoder(*args, **kwargs)

    monkeypatch.setitem(ENCODERS, 'nested', Nested)
    ids = torch.randint(3, VOCAB, (2, 5), generator=generator())
    first = FastformerModel(FastformerConfig(**SMALL, encoder_mixer='nested')).eval()
    model: Any = first
    expected = first(ids).last_hidden_state
    for cls in (FastformerModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoModelForSeq2SeqLM):
        model.save_pretrained(tmp_path)
        model = cls.from_pretrained(tmp_path)
        base = model.encoder if model.config.is_encoder_decoder else model.base_model
        assert torch.equal(base(ids).last_hidden_state, expected), cls


@pytest.mark.parametrize(
    'cls', [FastformerModel, FastformerForSequenceClassification, FastformerForConditionalGeneration]
)
def test_a_folder_of_which_nothing_fits_is_refused(tmp_path, cls: type):
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f'expected weights of a {cls.__name__} in .*, got none that fit'):
        cls.from_pretrained(tmp_path)


@pytest.mark.parametrize('cls', [FastformerModel, FastformerForSequenceClassification])
def test_a_folder_of_which_only_the_pooling_fits_is_refused(tmp_path, cls: type):
    model = cls(FastformerConfig(**SMALL))
    kept = {name: weight for name, weight in model.state_dict().items() if 'pooling.' in name}
    assert kept
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ValueError, match=f'expected weights of a {cls.__name__} in .*, got none that fit'):
        cls.from_pretrained(tmp_path)
