"""The commands train.pixel and train.char: results, interruption, evaluation, bad input."""

import csv
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import digest, stop_in
from PIL import Image
from small_runs import ROOT, assert_same_results

from aft_vision.models.decoders import load_decoder
from aft_vision.visualize import draw_bits
from train import char, pixel
from train.state import TrainState

MAINS = {'pixel': pixel.main, 'char': char.main}
# Two epochs of three updates.
COMMON = ['schedule.max_updates=null', 'schedule.epochs=2', 'ema.decay=0.9', 'run.cpu_threads=1']


@pytest.fixture(scope='module')
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The smoke experiments, on small files."""
    folder, rng = tmp_path_factory.mktemp('data'), np.random.default_rng(0)
    images = {f'x_{split}': rng.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
              for split, count in (('train', 6), ('test', 3))}  # fmt: skip
    np.savez(folder / 'cifar.npz', **images)
    (folder / 'text').write_bytes((b'abcdefghij' * 100)[:710] + bytes(rng.integers(256, size=290, dtype=np.uint8)))
    config = ROOT / 'configs' / 'smoke'
    return {
        'pixel': ['--quiet', '--config', f'{config}/pixel.yaml', f'data.dir={folder}/cifar.npz', *COMMON,
                  'data.batch_size=2', 'model.dropout=0.2'],
        'char': ['--quiet', '--config', f'{config}/char.yaml', f'data.file={folder}/text', *COMMON,
                 'data.context=32', 'data.eval_stride=20', 'data.batch_size=8', 'model.dropout=0.2'],
    }  # fmt: skip


@pytest.fixture(scope='module')
def whole(arguments, tmp_path_factory) -> dict[str, Path]:
    """Runs without an interruption."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in arguments}
    for kind, folder in folders.items():
        MAINS[kind]([*arguments[kind], f'run.dir={folder}'])
    return folders


def steps_of(folder: Path) -> list[tuple[str, str, str]]:
    with (folder / 'steps.csv').open() as file:
        return [(row['update'], row['loss'], row['lr']) for row in csv.DictReader(file)]


@pytest.mark.parametrize('kind', MAINS)
def test_a_run_leaves_what_the_tools_need(kind, whole, arguments):
    folder = whole[kind]
    names = 'best.pth last.pth last-1.pth summary.csv steps.csv curves.png result.json config.yaml tensorboard'
    assert {path.name for path in folder.iterdir()} == set(names.split())
    best = torch.load(folder / 'best.pth', weights_only=True)
    model = load_decoder(folder / 'best.pth')
    assert (best['task'], model.task) == (kind, kind)
    assert model.context == (3072 if kind == 'pixel' else 32)
    torch.testing.assert_close(model.state_dict(), best['state_dict'], rtol=0, atol=0)
    load_decoder(folder / 'last.pth')
    result = json.loads((folder / 'result.json').read_text())
    assert result['updates'] == 6
    # The seconds are rounded to tenths.
    assert 6 / result['updates_per_second'] == pytest.approx(result['seconds'], rel=0.5, abs=0.06)
    assert result['parameters'] == sum(p.numel() for p in model.parameters())
    assert [row[0] for row in steps_of(folder)] == ['3', '6']


def test_the_resolved_config_repeats_the_run_exactly_and_draws_its_curves(whole, tmp_path, monkeypatch):
    monkeypatch.setattr('train.sequence.draw_bits', draw_bits)
    char.main(['--quiet', '--config', str(whole['char'] / 'config.yaml'), f'run.dir={tmp_path}'])
    assert digest(tmp_path / 'last.pth') == digest(whole['char'] / 'last.pth')
    assert Image.open(tmp_path / 'curves.png').width > 500


@pytest.mark.parametrize(('kind', 'update'), [('char', 3), ('pixel', 4)])
def test_a_run_stopped_by_a_signal_ends_as_if_it_had_not_been(kind, update, whole, arguments, tmp_path, monkeypatch):
    again = [*arguments[kind], 'run.resume=auto', 'run.throughput_batches=1', f'run.dir={tmp_path}']
    assert stop_in(monkeypatch, update, MAINS[kind], again) == 128 + signal.SIGTERM
    assert torch.load(tmp_path / 'last.pth', weights_only=True)['updates'] == update
    state = MAINS[kind](again)
    assert state.progress.updates == 6
    assert_same_results(tmp_path, whole[kind])
    assert steps_of(tmp_path) == steps_of(whole[kind])
    if update == 3:
        # A run that is complete stays as it is.
        MAINS[kind](again)
        assert_same_results(tmp_path, whole[kind])
        assert steps_of(tmp_path) == steps_of(whole[kind])


def evaluate(kind: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[float, int]:
    capsys.readouterr()
    assert MAINS[kind]([*arguments, '--eval']) is None
    found = re.search(r'(test|valid|train): ([\d.]+) bits/.* (\d+) tokens', capsys.readouterr().out)
    return float(found[2]), int(found[3])


@pytest.mark.parametrize('kind', MAINS)
def test_eval_measures_the_best_weights_on_every_token(kind, whole, arguments, capsys):
    result = json.loads((whole[kind] / 'result.json').read_text())
    at = [*arguments[kind], f'run.dir={whole[kind]}']
    tokens = {'test': 3 * 3072, 'train': 6 * 3072} if kind == 'pixel' else {'test': 50, 'valid': 50, 'train': 900}
    for split, count in tokens.items():
        bits, found = evaluate(kind, [*at, f'data.eval_split={split}'], capsys)
        assert found == count
        if f'{split}_bits' in result:
            assert bits == pytest.approx(result[f'{split}_bits'], abs=1e-4)


def test_more_context_for_each_character_is_another_measurement(whole, arguments, capsys):
    at = [*arguments['char'], f'run.dir={whole["char"]}', 'data.eval_split=test']
    assert evaluate('char', [*at, 'data.eval_stride=1'], capsys) != evaluate(
        'char', [*at, 'data.eval_stride=32'], capsys
    )


def test_a_shorter_text_is_said_to_be_divided_in_proportion(whole, arguments, tmp_path, capsys):
    char.main([*arguments['char'], f'run.dir={tmp_path}', 'run.max_seconds=1e-9', 'run.throughput_batches=2'])
    shown = capsys.readouterr().out
    assert '1,000 characters, not 100,000,000: the first 90 % (900) train' in shown
    assert re.search(r'windows/s: loader alone \d+, model alone \d+, both \d+', shown)
    # The budget is used up by the first update.
    assert json.loads((tmp_path / 'result.json').read_text())['updates'] == 1


def still(kind: str, arguments: list[str], start: Path, folder: Path) -> TrainState:
    """A run from other weights whose rate is too small to change them."""
    rates = ['optim.lr=1e-30', 'schedule.max_updates=1', 'ema.decay=null']
    return MAINS[kind]([*arguments, *rates, f'run.init_from={start}', f'run.dir={folder}'])


def test_a_run_starts_from_the_weights_of_another(whole, arguments, tmp_path):
    state = still('char', arguments['char'], whole['char'] / 'best.pth', tmp_path / 'run')
    best = torch.load(whole['char'] / 'best.pth', weights_only=True)['state_dict']
    torch.testing.assert_close(state.model.state_dict(), best)
    with pytest.raises(ValueError, match=r'best\.pth: .*'):
        still('char', [*arguments['char'], 'model.depth=2'], whole['char'] / 'best.pth', tmp_path / 'other')
    assert not (tmp_path / 'other').exists()


def test_text8_has_a_model_of_27_symbols(arguments, tmp_path):
    (tmp_path / 'text8').write_bytes(b'the quick brown fox jumps over a lazy dog ' * 20)
    text8 = [f'data.file={tmp_path / "text8"}', 'data.vocabulary=text8', 'schedule.max_updates=1']
    state = char.main([*arguments['char'], *text8, f'run.dir={tmp_path / "run"}'])
    assert state.model.vocab_size == 27
    assert torch.load(tmp_path / 'run' / 'best.pth', weights_only=True)['vocabulary'] == 'text8'


@pytest.mark.parametrize(
    ('kind', 'changes', 'message'),
    [
        ('char', ['data.vocabulary=text8'], r'27 symbols of text8 .* got \d+ .* at byte 710'),
        ('char', ['data.context=1024'], 'at least 1024 characters to train on, a whole window, got 900'),
        ('char', ['data.batch_size=64'], r'batch_size must be in \[1, 28\], .*, got 64'),
        ('char', ['data.file=none'], r'a file of text, got none, which is none'),
        ('char', ['model.context=64'], r'model\.context = 64 is not for an experiment: the data decide'),
        ('char', ['model.name=transformer_char', 'model.bias_dim=3'], r"mixer='attention' has no bias_dim; it takes"),
        ('pixel', ['data.dir=none'], r'CIFAR10 in none: .* got nothing of this name'),
    ],
)
def test_bad_input_is_rejected_before_a_folder_is_made(kind, changes, message, arguments, tmp_path):
    with pytest.raises(ValueError, match=message):
        MAINS[kind]([*arguments[kind], *changes, f'run.dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run').exists()


def test_a_checkpoint_of_other_sequences_is_rejected(whole, arguments, capsys):
    at = [*arguments['char'], f'run.init_from={whole["char"] / "best.pth"}', '--eval', 'data.eval_stride=1']
    with pytest.raises(ValueError, match=r'a model of 16 tokens of 256 symbols, .* got .*best\.pth with 32 of 256'):
        char.main([*at, 'data.context=16'])
