"""Curves of training runs."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aft_vision.visualize.figure import new_figure

# Columns of summary.csv, and their labels.
BITS = {'eval_bits': 'evaluated', 'eval_ema_bits': 'evaluated, averaged weights'}


def read_history(path: str | Path) -> list[dict[str, float]]:
    """Read the summary.csv of a run: one mapping per epoch.

    Raises:
        ValueError: the file is not such a table.
    """
    rows = _read_numbers(path)
    if rows and 'epoch' not in rows[0]:
        raise ValueError(f'expected a table with a column epoch, got {path} with {", ".join(list(rows[0])[:5])}')
    return rows


def _read_numbers(path: str | Path) -> list[dict[str, float]]:
    with Path(path).open(newline='', encoding='utf-8') as file:
        try:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
        # A cell that is not a number, or a row of the wrong length.
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f'expected a table of numbers, got {path}: {error}') from error


def describe_targets(config: Mapping[str, Any]) -> str:
    """Return words for the targets of the training loss that differ from the targets of the validation.

    Args:
        config: Sections of an experiment, as in the config.yaml of a run: `label_smoothing` of `optim`, and `mixup`,
            `cutmix` and `mix_prob` of `augment`.
    """
    optim, augment = config.get('optim') or {}, config.get('augment') or {}
    smoothing = optim.get('label_smoothing') or 0.0
    words = [f'labels smoothed by {smoothing:g}'] if smoothing else []
    if augment.get('mix_prob', 1.0) and (augment.get('mixup') or augment.get('cutmix')):
        words.append('mixed images')
    return ', '.join(words)


def draw_history(history: Sequence[Mapping[str, float]], targets: str = '') -> Any:
    """Draw loss, accuracy and learning rate by epoch.

    Args:
        history: One mapping per epoch, with the columns of the trainer's summary.csv.
        targets: Words for the targets of the training loss, of `describe_targets`; '' if they are as in validation.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    training = f'training ({targets})' if targets else 'training'
    figure = new_figure(11, 3.2)
    loss, accuracy, rate = figure.subplots(1, 3)
    # A history counts its epochs from 0, summary.csv from 1.
    before = history[0]['epoch'] - 1 if history else 0
    for axes, names in (
        (loss, {'train_loss': training, 'eval_loss': 'validation', 'eval_ema_loss': 'validation, averaged weights'}),
        (accuracy, {'eval_top1': 'top-1', 'eval_top5': 'top-5', 'eval_ema_top1': 'top-1, averaged weights'}),
        (rate, {'train_lr': 'learning rate'}),
    ):
        for column, label in names.items():
            points = [
                (row['epoch'] - before, row[column]) for row in history if not math.isnan(row.get(column, math.nan))
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker='.', label=label)
        axes.set_xlabel('epoch')
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    loss.set_ylabel('cross-entropy (nats)')
    accuracy.set_ylabel('accuracy (%)')
    accuracy.set_ylim(0, 100)
    rate.set_ylabel('learning rate')
    for axes in (loss, accuracy):
        if axes.lines:
            axes.legend(fontsize='small')
    return figure


def draw_bits(folder: str | Path, unit: str = 'bits per token') -> Any:
    """Draw the bits of a run of the pixel, character or recall trainer, by update and by training time.

    Args:
        folder: Folder of the run, with its steps.csv and summary.csv.
        unit: Label of the bits.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a file is not such a table.
    """
    steps, epochs = _read_numbers(Path(folder) / 'steps.csv'), read_history(Path(folder) / 'summary.csv')
    smooth = _smoothed([row['loss'] / math.log(2) for row in steps])
    evaluated = {key: [row for row in epochs if not math.isnan(row.get(key, math.nan))] for key in BITS}
    figure = new_figure(11, 4)
    panels = figure.subplots(1, 2, sharey=True)
    columns = {'update': ('update', 'train_updates'), 'seconds of training': ('seconds', 'train_total_seconds')}
    for axes, (label, (of_step, of_epoch)) in zip(panels, columns.items(), strict=True):
        axes.plot([row[of_step] for row in steps], smooth, lw=0.8, alpha=0.6, label='training (moving average)')
        for key, rows in evaluated.items():
            if rows:
                axes.plot([row[of_epoch] for row in rows], [row[key] for row in rows], 'o-', ms=4, label=BITS[key])
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    # The first updates are much larger and would flatten the rest.
    shown = [*smooth[len(steps) // 10 :], *(row[key] for key, rows in evaluated.items() for row in rows)]
    if shown:
        margin = 0.1 * (max(shown) - min(shown)) + 0.02
        panels[0].set_ylim(min(shown) - margin, max(shown) + margin)
    panels[0].set_ylabel(unit)
    panels[0].legend(fontsize='small')
    return figure


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the moving average of values, corrected for its start at 0."""
    weight, smooth, mean = 0.5, [], 0.0
    for number, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        smooth.append(mean / (1 - weight**number))
    return smooth
