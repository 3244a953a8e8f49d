import dataclasses
import math
from pathlib import Path

import pytest
import timm
import torch
from helpers import generator

from train.build import model_arguments
from train.config import load_config
from train.distributed import World
from train.schema import Config, DistillConfig
from train.state import create_state

ROOT = Path(__file__).parents[1] / 'configs'
CONFIGS = sorted(ROOT.rglob('*.yaml'))
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
# A row and its teacher.
DISTILLED = {'aft_conv_small_k11_h384_distilled': 'aft_conv_small_k11_h384'}
IMAGENET_UPDATES = 1_281_167 // 1024


def header(path: Path) -> str:
    return ' '.join(line.lstrip('# ') for line in path.read_text().splitlines() if line.startswith('#'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_config_says_what_to_expect_on_which_hardware(path):
    assert path.read_text().startswith('# ')
    assert 'Expected:' in header(path)
    assert 'Hardware:' in header(path)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}-{path.stem}')
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
        state.scheduler.step_update((epoch + 1) * state.updates_per_epoch)
        state.scheduler.step(epoch + 1 - (state.config.schedule.step == 'deit'))
    return found


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: f'{path.parent.name}-{path.stem}')
def test_a_teacher_is_a_model_with_weights_for_the_classes_of_imagenet(path):
    teacher = load_config(path).distill.teacher
    if teacher is not None:
        assert timm.models.is_model_pretrained(teacher)
        assert timm.get_pretrained_cfg(teacher).num_classes == 1000


def test_every_row_of_table_7_has_a_config_with_its_number():
    assert {path.stem for path in (ROOT / 'imagenet').glob('*.yaml')} == {*TABLE_7, *DISTILLED, 'deit_300e'}
    for name, top1 in TABLE_7.items():
        text = header(ROOT / 'imagenet' / f'{name}.yaml')
        assert 'AFT Table 7, row' in text
        assert f'{top1:.1f} % top-1' in text
        assert f'Expected: {top1:.1f} % (published' in text


@pytest.mark.parametrize('name', TABLE_7)
def test_a_row_of_table_7_changes_nothing_of_the_recipe_but_the_model(name):
    row, recipe = (load_config(ROOT / 'imagenet' / f'{stem}.yaml') for stem in (name, 'deit_300e'))
    for section in ('data', 'augment', 'optim', 'ema', 'schedule', 'run'):
        assert getattr(row, section) == getattr(recipe, section)
    assert row.model['drop_path_rate'] == 0.1


@pytest.mark.parametrize('name', DISTILLED)
def test_a_distilled_row_is_the_row_with_deits_teacher_and_share(name):
    distilled, row = (load_config(ROOT / 'imagenet' / f'{stem}.yaml') for stem in (name, DISTILLED[name]))
    deit = DistillConfig(teacher='regnety_160.deit_in1k', kind='hard', task_loss_weight=0.5)
    assert distilled == dataclasses.replace(row, distill=deit)


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
