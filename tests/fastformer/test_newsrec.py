"""The recommender: scores and gradients against a loop, files, language models, whole files of impressions."""

import math

import numpy as np
import pytest
import torch
from helpers import assert_close, generator
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    CanineConfig,
    CanineModel,
    PreTrainedConfig,
    T5Config,
)

from aft_vision.fastformer import ENCODERS, FastformerForNewsRecommendation, FastformerNewsConfig
from aft_vision.fastformer.data.impressions import Behaviors, NewsCollator, Ragged
from aft_vision.fastformer.ranking import score_behaviors

C, VOCAB = 12, 30
BERT = dict(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
# Two users, one without a click, and five news.
HISTORY = torch.tensor([[4, 0, 4], [-1, -1, -1]])
CANDIDATES = torch.tensor([[1, 2, 0], [3, 4, -1]])


def make_model(**kwargs: object) -> FastformerForNewsRecommendation:
    torch.manual_seed(0)
    small = dict(vocab_size=VOCAB, hidden_size=C, num_attention_heads=3, num_hidden_layers=1, max_behaviors=9)
    windows = dict(attention_window=4, num_global_tokens=2, num_random_tokens=2, block_size=2, linformer_dim=4)
    small |= dict(**windows, poolingformer_window=4, pooling_hidden_size=6, initializer_range=0.3)
    return FastformerForNewsRecommendation(FastformerNewsConfig(**{**small, **kwargs})).eval()


def make_texts(news: int = 5, longest: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (news, longest), generator=generator())
    mask = (torch.arange(longest) < 1 + torch.arange(news)[:, None]).long()
    return {'input_ids': ids * mask, 'attention_mask': mask}


def make_behaviors(count: int = 23, news: int = 40) -> tuple[Behaviors, NewsCollator]:
    draw = np.random.default_rng(0)
    histories = Ragged.from_rows([draw.integers(0, news, draw.integers(0, 9)) for _ in range(count)])
    candidates = Ragged.from_rows([draw.integers(0, news, draw.integers(1, 7)) for _ in range(count)])
    tokens = Ragged.from_rows([draw.integers(1, VOCAB, draw.integers(1, 8)) for _ in range(news)])
    return Behaviors([str(i) for i in range(count)], histories, candidates, None), NewsCollator(tokens, 0)


def test_a_batch_without_users_has_no_scores():
    nobody = dict(history=HISTORY[:0], candidates=CANDIDATES[:0])
    assert make_model()(**make_texts(), **nobody).scores.shape == (0, 3)


def test_scores_equal_a_loop_over_users_in_value_and_gradients():
    model, texts = make_model().double(), make_texts()
    parameters = dict(model.named_parameters())
    got = model(**texts, history=HISTORY, candidates=CANDIDATES, labels=torch.tensor([1, 0]))

    def encode(row: int) -> Tensor:
        length = row + 1
        return model.text_encoder(texts['input_ids'][row : row + 1, :length])[0]

    user = model.user_encoder(torch.stack([encode(4), encode(0), encode(4)])[None])[0]
    first = torch.stack([user @ encode(row) for row in (1, 2, 0)])
    # The second user clicked nothing: all scores are 0, and the third candidate is none.
    expected = (F.cross_entropy(first, torch.tensor(1)) + math.log(2)) / 2
    assert_close(got.scores[0], first, 1e-12)
    assert got.scores[1, :2].tolist() == [0, 0]
    assert got.scores[1, 2] == torch.finfo(torch.float64).min
    assert_close(got.loss, expected, 1e-12)
    found, wanted = (
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        for loss in (got.loss, expected)
    )
    for name, gradient, want in zip(parameters, found, wanted, strict=True):
        assert_close(gradient, want, 1e-10, name, floor=1e-8)


@pytest.mark.parametrize('mixer', sorted(ENCODERS))
@pytest.mark.parametrize('history', [HISTORY, torch.full((2, 1), -1)], ids=['clicks', 'none'])
def test_every_parameter_of_every_encoder_has_a_part_in_the_loss(mixer: str, history: Tensor):
    model = make_model(encoder_mixer=mixer).train()
    model(**make_texts(), history=history, candidates=CANDIDATES, labels=torch.tensor([0, 1])).loss.backward()
    # Distributed training halts at a parameter without a gradient.
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


T5 = T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)


@pytest.mark.parametrize('text_config', [None, BertConfig(**BERT), T5], ids=['fastformer', 'bert', 't5'])
def test_files_and_auto_classes_give_the_same_model(tmp_path, text_config: PreTrainedConfig | None):
    model = make_model(text_config=text_config)
    inputs = dict(**make_texts(), history=HISTORY, candidates=CANDIDATES)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), FastformerNewsConfig)
    again = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(again, FastformerForNewsRecommendation)
    assert torch.equal(again(**inputs).scores, model(**inputs).scores)
    assert again.state_dict().keys() == model.state_dict().keys()


def test_a_saved_language_model_encodes_the_news_with_its_vocabulary(tmp_path):
    torch.manual_seed(1)
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path)
    model = FastformerForNewsRecommendation.from_text_model(tmp_path, hidden_size=C, num_attention_heads=3)
    saved = BertModel.from_pretrained(tmp_path).state_dict()
    loaded = model.text_encoder.model.state_dict()
    assert len(loaded) > 10
    assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
    assert model.config.vocab_size == VOCAB == len(model.get_input_embeddings().weight)
    stated = FastformerForNewsRecommendation.from_text_model(
        tmp_path, vocab_size=VOCAB - 1, hidden_size=C, num_attention_heads=3
    )
    assert stated.config.vocab_size == VOCAB - 1
    model(**make_texts(), history=HISTORY, candidates=CANDIDATES, labels=torch.tensor([0, 1])).loss.backward()
    # Distributed training halts at a parameter that has no part in the loss.
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize('stated', [{}, {'vocab_size': VOCAB}], ids=['default', 'stated'])
def test_a_language_model_without_a_vocabulary_encodes_the_news(tmp_path, stated: dict[str, int]):
    sizes = {name: size for name, size in BERT.items() if name != 'vocab_size'}
    hashes = dict(num_hash_functions=2, num_hash_buckets=16, local_transformer_stride=4)
    CanineModel(CanineConfig(**sizes, **hashes)).save_pretrained(tmp_path)
    model = FastformerForNewsRecommendation.from_text_model(tmp_path, hidden_size=C, num_attention_heads=3, **stated)
    assert model.config.vocab_size == stated.get('vocab_size', FastformerNewsConfig().vocab_size)
    texts = make_texts(longest=8)
    assert model(**texts, history=HISTORY, candidates=CANDIDATES).scores.isfinite().all()


@pytest.mark.parametrize('language_model', [BertConfig(**BERT), T5], ids=['bert', 't5'])
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
def test_a_language_model_has_the_attention_of_the_whole(tmp_path, attention: str, language_model: PreTrainedConfig):
    config = FastformerNewsConfig(hidden_size=C, num_attention_heads=3, text_config=language_model)
    model = FastformerForNewsRecommendation._from_config(config, attn_implementation=attention)
    # T5 has no fused attention in some versions of transformers.
    expected = {'eager', attention} if isinstance(language_model, T5Config) else {attention}
    assert model.text_encoder.model.config._attn_implementation in expected
    AutoModel.from_config(language_model).save_pretrained(tmp_path / 'text')
    model.text_encoder.load(tmp_path / 'text')
    assert model.text_encoder.model.config._attn_implementation in expected
    model.save_pretrained(tmp_path / 'whole')
    again = AutoModel.from_pretrained(tmp_path / 'whole', attn_implementation=attention)
    assert again.text_encoder.model.config._attn_implementation in expected


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_a_language_model_saved_in_half_precision_learns_in_float32(tmp_path, dtype: torch.dtype):
    torch.manual_seed(1)
    BertModel(BertConfig(**BERT)).to(dtype).save_pretrained(tmp_path / 'bert')
    model = FastformerForNewsRecommendation.from_text_model(tmp_path / 'bert', hidden_size=C, num_attention_heads=3)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model(**make_texts(), history=HISTORY, candidates=CANDIDATES, labels=torch.tensor([0, 1])).loss.backward()
    model.save_pretrained(tmp_path / 'whole')
    again = AutoModel.from_pretrained(tmp_path / 'whole')
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    halved = AutoModel.from_pretrained(tmp_path / 'whole', dtype=dtype)
    assert {p.dtype for p in halved.parameters()} == {dtype}


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_scores_are_near_and_in_float32(dtype: torch.dtype):
    model, inputs = make_model(), dict(**make_texts(), history=HISTORY, candidates=CANDIDATES)
    expected = model(**inputs).scores[0]
    with torch.autocast('cpu', dtype):
        out = model(**inputs, labels=torch.tensor([0, 1]))
    assert out.scores.dtype == torch.float32
    # Two encoders, and their product.
    assert_close(out.scores[0], expected, 4e-2 if dtype is torch.bfloat16 else 8e-3)
    assert torch.isfinite(out.loss)


@pytest.mark.parametrize(
    'arguments', [{}, dict(history=HISTORY), dict(history=HISTORY[:1], candidates=CANDIDATES)], ids=str
)
def test_missing_or_unequal_users_are_refused(arguments: dict[str, Tensor]):
    with pytest.raises(ValueError, match=r'expected history \(B, M\) and candidates \(B, n\) of the same users, got'):
        make_model()(**make_texts(), **arguments)


@pytest.mark.parametrize('batch_size', [1, 7, 256])
def test_a_file_is_scored_as_its_impressions_one_by_one(batch_size: int):
    model = make_model().double()
    behaviors, collator = make_behaviors()
    expected = []
    for i in range(len(behaviors)):
        sample = {'history': behaviors.histories[i], 'candidates': behaviors.candidates[i]}
        expected.append(model(**collator([sample])).scores[0].detach())
    got = score_behaviors(model.train(), behaviors, collator, batch_size)
    assert model.training
    assert got.dtype == np.float32
    assert_close(torch.from_numpy(got), torch.cat(expected), 1e-6)


def test_a_file_needs_each_news_once(monkeypatch):
    model, (behaviors, collator) = make_model(), make_behaviors()
    encoded = []
    encode = model.encode_news
    monkeypatch.setattr(
        model, 'encode_news', lambda **texts: encoded.append(len(texts['input_ids'])) or encode(**texts)
    )
    score_behaviors(model, behaviors, collator, 8)
    named = set(behaviors.histories.values.tolist()) | set(behaviors.candidates.values.tolist())
    assert sum(encoded) == len(named)


def test_no_impressions_have_no_scores():
    behaviors, collator = make_behaviors()
    assert score_behaviors(make_model(), behaviors.select(np.arange(0)), collator).shape == (0,)
