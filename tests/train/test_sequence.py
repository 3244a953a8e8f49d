"""Sequence models on the shared engine: the losses of a plain loop, decay, budgets, evaluation and diagnosis."""

import csv
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import pretend_terminal, stop_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.utils import ModelEmaV3
from torch import nn

from aft_vision.data import (
    STEP,
    EvalDataset,
    Loaders,
    WindowDataset,
    derive_seed,
    sequence_eval_loader,
    sequence_train_loader,
)
from aft_vision.models.decoders import create_decoder
from train.checkpoint import Saver
from train.diagnosis import NonFiniteLossError
from train.distributed import World
from train.engine import fit, train_one_epoch, train_step
from train.schema import EmaConfig, OptimizerConfig, RunConfig
from train.sequence import Likelihood, create_sequence_state
from train.sequence_schema import CharConfig, CharData, PixelConfig, SequenceSchedule
from train.state import TrainState

HERE = World(torch.device('cpu'))
TEXT = np.random.default_rng(0).integers(8, size=700).astype(np.uint8)
DESCRIPTION = {'model_name': 'aft_local_char', 'model_kwargs': {}, 'class_names': []}
UPDATES = 10


def make_config(**sections: object) -> CharConfig:
    defaults = dict(
        data=CharData(file='text', context=16, batch_size=4),
        optim=OptimizerConfig(lr=3e-3, weight_decay=0.1),
        schedule=SequenceSchedule(epochs=2, warmup_updates=4),
        run=RunConfig(tensorboard=False),
    )
    return CharConfig(**{**defaults, **sections})


def make_model(name: str = 'aft_local_char', **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(context=16, vocab_size=8, depth=2, dim=16, dropout=0.1)
    if name == 'aft_local_char':
        sizes |= dict(window=4, bias_dim=2)
    return create_decoder(name, **{**sizes, **kwargs})


def make_state(model: nn.Module | None = None, **sections: object) -> TrainState:
    objective = Likelihood('windows', 'bits/character', 16)
    return create_sequence_state(model or make_model(), make_config(**sections), UPDATES, objective, HERE)


def make_loaders(
    batch_size: int = 4, train: np.ndarray = TEXT[:640], valid: np.ndarray = TEXT[640:], stride: int = 8
) -> Loaders:
    windows = WindowDataset(train, 16, seed=0), EvalDataset(valid, 16, stride)
    return Loaders(sequence_train_loader(windows[0], batch_size), sequence_eval_loader(windows[1], 4), [])


def make_batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, (4, 16), generator=generator) for _ in range(count)]


def train(state: TrainState, batches: list[torch.Tensor]) -> list[float]:
    return [train_step(state, [(tokens, tokens)]) for tokens in batches]


def run(state: TrainState, folder: Path) -> TrainState:
    return fit(state, make_loaders(), Saver(folder, DESCRIPTION, keep=1, minutes=None), progress=False)


def rows_of(folder: Path, name: str = 'summary.csv') -> list[dict[str, str]]:
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize('name', ['aft_local_char', 'transformer_char'])
def test_twenty_losses_equal_those_of_a_plain_loop(name):
    batches, heads = make_batches(20), dict(num_heads=2) if name == 'transformer_char' else {}
    state = make_state(
        make_model(name, **heads),
        optim=OptimizerConfig(lr=3e-3, weight_decay=0.1, clip_grad=0.5),
        ema=EmaConfig(decay=0.9),
        run=RunConfig(seed=3, tensorboard=False),
    )
    losses = train(state, batches)

    model = make_model(name, **heads)
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    others = [p for p in model.parameters() if not any(p is weight for weight in linear)]
    optimizer = torch.optim.AdamW([{'params': others, 'weight_decay': 0.0}, {'params': linear, 'weight_decay': 0.1}])
    average = ModelEmaV3(model, decay=0.9)
    expected = []
    for update, tokens in enumerate(batches):
        seed = derive_seed(STEP, 3, update, 0)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for group in optimizer.param_groups:
            group['lr'] = 3e-3 * (update / 4 if update < 4 else math.sqrt(4 / update))
        loss = model.nll(tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        average.update(model)
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert len(set(losses)) == 20
    torch.testing.assert_close(state.averaged_model.state_dict(), average.module.state_dict(), rtol=1e-3, atol=1e-4)


def test_parts_of_a_batch_and_recomputed_activations_make_the_same_update():
    batches, found = make_batches(3), []
    for accumulate, again in ((1, False), (2, False), (1, True)):
        state = make_state(
            make_model(dropout=0.0),
            optim=OptimizerConfig(lr=3e-3, accumulate=accumulate),
            run=RunConfig(grad_checkpointing=again, tensorboard=False),
        )
        assert state.model.grad_checkpointing == again
        for tokens in batches:
            train_step(state, [(part, part) for part in tokens.chunk(accumulate)])
        found.append(state.model.head.weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], found[0], rtol=1e-4, atol=1e-6)


def test_fit_writes_bits_and_keeps_the_lowest(tmp_path, monkeypatch):
    scores = iter([3.0, 2.5, 2.0, 2.25])
    values = lambda models, *args, **kwargs: [{'loss': 1.0, 'bits': next(scores)} for _ in models]  # noqa: E731
    monkeypatch.setattr('train.engine.evaluate_all', values)
    state = run(make_state(ema=EmaConfig(decay=0.5), run=RunConfig()), tmp_path)
    assert state.progress.best == 2.0
    best, last = (torch.load(tmp_path / name, weights_only=True) for name in ('best.pth', 'last.pth'))
    assert (best['best_bits'], best['epoch'], best['averaged']) == (2.0, 2, False)
    assert last['best_bits'] == 2.0
    rows = rows_of(tmp_path)
    assert [float(row['eval_bits']) for row in rows] == [3.0, 2.0]
    assert [float(row['eval_ema_bits']) for row in rows] == [2.5, 2.25]
    for row in rows:
        assert float(row['train_bits']) == pytest.approx(float(row['train_loss']) / math.log(2))
        assert float(row['train_windows_per_second']) == pytest.approx(4 * float(row['train_updates_per_second']))
        assert float(row['train_updates_per_second']) == pytest.approx(10 / float(row['train_seconds']))
    assert [float(row['train_updates']) for row in rows] == [10, 20]
    seconds = sum(float(row['train_seconds']) for row in rows)
    assert float(rows[1]['train_total_seconds']) == pytest.approx(seconds)
    events = EventAccumulator(str(tmp_path / 'tensorboard'))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars('eval/bits')] == [(10, 3.0), (20, 2.0)]
    steps = rows_of(tmp_path, 'steps.csv')
    assert [row['update'] for row in steps] == ['10', '20']
    assert float(steps[1]['seconds']) == pytest.approx(seconds, abs=2e-3)


def test_a_run_learns_what_follows_from_what(tmp_path, capsys):
    # Each character follows from the one before it.
    text = (np.arange(700) % 7).astype(np.uint8)
    loaders = make_loaders(4, text, text, 16)
    state = make_state(
        make_model(dropout=0.0), optim=OptimizerConfig(lr=2e-2), schedule=SequenceSchedule(epochs=5, warmup_updates=10)
    )
    fit(state, loaders, Saver(tmp_path, DESCRIPTION, keep=1, minutes=None), progress=False)
    bits = [float(row['eval_bits']) for row in rows_of(tmp_path)]
    # What is left is the first character of a window, of 16, if everything was learned.
    assert math.log2(7) / 16 < bits[-1] < 0.8 < bits[0]
    line = capsys.readouterr().out.splitlines()[-1]
    assert 'windows/s' in line
    assert f'{bits[-1]:.4f}' in line
    assert 'bits/character' in line


def test_a_budget_of_updates_ends_the_run_within_an_epoch_and_a_larger_one_goes_on(tmp_path):
    whole = run(make_state(), make_folder(tmp_path / 'whole'))
    schedule = dict(epochs=2, warmup_updates=4)
    folder = make_folder(tmp_path / 'cut')
    cut = run(make_state(schedule=SequenceSchedule(**schedule, max_updates=13)), folder)
    assert (cut.progress.updates, cut.progress.epoch, cut.progress.updates_of_epoch) == (13, 1, 3)
    assert [row['epoch'] for row in rows_of(folder)] == ['1', '2']
    assert float(rows_of(folder)[1]['train_updates']) == 13
    assert not math.isnan(float(rows_of(folder)[1]['eval_bits']))
    content = torch.load(folder / 'last.pth', weights_only=True)
    again = make_state(schedule=SequenceSchedule(**schedule, max_updates=13))
    again.load_state_dict(content, source='test')
    before = rows_of(folder)
    run(again, folder)
    assert again.progress.updates == 13
    assert rows_of(folder) == before
    more = make_state()
    more.load_state_dict(content, source='test')
    run(more, folder)
    assert more.progress.updates == 20
    assert [row['epoch'] for row in rows_of(folder)] == ['1', '2']
    assert rows_of(folder)[1]['train_loss'] == rows_of(tmp_path / 'whole')[1]['train_loss']
    torch.testing.assert_close(more.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize('update', [13, 20])
def test_a_spent_run_that_was_stopped_before_its_evaluation_makes_up_for_it(update, tmp_path, monkeypatch):
    schedule = SequenceSchedule(epochs=2, warmup_updates=4, max_updates=update)
    expected = run(make_state(schedule=schedule), make_folder(tmp_path / 'whole'))
    stopped, folder = make_state(schedule=schedule), make_folder(tmp_path / 'stopped')
    stop_in(monkeypatch, update, run, stopped, folder)
    content = torch.load(tmp_path / 'stopped' / 'last.pth', weights_only=True)
    assert (content['updates'], len(content['history'])) == (update, 1)
    again = make_state(schedule=schedule)
    again.load_state_dict(content, source='test')
    run(again, tmp_path / 'stopped')
    assert [row['eval_bits'] for row in again.progress.history] == [
        row['eval_bits'] for row in expected.progress.history
    ]


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_time_left_is_that_of_the_budget(capsys, monkeypatch):
    pretend_terminal(monkeypatch)
    state = make_state(run=RunConfig(max_seconds=3600.0, tensorboard=False), schedule=SequenceSchedule(epochs=10**6))
    train_one_epoch(state, make_loaders().train)
    assert 'left=59:5' in capsys.readouterr().err


def test_an_update_that_is_not_finite_is_diagnosed_with_its_windows_and_layer(tmp_path):
    state, loaders = make_state(), make_loaders()
    with torch.no_grad():
        state.model.blocks[1].mlp.fc1.weight[3, 5] = float('nan')
    with pytest.raises(NonFiniteLossError, match='got nan in epoch 1, update 1'):
        train_one_epoch(state, loaders.train, progress=False, folder=tmp_path)
    found = json.loads((tmp_path / 'nonfinite-1-rank0.json').read_text())
    assert found['layer'] == 'blocks.1.mlp.fc1'
    assert found['weights'] == ['blocks.1.mlp.fc1.weight']
    loaders.set_epoch(0)
    assert found['windows'] == [draw.image for draw in loaders.train.sampler][:4]


def test_a_compiled_decoder_trains_as_an_eager_one(monkeypatch):
    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda module, **kwargs: compile_(module, backend='aot_eager'))
    losses = []
    for compiled in (False, True):
        state = make_state(make_model(dropout=0.0, depth=1), run=RunConfig(compile=compiled, tensorboard=False))
        losses.append(train(state, make_batches(3)))
        assert set(state.model.state_dict()) == set(make_model(depth=1).state_dict())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('kind', 'sections', 'message'),
    [
        (CharConfig, dict(data=dict(context=8, eval_stride=9)), r'data\.eval_stride to be at most .*is 8, .*, got 9'),
        (PixelConfig, dict(optim=dict(accumulate=3)), r'a multiple of optim\.accumulate \(3\) .* \(1\), got 128'),
        (PixelConfig, dict(schedule=dict(warmup_lr=1)), r'warmup_lr to be at most optim\.lr, .* 0\.0005, got 1'),
        (PixelConfig, dict(run=dict(init_from='x', reset_head=True)), r'reset_head to be false for a sequence model'),
    ],
)
def test_a_wrong_experiment_is_rejected_with_key_and_value(kind, sections, message):
    from dataclasses import fields

    types = {field.name: field.type for field in fields(kind)}
    with pytest.raises(ValueError, match=message):
        kind(**{name: types[name](**keys) for name, keys in sections.items()})
