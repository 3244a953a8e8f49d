"""Pictures: the curves of a training run, and the position biases that a model has learned."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aft_vision import ops
from aft_vision.layers import AFTConv, AFTFull, AFTLocal


def plot_history(history: Sequence[Mapping[str, float]], path: str | Path) -> None:
    """Draw loss, accuracy and learning rate by epoch.

    Args:
        history: One mapping per epoch, with the columns of the trainer's summary.csv.
        path: A PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(11, 3.2)
    loss, accuracy, rate = figure.subplots(1, 3)
    for axes, names in (
        (loss, {'train_loss': 'training', 'eval_loss': 'validation', 'eval_ema_loss': 'validation, averaged weights'}),
        (accuracy, {'eval_top1': 'top-1', 'eval_top5': 'top-5', 'eval_ema_top1': 'top-1, averaged weights'}),
        (rate, {'train_lr': 'learning rate'}),
    ):
        for column, label in names.items():
            points = [(row['epoch'] + 1, row[column]) for row in history if not math.isnan(row.get(column, math.nan))]
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
        axes.legend()
    figure.savefig(path, dpi=150)


@torch.no_grad()
def position_biases(model: nn.Module) -> list[torch.Tensor]:
    """Collect exp(w) - 1 of each mixer, from the first layer to the last, which AFT Fig. 1 shows.

    Returns:
        AFT-conv: (h, s, s) per layer, after AFT Eq. 8, and with one offset a head after AFT Eq. 10. AFT-full:
        (1, T, T), AFT Eq. 7. AFT-local: (1, T, 2s - 1), AFT Eq. 4.

    Raises:
        ValueError: no layer of the model has a position bias.
    """
    found = []
    for mixer in model.modules():
        if isinstance(mixer, AFTConv):
            kernel = mixer.kernel()
            found.append(ops.hard_kernel(kernel) if mixer.gumbel else kernel)
        elif isinstance(mixer, (AFTFull, AFTLocal)):
            found.append(mixer.position_bias()[None])
    if not found:
        raise ValueError(f'expected a model with position biases, got {type(model).__name__}, which has none')
    return [bias.detach().float().expm1().cpu() for bias in found]


def plot_position_biases(model: nn.Module, path: str | Path, max_heads: int = 16) -> None:
    """Draw exp(w) - 1 of a model: a row per layer and a column per head, or for one head a picture per layer.

    Red is above 0, where a token counts more than its key says, blue below. Each picture has its own scale, from minus
    to plus the number below it.

    Args:
        path: A PNG.
        max_heads: Columns at most; evenly spaced heads of the layer are taken.

    Raises:
        ValueError: the model has no position biases, or max_heads is below 1.
        ImportError: matplotlib is not installed.
    """
    if max_heads < 1:
        raise ValueError(f'max_heads must be at least 1, got {max_heads}')
    biases = position_biases(model)
    heads = min(len(biases[0]), max_heads)
    columns = heads if heads > 1 else math.ceil(math.sqrt(len(biases)))
    rows = math.ceil(len(biases) * heads / columns)
    side = 0.9 if heads > 1 else 2.4
    figure = new_figure(0.8 + side * columns, 0.6 + side * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[], frame_on=False)
    cells = iter(grid.flat)
    for layer, bias in enumerate(biases, start=1):
        for column, head in enumerate(torch.linspace(0, len(bias) - 1, heads).round().long().tolist()):
            axes = next(cells)
            limit = max(bias[head].abs().max().item(), 1e-6)
            axes.set_xlabel(f'\u00b1{limit:.2g}', fontsize=6, labelpad=1)
            axes.imshow(
                bias[head].numpy(), cmap='RdBu_r', vmin=-limit, vmax=limit, interpolation='nearest', aspect='auto'
            )
            axes.set_box_aspect(1)
            if column == 0:
                axes.set_ylabel(f'layer {layer}', fontsize=7)
            if heads > 1 and layer == 1:
                axes.set_title(f'head {head + 1}', fontsize=7)
    figure.suptitle('exp(w) - 1', fontsize=9)
    figure.savefig(path, dpi=150)


def new_figure(width: float, height: float) -> Any:
    """Make an empty matplotlib figure of that size in inches, which no window shows.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'aft-vision[viz]'") from error
    return Figure(figsize=(width, height), layout='constrained')
