"""Throughput: the limit of a run is named, and asking changes nothing of the run."""

import re
from pathlib import Path

import pytest
import timm
import torch

from train.build import build_loaders, build_state
from train.config import load_config
from train.distributed import World
from train.imagenet import main
from train.state import create_state
from train.throughput import Throughput, measure_overhead, measure_throughput
from train.throughput import main as report

ROOT = Path(__file__).parents[2]
WORLD = World(torch.device('cpu'))
SMALL = [f'data.dir={ROOT / "tests/assets/clothing"}', 'data.batch_size=100', 'run.amp=none']
RECIPE = ['--quiet', '--config', str(ROOT / 'configs' / 'smoke' / 'deit_recipe.yaml'), *SMALL]
FIGURES = r'images/s: loader alone \d+, model alone \d+, both \d+; the (loader|model) limits the run'


def test_a_run_says_what_limits_it_and_ends_with_the_same_bits(tmp_path, capsys):
    silent = main([*RECIPE, 'schedule.epochs=1', 'schedule.warmup_epochs=0', f'run.dir={tmp_path / "silent"}'])
    assert not re.search(FIGURES, capsys.readouterr().out)
    asked = ['run.throughput_batches=2', f'run.dir={tmp_path / "asked"}']
    state = main([*RECIPE, 'schedule.epochs=1', 'schedule.warmup_epochs=0', *asked])
    assert re.search(FIGURES, capsys.readouterr().out)
    for name, expected in silent.model.state_dict().items():
        torch.testing.assert_close(state.model.state_dict()[name], expected, rtol=0, atol=0)


def test_measuring_changes_neither_weights_nor_running_statistics():
    config = load_config(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml', SMALL)
    world = World(torch.device('cpu'))
    loaders = build_loaders(config, world)
    state = create_state(timm.create_model('resnet10t', num_classes=10), config, 6, 10, world)
    before = {name: x.clone() for name, x in state.model.state_dict().items()}
    measure_throughput(state, loaders, 1)
    for name, x in state.model.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_the_slower_of_loader_and_model_is_named():
    assert str(Throughput(100, 200, 90)).endswith('the loader limits the run')
    assert str(Throughput(300, 200, 190)).endswith('the model limits the run')


def test_a_slow_loader_is_found():
    config = load_config(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml', [*SMALL, 'augment.auto_augment=rand-m9'])
    world = World(torch.device('cpu'))
    loaders = build_loaders(config, world)
    state, _ = build_state(config, loaders, world)
    found = measure_throughput(state, loaders, 3)
    # The model has 20 thousand weights.
    assert found.loader < found.model
    # Nearer to the loader than to the model, by their ratios: another process may slow one of the three passes.
    assert found.both / found.loader < found.model / found.both


def test_an_update_is_timed_against_the_bare_one():
    config = load_config(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml', SMALL)
    world = World(torch.device('cpu'))
    loaders = build_loaders(config, world)
    state, _ = build_state(config, loaders, world)
    ratios = measure_overhead(state, next(iter(loaders.train)), rounds=4)
    assert len(ratios) == 4
    assert min(ratios) > 0.2


def test_an_epoch_of_one_batch_is_rejected_and_not_measured_by_the_trainer(tmp_path):
    config = load_config(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml', [*SMALL, 'data.batch_size=600'])
    world = World(torch.device('cpu'))
    loaders = build_loaders(config, world)
    state, _ = build_state(config, loaders, world)
    with pytest.raises(ValueError, match='at least 2 batches, got 1'):
        measure_throughput(state, loaders, 3)
    arguments = ['--quiet', '--config', str(ROOT / 'configs/smoke/one_epoch.yaml'), *SMALL, 'data.batch_size=600']
    assert main([*arguments, 'run.throughput_batches=2', f'run.dir={tmp_path}']).progress.updates == 1


def test_one_round_is_rejected():
    with pytest.raises(ValueError, match='at least 2 rounds, got 1'):
        report(['--config', str(ROOT / 'configs/smoke/one_epoch.yaml'), '--rounds', '1', *SMALL])


def test_what_was_read_ahead_does_not_count():
    config = load_config(
        ROOT / 'configs/smoke/one_epoch.yaml', [*SMALL, 'data.batch_size=4', 'data.num_workers=4', 'optim.lr=0.1']
    )
    loaders = build_loaders(config, WORLD)
    state, _ = build_state(config, loaders, WORLD)
    timed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('train.throughput._pass', lambda state, batch: timed.append(batch))
        measure_throughput(state, loaders, 5)
    # On one batch the first pass alone is left out; of the loader nine batches may lie ready.
    assert len(timed) == (1 + 5) + (9 + 5)


def test_all_images_that_are_timed_have_one_size():
    config = load_config(ROOT / 'configs/smoke/one_epoch.yaml', [*SMALL, 'data.train_sizes=[32,48]'])
    loaders = build_loaders(config, WORLD)
    state, _ = build_state(config, loaders, WORLD)
    sizes = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('train.throughput._pass', lambda state, batch: sizes.add(tuple(batch[0].shape[2:])))
        measure_throughput(state, loaders, 4)
    assert sizes == {(48, 48)}


def test_the_command_prints_both(capsys):
    arguments = ['--config', str(ROOT / 'configs' / 'smoke' / 'one_epoch.yaml'), '--rounds', '2', *SMALL]
    report(arguments)
    shown = capsys.readouterr().out
    assert re.search(FIGURES, shown)
    assert re.search(r'update by the trainer / bare update: \d\.\d+, quartiles', shown)
