import copy
import csv
import itertools
import json
import math
import os
import pkgutil
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers import NO_AUGMENTATION, pretend_terminal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.data import Mixup
from timm.data.loader import PrefetchLoader
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from aft_vision.data import STEP, Augmentation, Loaders, derive_seed
from aft_vision.data.images import CorruptImageError
from aft_vision.data.shards import WebDataset
from train.build import create_state
from train.checkpoint import Saver
from train.command_line import run_command
from train.diagnosis import NonFiniteLossError
from train.distributed import World
from train.engine import fit, train_one_epoch, train_step
from train.schema import Config, DataConfig, EmaConfig, OptimConfig, RunConfig, ScheduleConfig
from train.state import TrainState

HERE = World(torch.device('cpu'))
DESCRIPTION = {'model_name': 'linear', 'model_kwargs': {}, 'class_names': ['a', 'b', 'c']}
MIXED = Augmentation(repeats=1, random_erasing=0.0)


def make_config(**sections: object) -> Config:
    defaults = dict(
        data=DataConfig(batch_size=8),
        augment=NO_AUGMENTATION,
        optim=OptimConfig(lr=0.64, label_smoothing=0.0),
        schedule=ScheduleConfig(epochs=4, warmup_epochs=0, warmup_lr=0.0, step='update'),
        run=RunConfig(tensorboard=False),
    )
    return Config(**{**defaults, **sections})


def make_model() -> nn.Module:
    """A linear classifier of 2 x 2 images with fixed first weights."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    return model


def make_vit() -> nn.Module:
    """A small AFT-conv with drop path, so that its training is random."""
    torch.manual_seed(0)
    sizes = dict(depth=2, embed_dim=16, num_heads=4, kernel_size=3, patch_size=2, num_classes=3)
    return timm.create_model('aft_conv_tiny', drop_path_rate=0.3, **sizes)


def make_batches(count: int = 6, size: int = 8, side: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Separable images: the class is the channel with the largest values."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (count, size), generator=generator)
    images = 0.3 * torch.randn(count, size, 3, side, side, generator=generator)
    images += nn.functional.one_hot(targets, 3)[..., None, None]
    return list(zip(images, targets, strict=True))


def make_state(model: nn.Module | None = None, updates_per_epoch: int = 6, **sections: object) -> TrainState:
    return create_state(model or make_model(), make_config(**sections), updates_per_epoch, num_classes=3, world=HERE)


def train(state: TrainState, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The loss of one update for each batch."""
    return [train_step(state, [(images.clone(), targets)]) for images, targets in batches]


def run(state: TrainState, folder: Path, evaluated: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
    """Train to the last epoch."""
    loaders = Loaders(make_batches(), evaluated or make_batches(), [])
    fit(state, loaders, Saver(folder, DESCRIPTION, keep=1, minutes=None), progress=False)


def test_twenty_losses_equal_those_of_a_plain_loop():
    # In float64: AdamW moves a weight by about the rate also where its gradient is rounding noise of float32.
    batches = [(images.double(), targets) for images, targets in make_batches(20, side=4)]
    config = make_config(
        augment=MIXED,
        optim=OptimConfig(lr=0.064, weight_decay=0.1, clip_grad=0.5, label_smoothing=0.1),
        ema=EmaConfig(decay=0.9),
        run=RunConfig(seed=3, tensorboard=False),
    )
    state = create_state(make_vit().double(), config, updates_per_epoch=20, num_classes=3, world=HERE)
    losses = train(state, batches)

    model = make_vit().double()
    exempt = model.no_weight_decay()
    named = dict(model.named_parameters())
    flat = [p for name, p in named.items() if p.ndim < 2 or any(fnmatch(name, e) for e in exempt)]
    decayed = [p for p in named.values() if not any(p is other for other in flat)]
    optimizer = torch.optim.AdamW([{'params': flat, 'weight_decay': 0.0}, {'params': decayed, 'weight_decay': 0.1}])
    average = ModelEmaV3(model, decay=0.9)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=3)
    expected = []
    for update, (images, targets) in enumerate(batches):
        seed = derive_seed(STEP, 3, update, 0)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for group in optimizer.param_groups:
            group['lr'] = 1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * update / 80)) / 2
        images, soft_targets = mixup(images.clone(), targets)
        loss = -(soft_targets * model(images).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        average.update(model)
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert len(set(losses)) == 20
    # A weight moves by about 1e-3 an update.
    torch.testing.assert_close(state.averaged_model.state_dict(), average.module.state_dict(), rtol=0, atol=1e-8)


def test_a_threshold_that_makes_every_class_a_target_is_refused():
    config = make_config(optim=OptimConfig(lr=0.64, loss='bce', bce_target_thresh=0.01, label_smoothing=0.1))
    with pytest.raises(ValueError, match=r'optim\.bce_target_thresh to be above .* / 5 classes \(0\.02\).*, got 0\.01'):
        create_state(make_model(), config, 3, 5, HERE)
    for threshold, smoothing in ((0.03, 0.1), (0.0, 0.0)):
        config = make_config(
            optim=OptimConfig(lr=0.64, loss='bce', bce_target_thresh=threshold, label_smoothing=smoothing)
        )
        create_state(make_model(), config, 3, 5, HERE)


def test_accumulated_parts_make_the_update_of_the_whole_batch():
    options = dict(lr=0.64, clip_grad=0.1, label_smoothing=0.1)
    whole, parts = (make_state(optim=OptimConfig(accumulate=count, **options)) for count in (1, 4))
    for images, targets in make_batches():
        loss = train_step(whole, [(images, targets)])
        split = train_step(parts, zip(images.split(2), targets.split(2), strict=True))
        assert split == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=1e-4, atol=1e-6)
    assert parts.progress.updates == whole.progress.updates == 6


def test_an_epoch_leaves_out_the_parts_of_an_incomplete_update():
    state = make_state(updates_per_epoch=2, data=DataConfig(batch_size=24), optim=OptimConfig(accumulate=3))
    trained = train_one_epoch(state, make_batches(8), progress=False)
    assert state.progress.updates == 2
    assert trained['images_per_second'] == pytest.approx(48 / trained['seconds'])


@pytest.mark.parametrize('count', [0, 8, 9])
def test_a_loader_that_ends_before_the_epoch_is_refused(count):
    state = make_state(updates_per_epoch=6, optim=OptimConfig(accumulate=2), data=DataConfig(batch_size=16))
    with pytest.raises(ValueError, match=rf'expected 6 updates .* got {count // 2} and {count % 2} batches'):
        train_one_epoch(state, make_batches(count), progress=False)


def test_an_update_without_all_its_parts_changes_nothing():
    state = make_state(optim=OptimConfig(lr=0.64, accumulate=2), ema=EmaConfig(decay=0.5), run=RunConfig(amp='float16'))
    before = _clone(state.task)
    for parts in ([], make_batches(1)):
        with pytest.raises(ValueError, match='updates of 2 batches'):
            train_step(state, parts)
    torch.testing.assert_close(_clone(state.task), before, rtol=0, atol=0)
    assert state.progress.updates == 0


def test_training_is_a_function_of_the_seed_and_the_update():
    batches = make_batches(4, side=4)
    first, again, other = (make_state(make_vit(), run=RunConfig(seed=s, tensorboard=False)) for s in (1, 1, 2))
    losses = train(first, batches)
    # Whatever else draws random numbers between the updates.
    repeated = [loss for batch in batches for loss in (train(again, [batch]), torch.rand(3))[0]]
    assert losses == repeated
    assert losses != train(other, batches)


def test_the_rate_is_per_512_images_and_warms_up_by_epoch():
    schedule = ScheduleConfig(epochs=4, warmup_epochs=2, warmup_lr=0.0, min_lr=0.0, step='epoch')
    state = make_state(schedule=schedule)
    rates = []
    for epoch in range(4):
        rates.append(train_one_epoch(state, make_batches(), progress=False)['lr'])
        state.progress.epoch = epoch + 1
        state.progress.restart_epoch()
        state.scheduler.step(state.progress.epoch)
    assert rates == pytest.approx([0.0, 0.005, 0.005, 0.01 * (1 + math.cos(math.pi * 3 / 4)) / 2])


def test_fit_trains_each_epoch_at_deits_rate_one_epoch_late(tmp_path):
    schedule = ScheduleConfig(epochs=5, warmup_epochs=2, warmup_lr=1e-4, min_lr=1e-3, step='deit')
    state = make_state(schedule=schedule)
    run(state, tmp_path)
    rates = [row['train_lr'] for row in state.progress.history]
    cosine = [1e-3 + (0.01 - 1e-3) * (1 + math.cos(math.pi * epoch / 5)) / 2 for epoch in (2, 3)]
    assert rates == pytest.approx([1e-4, 1e-4, (1e-4 + 0.01) / 2, *cosine])


def test_the_rate_that_is_shown_is_the_fastest_layers():
    state = make_state(make_vit(), optim=OptimConfig(lr=0.64, layer_decay=0.5))
    assert train_one_epoch(state, make_batches(side=4), progress=False)['lr'] == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize('step', ['epoch', 'update', 'deit'])
@pytest.mark.parametrize('updates', [3, 6, 8, 17])
def test_a_restored_state_has_the_rate_and_the_settings_of_its_own_experiment(step, updates, tmp_path):
    def run_to(count: int, **optim: float) -> TrainState:
        schedule = ScheduleConfig(epochs=4, warmup_epochs=2, warmup_lr=1e-4, min_lr=1e-3, step=step)
        state = make_state(schedule=schedule, optim=OptimConfig(**{'lr': 0.64, 'label_smoothing': 0.0, **optim}))
        for batch in (make_batches() * 3)[:count]:
            train(state, [batch])
            if state.progress.updates % 6 == 0:
                state.progress.epoch += 1
                state.scheduler.step(state.progress.epoch - (step == 'deit'))
        return state

    first = run_to(updates)
    same, other = run_to(0), run_to(0, lr=0.32, weight_decay=0.3)
    for state in (same, other):
        state.load_state_dict({**first.state_dict(), 'updates_per_epoch': 6}, source='test')
    rates = [state.optimizer.param_groups[-1]['lr'] for state in (first, same, other, run_to(updates, lr=0.32))]
    assert rates[0] == rates[1]
    assert rates[2] == rates[3]
    assert {group['weight_decay'] for group in other.optimizer.param_groups} == {0.0, 0.3}


def test_arguments_of_the_optimizer_are_passed_on():
    state = make_state(optim=OptimConfig(lr=0.64, args={'betas': [0.8, 0.9], 'eps': 1e-6}))
    assert isinstance(state.optimizer, torch.optim.AdamW)
    assert (state.optimizer.defaults['betas'], state.optimizer.defaults['eps']) == ((0.8, 0.9), 1e-6)


def test_adamw_on_a_cpu_makes_one_call_for_all_weights_unless_told_otherwise():
    def weights(**args: bool) -> tuple[bool, torch.Tensor]:
        state = make_state(optim=OptimConfig(lr=0.64, args=args, clip_grad=1.0))
        train(state, make_batches())
        return bool(state.optimizer.param_groups[0].get('fused')), state.model[1].weight.detach()

    found = {
        name: weights(**args) for name, args in (('own', {}), ('many', {'fused': False}), ('each', {'foreach': True}))
    }
    assert {name: is_fused for name, (is_fused, _) in found.items()} == {'own': True, 'many': False, 'each': False}
    for _, other in found.values():
        torch.testing.assert_close(other, found['many'][1], rtol=1e-5, atol=1e-6)


def test_moments_of_an_optimizer_of_many_calls_go_on_in_one_call():
    # As a checkpoint of an earlier version, or of a GPU, has them.
    first = make_state(optim=OptimConfig(lr=0.64, args={'fused': False}))
    batches = make_batches()
    train(first, batches[:3])
    other = make_state(optim=OptimConfig(lr=0.64))
    other.load_state_dict({**copy.deepcopy(first.state_dict()), 'updates_per_epoch': 6}, source='test')
    assert other.optimizer.param_groups[0]['fused'] is True
    for state in (first, other):
        train(state, batches[3:])
    torch.testing.assert_close(other.model.state_dict(), first.model.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('supported', [True, False])
def test_autocast_is_chosen_by_what_the_device_multiplies(supported: bool, monkeypatch):
    monkeypatch.setattr('train.state.has_bfloat16', lambda device: supported)
    state = make_state(run=RunConfig(amp='auto', tensorboard=False))
    assert state.amp_dtype is (torch.bfloat16 if supported else None)
    assert train(state, make_batches(1))[0] == pytest.approx(math.log(3), rel=1e-2)
    assert state.model[1].weight.dtype is torch.float32


@pytest.mark.parametrize(('amp', 'dtype'), [('bfloat16', torch.bfloat16), ('float16', torch.float16)])
def test_autocast_gives_half_precision_activations_and_float32_weights(amp: str, dtype: torch.dtype):
    seen = []
    model = make_model()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    state = make_state(model, run=RunConfig(amp=amp, tensorboard=False))
    loss = train(state, make_batches())
    assert seen == [dtype] * 6
    assert model[1].weight.dtype == torch.float32
    assert loss[-1] < loss[0]


def test_a_scaled_float16_loss_makes_the_update_of_float32():
    states = [make_state(run=RunConfig(amp=amp, tensorboard=False)) for amp in ('none', 'float16')]
    for state in states:
        train(state, make_batches())
    assert states[1].scaler.get_scale() > 1
    weights = [state.model[1].weight for state in states]
    torch.testing.assert_close(weights[1], weights[0], rtol=2e-2, atol=2e-3)


def test_a_scaled_gradient_is_clipped_at_its_true_norm(monkeypatch):
    norms = []
    clip = nn.utils.clip_grad_norm_

    def record(*args: object) -> torch.Tensor:
        norm = clip(*args)
        norms.append(norm.item())
        return norm

    monkeypatch.setattr(nn.utils, 'clip_grad_norm_', record)
    for amp in ('none', 'float16'):
        state = make_state(optim=OptimConfig(lr=0.64, clip_grad=0.1), run=RunConfig(amp=amp))
        # The usual first scale overflows, and the update is skipped.
        state.scaler = torch.amp.GradScaler('cpu', init_scale=256.0, enabled=amp == 'float16')
        train(state, make_batches(1))
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert norms[0] > 0.1


def test_the_decay_of_the_average_warms_up():
    batches = make_batches(3)
    states = [make_state(ema=EmaConfig(decay=0.9999, warmup=warmup)) for warmup in (False, True)]
    for state in states:
        train(state, batches)
    still, moved = (abs(state.averaged_model[1].weight).sum().item() for state in states)
    assert moved > 100 * still
    assert moved < 1.5 * abs(states[1].model[1].weight).sum().item()


def test_a_compiled_model_has_a_graph_for_each_training_size(monkeypatch):
    compile_module, inputs = torch.compile, []

    def backend(graph, examples):
        inputs.append(examples)
        return graph

    monkeypatch.setattr(
        torch, 'compile', lambda model, dynamic, **_: compile_module(model, backend=backend, dynamic=dynamic)
    )
    torch._dynamo.reset()
    data = DataConfig(batch_size=8, train_sizes=[4, 6])
    state = make_state(make_vit(), data=data, run=RunConfig(compile=True, tensorboard=False))
    for side in (4, 6, 4, 6):
        train(state, make_batches(1, side=side))
    assert len(inputs) == 2
    assert not any(isinstance(x, torch.SymInt) for examples in inputs for x in examples)


def test_fit_learns_and_writes_one_row_per_epoch(tmp_path):
    state = make_state(run=RunConfig(eval_every=3), ema=EmaConfig(decay=0.5, warmup=True))
    run(state, tmp_path)
    with (tmp_path / 'summary.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [row['epoch'] for row in rows] == ['1', '2', '3', '4']
    for column in ('eval_top1', 'eval_ema_top1'):
        assert [math.isnan(float(row[column])) for row in rows] == [True, True, False, False]
    assert [float(row['train_loss']) for row in rows] == [row['train_loss'] for row in state.progress.history]
    assert float(rows[-1]['train_loss']) < float(rows[0]['train_loss'])
    assert all(float(row['train_memory_mb']) > 10 for row in rows)
    assert state.progress.best > 90
    assert state.progress.updates == 24


def test_tensorboard_has_the_steps_and_the_epochs(tmp_path):
    state = make_state(run=RunConfig(eval_every=2))
    run(state, tmp_path)
    events = EventAccumulator(str(tmp_path / 'tensorboard'))
    events.Reload()
    assert [event.step for event in events.Scalars('step/loss')] == [6, 10, 12, 18, 20, 24]
    assert [event.step for event in events.Scalars('train/loss')] == [6, 12, 18, 24]
    assert [event.step for event in events.Scalars('eval/top1')] == [12, 24]
    assert events.Scalars('eval/top1')[-1].value == pytest.approx(state.progress.history[-1]['eval_top1'])


def test_the_progress_bar_shows_loss_rate_speed_and_the_time_left(capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    train_one_epoch(make_state(), make_batches())
    shown = capsys.readouterr().err
    assert 'epoch 1/4' in shown
    for figure in ('loss=', 'lr=', 'images/s=', 'left=00:0'):
        assert figure in shown


def test_a_new_run_starts_a_new_log(tmp_path):
    (tmp_path / 'summary.csv').write_text('epoch,other\n0,1\n')
    state = make_state(schedule=ScheduleConfig(epochs=1, warmup_epochs=0))
    run(state, tmp_path)
    assert (tmp_path / 'summary.csv').read_text().startswith('epoch,train_loss')


def scored(scores: Iterable[float]) -> Callable[..., list[dict[str, float]]]:
    """In place of the evaluation of some models: these accuracies, one after the other."""
    return lambda models, *args, **kwargs: [{'loss': 1.0, 'top1': next(scores), 'top5': 100.0} for _ in models]


def test_best_keeps_the_weights_of_the_best_epoch_and_last_those_of_the_last(tmp_path, monkeypatch):
    scores = iter([50.0, 80.0, 60.0, 80.0])
    monkeypatch.setattr('train.engine.evaluate_all', scored(scores))
    state = make_state()
    run(state, tmp_path)
    best = torch.load(tmp_path / 'best.pth', weights_only=True)
    last = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert (best['epoch'], best['best_top1'], best['averaged']) == (2, 80.0, False)
    assert (last['epoch'], last['updates']) == (4, 24)
    assert last['model_name'] == 'linear'
    assert last['config']['optim']['lr'] == 0.64
    assert last['history'][1]['eval_top1'] == 80.0
    assert last['optimizer']['state']
    assert last['ema_state_dict'] is None
    torch.testing.assert_close(last['state_dict'], state.model.state_dict())


def test_best_keeps_the_average_where_it_is_better_than_the_weights(tmp_path, monkeypatch):
    state = make_state(ema=EmaConfig(decay=0.9))
    scores = iter([50.0, 40.0, 55.0, 70.0, 60.0, 65.0, 10.0, 10.0])
    monkeypatch.setattr('train.engine.evaluate_all', scored(scores))
    averages = []
    monkeypatch.setattr('tqdm.tqdm.write', lambda line: averages.append(_clone(state.averaged_model)))
    run(state, tmp_path)
    best = torch.load(tmp_path / 'best.pth', weights_only=True)
    assert (best['epoch'], best['best_top1'], best['averaged']) == (2, 70.0, True)
    torch.testing.assert_close(best['state_dict'], averages[1])
    last = torch.load(tmp_path / 'last.pth', weights_only=True)
    torch.testing.assert_close(last['ema_state_dict'], state.averaged_model.state_dict())


@pytest.mark.parametrize('resumed', [False, True])
def test_of_equal_results_the_one_with_the_lower_loss_is_the_best(tmp_path, monkeypatch, resumed):
    # The weights and their average, epoch by epoch.
    results = iter(
        [(80.0, 0.9), (80.0, 0.9), (80.0, 0.6), (80.0, 0.5), (80.0, 0.7), (70.0, 0.1), (80.0, 0.5), (60.0, 0.1)]
    )

    def score(models, *args, **kwargs):
        return [{'loss': loss, 'top1': top1} for top1, loss in (next(results) for _ in models)]

    monkeypatch.setattr('train.engine.evaluate_all', score)
    state = make_state(ema=EmaConfig(decay=0.9))
    if resumed:
        state.loop = replace(state.loop, epochs=2)
        run(state, tmp_path)
        state = make_state(ema=EmaConfig(decay=0.9))
        state.load_state_dict(torch.load(tmp_path / 'last.pth', weights_only=True), 'last.pth')
    run(state, tmp_path)
    best = torch.load(tmp_path / 'best.pth', weights_only=True)
    assert (best['epoch'], best['best_top1'], best['averaged']) == (2, 80.0, True)


def _clone(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def break_batch(number: int, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    images, targets = batches[number]
    batches[number] = images * float('nan'), targets


def test_a_loss_that_is_not_finite_stops_the_run_before_a_weight_changes(tmp_path):
    state = make_state(updates_per_epoch=1, ema=EmaConfig(decay=0.5))
    before, batches = _clone(state.task), make_batches(1)
    break_batch(0, batches)
    with pytest.raises(NonFiniteLossError, match=r'got nan in epoch 1, update 1; .*nonfinite-1-rank0\.json says where'):
        train_one_epoch(state, batches, progress=False, folder=tmp_path)
    torch.testing.assert_close(_clone(state.task), before, rtol=0, atol=0)
    assert json.loads((tmp_path / 'nonfinite-1-rank0.json').read_text())['loss'] == 'nan'


def test_a_gradient_that_is_not_finite_stops_the_run_though_the_loss_is(tmp_path):
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float('inf')

    for clip in (None, 1.0):
        state = make_state(optim=OptimConfig(lr=0.64, clip_grad=clip))
        before = _clone(state.model)
        state.model[1].register_forward_hook(lambda module, args, output: Overflow.apply(output))
        with pytest.raises(NonFiniteLossError, match=r'finite training loss and gradient, got (nan|inf)'):
            train_one_epoch(state, make_batches(), progress=False, folder=tmp_path)
        torch.testing.assert_close(_clone(state.model), before, rtol=0, atol=0)


def test_some_updates_without_a_finite_loss_are_left_out(tmp_path):
    broken = make_batches()
    for number in (1, 4):
        break_batch(number, broken)
    settings = RunConfig(skip_nonfinite=2)
    state = make_state(run=settings)
    reached: list[int] = []

    def after_update() -> None:
        reached.append(state.progress.updates)

    trained = train_one_epoch(state, broken, progress=False, after_update=after_update, folder=tmp_path)
    # A signal or a checkpoint that is due waits for no update with a finite loss.
    assert reached == [1, 2, 3, 4, 5, 6]
    assert (state.progress.updates, state.progress.skipped, state.progress.epoch_done) == (6, 2, 4)
    other = make_state(run=settings)
    whole = make_batches()
    losses = []
    for number, batch in enumerate(whole):
        if number in (1, 4):
            # The schedule goes on.
            other.progress.updates += 1
            other.scheduler.step_update(other.progress.updates)
        else:
            losses += train(other, [batch])
    assert trained['loss'] == pytest.approx(sum(losses) / 4)
    torch.testing.assert_close(state.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    with pytest.raises(NonFiniteLossError):
        train_one_epoch(make_state(run=RunConfig(skip_nonfinite=1)), broken, progress=False, folder=tmp_path)


def test_statistics_of_a_batch_that_is_left_out_are_not_kept(tmp_path):
    broken = make_batches()
    break_batch(2, broken)
    model = nn.Sequential(nn.BatchNorm2d(3), *make_model())
    train_one_epoch(make_state(model, run=RunConfig(skip_nonfinite=1)), broken, progress=False, folder=tmp_path)
    other = make_state(nn.Sequential(nn.BatchNorm2d(3), *make_model()))
    other.model.train()
    train(other, broken[:2] + broken[3:])
    assert all(x.isfinite().all() for x in model.buffers())
    torch.testing.assert_close(list(model.buffers()), list(other.model.buffers()), rtol=0, atol=0)


def test_weights_that_have_diverged_replace_no_checkpoint(tmp_path):
    state = make_state(schedule=ScheduleConfig(epochs=1, warmup_epochs=0))
    run(state, tmp_path)
    before = [(tmp_path / name).read_bytes() for name in ('last.pth', 'best.pth')]
    state = make_state()
    nn.init.constant_(state.model[1].weight, 1e38)
    with pytest.raises(FloatingPointError, match=r'expected a finite training loss and gradient, got (nan|inf)'):
        run(state, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ('last.pth', 'best.pth')] == before


def test_weights_whose_validation_loss_is_not_finite_replace_no_checkpoint(tmp_path, monkeypatch):
    original, calls = pkgutil.resolve_name('train.engine.evaluate_all'), itertools.count(1)

    def evaluate(*args, **kwargs):
        found = original(*args, **kwargs)
        return [{**each, 'loss': math.nan} for each in found] if next(calls) == 2 else found

    monkeypatch.setattr('train.engine.evaluate_all', evaluate)
    state = make_state()
    with pytest.raises(FloatingPointError, match='a finite validation loss, got nan after epoch 2'):
        run(state, tmp_path)
    for name in ('last.pth', 'best.pth'):
        assert torch.load(tmp_path / name, weights_only=True)['epoch'] == 1


@pytest.mark.parametrize('epoch', [1, 4])
@pytest.mark.parametrize('fails', ['train.engine.evaluate_all', 'train.log.update_summary', 'tqdm.tqdm.write'])
def test_an_epoch_is_saved_before_what_may_fail_after_it_and_gone_on_with_exactly(fails, epoch, tmp_path, monkeypatch):
    def start() -> TrainState:
        return make_state(ema=EmaConfig(decay=0.9))

    whole, state = start(), start()
    run(whole, tmp_path / 'whole')
    original, calls = pkgutil.resolve_name(fails), itertools.count(1)

    def function(*args, **kwargs):
        if next(calls) == epoch:
            raise OSError('no space left')
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(fails, function)
        with pytest.raises(OSError, match='no space left'):
            run(state, tmp_path / 'ended')
    last = torch.load(tmp_path / 'ended' / 'last.pth', weights_only=True)
    assert last['updates'] == 6 * epoch
    restored = start()
    restored.load_state_dict(last, 'last.pth')
    run(restored, tmp_path / 'ended')
    rows = [
        [{k: row[k] for k in ('epoch', 'train_loss', 'eval_top1', 'eval_ema_loss')} for row in each]
        for each in (whole.progress.history, restored.progress.history)
    ]
    assert rows[0] == rows[1]
    for name in ('last.pth', 'best.pth'):
        ends = [torch.load(tmp_path / folder / name, weights_only=True) for folder in ('whole', 'ended')]
        for key in ('state_dict', 'epoch', 'updates', 'best_top1'):
            torch.testing.assert_close(ends[1][key], ends[0][key], rtol=0, atol=0)


def test_the_updates_before_a_training_image_that_cannot_be_read_are_saved(tmp_path):
    class Damaged(list):
        def __iter__(self):
            yield from make_batches()[:4]
            raise CorruptImageError('1.jpg')

    saver = Saver(tmp_path, DESCRIPTION, keep=1, minutes=None)
    with pytest.raises(CorruptImageError):
        fit(make_state(), Loaders(Damaged(), make_batches(), []), saver, progress=False)
    assert torch.load(tmp_path / 'last.pth', weights_only=True)['updates'] == 4


class Killed(list):
    """Batches, and a loading process that the system ends at the fifth."""

    def __getitem__(self, index):
        if index == 4:
            # When the batch before it has been sent.
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_the_updates_before_the_end_of_a_loading_process_are_saved_and_the_error_is_one_line(
    tmp_path, monkeypatch, capsys
):
    # Torch looks for loading processes that have ended as often, in seconds.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, '__defaults__', (0.1,))
    # timm's loader starts the processes at the first batch.
    loader = PrefetchLoader(
        DataLoader(Killed(make_batches()), batch_size=None, num_workers=1, prefetch_factor=1),
        device=torch.device('cpu'),
    )
    before = signal.getsignal(signal.SIGCHLD)
    saver = Saver(tmp_path, DESCRIPTION, keep=1, minutes=None)
    with pytest.raises(SystemExit):
        run_command(lambda _: fit(make_state(), Loaders(loader, make_batches(), []), saver, progress=False), [])
    assert capsys.readouterr().err.startswith('error: DataLoader worker (pid')
    # timm's loader holds the fourth batch.
    assert torch.load(tmp_path / 'last.pth', weights_only=True)['updates'] == 3
    assert signal.getsignal(signal.SIGCHLD) == before


def test_a_batch_that_cannot_be_read_leaves_the_statistics_of_whole_updates(tmp_path):
    class Broken(list):
        def __iter__(self):
            yield from self[:3]
            raise CorruptImageError('broken')

    model = nn.Sequential(nn.BatchNorm2d(3), *make_model())
    halves = dict(optim=OptimConfig(lr=0.064, label_smoothing=0.0, accumulate=2), data=DataConfig(batch_size=16))
    state = make_state(model, 3, **halves)
    saver = Saver(tmp_path, DESCRIPTION, keep=1, minutes=None)
    with pytest.raises(CorruptImageError):
        fit(state, Loaders(Broken(make_batches()), make_batches(), []), saver, progress=False)
    found = torch.load(tmp_path / 'last.pth', weights_only=True)
    assert found['updates'] == 1
    assert found['state_dict']['0.num_batches_tracked'] == 2


def test_an_epoch_of_a_stream_that_is_trained_and_not_evaluated_is_not_trained_again(tmp_path):
    class Stream(list):
        dataset = object.__new__(WebDataset)

    state = make_state(schedule=ScheduleConfig(epochs=1, warmup_epochs=0))
    train_one_epoch(state, make_batches(), progress=False)
    trained = _clone(state.model)
    fit(
        state, Loaders(Stream(), make_batches(), []), Saver(tmp_path, DESCRIPTION, keep=1, minutes=None), progress=False
    )
    torch.testing.assert_close(_clone(state.model), trained, rtol=0, atol=0)
    assert len(state.progress.history) == 1


def test_a_budget_of_seconds_ends_a_run_within_an_epoch(tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr('train.engine.time.perf_counter', lambda: float(next(clock)))
    state = make_state(run=RunConfig(max_seconds=7.5, eval_every=3))
    run(state, tmp_path)
    # Each update takes one tick.
    assert (state.progress.updates, state.progress.epoch, state.progress.seconds) == (8, 1, 8.0)
    with (tmp_path / 'summary.csv').open() as file:
        assert [math.isnan(float(row['eval_top1'])) for row in csv.DictReader(file)] == [True, False]


def test_activations_that_are_computed_again_give_the_same_losses():
    batches, losses = make_batches(3, side=4), []
    for again in (False, True):
        state = make_state(make_vit(), run=RunConfig(grad_checkpointing=again, tensorboard=False))
        assert state.model.grad_checkpointing == again
        losses.append(train(state, batches))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r'grad_checkpointing to be false for a Sequential, got true'):
        make_state(run=RunConfig(grad_checkpointing=True))


def test_channels_next_to_each_other_change_the_layout_and_not_the_losses():
    batches, losses, layouts = make_batches(2, side=32), [], []
    for near in (False, True):
        torch.manual_seed(0)
        model = timm.create_model('test_resnet', num_classes=3)
        model.layer2.register_forward_hook(
            lambda module, inputs, output: layouts.append(output.is_contiguous(memory_format=torch.channels_last))
        )
        losses.append(train(make_state(model, run=RunConfig(channels_last=near, tensorboard=False)), batches))
    assert layouts == [False, False, True, True]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
