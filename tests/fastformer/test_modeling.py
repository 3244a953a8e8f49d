"""The Hugging Face models: outputs, losses, files, masks, precisions, checkpointing, compilation."""

import math

import pytest
import torch
from accelerate import infer_auto_device_map
from helpers import assert_close, generator, randn
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline
from transformers.modeling_outputs import BaseModelOutput

from aft_vision.fastformer import (
    ENCODERS,
    FastformerConfig,
    FastformerForConditionalGeneration,
    FastformerForSequenceClassification,
    FastformerModel,
    encoder,
    reference,
)

C, HEADS, VOCAB = 12, 3, 30
# Shorter and longer than C: token by token, and composed.
LENGTHS = (5, 16)


def make_config(**kwargs: object) -> FastformerConfig:
    small = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=HEADS, max_position_embeddings=40)
    return FastformerConfig(**{**small, 'embedding_size': 8, 'pooling_hidden_size': 6, **kwargs})


def make_model(cls: type = FastformerForSequenceClassification, seed: int = 0, **kwargs: object) -> nn.Module:
    """A model in evaluation, with weights large enough for all terms to matter."""
    torch.manual_seed(seed)
    return cls(make_config(**{'initializer_range': 0.3, **kwargs})).eval()


def make_ids(B: int, N: int) -> Tensor:
    return torch.randint(1, VOCAB, (B, N), generator=generator())


def test_the_encoder_gives_states_and_weights_of_every_layer():
    model = make_model(num_hidden_layers=3)
    out = model(make_ids(2, 5), output_hidden_states=True, output_attentions=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 5, C)] * 4
    assert [[tuple(x.shape) for x in pair] for pair in out.attentions] == [[(2, HEADS, 5)] * 2] * 3
    plain = model(make_ids(2, 5))
    assert plain.hidden_states is plain.attentions is None
    assert torch.equal(plain.logits, out.logits)


@pytest.mark.parametrize(
    ('fields', 'labels', 'loss'),
    [
        (dict(num_labels=4), torch.tensor([3, 0]), F.cross_entropy),
        (dict(num_labels=4), torch.tensor([[0.0, 1, 1, 0], [1, 0, 0, 0]]), F.binary_cross_entropy_with_logits),
        (dict(num_labels=4), torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]), F.binary_cross_entropy_with_logits),
        (dict(num_labels=4), torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]).bool(), F.binary_cross_entropy_with_logits),
        (dict(num_labels=4), torch.tensor([[3], [0]]), lambda y, labels: F.cross_entropy(y, labels[:, 0])),
        (dict(num_labels=4, problem_type='regression'), torch.arange(8).view(2, 4), F.mse_loss),
        (dict(num_labels=1), torch.tensor([3, 0]), lambda y, labels: F.mse_loss(y[:, 0], labels.float())),
    ],
    ids=['one label', 'several labels', 'integers', 'booleans', 'a column', 'regression', 'one number'],
)
def test_labels_give_the_loss_of_their_problem(fields: dict[str, object], labels: Tensor, loss):
    out = make_model(**fields)(make_ids(2, 5), labels=labels)
    assert out.logits.shape == (2, fields['num_labels'])
    target = labels.float() if loss in (F.mse_loss, F.binary_cross_entropy_with_logits) else labels
    torch.testing.assert_close(out.loss, loss(out.logits, target))


def test_embeddings_may_be_given_instead_of_ids():
    model, ids = make_model(), make_ids(2, 5)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


@pytest.mark.parametrize('N', LENGTHS)
@pytest.mark.parametrize('sharing', [True, False], ids=['shared', 'distinct'])
def test_padding_changes_nothing_and_a_row_equals_a_single_text(N: int, sharing: bool):
    model, ids = make_model(share_layers=sharing).double(), make_ids(1, N)
    alone = model(ids).logits
    for pad, length in ((0, 3), (0, 20), (17, 20)):
        batch = torch.cat([torch.cat([ids, torch.full((1, length), pad)], 1), make_ids(1, N + length)])
        mask = torch.ones_like(batch)
        mask[0, N:] = 0
        assert_close(model(batch, attention_mask=mask).logits[:1], alone, 1e-12)


@pytest.mark.parametrize('N', LENGTHS)
def test_an_empty_text_is_pooled_to_zero_with_finite_gradients(N: int):
    model = make_model(FastformerModel)
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0] = 0
    pooled = model(make_ids(2, N), attention_mask=mask).pooler_output
    pooled.square().sum().backward()
    assert not pooled[0].any()
    assert pooled[1].any()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize('N', LENGTHS)
@pytest.mark.parametrize('autocast', [False, True], ids=['pure', 'autocast'])
@pytest.mark.parametrize(('dtype', 'bound'), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_half_precision_is_near_float32_and_finite(dtype: torch.dtype, bound: float, autocast: bool, N: int):
    model, ids, mask = make_model(), make_ids(3, N), torch.ones(3, N, dtype=torch.long)
    mask[1, 2:], mask[2] = 0, 0
    expected = model(ids, attention_mask=mask).logits
    model = model if autocast else model.to(dtype)
    with torch.autocast('cpu', dtype, enabled=autocast):
        out = model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 0]))
    out.loss.backward()
    # The bound of the operation, and half again in bfloat16 for two layers, three norms and a head.
    assert_close(out.logits, expected, bound)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_files_and_auto_classes_give_the_same_model(tmp_path):
    model, ids = make_model(num_labels=3), make_ids(2, 5)
    model.save_pretrained(tmp_path)
    # Who may read one file may read the other.
    assert (tmp_path / 'config.json').stat().st_mode == (tmp_path / 'model.safetensors').stat().st_mode
    assert (tmp_path / 'model.safetensors').exists()
    assert isinstance(AutoConfig.from_pretrained(tmp_path), FastformerConfig)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert isinstance(again, FastformerForSequenceClassification)
    assert torch.equal(again(ids).logits, model(ids).logits)
    base = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(base, FastformerModel)
    assert torch.equal(base(ids).pooler_output, model.model(ids).pooler_output)


def test_a_file_without_one_parameter_keeps_the_rest(tmp_path):
    model = make_model(interaction='concat', hidden_size=48, embedding_size=8)
    state = model.state_dict()
    del state['model.encoder.layers.0.attn.query_score']
    # A copy, because saving empties it.
    model.save_pretrained(tmp_path, state_dict=dict(state))
    again = FastformerForSequenceClassification.from_pretrained(tmp_path).state_dict()
    assert len(state) > 20
    assert all(torch.equal(again[name], value) for name, value in state.items())
    assert 0.2 < again['model.encoder.layers.0.attn.query_score'].std() < 0.4


def test_initial_weights_have_the_configured_size():
    model = FastformerModel(FastformerConfig(vocab_size=100, interaction='concat', initializer_range=0.05))
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert 0.04 < p.std() < 0.06, name
    assert not model.embeddings.embed_tokens.weight[0].any()


@pytest.mark.parametrize('score', ['per_head', 'dense'])
@pytest.mark.parametrize('interaction', ['multiply', 'concat'])
@pytest.mark.parametrize('width', [64, 256])
def test_the_global_path_has_its_share_of_the_first_output_at_any_width(width: int, interaction: str, score: str):
    torch.manual_seed(0)
    sizes = dict(vocab_size=9, hidden_size=width, num_attention_heads=width // 16, num_hidden_layers=1)
    config = FastformerConfig(**sizes, use_output_proj=False, interaction=interaction, score=score)
    attention = FastformerModel(config).encoder.layers[0].attn.double()
    x = randn(8, 256, width)
    with torch.no_grad():
        query = attention.query(x)
        share = ((attention(x)[0] - query).norm() / query.norm()).item()
    assert 0.9 < (query.norm() / x.norm()).item() < 1.1
    # The global query and key are means of 256 tokens, each 1/16 of a token: their product has 1/256 of it. What is
    # concatenated with a token keeps the token.
    assert (2e-3 < share < 1.5e-2) if interaction == 'multiply' else (0.5 < share < 1.5)


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
def test_first_weights_follow_the_width_in_every_encoder(mixer: str):
    for width in (64, 256):
        config = FastformerConfig(vocab_size=500, hidden_size=width, num_attention_heads=4, encoder_mixer=mixer)
        model = FastformerForConditionalGeneration(config)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not model.lm_head:
                expected = (2 / (module.in_features + module.out_features)) ** 0.5
                assert module.weight.std().item() == pytest.approx(expected, rel=0.1), name
                assert module.bias is None or not module.bias.any(), name
        embeddings = model.get_input_embeddings()
        assert model.lm_head.weight is embeddings.weight
        assert embeddings.weight[1:].std().item() == pytest.approx(0.02, rel=0.05)


SWITCHES = ('use_residual', 'use_layer_norm', 'use_ffn', 'share_layers', 'use_position_embeddings')


@pytest.mark.parametrize(
    'off', [(), *((name,) for name in SWITCHES), SWITCHES], ids=lambda off: ' '.join(off) or 'none'
)
@pytest.mark.parametrize('N', [3, C + 1])
def test_the_classifier_equals_the_loops_in_value_and_every_gradient(N: int, off: tuple[str, ...]):
    # Norms of no eps to speak of would let the second derivative of small states dominate.
    model = make_model(num_labels=3, layer_norm_eps=1e-3, **dict.fromkeys(off, False)).double()
    ids, mask = make_ids(3, N), torch.rand(3, N, generator=generator(3)) > 0.4
    # A text of all its tokens, one of some and one of none: the weights of a single token are 1, and have no gradient.
    mask[0], mask[1, 1], mask[-1] = True, True, False
    parameters = dict(model.named_parameters())
    found, expected = model(ids, attention_mask=mask).logits, reference.classify(model.config, model, ids, mask)
    assert_close(found, expected, 1e-11, 'logits')
    weight = randn(*found.shape, seed=60)
    got, wanted = (torch.autograd.grad(y, list(parameters.values()), weight) for y in (found, expected))
    # The gradients of scores are differences of terms as large as the largest gradient, whose rounding they keep.
    floor = 1e-5 * max(want.norm().item() for want in wanted)
    for name, grad, want in zip(parameters, got, wanted, strict=True):
        assert_close(grad, want, 1e-9, f'grad {name}', floor)
    layer = model.model.encoder.layers[0]
    assert (layer.mlp is None) == ('use_ffn' in off)


def test_a_model_without_positions_sees_a_bag_of_tokens():
    ids = make_ids(1, 6)
    turned = ids.flip(1)
    without, with_positions = make_model(use_position_embeddings=False), make_model()
    assert_close(without(turned).logits, without(ids).logits, 1e-5)
    assert (with_positions(turned).logits - with_positions(ids).logits).abs().max() > 1e-3


def test_positions_may_be_given():
    model, ids = make_model(FastformerModel).double(), make_ids(1, 4)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask, positions = (padded > 0).long(), torch.tensor([[0, 0, 0, 0, 1, 2, 3]])
    got = model(padded, attention_mask=mask, position_ids=positions).pooler_output
    assert_close(got, model(ids).pooler_output, 1e-12)


@pytest.mark.parametrize(('N', 'masked'), [(LENGTHS[0], True), (LENGTHS[1], False)])
def test_the_encoder_compiles_to_one_graph(N: int, masked: bool):
    layers, x = make_model(FastformerModel).encoder, randn(2, N, C).float()
    mask = torch.rand(2, N, generator=generator()) > 0.3 if masked else None
    torch.compiler.reset()
    compiled = torch.compile(layers, fullgraph=True, backend='eager')
    assert_close(compiled(x, mask).last_hidden_state, layers(x, mask).last_hidden_state, 1e-5)


@pytest.mark.parametrize('shortest', [1, C])
def test_an_exported_model_takes_any_batch_and_length(shortest: int):
    model = make_model(num_hidden_layers=1)
    batch, length = Dim('batch', min=1, max=64), Dim('length', min=shortest, max=40)
    shapes = {name: {0: batch, 1: length} for name in ('input_ids', 'attention_mask')}
    example = {'input_ids': make_ids(2, 20), 'attention_mask': torch.ones(2, 20, dtype=torch.long)}
    program = torch.export.export(model, (), example, dynamic_shapes=shapes)
    for B, N in ((1, shortest), (3, 40)):
        mask = torch.ones(B, N, dtype=torch.long)
        mask[-1, N // 2 + 1 :] = 0
        expected = model(make_ids(B, N), attention_mask=mask).logits
        assert_close(program.module()(input_ids=make_ids(B, N), attention_mask=mask).logits, expected, 1e-5)
    # One product with the composed matrix, where no text can be too short for it.
    composed = torch.ops.aten.baddbmm.default in {node.target for node in program.graph.nodes}
    assert composed == (shortest == C)


def test_another_encoder_plugs_in_by_name(monkeypatch):
    monkeypatch.setattr(encoder, 'ENCODERS', dict(encoder.ENCODERS))

    @encoder.register_encoder('identity')
    class IdentityEncoder(nn.Module):
        def __init__(self, config: FastformerConfig) -> None:
            super().__init__()

        def forward(self, hidden_states, attention_mask=None, output_hidden_states=False, output_attentions=False):
            return BaseModelOutput(last_hidden_state=hidden_states)

    assert make_model(encoder_mixer='identity')(make_ids(2, 5)).logits.shape == (2, 2)


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
@pytest.mark.parametrize('shape', [(0, 6), (2, 0), (0, 0)], ids=str)
def test_an_empty_batch_has_its_logits(mixer: str, shape: tuple[int, int]):
    model = make_model(encoder_mixer=mixer, num_labels=3, hidden_size=16, num_attention_heads=2)
    ids = torch.zeros(shape, dtype=torch.long)
    for mask in (None, ids):
        out = model(ids, attention_mask=mask, output_hidden_states=True)
        assert out.logits.shape == (shape[0], 3)
        assert out.logits.isfinite().all()
        assert all(state.shape == (*shape, 16) for state in out.hidden_states)
    out.logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_embeddings_that_are_not_finite_change_nothing_where_they_do_not_count(mixer: str, bad: float):
    model = make_model(encoder_mixer=mixer, hidden_size=16, num_attention_heads=2)
    embeds, mask = randn(2, 20, 8).float(), torch.ones(2, 20, dtype=torch.long)
    mask[0, 5:] = 0
    broken = embeds.masked_fill(mask[..., None] == 0, bad).requires_grad_()
    logits = model(inputs_embeds=broken, attention_mask=mask).logits
    assert torch.equal(logits, model(inputs_embeds=embeds, attention_mask=mask).logits)
    logits.sum().backward()
    assert broken.grad.isfinite().all()
    assert broken.grad[0, :5].any()
    assert not broken.grad[0, 5:].any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('mixer', ['fastformer', 'transformer'])
@pytest.mark.parametrize('cls', [FastformerForSequenceClassification, FastformerForConditionalGeneration])
def test_a_config_that_asks_for_weights_is_saved_with_its_model(tmp_path, cls: type, mixer: str):
    model = make_model(cls, encoder_mixer=mixer, output_attentions=True)
    model.save_pretrained(tmp_path)
    again = cls.from_pretrained(tmp_path)
    assert again.config.output_attentions is True
    again.save_pretrained(tmp_path / 'again')
    inputs = dict(input_ids=make_ids(2, 5)) | (dict(labels=make_ids(2, 3)) if model.config.is_encoder_decoder else {})
    out = again(**inputs)
    weights = out.encoder_attentions if model.config.is_encoder_decoder else out.attentions
    assert len(weights) == 2
    assert_close(weights[0][0].sum(-1), torch.ones(weights[0][0].shape[:-1]), 1e-5)
    # Whatever attention the others have.
    if mixer == 'fastformer':
        other = cls.from_pretrained(tmp_path, attn_implementation='sdpa')
        other.save_pretrained(tmp_path / 'other')
        assert (tmp_path / 'other' / 'config.json').read_text() == (tmp_path / 'config.json').read_text()


def test_weights_may_be_asked_for_after_a_model_was_made(tmp_path):
    model = make_model()
    model.config.output_attentions = True
    assert len(model(make_ids(2, 5)).attentions) == 2
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='eager'):
        make_model(encoder_mixer='transformer').config.output_attentions = True


class OpaqueTensor(Tensor):
    """A weight as of torchao's, made for one product and nothing else."""

    @staticmethod
    def __new__(cls, dense: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, dense.shape, dtype=dense.dtype)

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense

    def __tensor_flatten__(self):
        return ['dense'], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner['dense'])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.dense, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].dense)
        raise NotImplementedError(f'{function} of a quantised weight')


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Those whose weight is no embedding's."""
    return [layer for layer in model.modules() if type(layer) is nn.Linear and layer.out_features != VOCAB]


# Each form of an attention that reads weights.
READERS = [
    *(dict(encoder_mixer=mixer) for mixer in sorted(ENCODERS)),
    dict(interaction='concat', score='dense', share_query_value=False, use_output_proj=False),
    dict(share_heads=True, interaction='add'),
]


@pytest.mark.parametrize('fields', READERS, ids=str)
@pytest.mark.parametrize('cls', [FastformerForSequenceClassification, FastformerForConditionalGeneration])
def test_linear_layers_are_called_where_their_weights_cannot_be_read(cls: type, fields: dict[str, object]):
    model = make_model(cls, **{'hidden_size': 16, 'num_attention_heads': 2, 'initializer_range': None, **fields})
    ids, mask = make_ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, 7:] = 0
    inputs = dict(input_ids=ids, attention_mask=mask) | ({'labels': ids[:, :4]} if hasattr(model, 'decoder') else {})
    expected = model(**inputs).logits
    layers = linear_layers(model)
    assert len(layers) > 8
    for layer in layers:
        layer.weight = nn.Parameter(OpaqueTensor(layer.weight.detach()), requires_grad=False)
    assert_close(model(**inputs).logits, expected, 1e-5)


def test_an_unknown_encoder_is_refused():
    with pytest.raises(ValueError, match=r"one of \[.*'fastformer'.*got 'slowformer'"):
        encoder.create_encoder(make_config(encoder_mixer='slowformer'))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({}, 'either input_ids or inputs_embeds'),
        (dict(input_ids=make_ids(1, 3), inputs_embeds=randn(1, 3, 8).float()), 'either input_ids or inputs_embeds'),
        (dict(input_ids=make_ids(2, 3), attention_mask=torch.ones(2, 4)), r'shape \(2, 3\).*got \(2, 4\)'),
        (dict(input_ids=make_ids(1, 41)), 'may have 40 tokens'),
    ],
)
def test_inputs_that_do_not_fit_are_refused(arguments: dict[str, Tensor], message: str):
    with pytest.raises(ValueError, match=message):
        make_model()(**arguments)


def test_a_pipeline_classifies_text():
    words = {'[PAD]': 0, '[UNK]': 1, 'good': 2, 'bad': 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token='[UNK]'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token='[PAD]', unk_token='[UNK]')
    model = make_model(num_labels=2, id2label={0: 'no', 1: 'yes'}, label2id={'no': 0, 'yes': 1})
    found = pipeline('text-classification', model=model, tokenizer=fast)(['good', 'bad bad good'], batch_size=2)
    probability = model(torch.tensor([[2]])).logits.softmax(-1)[0]
    assert found[0]['label'] == model.config.id2label[int(probability.argmax())]
    assert found[0]['score'] == pytest.approx(probability.max().item(), rel=1e-5)


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
def test_no_layer_is_divided_between_devices(mixer: str):
    config = FastformerConfig(
        vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=4, share_layers=False, encoder_mixer=mixer
    )
    layers = ('FastformerLayer', 'BaselineLayer', 'FastformerDecoderLayer')
    for model in (FastformerForSequenceClassification(config), FastformerForConditionalGeneration(config)):
        size = sum(p.nbytes for p in model.parameters())
        whole = [name for name, module in model.named_modules() if type(module).__name__ in layers]
        assert len(whole) >= 4
        for tenths in range(1, 10):
            devices = infer_auto_device_map(
                model, {0: size * tenths // 10, 'cpu': 2 * size}, no_split_module_classes=model._no_split_modules
            )
            assert not [key for key in devices if key.startswith(tuple(f'{name}.' for name in whole))]
