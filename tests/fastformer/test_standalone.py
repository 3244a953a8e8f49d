import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_imports

from aft_vision.fastformer import (
    FastformerConfig,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerModel,
    FastformerNewsConfig,
    encoder,
)
from aft_vision.fastformer.tokenize import train_tokenizer

SIZES = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=16)
WINDOWS = dict(attention_window=4, num_global_tokens=1, num_random_tokens=1, block_size=2, linformer_dim=4)
SMALL: dict[str, Any] = dict(**SIZES, **WINDOWS, poolingformer_window=4)


def test_a_saved_model_names_its_code_which_does_not_import_the_package(tmp_path):
    model = FastformerForSequenceClassification(FastformerConfig(encoder_mixer='linformer', **SMALL))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['auto_map'] == {
        'AutoConfig': 'fastformer_config.FastformerConfig',
        'AutoModel': 'fastformer_modeling.FastformerModel',
        'AutoModelForSequenceClassification': 'fastformer_modeling.FastformerForSequenceClassification',
    }
    files = {path.stem: path.read_text() for path in tmp_path.glob('*.py')}
    # Nothing that a user may have there, or that Python would import when it is started there.
    assert all(name.startswith('fastformer_') for name in files)
    assert {'fastformer_modeling', 'fastformer_config', 'fastformer_additive', 'fastformer_baselines'} <= files.keys()
    assert [name for name, text in files.items() if re.search('(from|import) aft_vision', text)] == []


@pytest.mark.filterwarnings('ignore:NLTK has no punkt_tab')
@pytest.mark.parametrize('method', ['nltk', 'wordpunct'])
def test_a_saved_tokeniser_is_no_module_of_python_and_needs_nltk_only_for_its_words(method, tmp_path):
    train_tokenizer(['A film.'], method).save_pretrained(tmp_path)
    (name,) = {path.stem for path in tmp_path.glob('*.py')} - {'fastformer_standalone'}
    assert name == 'fastformer_tokenize'
    assert 'nltk' not in get_imports(tmp_path / f'{name}.py')


def test_a_model_with_an_adapter_is_saved_without_its_configuration(tmp_path, monkeypatch):
    model = FastformerModel(FastformerConfig(**SMALL))

    def save(self: Any, folder: Path, *args: Any, **kwargs: Any) -> None:
        # As transformers does after `add_adapter`.
        (folder / 'adapter_config.json').write_text('{}')
        (folder / 'adapter_model.safetensors').write_bytes(b'')
        (folder / 'adapter_model.safetensors').chmod(0o600)

    monkeypatch.setattr(PreTrainedModel, 'save_pretrained', save)
    model.save_pretrained(tmp_path)
    modes = {(tmp_path / f'adapter_{name}').stat().st_mode for name in ('config.json', 'model.safetensors')}
    assert len(modes) == 1


@pytest.mark.parametrize('kind', ['class', 'encoder', 'loaded encoder', 'language model'])
def test_what_cannot_be_copied_is_said_when_it_is_saved(kind, tmp_path, caplog, monkeypatch):
    class Foreign(FastformerModel):
        pass

    class ForeignConfig(BertConfig):
        pass

    if kind == 'class':
        model: Any = Foreign(FastformerConfig(**SMALL))
    elif kind.endswith('encoder'):
        module = 'transformers_modules.other.mine' if kind.startswith('loaded') else 'mine'
        monkeypatch.setitem(encoder.ENCODERS, 'foreign', type('Mine', (torch.nn.Identity,), {'__module__': module}))
        model = FastformerModel(FastformerConfig(encoder_mixer='foreign', **SMALL))
    else:
        bert = ForeignConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        model = FastformerForNewsRecommendation(FastformerNewsConfig(**SMALL))
        model.config.text_config = bert
    with caplog.at_level(logging.WARNING, 'aft_vision'):
        model.save_pretrained(tmp_path)
    name = {'class': 'Foreign', 'encoder': 'Mine', 'loaded encoder': 'Mine', 'language model': 'ForeignConfig'}[kind]
    assert f'{name} can be imported' in caplog.text
    assert not [*tmp_path.glob('*.py')]
    assert not json.loads((tmp_path / 'config.json').read_text()).get('auto_map')
