import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from helpers import generator

from train.build import model_arguments
from train.config import load_config
from train.distributed import World
from train.schema import Config, DistillConfig, RegularizeConfig
from train.sequence import Likelihood, build_sequence_model, create_sequence_state
from train.sequence_schema import CharConfig, PixelConfig
from train.state import create_state

ROOT = Path(__file__).parents[1] / 'configs'
CONFIGS = sorted(ROOT.rglob('*.yaml'))
# Of sequence models, and what they are read into.
SEQUENCES = {
    path: {'pixel': PixelConfig, 'char': CharConfig}[kind]
    for path in CONFIGS
    for kind in ('pixel', 'char')
    if kind in (path.parent.name, path.stem)
}
# Of text classifiers: tests/test_text_configs.py.
TEXTS = [
    path
    for path in CONFIGS
    if 'fastformer' in path.relative_to(ROOT).parts
    or path.stem in ('fastformer', 'conversion', 'recommendation', 'summarization')
]
IMAGES = [path for path in CONFIGS if path not in SEQUENCES and path not in TEXTS]
# Top-1 accuracy that Table 7 prints, and DeiT's own recipe, which the rows build on.
TABLE_7 = {
    'deit_tiny': 72.2,
    'deit_small': 79.9,
    'aft_full_tiny': 72.4,
    'aft_full_small': 79.8,
    'aft_conv_tiny_k11_h32': 73.9,
    'aft_conv_tiny_k11_h192': 74.8,
    'aft_conv_small_k11_h16': 80.2,
    'aft_conv_small_k11_h384': 80.8,
    'aft_conv_small_k15_h384': 81.0,
}
# Fine-tuned from DeiT base, and from random initialisation.
TABLE_8 = {'aft_conv_base_k25_h32_384_ft': 83.4, 'aft_conv_base_k25_h32_384_rand': 81.6}
# Top-1 accuracy that Tables 9 to 12 and Sec. 5.3 print, and what a row changes of which row of Table 7.
ABLATIONS = {
    'aft_full_small_unfactorized': ('Table 9', 78.2, 'aft_full_small', dict(factorize_bias=False)),
    'aft_conv_small_k7_h384_naive': (
        'Table 10',
        79.4,
        'aft_conv_small_k11_h384',
        dict(kernel_size=7, standardize_kernel=False),
    ),
    'aft_conv_small_k3_h384': ('Table 11', 79.9, 'aft_conv_small_k11_h384', dict(kernel_size=3)),
    'aft_conv_small_k7_h384': ('Table 11', 80.8, 'aft_conv_small_k11_h384', dict(kernel_size=7)),
    'aft_conv_small_k25_h384': ('Table 11', 80.7, 'aft_conv_small_k11_h384', dict(kernel_size=25)),
    'aft_conv_small_k27_h384': ('Table 11', 81.0, 'aft_conv_small_k11_h384', dict(kernel_size=27)),
    'aft_conv_small_k11_h384_without_query': ('Table 12', 79.3, 'aft_conv_small_k11_h384', dict(query_gate=False)),
    'aft_conv_small_k15_h384_without_query': ('Table 12', 79.5, 'aft_conv_small_k15_h384', dict(query_gate=False)),
    'aft_conv_small_k7_h384_local': (
        'Sec. 5.3',
        79.9,
        'aft_conv_small_k11_h384',
        dict(kernel_size=7, global_context=False),
    ),
}
# Of the sequence models: the table, bits on test and training data, iterations/s and GB per GPU where they are printed,
# the model and what is changed of its builder's defaults, and the tokens of a sequence.
TRANSFORMER, LOCAL, SIMPLE = 'transformer', 'aft_local', 'aft_simple'
LARGE, DEEP = dict(depth=12, dim=512), dict(depth=24, dim=256)
TABLE_2 = {
    'transformer_l12_d512': (2, 2.88, 2.90, (1.35, 30.6), TRANSFORMER, LARGE | dict(num_heads=4)),
    'transformer_l24_d256': (2, 2.86, 2.90, (1.36, 30.4), TRANSFORMER, DEEP | dict(num_heads=2)),
    'aft_local_256_l12_d512': (2, 2.80, 2.78, (1.68, 11.4), LOCAL, LARGE | dict(window=256, bias_dim=64)),
    'aft_local_256_l24_d256': (2, 2.74, 2.75, (1.67, 12.8), LOCAL, DEEP | dict(window=256, bias_dim=64)),
    'aft_simple_l24_d256': (2, 2.89, 2.82, (2.15, 9.5), SIMPLE, DEEP),
    'aft_local_256_l24_d256_unfactorized': (3, 2.84, 2.82, None, LOCAL, DEEP | dict(window=256, factorize_bias=False)),
}
TABLE_4 = {
    'transformer_l12_d512': (4, 1.137, 0.977, (1.42, 29.4), TRANSFORMER, LARGE | dict(num_heads=8)),
    'transformer_l24_d256': (4, 1.130, 1.039, (1.57, 28.3), TRANSFORMER, DEEP | dict(num_heads=4)),
    'aft_local_32_l12_d512': (4, 1.180, 0.854, (1.85, 11.3), LOCAL, LARGE | dict(window=32, bias_dim=256)),
    'aft_local_32_l24_d256': (4, 1.154, 0.972, (2.04, 11.2), LOCAL, DEEP | dict(window=32, bias_dim=256)),
    'aft_simple_l24_d256': (4, 1.209, 1.046, (2.61, 9.6), SIMPLE, DEEP),
}
TABLE_5 = {
    1: (1.205, 1.043),
    2: (1.176, 1.009),
    4: (1.165, 0.990),
    8: (1.162, 0.983),
    64: (1.160, 0.981),
    128: (1.165, 0.985),
    256: (1.164, 0.986),
    512: (1.171, 0.988),
    1024: (1.173, 0.991),
}
TABLE_6 = {2048: (1.135, 0.951), 4096: (1.134, 0.945)}
SMALL = ('small', 'small_aft_local', 'small_aft_simple', 'small_transformer')
# A row and its teacher.
DISTILLED = {'aft_conv_small_k11_h384_distilled': 'aft_conv_small_k11_h384'}
# A row whose kernels are kept sparse, as AFT Sec. 8 does: the accuracy that it prints.
SPARSE = {'aft_conv_small_k11_h384_entropy': 80.9, 'aft_conv_small_k11_h384_gumbel': 79.9}
IMAGENET_UPDATES = 1_281_167 // 1024


def header(path: Path) -> str:
    return ' '.join(line.lstrip('# ') for line in path.read_text().splitlines() if line.startswith('#'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_config_says_what_to_expect_on_which_hardware(path):
    assert path.read_text().startswith('# ')
    assert 'Expected:' in header(path)
    assert 'Hardware:' in header(path)


@pytest.mark.parametrize('path', IMAGES, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_config_is_valid_and_its_model_optimizer_and_schedule_can_be_built(path):
    # timm's moving average cannot be made on the meta device.
    config = load_config(path, ['run.compile=false', 'ema.decay=null', 'ema.warmup=false'])
    name, kwargs = model_arguments(config, num_classes=10)
    model = timm.create_model(name, device='meta', **kwargs)
    assert all(parameter.is_meta for parameter in model.parameters())
    # Nothing is downloaded, so the teacher is one without its weights.
    teacher = config.distill.teacher and timm.create_model(config.distill.teacher, device='meta')
    world = World(torch.device('meta'))
    state = create_state(model, config, updates_per_epoch=7, num_classes=10, world=world, teacher=teacher)
    optimized = {id(p) for group in state.optimizer.param_groups for p in group['params']}
    assert optimized == {id(p) for p in model.parameters()}
    assert 0 < max(rates(state)) <= config.optim.lr * config.data.batch_size / 512


def rates(state) -> list[float]:
    """The learning rate at the first update of every epoch."""
    found = []
    for epoch in range(state.config.schedule.epochs):
        found.append(state.optimizer.param_groups[-1]['lr'])
        state.scheduler.step_update((epoch + 1) * state.progress.updates_per_epoch)
        state.scheduler.step(epoch + 1 - (state.config.schedule.step == 'deit'))
    return found


@pytest.mark.parametrize('path', IMAGES, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_a_teacher_is_a_model_with_weights_for_the_classes_of_imagenet(path):
    teacher = load_config(path).distill.teacher
    if teacher is not None:
        assert timm.models.is_model_pretrained(teacher)
        assert timm.get_pretrained_cfg(teacher).num_classes == 1000


def test_every_aft_row_of_tables_7_and_8_has_a_config_with_its_number():
    names = {*TABLE_7, *TABLE_8, *DISTILLED, *SPARSE, 'deit_300e'}
    assert {path.stem for path in (ROOT / 'imagenet').glob('*.yaml')} == names
    for name, top1 in {**TABLE_7, **TABLE_8}.items():
        text = header(ROOT / 'imagenet' / f'{name}.yaml')
        assert f'AFT Table {8 if name in TABLE_8 else 7}, row' in text
        assert f'{top1:.1f} % top-1' in text
        assert f'Expected: {top1:.1f} % (published' in text


@pytest.mark.parametrize('name', TABLE_7)
def test_a_row_of_table_7_changes_nothing_of_the_recipe_but_the_model(name):
    row, recipe = (load_config(ROOT / 'imagenet' / f'{stem}.yaml') for stem in (name, 'deit_300e'))
    for section in ('data', 'augment', 'optim', 'ema', 'schedule', 'run'):
        assert getattr(row, section) == getattr(recipe, section)
    assert row.model['drop_path_rate'] == 0.1


def test_the_rows_of_table_8_have_the_papers_numbers_and_deits_recipe():
    row = load_config(ROOT / 'imagenet' / 'aft_conv_base_k25_h32_384_rand.yaml')
    recipe = load_config(ROOT / 'imagenet' / 'deit_300e.yaml')
    assert (row.data.batch_size, row.schedule.epochs, row.data.img_size) == (64, 100, (384, 384))
    assert row.optim.lr * row.data.batch_size / 512 == pytest.approx(6.25e-5)
    assert (row.augment, row.optim, row.ema) == (recipe.augment, recipe.optim, recipe.ema)
    model = timm.create_model(row.model['name'], device='meta')
    assert tuple(model.blocks[0].attn.kernel.weight.shape) == (32, 25, 25)


@pytest.mark.parametrize('stem', ['imagenet/aft_conv_base_k25_h32_384', 'imagenette/aft_conv_tiny'])
def test_a_fine_tuned_row_differs_from_its_control_in_its_start_alone(stem):
    tuned, control = (load_config(ROOT / f'{stem}_{kind}.yaml') for kind in ('ft', 'rand'))
    assert tuned.run.init_from is not None
    assert dataclasses.replace(tuned, run=dataclasses.replace(tuned.run, init_from=None)) == control


@pytest.mark.parametrize('name', ABLATIONS)
def test_an_ablation_changes_its_one_argument_and_says_its_number(name):
    place, top1, row, change = ABLATIONS[name]
    path = ROOT / 'imagenet' / 'ablations' / f'{name}.yaml'
    text = header(path)
    assert f'AFT {place}' in text or f'and {place}' in text
    assert f'{top1:.1f} % top-1' in text
    assert f'Expected: {top1:.1f} % (published' in text
    ablation, whole = load_config(path), load_config(ROOT / 'imagenet' / f'{row}.yaml')
    assert ablation == dataclasses.replace(whole, model={**whole.model, **change})


@pytest.mark.parametrize('name', DISTILLED)
def test_a_distilled_row_is_the_row_with_deits_teacher_and_share(name):
    distilled, row = (load_config(ROOT / 'imagenet' / f'{stem}.yaml') for stem in (name, DISTILLED[name]))
    deit = DistillConfig(teacher='regnety_160.deit_in1k', kind='hard', task_loss_weight=0.5)
    assert distilled == dataclasses.replace(row, distill=deit)


@pytest.mark.parametrize('name', SPARSE)
def test_a_sparse_row_is_the_row_with_the_numbers_of_section_8(name):
    path = ROOT / 'imagenet' / f'{name}.yaml'
    sparse, row = load_config(path), load_config(ROOT / 'imagenet' / 'aft_conv_small_k11_h384.yaml')
    if name.endswith('entropy'):
        assert sparse == dataclasses.replace(row, regularize=RegularizeConfig(kernel_entropy=0.001))
    else:
        assert sparse == dataclasses.replace(row, model={**row.model, 'gumbel': True, 'tau': 0.5})
    assert f'Expected: {SPARSE[name]:.1f} % (published' in header(path)


@pytest.mark.parametrize('kind', ['entropy', 'gumbel'])
def test_the_sparse_models_of_imagenette_differ_from_the_plain_one_in_that_alone(kind):
    sparse, plain = (load_config(ROOT / 'imagenette' / f'aft_conv_tiny{end}.yaml') for end in (f'_{kind}', ''))
    changes = {
        'entropy': dict(regularize=RegularizeConfig(kernel_entropy=0.001)),
        'gumbel': dict(model={**plain.model, 'gumbel': True, 'tau': 0.5}),
    }
    assert sparse == dataclasses.replace(plain, **changes[kind])


def test_the_recipe_has_deits_numbers():
    config = load_config(ROOT / 'imagenet' / 'deit_300e.yaml')
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
    config = load_config(ROOT / 'imagenet' / 'deit_300e.yaml', ['run.compile=false'])
    state = create_state(
        torch.nn.Linear(2, 2), config, IMAGENET_UPDATES, num_classes=2, world=World(torch.device('cpu'))
    )
    warmup = [1e-6 + (1e-3 - 1e-6) * epoch / 5 for epoch in range(5)]
    cosine = [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * epoch / 300)) / 2 for epoch in range(5, 299)]
    found = rates(state)
    assert found == pytest.approx([1e-6, *warmup, *cosine])
    assert found[:4] == pytest.approx([1e-6, 1e-6, 2.008e-4, 4.006e-4])
    assert found[-1] == pytest.approx(1.0108e-5, rel=1e-3)


def recipe(name: str, *overrides: str) -> Config:
    return load_config(ROOT / 'imagenet' / 'recipes' / f'{name}.yaml', ['run.compile=false', *overrides])


def test_fine_tuning_at_384_px_has_deits_constant_rate_after_its_warm_up():
    config = recipe('deit_finetune_384')
    state = create_state(torch.nn.Linear(2, 2), config, 2502, num_classes=2, world=World(torch.device('cpu')))
    warmup = [1e-6 + (5e-6 - 1e-6) * epoch / 5 for epoch in range(5)]
    # By DeiT's code each epoch has the rate meant for the one before it.
    assert rates(state) == pytest.approx([1e-6, *warmup, *([5e-6] * 24)])
    assert config.optim.weight_decay == 1e-8


def test_deit_3_counts_every_mixed_class_as_a_target():
    config = recipe('deit3_800e', 'ema.decay=null')
    assert config.optim.lr * config.data.batch_size / 512 == pytest.approx(4e-3)
    state = create_state(torch.nn.Linear(3, 3), config, 625, num_classes=3, world=World(torch.device('cpu')))
    images, targets = torch.randn(2, 3, generator=generator()), torch.tensor([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0]])
    found = state.task(images, targets)['loss']
    logits = state.model(images).double()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets.gt(0).double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


def test_nadamuon_leaves_position_biases_and_vectors_to_adamw():
    config = recipe('nadamuon_300e')
    model = timm.create_model('aft_conv_tiny', depth=2, num_classes=3)
    state = create_state(model, config, 9, num_classes=3, world=World(torch.device('cpu')))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    orthogonalised = {
        names[id(parameter)]
        for group in state.optimizer.param_groups
        if not group.get('use_fallback')
        for parameter in group['params']
        if parameter.ndim > 1
    }
    assert not [name for name in orthogonalised if 'kernel' in name or 'pos_embed' in name]
    assert {'blocks.0.attn.qkv.weight', 'blocks.1.mlp.fc1.weight'} <= orthogonalised
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(2, 3, 64, 64, generator=generator())).square().sum().backward()
    state.optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved >= {'blocks.0.attn.qkv.weight', 'norm.weight'}
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name


def test_the_budget_on_ffcv_files_rises_in_size():
    schedule = recipe('ffcv_88e').size_schedule
    means = [sum(schedule.choices(0, epoch, 500)) / 500 for epoch in (0, 44, 87)]
    assert means == sorted(means)
    assert schedule.sizes == ((160, 160), (176, 176), (192, 192))
    assert schedule.epochs == 88


@pytest.mark.parametrize('path', SEQUENCES, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_config_of_a_sequence_model_is_valid_and_can_be_built(path):
    config = load_config(path, ['run.compile=false', 'ema.decay=null'], SEQUENCES[path])
    length = config.data.context if isinstance(config, CharConfig) else 3072
    model = build_sequence_model(config, SimpleNamespace(length=length, vocab_size=256), device='meta')
    assert all(parameter.is_meta for parameter in model.parameters())
    world = World(torch.device('meta'))
    state = create_sequence_state(model, config, 7, Likelihood('windows', 'bits', length), world)
    optimized = {id(p) for group in state.optimizer.param_groups for p in group['params']}
    assert optimized == {id(p) for p in model.parameters()}
    state.scheduler.step_update(config.schedule.warmup_updates)
    assert 0.5 * config.optim.lr < state.optimizer.param_groups[0]['lr'] <= config.optim.lr


def sequence_rows(kind: str) -> dict[str, tuple]:
    if kind == 'pixel':
        return TABLE_2
    deep = DEEP | dict(bias_dim=256)
    windows = {f'aft_local_{s}_l24_d256': (5, *bits, None, LOCAL, deep | dict(window=s)) for s, bits in TABLE_5.items()}
    longer = {
        f'aft_local_32_l24_d256_t{length}': (6, *bits, None, LOCAL, deep | dict(window=32))
        for length, bits in TABLE_6.items()
    }
    return {**TABLE_4, **windows, **longer}


@pytest.mark.parametrize('kind', ['pixel', 'char'])
def test_every_row_of_tables_2_to_6_has_a_config_with_its_numbers_and_its_model(kind):
    rows, base = sequence_rows(kind), {'pixel': 'cifar10_200e', 'char': 'enwik8_100e'}[kind]
    assert {path.stem for path in (ROOT / kind).glob('*.yaml')} == {*rows, *SMALL, base}
    recipe = load_config(ROOT / kind / f'{base}.yaml', [], SEQUENCES[ROOT / kind / f'{base}.yaml'])
    digits, unit = (2, 'bits/dim') if kind == 'pixel' else (3, 'bits/character')
    for stem, (table, test, train, measured, name, arguments) in rows.items():
        path = ROOT / kind / f'{stem}.yaml'
        text, row = header(path), load_config(path, [], SEQUENCES[path])
        assert f'AFT Table {table}' in text
        assert f'{test:.{digits}f} {unit} (test), {train:.{digits}f} (training)' in text
        assert f'Expected: {test:.{digits}f} {unit} (published' in text
        if measured is not None:
            batch = 32 if kind == 'pixel' else 128
            assert f'{measured[0]:.2f} iterations/s and {measured[1]:.1f} GB per GPU at a batch of {batch}' in text
        kept = {key: value for key, value in row.model.items() if value is not None}
        assert kept == {'name': f'{name}_{kind}', 'dropout': 0.1, **arguments}
        length = TABLE_6.keys() & {int(stem.rpartition('_t')[2])} if table == 6 else set()
        data = dataclasses.replace(recipe.data, context=min(length), eval_stride=min(length) // 2) if length else None
        assert row == dataclasses.replace(recipe, model=row.model, data=data or recipe.data)


def test_the_recipes_of_the_sequence_models_have_the_papers_numbers():
    pixel = load_config(ROOT / 'pixel' / 'cifar10_200e.yaml', [], PixelConfig)
    char = load_config(ROOT / 'char' / 'enwik8_100e.yaml', [], CharConfig)
    assert (pixel.augment.hflip, pixel.augment.shift) == (0.5, 10)
    for config, decay, epochs in ((pixel, 0.1, 200), (char, 0.5, 100)):
        assert (config.optim.name, config.optim.lr, config.optim.weight_decay) == ('adamw', 3e-3, decay)
        assert (config.data.batch_size, config.schedule.epochs, config.model['dropout']) == (128, epochs, 0.1)
        assert (config.schedule.kind, config.schedule.warmup_updates, config.run.amp) == ('inverse_sqrt', 4000, 'none')
    assert (char.data.context, char.data.vocabulary) == (1024, 'bytes')


@pytest.mark.parametrize('kind', ['pixel', 'char'])
def test_the_small_sequence_models_differ_in_their_mixer_alone(kind):
    found = [load_config(ROOT / kind / f'{name}.yaml', [], SEQUENCES[ROOT / kind / f'{name}.yaml']) for name in SMALL]
    assert [config.model['name'] for config in found[1:]] == [f'{name}_{kind}' for name in (LOCAL, SIMPLE, TRANSFORMER)]
    for config in found:
        assert (config.model['depth'], config.model['dim']) == (6, 128)
        assert dataclasses.replace(config, model={}) == dataclasses.replace(found[0], model={})


@pytest.mark.parametrize(('factorize', 'expected'), [(True, 589_824), (False, 9_633_792)])
def test_the_parameters_per_layer_of_table_3_are_those_of_the_mixer_without_its_projection(factorize, expected):
    name = 'aft_local_256_l24_d256' + ('' if factorize else '_unfactorized')
    config = load_config(ROOT / 'pixel' / f'{name}.yaml', ['model.out_proj=false', 'model.qkv_bias=false'], PixelConfig)
    model = build_sequence_model(config, SimpleNamespace(length=3072, vocab_size=256), device='meta')
    assert sum(parameter.numel() for parameter in model.blocks[0].attn.parameters()) == expected
