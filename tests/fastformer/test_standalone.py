import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, PreTrainedModel

from aft_vision.fastformer import (
    FastformerConfig,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerModel,
    FastformerNewsConfig,
    encoder,
)

SIZES = dict(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=16)
WINDOWS = dict(attention_window=4, num_global_tokens=1, num_random_tokens=1, block_size=2, linformer_dim=4)
SMALL: dict[str, Any] = dict(**SIZES, **WINDOWS, poolingformer_window=4)


def test_a_saved_model_names_its_code_which_has_only_its_encoder(tmp_path):
    model = FastformerForSequenceClassification(FastformerConfig(encoder_mixer='linformer', **SMALL))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    assert config['auto_map'] == {
        'AutoConfig': 'modeling_fastformer.FastformerConfig',
        'AutoModel': 'modeling_fastformer.FastformerModel',
        'AutoModelForSequenceClassification': 'modeling_fastformer.FastformerForSequenceClassification',
    }
    text = (tmp_path / 'modeling_fastformer.py').read_text()
    assert 'class LinformerEncoder' in text
    assert 'class LongformerEncoder' not in text
    assert 'import aft_vision' not in text
    assert 'from aft_vision' not in text
    options = ['--no-cache', '--config', str(Path(__file__).parents[2] / 'pyproject.toml'), str(tmp_path)]
    for ruff in (['check'], ['format', '--check']):
        done = subprocess.run([sys.executable, '-m', 'ruff', *ruff, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


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


@pytest.mark.parametrize('kind', ['class', 'encoder', 'language model'])
def test_what_cannot_be_copied_is_said_when_it_is_saved(kind, tmp_path, caplog, monkeypatch):
    class Foreign(FastformerModel):
        pass

    class ForeignConfig(BertConfig):
        pass

    if kind == 'class':
        model: Any = Foreign(FastformerConfig(**SMALL))
    elif kind == 'encoder':
        monkeypatch.setitem(encoder.ENCODERS, 'foreign', torch.nn.Identity)
        model = FastformerModel(FastformerConfig(encoder_mixer='foreign', **SMALL))
    else:
        bert = ForeignConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        model = FastformerForNewsRecommendation(FastformerNewsConfig(**SMALL))
        model.config.text_config = bert
    with caplog.at_level(logging.WARNING, 'aft_vision'):
        model.save_pretrained(tmp_path)
    name = {'class': 'Foreign', 'encoder': 'Identity', 'language model': 'ForeignConfig'}[kind]
    assert f'{name} can be imported' in caplog.text
    assert not (tmp_path / 'modeling_fastformer.py').exists()
    assert not json.loads((tmp_path / 'config.json').read_text()).get('auto_map')
