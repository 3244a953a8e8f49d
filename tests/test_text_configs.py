import dataclasses
from pathlib import Path

import pytest
import torch

from aft_vision.fastformer import (
    PRESETS,
    FastformerConfig,
    FastformerConversionConfig,
    FastformerForConditionalGeneration,
    FastformerForConversion,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerNewsConfig,
)
from train.fastformer.schema import TextConfig, text_model_config
from train.fastformer.tasks import TASKS, load_text_config

ROOT = Path(__file__).parents[1] / 'configs'
FOLDER = ROOT / 'fastformer'
SMOKE = ('fastformer', 'conversion', 'recommendation', 'summarization')
CONFIGS = [*sorted(FOLDER.rglob('*.yaml')), *(ROOT / 'smoke' / f'{name}.yaml' for name in SMOKE)]
# The model of each task, and its configuration.
MODELS = {
    'classification': (FastformerForSequenceClassification, FastformerConfig),
    'conversion': (FastformerForConversion, FastformerConversionConfig),
    'recommendation': (FastformerForNewsRecommendation, FastformerNewsConfig),
    'summarization': (FastformerForConditionalGeneration, FastformerConfig),
}
# AUC, memory in training and latency that Table 8 prints.
TABLE_8 = {'conversion_transformer': ('0.7299', '30 GB', '176 ms'), 'conversion': ('0.7394', '25 GB', '163 ms')}
TITLES = {'amazon': 'Amazon', 'imdb': 'IMDB', 'mind_topic': 'MIND'}
# Accuracy and macro-F in percent, each with its deviation, that Table 4 prints for Amazon, IMDB and MIND.
TABLE_4 = {
    'transformer': ('65.32 0.35 42.31 0.33', '52.04 0.50 42.69 0.47', '80.90 0.20 60.02 0.21'),
    'longformer': ('65.45 0.39 42.48 0.44', '52.21 0.36 43.36 0.38', '81.36 0.21 62.59 0.23'),
    'bigbird': ('66.14 0.42 42.96 0.40', '53.23 0.46 44.03 0.44', '81.93 0.24 63.58 0.26'),
    'linformer': ('66.20 0.49 43.13 0.48', '53.17 0.59 44.34 0.57', '82.16 0.28 63.77 0.30'),
    'linear_transformer': ('66.12 0.42 43.04 0.44', '53.09 0.47 44.30 0.49', '82.25 0.23 63.81 0.22'),
    'poolingformer': ('66.05 0.44 43.00 0.45', '53.78 0.51 44.52 0.50', '82.46 0.24 64.10 0.26'),
    'fastformer': ('66.13 0.29 43.23 0.30', '54.10 0.42 44.65 0.44', '82.34 0.19 63.89 0.20'),
}
# AUC, MRR, nDCG@5 and nDCG@10 in percent that Table 5 prints.
TABLE_5 = {
    'transformer': '68.22 33.32 36.35 42.23',
    'longformer': '67.98 33.04 36.18 42.06',
    'bigbird': '68.14 33.28 36.30 42.18',
    'linformer': '68.02 33.19 36.22 42.10',
    'linear_transformer': '67.76 32.94 36.16 41.97',
    'poolingformer': '68.54 33.60 36.69 42.60',
    'fastformer': '69.11 34.25 37.26 43.38',
    'plm': '71.04 35.91 39.16 45.03',
}
RECOMMENDATION = 'mind_recommendation'
# ROUGE-1, 2 and L in percent that Table 6 prints for CNN/DailyMail and PubMed.
TABLE_6 = {
    'transformer': ('38.52 16.04 35.87', '34.26 11.88 31.64'),
    'longformer': ('37.89 15.46 35.19', '36.92 14.34 33.75'),
    'bigbird': ('38.31 15.78 35.60', '37.73 14.99 34.51'),
    'linformer': ('37.96 15.58 35.34', '37.22 14.48 34.02'),
    'linear_transformer': ('37.24 14.87 34.64', '36.43 13.80 33.21'),
    'poolingformer': ('38.58 16.16 36.17', '37.82 15.15 34.63'),
    'fastformer': ('38.54 16.22 36.21', '38.09 15.44 34.81'),
}
SUMMARIES = {'cnn_dailymail': 'CNN/DailyMail', 'pubmed': 'PubMed'}
ROUGE = {(name, mixer): row[i] for mixer, row in TABLE_6.items() for i, name in enumerate(SUMMARIES)}
NUMBERS = {(name, mixer): row[i] for mixer, row in TABLE_4.items() for i, name in enumerate(TITLES)}
# What an ablation of Figs. 3 and 4 changes of the model of imdb.yaml, and of small_imdb.yaml.
ABLATIONS = {
    'add': ('3', dict(interaction='add')),
    'concat': ('3', dict(interaction='concat')),
    'unshared': ('4', dict(share_query_value=False, share_layers=False)),
    'query_value': ('4', dict(share_layers=False)),
    'query_value_heads': ('4', dict(share_heads=True, share_layers=False)),
}
ABLATED = {'imdb': ', IMDB: ', 'small_imdb': ' on the IMDB of two classes: '}


def load(name: str) -> TextConfig:
    return load_text_config(FOLDER / f'{name}.yaml')


def header(path: Path) -> str:
    return ' '.join(line.lstrip('# ') for line in path.read_text().splitlines() if line.startswith('#'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_a_text_config_is_valid_and_its_model_and_trainer_can_be_made(path, tmp_path):
    config = load_text_config(path, ['run.device=cpu', 'run.amp=none'])
    with torch.device('meta'):
        model_class, kind = MODELS[config.task]
        fields = {name: value for name, value in config.model.items() if name != 'text_model'}
        model = model_class(text_model_config(fields, config.data.max_length, kind))
    assert all(parameter.is_meta for parameter in model.parameters())
    arguments = TASKS[config.task](config, tmp_path).arguments(tmp_path, seed=0)
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == config.data.batch_size
    assert (arguments.learning_rate, arguments.num_train_epochs) == (config.optim.lr, config.schedule.epochs)


@pytest.mark.parametrize(('name', 'mixer'), NUMBERS)
def test_every_row_of_table_4_has_a_config_with_its_numbers_and_its_model(name, mixer):
    stem = name if mixer == 'fastformer' else f'{name}_{mixer}'
    accuracy, accuracy_std, macro_f, macro_f_std = NUMBERS[name, mixer].split()
    text = header(FOLDER / f'{stem}.yaml')
    assert 'Fastformer Table 4, row' in text
    assert TITLES[name] in text
    assert f'accuracy {accuracy} +- {accuracy_std} %, macro-F {macro_f} +- {macro_f_std} % (published' in text
    row, recipe = load(stem), load(name)
    if mixer != 'fastformer':
        length = min(recipe.data.max_length, 512) if mixer == 'transformer' else recipe.data.max_length
        data = dataclasses.replace(recipe.data, max_length=length)
        assert row == dataclasses.replace(recipe, model={**recipe.model, 'encoder_mixer': mixer}, data=data)


@pytest.mark.parametrize(('name', 'mixer'), ROUGE)
def test_every_row_of_table_6_has_a_config_with_its_numbers_and_its_model(name, mixer):
    stem = name if mixer == 'fastformer' else f'{name}_{mixer}'
    one, two, longest = ROUGE[name, mixer].split()
    text = header(FOLDER / f'{stem}.yaml')
    assert f'Fastformer Table 6, row "{mixer.replace("_", " ")}", {SUMMARIES[name]}'.lower() in text.lower()
    assert f'ROUGE-1 {one} %, ROUGE-2 {two} %, ROUGE-L {longest} % (published' in text
    row, recipe = load(stem), load(name)
    if mixer != 'fastformer':
        length = 512 if mixer == 'transformer' else recipe.data.max_length
        data = dataclasses.replace(recipe.data, max_length=length)
        assert row == dataclasses.replace(recipe, model={**recipe.model, 'encoder_mixer': mixer}, data=data)


@pytest.mark.parametrize('name', SUMMARIES)
def test_the_recipes_of_summaries_are_the_columns_of_table_9(name):
    config, preset = load(name), PRESETS[name]
    assert (config.task, config.model, config.data.kind) == ('summarization', {'preset': name}, name)
    assert (config.data.max_length, config.data.batch_size) == (preset.max_length, preset.batch_size)
    assert (config.optim.lr, config.schedule.epochs) == (preset.lr, preset.epochs)
    assert config.generate.num_beams == preset.num_beams
    assert (config.optim.name, config.optim.weight_decay, len(config.run.seeds)) == ('adamw_torch', 0, 5)
    # Appendix A.2, and GloVe as wide as the embedding.
    assert config.data.tokenizer == 'nltk'
    assert f'{preset.model["embedding_size"]}d' in config.data.glove


@pytest.mark.parametrize('name', TITLES)
def test_the_recipes_are_the_columns_of_table_9(name):
    config, preset = load(name), PRESETS[name]
    assert config.model == {'preset': name}
    assert (config.data.max_length, config.data.batch_size) == (preset.max_length, preset.batch_size)
    assert (config.optim.lr, config.schedule.epochs) == (preset.lr, preset.epochs)
    # AdamW without weight decay is Adam.
    assert (config.optim.name, config.optim.weight_decay) == ('adamw_torch', 0)
    assert (len(config.run.seeds), config.data.valid_share, config.data.test_share) == (5, 0.1, 0.1)
    # Appendix A.2, and GloVe as wide as the embedding.
    assert config.data.tokenizer == 'nltk'
    assert f'{preset.model["embedding_size"]}d' in config.data.glove
    baseline = load(f'{name}_transformer')
    assert baseline.data.max_length == preset.transformer_max_length


@pytest.mark.parametrize('recipe', ABLATED)
@pytest.mark.parametrize('name', ABLATIONS)
def test_an_ablation_of_a_figure_changes_its_arguments_alone(name, recipe):
    figure, change = ABLATIONS[name]
    assert f'Fastformer Fig. {figure}{ABLATED[recipe]}' in header(FOLDER / 'ablations' / f'{recipe}_{name}.yaml')
    whole = load(recipe)
    assert load(f'ablations/{recipe}_{name}') == dataclasses.replace(whole, model={**whole.model, **change})


@pytest.mark.parametrize('mixer', TABLE_5)
def test_every_row_of_table_5_has_a_config_with_its_numbers_and_its_model(mixer):
    stem = RECOMMENDATION if mixer == 'fastformer' else f'{RECOMMENDATION}_{mixer}'
    auc, mrr, ndcg5, ndcg10 = TABLE_5[mixer].split()
    text = header(FOLDER / f'{stem}.yaml')
    assert 'Fastformer Table 5, row' in text
    assert f'AUC {auc}, MRR {mrr}, nDCG@5 {ndcg5}, nDCG@10 {ndcg10} % (published' in text
    row, recipe = load(stem), load(RECOMMENDATION)
    if mixer == 'plm':
        optim = dataclasses.replace(recipe.optim, lr=PRESETS[RECOMMENDATION].lr_plm)
        model, data = {**recipe.model, 'text_model': 'bert-base-uncased'}, dataclasses.replace(recipe.data, glove=None)
        assert row == dataclasses.replace(recipe, model=model, data=data, optim=optim)
    elif mixer != 'fastformer':
        assert row == dataclasses.replace(recipe, model={**recipe.model, 'encoder_mixer': mixer})


def test_the_recommender_is_a_column_of_table_9():
    config, preset = load(RECOMMENDATION), PRESETS[RECOMMENDATION]
    data = config.data
    assert (config.task, config.model) == ('recommendation', {'preset': RECOMMENDATION})
    assert (data.max_length, data.max_behaviors, data.batch_size) == (
        preset.max_length,
        preset.max_behaviors,
        preset.batch_size,
    )
    assert (config.optim.lr, config.schedule.epochs, len(config.run.seeds)) == (preset.lr, preset.epochs, 5)
    assert (config.optim.name, config.optim.weight_decay) == ('adamw_torch', 0)


@pytest.mark.parametrize('name', TABLE_8)
def test_the_rows_of_table_8_differ_in_their_encoder_alone(name):
    auc, memory, latency = TABLE_8[name]
    text = header(FOLDER / f'{name}.yaml')
    assert 'Fastformer Table 8, row' in text
    assert f'AUC {auc} (published' in text
    assert f'published memory in training {memory}, latency {latency}' in text
    row, recipe = load(name), load('conversion')
    assert {**row.model, 'encoder_mixer': 'fastformer'} == {**recipe.model, 'encoder_mixer': 'fastformer'}
    assert dataclasses.replace(row, model=recipe.model) == recipe
    # The sizes of news recommendation, with what its preset switches off.
    preset = dict(PRESETS['mind_recommendation'].model)
    assert recipe.model == {name: value for name, value in preset.items() if not name.startswith('use_')}
    assert (recipe.data.max_behaviors, recipe.data.max_length) == (50, PRESETS['mind_recommendation'].max_length)


def test_there_are_no_other_configs():
    small = {'ag_news', 'small_imdb', 'small_ag_news', 'small_movielens', 'small_movielens_conversion'}
    small |= {'small_alimama', 'small_bbc', 'small_cnn_dailymail', *TABLE_8}
    rows = {name if mixer == 'fastformer' else f'{name}_{mixer}' for name, mixer in (NUMBERS | ROUGE)}
    rows |= {RECOMMENDATION if mixer == 'fastformer' else f'{RECOMMENDATION}_{mixer}' for mixer in TABLE_5}
    assert {path.stem for path in FOLDER.glob('*.yaml')} == rows | small
    ablations = {f'{recipe}_{name}' for recipe in ABLATED for name in ABLATIONS}
    assert {path.stem for path in (FOLDER / 'ablations').glob('*.yaml')} == ablations


def test_the_small_recipes_differ_in_their_texts_alone():
    imdb, ag_news = load('small_imdb'), load('small_ag_news')
    assert dataclasses.replace(imdb, data=ag_news.data) == ag_news
    assert imdb.run.seeds == [0, 1, 2]


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('data.max_length=0', r'data\.max_length to be at least 1, got 0'),
        ('data.batch_size=0', r'data\.batch_size to be at least 1, got 0'),
        ('data.min_frequency=0', r'data\.min_frequency to be at least 1, got 0'),
        ('data.eval_batch_size=0', r'data\.eval_batch_size to be at least 1, or null.*, got 0'),
        ('data.test_share=1.0', r'data\.test_share to be in \(0, 1\), got 1\.0'),
        ('data={test_share: 0.5, valid_share: 0.5}', r'data\.test_share \+ data\.valid_share to be below 1, got 1\.0'),
        ('data.num_workers=-1', r'data\.num_workers to be in \[0, 1024\], got -1'),
    ],
)
@pytest.mark.parametrize('name', SMOKE)
def test_every_task_checks_what_all_data_have(name, override, message):
    with pytest.raises(ValueError, match=message):
        load_text_config(ROOT / 'smoke' / f'{name}.yaml', [override])
