"""The configuration's defaults and refusals, and the presets against Table 9."""

import math
from typing import Any

import pytest
import torch

from aft_vision.fastformer import (
    ENCODERS,
    PRESETS,
    FastformerConfig,
    FastformerForConditionalGeneration,
    FastformerForNewsRecommendation,
    FastformerNewsConfig,
)
from aft_vision.fastformer.config import FIELDS_OF
from aft_vision.fastformer.decoder import FastformerDecoder

ORDER = ('amazon', 'imdb', 'mind_topic', 'mind_recommendation', 'cnn_dailymail', 'pubmed')
# Fastformer Table 9, row by row; None where it has a dash.
TABLE = {
    'num_hidden_layers': (2, 2, 2, 1, 4, 2),
    'decoder_layers': (None, None, None, None, 4, 4),
    'num_global_tokens': (8, 8, 16, 8, 64, 64),
    'num_random_tokens': (8, 8, 16, 8, 64, 64),
    'attention_window': (8, 8, 16, 8, 64, 64),
    'poolingformer_window': (64, 64, 256, 64, 256, 256),
    'block_size': (4, 4, 8, 4, 32, 32),
    'linformer_dim': (16, 16, 16, 16, 64, 64),
    'num_attention_heads': (16,) * 6,
    'num_beams': (None, None, None, None, 5, 5),
    'transformer_max_length': (512,) * 6,
    'max_length': (512, 1024, 2048, 48, 2048, 4096),
    'max_behaviors': (None, None, None, 50, None, None),
    'hidden_size': (256,) * 6,
    'batch_size': (64, 64, 64, 64, 32, 32),
    'lr': (1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4),
    'lr_plm': (None, None, None, 3e-6, None, None),
    'epochs': (3, 3, 3, 3, 12, 15),
    'hidden_dropout_prob': (0.2,) * 6,
}


@pytest.mark.parametrize('row', TABLE)
def test_the_presets_are_table_9(row: str):
    assert tuple(PRESETS) == ORDER
    found = [preset.model.get(row, getattr(preset, row, None)) for preset in PRESETS.values()]
    assert tuple(found) == TABLE[row]


def test_a_preset_makes_a_config_that_arguments_override():
    config = PRESETS['imdb'].create_config(vocab_size=10, num_labels=10, hidden_size=32)
    assert (config.vocab_size, config.num_labels, config.hidden_size) == (10, 10, 32)
    assert (config.embedding_size, config.max_position_embeddings) == (300, 1024)


def test_a_preset_makes_the_config_of_a_recommender():
    preset = PRESETS['mind_recommendation']
    config = preset.create_config(FastformerNewsConfig, vocab_size=30)
    assert isinstance(config, FastformerNewsConfig)
    assert (config.vocab_size, config.max_behaviors, config.text_config) == (30, 50, None)
    assert (config.max_position_embeddings, config.use_position_embeddings) == (48, False)
    assert preset.create_config(FastformerNewsConfig, max_behaviors=7).max_behaviors == 7
    assert not hasattr(preset.create_config(vocab_size=30), 'max_behaviors')
    small = dict(vocab_size=30, embedding_size=8, hidden_size=8, num_attention_heads=2)
    assert (
        FastformerForNewsRecommendation(preset.create_config(FastformerNewsConfig, **small)).config.max_behaviors == 50
    )


def test_a_preset_gives_the_transformer_512_positions():
    assert PRESETS['pubmed'].create_config(encoder_mixer='transformer').max_position_embeddings == 512
    assert PRESETS['mind_recommendation'].create_config(encoder_mixer='transformer').max_position_embeddings == 48


def test_the_presets_of_summaries_leave_room_for_their_average_length():
    lengths = [PRESETS[name].create_config().max_target_positions for name in ('cnn_dailymail', 'pubmed')]
    assert lengths == [128, 256]


def test_what_is_left_out_follows_from_the_rest():
    config = FastformerConfig(hidden_size=32, num_hidden_layers=3, poolingformer_window=8)
    assert (config.embedding_size, config.intermediate_size) == (32, 32)
    assert (config.decoder_layers, config.poolingformer_second_window) == (3, 32)
    assert config.max_target_positions == config.max_position_embeddings == 512
    assert config.decoder_start_token_id == config.bos_token_id == 1


def test_a_config_keeps_every_field_through_a_file(tmp_path):
    config = FastformerConfig(score='dense', interaction='add', share_layers=False, embedding_size=300, num_labels=7)
    config.save_pretrained(tmp_path)
    again = FastformerConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert (again.score, again.share_layers, again.num_labels) == ('dense', False, 7)


class Noted:
    """A config that notes which of its fields are read."""

    def __init__(self, config: FastformerConfig) -> None:
        self.config, self.read = config, set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize('part', FIELDS_OF)
def test_each_part_reads_the_fields_of_its_row_of_the_table(part: str):
    assert {*ENCODERS, 'decoder'} >= set(FIELDS_OF) >= {'fastformer', 'decoder'}
    config = Noted(FastformerConfig(hidden_size=8, num_attention_heads=2, max_position_embeddings=16))
    if part == 'decoder':
        FastformerDecoder(config)
    else:
        ENCODERS[part](config)(torch.zeros(1, 16, 8))
    assert config.read & {name for fields in FIELDS_OF.values() for name in fields} == set(FIELDS_OF[part])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(hidden_size=30), 'multiple of num_attention_heads'),
        (dict(score='sparse'), 'score must be one of'),
        (dict(interaction='divide'), 'interaction must be one of'),
        (dict(score='dense', share_heads=True), 'share_heads needs'),
        (dict(causal='acausal'), 'causal must be one of'),
        (dict(cross_attention='linear'), 'cross_attention must be one of'),
        (dict(cross_attention='additive', interaction='add'), "needs interaction='multiply'"),
        (dict(hidden_dropout_prob=1.0), r'lie in \[0, 1\)'),
        (dict(initializer_range=0.0), 'initializer_range must be above 0 and finite, or None'),
        (dict(initializer_range=math.nan), 'initializer_range must be above 0 and finite, or None'),
        (dict(num_hidden_layers=0), 'num_hidden_layers must be at least 1, got 0'),
        (dict(num_attention_heads=0), 'num_attention_heads must be at least 1, got 0'),
        (dict(encoder_mixer='longformer', attention_window=7), 'attention_window must be even, got 7'),
        (dict(encoder_mixer='bigbird', block_size=0), 'block_size of bigbird must be at least 1, got 0'),
        (dict(encoder_mixer='longformer', num_global_tokens=-1), 'num_global_tokens of longformer must be at least 0'),
    ],
)
def test_a_config_refuses_what_makes_no_model(fields: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        FastformerConfig(**fields)


@pytest.mark.parametrize(
    ('fields', 'message'), [(dict(causal='stream'), 'causal must be one of'), (dict(decoder_layers=0), 'at least 1')]
)
def test_fields_that_from_pretrained_sets_are_checked(tmp_path, fields: dict[str, object], message: str):
    small = dict(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, max_position_embeddings=8)
    FastformerForConditionalGeneration(FastformerConfig(**small)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        FastformerForConditionalGeneration.from_pretrained(tmp_path, **fields)
