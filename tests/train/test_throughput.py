"""Throughput: the limit of a run is named, and asking changes nothing of the run."""

import re
import time
from pathlib import Path

import pytest
import timm
import torch
from helpers import CLOTHING, link_photographs

from aft_vision.data import Loaders
from train.build import build_loaders, build_state, create_state, resolve_images
from train.config import load_config
from train.distributed import World
from train.engine import train_step
from train.imagenet import main
from train.state import TrainState
from train.throughput import Throughput, measure_overhead, measure_throughput
from train.throughput import main as report

CONFIGS = Path(__file__).parents[2] / 'configs' / 'smoke'
ONE_EPOCH = CONFIGS / 'one_epoch.yaml'
WORLD = World(torch.device('cpu'))
FIGURES = r'images/s: loader alone \d+, model alone \d+, both \d+; the (loader|model) limits the run'


@pytest.fixture(scope='module')
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Six updates an epoch of 20 photographs."""
    folder = link_photographs(tmp_path_factory.mktemp('photographs'), 12, 2)
    return [f'data.dir={folder}', 'data.batch_size=20', 'run.amp=none']


def prepare(*overrides: str) -> tuple[TrainState, Loaders]:
    config = load_config(ONE_EPOCH, overrides)
    loaders = build_loaders(config, resolve_images(config), WORLD)
    return build_state(config, resolve_images(config), loaders, WORLD)[0], loaders


def test_a_run_says_what_limits_it_and_ends_with_the_same_bits(small, tmp_path, capsys):
    recipe = ['--quiet', '--config', str(CONFIGS / 'deit_recipe.yaml'), *small, 'schedule.epochs=1']
    recipe += ['schedule.warmup_epochs=0']
    silent = main([*recipe, f'run.dir={tmp_path / "silent"}'])
    assert not re.search(FIGURES, capsys.readouterr().out)
    state = main([*recipe, 'run.throughput_batches=2', f'run.dir={tmp_path / "asked"}'])
    assert re.search(FIGURES, capsys.readouterr().out)
    for name, expected in silent.model.state_dict().items():
        torch.testing.assert_close(state.model.state_dict()[name], expected, rtol=0, atol=0)


def test_measuring_changes_neither_weights_nor_running_statistics(small):
    config = load_config(ONE_EPOCH, small)
    loaders = build_loaders(config, resolve_images(config), WORLD)
    state = create_state(timm.create_model('resnet10t', num_classes=10), config, 6, 10, WORLD)
    before = {name: x.clone() for name, x in state.model.state_dict().items()}
    measure_throughput(state, loaders, 1)
    for name, x in state.model.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_the_bare_update_with_float16_takes_unscaled_gradients(small):
    state, loaders = prepare(*small, 'run.amp=float16', 'optim.name=sgd', 'optim.lr=0.1')
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    measure_overhead(state, next(iter(loaders.train)), rounds=3)
    # A few updates at a rate of 0.004; the scale of the loss is 65,536.
    for parameter, old in zip(state.model.parameters(), before, strict=True):
        assert (parameter - old).abs().max() < 0.1


def test_the_slower_of_loader_and_model_is_named():
    assert str(Throughput(100, 200, 90)).endswith('the loader limits the run')
    assert str(Throughput(300, 200, 190)).endswith('the model limits the run')


def test_a_slow_loader_is_found():
    # Long enough that another process cannot slow one of the three passes by as much as they differ.
    state, loaders = prepare(f'data.dir={CLOTHING}', 'data.batch_size=100', 'augment.auto_augment=rand-m9')
    found = measure_throughput(state, loaders, 3)
    # The model has 20 thousand weights.
    assert found.loader < found.model
    # Nearer to the loader than to the model, by their ratios.
    assert found.both / found.loader < found.model / found.both


def test_an_update_is_timed_against_the_bare_one(small, monkeypatch):
    state, loaders = prepare(*small)
    monkeypatch.setattr('train.throughput.train_step', lambda *update: time.sleep(0.2) or train_step(*update))
    # A bare update takes about 0.007 s.
    assert measure_overhead(state, next(iter(loaders.train)), rounds=3).ratio > 2


# On one batch the first pass alone is left out; of the loader one batch may lie ready of each of two, or the epoch.
@pytest.mark.parametrize(('batch_size', 'workers', 'ahead'), [(4, 4, 9), (120, 1, 1)])
def test_what_was_read_ahead_does_not_count_and_a_short_epoch_is_read_again(
    small, monkeypatch, batch_size, workers, ahead
):
    state, loaders = prepare(*small, f'data.batch_size={batch_size}', f'data.num_workers={workers}', 'optim.lr=0.1')
    timed = []
    monkeypatch.setattr('train.throughput._forward_backward', lambda state, batch: timed.append(batch))
    measure_throughput(state, loaders, 3)
    assert len(timed) == (1 + 3) + (ahead + 3)


def test_all_images_that_are_timed_have_one_size(small, monkeypatch):
    state, loaders = prepare(*small, 'data.train_sizes=[32,48]')
    sizes = set()
    monkeypatch.setattr('train.throughput._forward_backward', lambda state, batch: sizes.add(tuple(batch[0].shape[2:])))
    measure_throughput(state, loaders, 4)
    assert sizes == {(48, 48)}


def test_the_command_prints_both(small, capsys):
    report(['--config', str(ONE_EPOCH), '--rounds', '2', *small])
    shown = capsys.readouterr().out
    assert re.search(FIGURES, shown)
    assert re.search(r'update by the trainer / bare update: \d\.\d+, quartiles', shown)
