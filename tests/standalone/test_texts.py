"""Folders of text models and tokenisers load where this package is not installed."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import BertConfig

from aft_vision.fastformer import (
    ENCODERS,
    FastformerConfig,
    FastformerConversionConfig,
    FastformerForConditionalGeneration,
    FastformerForConversion,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerNewsConfig,
)
from aft_vision.fastformer.tokenize import train_tokenizer
from tests import helpers

SIZES = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=16)
WINDOWS = dict(attention_window=4, num_global_tokens=1, num_random_tokens=1, block_size=2, linformer_dim=4)
SMALL: dict[str, Any] = dict(**SIZES, **WINDOWS, poolingformer_window=4)
TEXTS = ["It isn't over.", '', 'Good (very good) films. Or is it, Dr. Smith said, "over"?']

# Loads folders where this package is not installed, and saves what models and tokenisers compute.
ALONE = """
import importlib.util, sys
packages, folder = sys.argv[1:]
sys.path.insert(0, packages)
assert importlib.util.find_spec('aft_vision') is None
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

def load(auto, path):
    # Twice saved again with its code, and loaded from there.
    for _ in range(2):
        model = auto.from_pretrained(path, trust_remote_code=True)
        path += '_again'
        model.save_pretrained(path)
    return auto.from_pretrained(path, trust_remote_code=True).eval()

given, found = torch.load(f'{folder}/given.pt'), {}
for name in given['tokenizers']:
    tokenizer = AutoTokenizer.from_pretrained(f'{folder}/{name}', trust_remote_code=True)
    tokenizer.save_pretrained(f'{folder}/{name}_again')
    tokenizer = AutoTokenizer.from_pretrained(f'{folder}/{name}_again', trust_remote_code=True)
    found[name] = tokenizer(given['texts'], padding=True)['input_ids']
inputs, users = given['inputs'], given['users']
with torch.no_grad():
    for name in given['encoders']:
        base = load(AutoModel, f'{folder}/{name}')
        found[name] = load(AutoModelForSequenceClassification, f'{folder}/{name}')(**inputs).logits
        found[f'{name} base'] = base(**inputs).last_hidden_state
    writer = load(AutoModelForSeq2SeqLM, f'{folder}/seq2seq')
    found['seq2seq'] = writer.generate(**inputs, max_new_tokens=4, num_beams=2)
    model, found['conversion'] = load(AutoModel, f'{folder}/news'), load(AutoModel, f'{folder}/conversion').state_dict()
    found['news'], found['scores'] = model.state_dict(), model(**inputs, **users).scores
torch.save(found, f'{folder}/found.pt')
"""


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
def test_every_encoder_and_tokeniser_loads(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(3, SMALL['vocab_size'], (3, 9))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    inputs = {'input_ids': ids * mask, 'attention_mask': mask.long()}
    users = {'history': torch.tensor([[0, 2], [1, -1]]), 'candidates': torch.tensor([[1, 2], [0, 2]])}
    expected: dict[str, Any] = {}
    for method in ('nltk', 'wordpunct'):
        tokenizer = train_tokenizer(TEXTS, method, max_length=8)
        tokenizer.save_pretrained(tmp_path / method)
        expected[method] = tokenizer(TEXTS, padding=True)['input_ids']
    bert = BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with torch.no_grad():
        for name in ENCODERS:
            model: Any = FastformerForSequenceClassification(FastformerConfig(encoder_mixer=name, **SMALL)).eval()
            model.save_pretrained(tmp_path / name)
            expected[name] = model(**inputs).logits
            expected[f'{name} base'] = model.model(**inputs).last_hidden_state
        model = FastformerForConditionalGeneration(FastformerConfig(encoder_mixer='linformer', **SMALL)).eval()
        model.save_pretrained(tmp_path / 'seq2seq')
        expected['seq2seq'] = model.generate(**inputs, max_new_tokens=4, num_beams=2)
        model = FastformerForConversion(FastformerConversionConfig(encoder_mixer='longformer', **SMALL))
        model.save_pretrained(tmp_path / 'conversion')
        expected['conversion'] = model.state_dict()
        config = FastformerNewsConfig(encoder_mixer='bigbird', text_config=bert, **SMALL)
        model = FastformerForNewsRecommendation(config).eval()
        model.save_pretrained(tmp_path / 'news')
        expected['news'] = model.state_dict()
        # Weights of a file lie at other addresses than those of a new model, which may change the last bit.
        model = FastformerForNewsRecommendation.from_pretrained(tmp_path / 'news').eval()
        expected['scores'] = model(**inputs, **users).scores
    given = {'texts': TEXTS, 'inputs': inputs, 'users': users}
    torch.save({**given, 'encoders': [*ENCODERS], 'tokenizers': ['nltk', 'wordpunct']}, tmp_path / 'given.pt')

    (tmp_path / 'packages').mkdir()
    helpers.link_packages(tmp_path / 'packages', ['torch', 'transformers', 'safetensors', 'nltk'])
    environment = {**os.environ, 'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '1'}
    command = [sys.executable, '-I', '-S', '-c', ALONE, str(tmp_path / 'packages'), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / 'found.pt')
    # The same code on the same machine: every bit is.
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
