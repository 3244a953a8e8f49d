import pytest
import torch
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

from aft_vision.fastformer import (
    FastformerConfig,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerNewsConfig,
)
from aft_vision.fastformer.summarize import load_summarizer, summarize
from aft_vision.fastformer.tokenize import train_tokenizer

TEXTS = ['red blue green', 'blue', 'green green red blue yellow red', '', 'yellow red']


@pytest.fixture(scope='module')
def tokenizer():
    return train_tokenizer(['red blue green yellow'])


@pytest.fixture(scope='module')
def model(tokenizer):
    """Any model of transformers with an encoder and a decoder will do; its weights are random."""
    torch.manual_seed(0)
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None)
    config = BartConfig(
        vocab_size=len(tokenizer), encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, init_std=1.0,
        **sizes, **tokens,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


@pytest.mark.parametrize('beams', [1, 3])
def test_a_summary_is_what_the_model_generates_whatever_batch_the_text_is_in(model, tokenizer, beams):
    options = dict(num_beams=beams, max_new_tokens=6, do_sample=False)
    model.eval()
    expected = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)['input_ids'] or [tokenizer.unk_token_id]])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        expected.append(tokenizer.decode(generated, skip_special_tokens=True).strip())
    assert len(set(expected)) > 1
    for batch_size in (1, 2, 8):
        assert summarize(model, tokenizer, TEXTS, batch_size, **options) == expected


def test_long_texts_are_cut_to_what_the_model_takes(model, tokenizer):
    text = ' '.join(['red', 'blue', 'green', 'yellow'] * 8)
    expected = summarize(model, tokenizer, [text], max_new_tokens=6)
    assert summarize(model, tokenizer, [text + ' red' * 90], max_new_tokens=6) == expected
    assert summarize(model, tokenizer, [text[3:]], max_new_tokens=6) != expected


def test_dropout_is_off_and_the_mode_comes_back(model, tokenizer):
    expected = summarize(model.eval(), tokenizer, TEXTS, max_new_tokens=6)
    model.train()
    assert summarize(model, tokenizer, TEXTS, max_new_tokens=6) == expected
    assert model.training
    model.eval()


def test_the_mode_comes_back_where_generation_fails(model, tokenizer):
    model.train()
    with pytest.raises(ValueError, match='colour'):
        summarize(model, tokenizer, TEXTS, colour='red')
    assert model.training
    model.eval()


def test_a_saved_model_summarizes_as_before(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = summarize(*load_summarizer(tmp_path), TEXTS, max_new_tokens=6)
    assert loaded == summarize(model, tokenizer, TEXTS, max_new_tokens=6)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_no_texts_give_no_summaries(model, tokenizer):
    assert summarize(model, tokenizer, []) == []


def test_what_cannot_be_summarized_is_named(model, tokenizer, tmp_path):
    with pytest.raises(ValueError, match='got one text'):
        summarize(model, tokenizer, 'one text')
    with pytest.raises(ValueError, match=r'a folder with a saved model, got .*, which has no config\.json'):
        load_summarizer(tmp_path / 'nowhere')


@pytest.mark.parametrize('other', ['classifier', 'recommender'])
def test_a_model_of_another_task_is_refused_before_anything_is_printed(tmp_path, capfd, other):
    small = dict(vocab_size=9, hidden_size=4, num_attention_heads=2, num_hidden_layers=1)
    if other == 'classifier':
        FastformerForSequenceClassification(FastformerConfig(**small)).save_pretrained(tmp_path)
    else:
        FastformerForNewsRecommendation(FastformerNewsConfig(**small)).save_pretrained(tmp_path)
    capfd.readouterr()
    with pytest.raises(ValueError, match=r'expected a model that summarises, .* got .* with a FastformerFor'):
        load_summarizer(tmp_path)
    assert capfd.readouterr() == ('', '')
