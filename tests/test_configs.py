"""Every recipe of configs/, and every row that the header of one names, is read and built.

A line of a header that begins with three spaces and a key is a row: `#   section.key=value [section.key=value ...]  #
target`. Its words on a command line, after `--config` and the file, train it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import yaml
from helpers import generator
from torch import nn

from aft_vision.fastformer import PRESETS
from train.build import create_state, model_arguments
from train.config import load_config
from train.convert_schema import ConvertConfig
from train.distributed import World
from train.fastformer.schema import text_model_config
from train.fastformer.tasks import TASKS, load_text_config
from train.schema import Config
from train.sequence import Likelihood, build_sequence_model, create_sequence_state
from train.sequence_schema import CharConfig, PixelConfig, RecallConfig

ROOT = Path(__file__).parents[1] / 'configs'
CONFIGS = sorted(ROOT.rglob('*.yaml'))
SMOKE_TEXTS = ('fastformer', 'conversion', 'recommendation', 'summarization')
IMAGENET_UPDATES = 1_281_167 // 1024
# What the papers print for the rows of a header, in their order: what changes, without its first section, and the
# numbers; `-` is the recipe itself.
PUBLISHED = {
    'imagenet/deit_300e': """
        Table 7: deit_tiny_patch16_224 72.2, deit_small_patch16_224 79.9, aft_full_tiny 72.4, aft_full_small 79.8,
            aft_conv_tiny_k11_h32 73.9, aft_conv_tiny 74.8, aft_conv_small_k11_h16 80.2, aft_conv_small_k15_h384 81.0;
        Table 9: aft_full_small model.factorize_bias=false 78.2 3.17;
        Table 12: aft_conv_small_k15_h384 model.query_gate=false 79.5""",
    'imagenet/aft_conv_small_k11_h384': """
        Table 7: - 80.8; Table 10: kernel_size=7 model.standardize_kernel=false 79.4 3.11;
        Table 11: kernel_size=3 79.9 3.02, kernel_size=7 80.8 2.94, kernel_size=25 80.7 2.93, kernel_size=27 81.0 2.94;
        Table 12: query_gate=false 79.3; Sec. 5.3: kernel_size=7 model.global_context=false 79.9;
        Sec. 8: kernel_entropy=0.001 80.9, gumbel=true model.tau=0.5 79.9""",
    'imagenet/aft_conv_base_k25_h32_384_rand': 'Table 8: - 81.6, init_from=runs/deit_base_384_transferred 83.4',
    'pixel/aft_local_256_l24_d256': """
        Table 2: - 2.74 2.75; Table 3: factorize_bias=false model.bias_dim=null 2.84 2.82""",
    'char/aft_local_32_l24_d256': """
        Table 4: - 1.154 0.972; Table 5: window=1 1.205 1.043, window=2 1.176 1.009, window=4 1.165 0.990,
            window=8 1.162 0.983, window=64 1.160 0.981, window=128 1.165 0.985, window=256 1.164 0.986,
            window=512 1.171 0.988, window=1024 1.173 0.991;
        Table 6: context=2048 data.eval_stride=1024 1.135 0.951, context=4096 data.eval_stride=2048 1.134 0.945""",
    'fastformer/mind_recommendation_plm': 'Table 5: - 71.04 35.91 39.16 45.03 72.68 37.45 41.51 46.84',
    'fastformer/conversion': 'Table 8: - 0.7394 25 163, encoder_mixer=transformer 0.7299 30 176',
}
# Fastformer Tables 4 (accuracy, macro-F, their deviations), 5 (AUC, MRR, nDCG@5, nDCG@10) and 6 (ROUGE-1, 2, L).
ENCODERS = ('-', 'transformer', 'longformer', 'bigbird', 'linformer', 'linear_transformer', 'poolingformer')
TABLES = {
    'amazon': """Table 4: 66.13 0.29 43.23 0.30, 65.32 0.35 42.31 0.33, 65.45 0.39 42.48 0.44, 66.14 0.42 42.96 0.40,
        66.20 0.49 43.13 0.48, 66.12 0.42 43.04 0.44, 66.05 0.44 43.00 0.45""",
    'imdb': """Table 4: 54.10 0.42 44.65 0.44, 52.04 0.50 42.69 0.47, 52.21 0.36 43.36 0.38, 53.23 0.46 44.03 0.44,
        53.17 0.59 44.34 0.57, 53.09 0.47 44.30 0.49, 53.78 0.51 44.52 0.50""",
    'mind_topic': """Table 4: 82.34 0.19 63.89 0.20, 80.90 0.20 60.02 0.21, 81.36 0.21 62.59 0.23,
        81.93 0.24 63.58 0.26, 82.16 0.28 63.77 0.30, 82.25 0.23 63.81 0.22, 82.46 0.24 64.10 0.26""",
    'mind_recommendation': """Table 5: 69.11 34.25 37.26 43.38, 68.22 33.32 36.35 42.23, 67.98 33.04 36.18 42.06,
        68.14 33.28 36.30 42.18, 68.02 33.19 36.22 42.10, 67.76 32.94 36.16 41.97, 68.54 33.60 36.69 42.60""",
    'cnn_dailymail': """Table 6: 38.54 16.22 36.21, 38.52 16.04 35.87, 37.89 15.46 35.19, 38.31 15.78 35.60,
        37.96 15.58 35.34, 37.24 14.87 34.64, 38.58 16.16 36.17""",
    'pubmed': """Table 6: 38.09 15.44 34.81, 34.26 11.88 31.64, 36.92 14.34 33.75, 37.73 14.99 34.51,
        37.22 14.48 34.02, 36.43 13.80 33.21, 37.82 15.15 34.63""",
}
for name, text in TABLES.items():
    table, _, numbers = text.partition(': ')
    # Fastformer Table 9 gives the Transformer 512 tokens of a text; those of news are shorter.
    short = {} if name in ('amazon', 'mind_recommendation') else {'transformer': 'transformer data.max_length=512'}
    encoders = [short.get(encoder, encoder) for encoder in ENCODERS]
    rows_of_table = zip(encoders, numbers.split(','), strict=True)
    PUBLISHED[f'fastformer/{name}'] = f'{table}: {", ".join(" ".join(row) for row in rows_of_table)}'


def header(path: Path) -> str:
    return ''.join(line.removeprefix('#') for line in path.read_text().splitlines() if line.startswith('#'))


def rows(text: str) -> dict[str, str]:
    """Read the rows of a header: what changes, and what to expect of it."""
    found = {}
    for line in re.findall(r'^#   +([a-z]\w*\..*=.*)$', text, re.MULTILINE):
        row = re.fullmatch(r'((?:\w+(?:\.\w+)+=\S+ )+) # (\S.*)', line)
        if row is None or row[1].strip() in found:
            raise ValueError(f'expected `section.key=value [section.key=value]  # target`, each once, got {line!r}')
        found[row[1].strip()] = row[2]
    return found


ROWS = {path: rows(path.read_text()) for path in CONFIGS}
EXPERIMENTS = [(path, row.split()) for path in CONFIGS for row in ('', *ROWS[path])]


def kind(path: Path) -> str:
    """Name what a recipe trains: `pixel`, `char`, `recall`, `text`, `image` or, from a ViT, `conversion`."""
    if path.stem.endswith('convert'):
        return 'conversion'
    if path.stem == 'recall':
        return 'recall'
    name = path.stem if path.parent.name == 'smoke' else path.parent.name
    return 'text' if name in SMOKE_TEXTS else name if name in ('pixel', 'char') else 'image'


def load(path: Path | str, *overrides: str) -> Any:
    path = path if isinstance(path, Path) else ROOT / f'{path}.yaml'
    if kind(path) == 'text':
        return load_text_config(path, overrides)
    schemas = {'pixel': PixelConfig, 'char': CharConfig, 'recall': RecallConfig, 'conversion': ConvertConfig}
    return load_config(path, overrides, schemas.get(kind(path), Config))


def of_kind(*kinds: str) -> pytest.MarkDecorator:
    found = [(path, row) for path, row in EXPERIMENTS if kind(path) in kinds]
    ids = ['-'.join((path.parent.name, path.stem, *row)) for path, row in found]
    return pytest.mark.parametrize(('path', 'row'), found, ids=ids)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_config_says_what_to_expect_on_which_hardware(path):
    assert path.read_text().startswith('# ')
    assert 'Expected:' in header(path)
    assert 'Hardware:' in header(path)


@pytest.mark.parametrize(
    'line', ['model.a=1', 'model.a=1  #', 'model.a=1 # target', 'model.a=1 b=2  # target', 'model.a = 1  # target']
)
def test_a_line_that_is_no_row_is_refused(line):
    assert rows('# model.a=1 in prose\n#   model.a=1 data.b=x  # 5 %\n') == {'model.a=1 data.b=x': '5 %'}
    with pytest.raises(ValueError, match='expected `section'):
        rows(f'#   {line}\n')


def published(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Read what changes, the place in the paper and the numbers there of each row of PUBLISHED."""
    for part in text.split(';'):
        place, _, entries = part.partition(':')
        for entry in entries.split(','):
            words = entry.split()
            values = [word for word in words if re.fullmatch(r'[\d.]+', word)]
            yield ' '.join(words[: -len(values)]), place.strip(), values


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_recipe_has_the_rows_of_the_papers_with_their_numbers(name):
    path, wanted = ROOT / f'{name}.yaml', list(published(PUBLISHED[name]))
    found = [pair for pair in ROWS[path].items() if not re.match(r'Fig\. \d|unpublished', pair[1])]
    if wanted[0][0] == '-':
        found.insert(0, ('', header(path)))
    for (row, target), (changes, place, values) in zip(found, wanted, strict=True):
        assert re.fullmatch('' if changes == '-' else rf'\w+\.(\w+=)?{re.escape(changes)}', row)
        assert re.search(rf'{place}\b', target), row
        for value in values:
            assert re.search(rf'(?<![\d.]){value}(?![\d])', target), (row, value)


@cache
def make_teacher(name: str) -> nn.Module:
    """A teacher without its weights: nothing is downloaded."""
    return timm.create_model(name, device='meta')


@of_kind('image')
def test_an_image_model_its_optimizer_and_schedule_can_be_built(path, row):
    # timm's moving average cannot be made on the meta device.
    config = load(path, *row, 'run.compile=false', 'ema.decay=null', 'ema.warmup=false')
    name, kwargs = model_arguments(config, num_classes=10)
    # One block, for time; all are alike. No weights, which are those of all blocks.
    fewer = {'pretrained': False} | ({} if 'pyramid' in name else {'depth': 1})
    model = timm.create_model(name, device='meta', **kwargs | fewer)
    assert all(parameter.is_meta for parameter in model.parameters())
    teacher = config.distill.teacher
    if teacher is not None:
        assert timm.models.is_model_pretrained(teacher)
        assert timm.get_pretrained_cfg(teacher).num_classes == 1000
        teacher = make_teacher(teacher)
    world = World(torch.device('meta'))
    state = create_state(model, config, updates_per_epoch=7, num_classes=10, world=world, teacher=teacher)
    optimized = {id(p) for group in state.optimizer.param_groups for p in group['params']}
    # A projection of features is trained too.
    trained = {id(p) for p in state.task.get_trainable_module().parameters()}
    assert optimized == trained >= {id(p) for p in model.parameters()}
    assert (optimized == {id(p) for p in model.parameters()}) == ('feature' not in config.distill.kind)
    assert 0 < max(rates(state)) <= config.optim.lr * config.data.batch_size / 512


def test_the_arguments_of_a_pyramid_are_those_of_its_class():
    model = ['model.name=aft_pyramid_nano', 'model.depths=[1, 1, 1, 1]', 'model.drop_path_rate=0.1']
    config = load('small/imagenette_128', *model)
    name, kwargs = model_arguments(config, num_classes=10)
    assert [len(stage.blocks) for stage in timm.create_model(name, device='meta', **kwargs).stages] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r'model\.depth\b'):
        load('small/imagenette_128', *model, 'model.depth=2')


def test_the_trainer_accepts_every_published_config_and_the_command_of_a_card_of_weights():
    root = ROOT.parent
    cards = list((root / 'aft_vision' / 'weights').glob('*.*.md'))
    named = {root / re.search(r'train\.imagenet --config (\S+) data\.dir=', card.read_text())[1] for card in cards}
    published = set((root / 'docs' / 'results' / 'data').glob('*imagenet*/*_seed*/config.yaml'))
    assert named
    assert named <= published
    for path in published:
        kept = yaml.safe_load(path.read_text())
        if kept['run'].get('imports'):
            # Its models would be registered for all tests of this process.
            continue
        config = load_config(path, ['data.dir=IMAGENETTE.tar'])
        assert config.data.dir == 'IMAGENETTE.tar'
        assert (config.model, config.optim.lr, config.run.seed) == (
            kept['model'],
            kept['optim']['lr'],
            kept['run']['seed'],
        )


@of_kind('conversion')
def test_the_stages_of_a_conversion_can_be_built(path, row):
    config = load(path, *row, 'run.compile=false', 'ema.decay=null', 'ema.warmup=false')
    name, kwargs = model_arguments(config, num_classes=10)
    trained = {}
    for stage, experiment in config.stages().items():
        model = timm.create_model(name, device='meta', **kwargs)
        # Nothing is read, so the teacher is one without weights.
        sizes = dict(patch_size=model.patch_embed.patch_size, embed_dim=model.embed_dim, num_heads=1)
        sizes |= dict(img_size=config.data.img_size, depth=len(model.blocks))
        teacher = timm.create_model('deit_tiny_patch16_224', device='meta', **sizes)
        taught = None if experiment.distill.teacher is None else teacher
        state = create_state(model, experiment, 7, num_classes=10, world=World(torch.device('meta')), teacher=taught)
        trained[stage] = sum(len(group['params']) for group in state.optimizer.param_groups)
    every, blocks = (len(list(module.parameters())) for module in (model, model.blocks))
    assert trained == {'blocks': blocks, 'features': every, 'labels': every}


@of_kind('pixel', 'char', 'recall')
def test_a_sequence_model_its_optimizer_and_schedule_can_be_built(path, row):
    config = load(path, *row, 'run.compile=false', 'ema.decay=null', 'model.depth=1')
    length = 3072 if isinstance(config, PixelConfig) else config.data.context
    model = build_sequence_model(config, SimpleNamespace(length=length, vocab_size=256), device='meta')
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model(torch.zeros(1, length, dtype=torch.int64, device='meta')).shape == (1, length, 256)
    world = World(torch.device('meta'))
    state = create_sequence_state(model, config, 7, Likelihood('windows', 'bits', length), world)
    optimized = {id(p) for group in state.optimizer.param_groups for p in group['params']}
    assert optimized == {id(p) for p in model.parameters()}
    state.scheduler.step_update(config.schedule.warmup_updates)
    assert 0.5 * config.optim.lr < state.optimizer.param_groups[0]['lr'] <= config.optim.lr


@of_kind('text')
def test_a_text_model_and_its_trainer_can_be_built(path, row, tmp_path):
    config = load(path, *row, 'run.device=cpu', 'run.amp=none')
    with torch.device('meta'):
        model_class = TASKS[config.task].model_class
        fields = {name: value for name, value in config.model.items() if name != 'text_model'}
        model = model_class(text_model_config(fields, config.data.max_length, model_class.config_class))
    assert all(parameter.is_meta for parameter in model.parameters())
    arguments = TASKS[config.task](config, tmp_path).arguments(tmp_path, seed=0)
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == config.data.batch_size
    assert (arguments.learning_rate, arguments.num_train_epochs) == (config.optim.lr, config.schedule.epochs)


def rates(state) -> list[float]:
    """The learning rate at the first update of every epoch."""
    found = []
    for epoch in range(state.loop.epochs):
        found.append(state.optimizer.param_groups[-1]['lr'])
        state.scheduler.step_update((epoch + 1) * state.progress.updates_per_epoch)
        state.scheduler.step(epoch + 1 - state.loop.epoch_delay)
    return found


def test_the_rows_of_table_8_have_the_papers_numbers_and_deits_recipe():
    row = load('imagenet/aft_conv_base_k25_h32_384_rand')
    recipe = load('imagenet/deit_300e')
    assert (row.data.batch_size, row.schedule.epochs, row.data.img_size) == (64, 100, (384, 384))
    assert row.optim.lr * row.data.batch_size / 512 == pytest.approx(6.25e-5)
    assert (row.augment, row.optim, row.ema) == (recipe.augment, recipe.optim, recipe.ema)
    model = timm.create_model(row.model['name'], device='meta')
    assert tuple(model.blocks[0].attn.kernel.weight.shape) == (32, 25, 25)


def test_the_recipe_has_deits_numbers():
    config = load('imagenet/deit_300e')
    assert (config.data.batch_size, config.data.crop_pct, config.data.img_size) == (1024, 0.875, (224, 224))
    augment = config.augment
    assert (augment.scale, augment.hflip, augment.color_jitter) == ((0.08, 1.0), 0.5, 0.3)
    assert (augment.auto_augment, augment.repeats, augment.random_erasing) == ('rand-m9-mstd0.5-inc1', 3, 0.25)
    assert (augment.mixup, augment.cutmix, augment.mix_prob, augment.mix_switch_prob) == (0.8, 1.0, 1.0, 0.5)
    optim = config.optim
    assert (optim.name, optim.weight_decay, optim.clip_grad, optim.label_smoothing) == ('adamw', 0.05, None, 0.1)
    assert config.ema.decay == 0.99996


def test_the_learning_rates_of_the_recipe_are_deits():
    # DeiT's scheduler.step(epoch) comes after the epoch, so each epoch has the rate meant for the one before it.
    config = load('imagenet/deit_300e', 'run.compile=false')
    state = create_state(
        torch.nn.Linear(2, 2), config, IMAGENET_UPDATES, num_classes=2, world=World(torch.device('cpu'))
    )
    warmup = [1e-6 + (1e-3 - 1e-6) * epoch / 5 for epoch in range(5)]
    cosine = [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * epoch / 300)) / 2 for epoch in range(5, 299)]
    found = rates(state)
    assert found == pytest.approx([1e-6, *warmup, *cosine])
    assert found[:4] == pytest.approx([1e-6, 1e-6, 2.008e-4, 4.006e-4])
    assert found[-1] == pytest.approx(1.0108e-5, rel=1e-3)


def test_fine_tuning_at_384_px_has_deits_constant_rate_after_its_warm_up():
    config = load('imagenet/recipes/deit_finetune_384', 'run.compile=false')
    state = create_state(torch.nn.Linear(2, 2), config, 2502, num_classes=2, world=World(torch.device('cpu')))
    warmup = [1e-6 + (5e-6 - 1e-6) * epoch / 5 for epoch in range(5)]
    # By DeiT's code each epoch has the rate meant for the one before it.
    assert rates(state) == pytest.approx([1e-6, *warmup, *([5e-6] * 24)])
    assert config.optim.weight_decay == 1e-8


def test_deit_3_counts_every_mixed_class_as_a_target():
    config = load('imagenet/recipes/deit3_800e', 'run.compile=false', 'ema.decay=null')
    assert config.optim.lr * config.data.batch_size / 512 == pytest.approx(4e-3)
    state = create_state(torch.nn.Linear(3, 3), config, 625, num_classes=3, world=World(torch.device('cpu')))
    images, targets = torch.randn(2, 3, generator=generator()), torch.tensor([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0]])
    found = state.task(images, targets)['loss']
    logits = state.model(images).double()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets.gt(0).double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(('choice', 'expected'), [([], True), (['optim.args.fallback_list=[head.weight]'], False)])
def test_nadamuon_orthogonalises_matrices_but_no_position_biases_nor_what_the_fallback_list_has(choice, expected):
    row = next(row for row in ROWS[ROOT / 'imagenet' / 'deit_300e.yaml'] if 'nadamuon' in row)
    config = load('imagenet/deit_300e', *row.split(), *choice, 'run.compile=false')
    model = timm.create_model('aft_conv_tiny', depth=1, embed_dim=32, num_heads=32, img_size=32, num_classes=10)
    state = create_state(model, config, 9, num_classes=10, world=World(torch.device('cpu')))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(2, 3, 32, 32, generator=generator())).square().sum().backward()
    state.optimizer.step()
    moments = {name: state.optimizer.state[parameter] for name, parameter in model.named_parameters()}
    orthogonalised = {name for name, moment in moments.items() if 'momentum_buffer' in moment}
    assert ('head.weight' in orthogonalised) == expected
    assert {'blocks.0.attn.qkv.weight', 'blocks.0.mlp.fc1.weight'} <= orthogonalised
    assert not [name for name in orthogonalised if 'kernel' in name or 'pos_embed' in name or name.endswith('bias')]
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    assert not torch.equal(model.norm.weight, before['norm.weight'])
    assert not torch.equal(model.blocks[0].attn.qkv.weight, before['blocks.0.attn.qkv.weight'])


def test_the_budget_on_ffcv_files_rises_in_size():
    schedule = load('imagenet/recipes/ffcv_88e', 'run.compile=false').size_schedule
    means = [sum(schedule.choices(0, epoch, 500)) / 500 for epoch in (0, 44, 87)]
    assert means == sorted(means)
    assert schedule.sizes == ((160, 160), (176, 176), (192, 192))
    assert schedule.epochs == 88


def test_the_recipes_of_the_sequence_models_have_the_papers_numbers():
    pixel = load('pixel/cifar10_200e')
    char = load('char/enwik8_100e')
    assert (pixel.augment.hflip, pixel.augment.shift) == (0.5, 10)
    for config, decay, epochs in ((pixel, 0.1, 200), (char, 0.5, 100)):
        assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ('adamw', 3e-3, decay)
        assert (config.data.batch_size, config.schedule.epochs, config.model['dropout']) == (128, epochs, 0.1)
        assert (config.schedule.kind, config.schedule.warmup_updates, config.run.amp) == ('inverse_sqrt', 4000, 'none')
    assert (char.data.context, char.data.vocabulary) == (1024, 'bytes')


@pytest.mark.parametrize(
    'path', [path for path in CONFIGS if path.parent.name in ('pixel', 'char') and '\nbase: ' in path.read_text()]
)
def test_a_row_of_the_sequence_models_changes_nothing_of_the_recipe_but_the_model(path):
    row, recipe = load(path), load(path.with_stem({'pixel': 'cifar10_200e', 'char': 'enwik8_100e'}[path.parent.name]))
    assert row == dataclasses.replace(recipe, model=row.model)
    assert row.model['dropout'] == 0.1


@pytest.mark.parametrize(
    ('row', 'expected'), [('', 589_824), ('model.factorize_bias=false model.bias_dim=null', 9_633_792)]
)
def test_the_parameters_per_layer_of_table_3_are_those_of_the_mixer_without_its_projection(row, expected):
    config = load('pixel/aft_local_256_l24_d256', *row.split(), 'model.out_proj=false', 'model.qkv_bias=false')
    model = build_sequence_model(config, SimpleNamespace(length=3072, vocab_size=256), device='meta')
    assert sum(parameter.numel() for parameter in model.blocks[0].attn.parameters()) == expected


@pytest.mark.parametrize('name', TABLES)
def test_the_recipes_of_texts_are_the_columns_of_table_9(name):
    config, preset = load(f'fastformer/{name}'), PRESETS[name]
    data = config.data
    assert config.model == {'preset': name}
    assert (data.max_length, data.batch_size) == (preset.max_length, preset.batch_size)
    assert (config.optim.lr, config.schedule.epochs) == (preset.lr, preset.epochs)
    # AdamW without weight decay is Adam.
    assert (config.optim.name, config.optim.weight_decay, len(config.run.seeds)) == ('adamw_torch', 0, 5)
    # Appendix A.2, and GloVe as wide as the embedding.
    assert data.tokenizer == 'nltk'
    assert f'{preset.model["embedding_size"]}d' in data.glove
    if config.task == 'classification':
        assert (data.kind == name or name == 'imdb', data.valid_share, data.test_share) == (True, 0.1, 0.1)
        baseline = next(row for row in ROWS[ROOT / f'fastformer/{name}.yaml'] if 'mixer=transformer' in row)
        assert load(f'fastformer/{name}', *baseline.split()).data.max_length == preset.transformer_max_length
    elif config.task == 'summarization':
        assert (data.kind, config.generate.num_beams) == (name, preset.num_beams)
    else:
        assert (config.task, data.max_behaviors) == ('recommendation', preset.max_behaviors)
        plm = load(f'fastformer/{name}_plm')
        optim, data = dataclasses.replace(config.optim, lr=preset.lr_plm), dataclasses.replace(data, glove=None)
        model = {**config.model, 'text_model': 'bert-base-uncased'}
        assert plm == dataclasses.replace(config, model=model, data=data, optim=optim)


def test_conversion_has_the_sizes_of_news_recommendation():
    config, preset = load('fastformer/conversion'), PRESETS['mind_recommendation']
    # Except what its preset switches off.
    assert config.model == {name: value for name, value in preset.model.items() if not name.startswith('use_')}
    assert (config.data.max_behaviors, config.data.max_length) == (50, preset.max_length)


@pytest.mark.parametrize('name', SMOKE_TEXTS)
def test_every_task_leaves_texts_to_train_with(name):
    with pytest.raises(ValueError, match=r'data\.test_share \+ data\.valid_share to be below 1, got 1\.0'):
        load(f'smoke/{name}', 'data={test_share: 0.5, valid_share: 0.5}')
