import math
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aft_vision.visualize import describe_targets, draw_bits, draw_history, read_history, save_figure


def test_curves_are_drawn_without_the_epochs_that_were_not_evaluated(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr('matplotlib.axes.Axes.plot', lambda self, x, y, label, **k: drawn.update({label: (x, y)}))
    monkeypatch.setattr('matplotlib.axes.Axes.legend', lambda self, **k: None)
    row = {'train_loss': 2.0, 'train_lr': 0.1, 'eval_loss': math.nan, 'eval_top1': math.nan, 'eval_top5': math.nan}
    history = [{'epoch': 0, **row}, {'epoch': 1, **row, 'eval_loss': 1.5, 'eval_top1': 40.0, 'eval_top5': 80.0}]
    save_figure(draw_history(history), tmp_path / 'curves.png')
    assert drawn == {
        'training': ((1, 2), (2.0, 2.0)),
        'validation': ((2,), (1.5,)),
        'top-1': ((2,), (40.0,)),
        'top-5': ((2,), (80.0,)),
        'learning rate': ((1, 2), (0.1, 0.1)),
    }
    assert Image.open(tmp_path / 'curves.png').size[0] > 500


@pytest.mark.filterwarnings('error')
def test_a_panel_without_curves_has_no_legend():
    loss, accuracy, _ = draw_history([{'epoch': 0, 'train_loss': 2.0, 'train_lr': 0.1}]).axes
    assert loss.get_legend() is not None
    assert accuracy.get_legend() is None


@pytest.mark.parametrize(
    ('optim', 'augment', 'words'),
    [
        ({'label_smoothing': 0.1}, {'mixup': 0.8, 'cutmix': 0.0}, 'labels smoothed by 0.1, mixed images'),
        ({'label_smoothing': 0.1}, {'mixup': 0.8, 'cutmix': 1.0, 'mix_prob': 0.0}, 'labels smoothed by 0.1'),
        ({'label_smoothing': 0.0}, {'mixup': 0.0, 'cutmix': 1.0}, 'mixed images'),
        ({'label_smoothing': 0.0}, {'mixup': 0.0, 'cutmix': 0.0}, ''),
    ],
)
def test_the_curve_of_training_says_what_its_targets_are(monkeypatch, optim, augment, words):
    labels = []
    monkeypatch.setattr('matplotlib.axes.Axes.plot', lambda self, x, y, label, **k: labels.append(label))
    monkeypatch.setattr('matplotlib.axes.Axes.legend', lambda self, **k: None)
    targets = describe_targets({'optim': optim, 'augment': augment})
    assert targets == words
    history = [{'epoch': 0, 'train_loss': 2.0, 'eval_loss': 1.5}]
    draw_history(history, targets)
    assert labels == [f'training ({words})' if words else 'training', 'validation']


def test_a_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(ImportError, match=r'aft-vision\[viz\]'):
        draw_history([])


def test_the_table_of_a_run_is_read_with_its_gaps(tmp_path):
    (tmp_path / 'summary.csv').write_text('epoch,train_loss,eval_top1\n0,2.5,nan\n1,2.0,40\n')
    rows = read_history(tmp_path / 'summary.csv')
    assert [row['train_loss'] for row in rows] == [2.5, 2.0]
    assert math.isnan(rows[0]['eval_top1'])


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('epoch,loss\n0,high\n', 'a table of numbers, got '),
        ('epoch,loss\n0\n', 'a table of numbers, got '),
        ('step,loss\n0,1\n', 'a column epoch, got .* with step, loss'),
    ],
)
def test_another_table_is_rejected(tmp_path, text, message):
    (tmp_path / 'summary.csv').write_text(text)
    with pytest.raises(ValueError, match=message):
        read_history(tmp_path / 'summary.csv')


def test_a_table_that_counts_from_1_has_the_curves_of_a_history_that_counts_from_0():
    rows = [{'epoch': epoch, 'train_loss': 2.0, 'eval_loss': 1.5} for epoch in (0, 1)]
    (ours, *_), (theirs, *_) = (
        draw_history([{**row, 'epoch': row['epoch'] + first} for row in rows]).axes for first in (0, 1)
    )
    found = [[list(line.get_xdata()) for line in axes.lines] for axes in (ours, theirs)]
    assert found[0] == found[1] == [[1, 2], [1, 2]]


def make_run(folder: Path, nats: float) -> Path:
    """A run of two epochs of 20 updates of half a second, whose loss is the same all the time."""
    folder.mkdir()
    steps = ''.join(f'{u},{u / 2},{nats}\n' for u in range(10, 50, 10))
    (folder / 'steps.csv').write_text(f'update,seconds,loss\n{steps}')
    (folder / 'summary.csv').write_text('epoch,train_updates,train_total_seconds,eval_bits\n0,20,10,4.0\n1,40,20,3.0\n')
    return folder


def test_the_curves_have_their_bits_by_update_and_by_seconds(tmp_path):
    run = make_run(tmp_path / 'run', 2.0794415416798357)
    panels = draw_bits(run, 'bits/dim').axes
    for axes, training, evaluated in zip(
        panels, ([10, 20, 30, 40], [5, 10, 15, 20]), ([20, 40], [10, 20]), strict=True
    ):
        lines = {line.get_label(): line.get_xydata() for line in axes.lines}
        assert lines['training (moving average)'] == pytest.approx(np.array([[x, 3.0] for x in training]))
        assert lines['evaluated'].tolist() == [[x, y] for x, y in zip(evaluated, (4.0, 3.0), strict=True)]
