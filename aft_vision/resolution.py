"""Classifiers at other image sizes than in training: native shapes, and pictures of their accuracy."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timm.layers import to_2tuple
from timm.models.naflexvit import NaFlexVit
from torch import nn

from aft_vision.data import NativeShape
from aft_vision.models import AFTVisionTransformer
from aft_vision.sizes import has_fixed_input_size
from aft_vision.visualize import new_figure


def naflex_shape(model: nn.Module, max_tokens: int) -> NativeShape:
    """Return the shapes of images of at most this many patches, for a model of timm's NaFlex batches.

    Raises:
        ValueError: the model takes only images of one shape.
    """
    if isinstance(model, NaFlexVit):
        return NativeShape(max_tokens, to_2tuple(model.embeds.patch_size))
    if not isinstance(model, AFTVisionTransformer):
        raise ValueError(
            'expected a model of images of native shapes, an aft_* vision transformer or a naflexvit_* of timm, got '
            f'{type(model).__name__}, which takes sizes in pixels'
        )
    if has_fixed_input_size(model):
        raise ValueError(
            'expected a model of images of native shapes, got one of a fixed size: create it with dynamic_img_size=True'
        )
    if model.attn_pool is not None:
        raise ValueError(
            'expected a model of images of native shapes, got attention pooling: create it with global_pool=avg'
        )
    return NativeShape(max_tokens, to_2tuple(model.patch_embed.patch_size))


def size_label(row: Mapping[str, Any]) -> str:
    """Format the size of a row with `height` and `width`, or `max_tokens`: `224`, `384x256`, `native 96`."""
    if 'max_tokens' in row:
        return f'native {row["max_tokens"]}'
    height, width = row['height'], row['width']
    return str(height) if height == width else f'{height}x{width}'


def standard_error(row: Mapping[str, Any], key: str = 'top1') -> float:
    """Return the standard error of an accuracy in percent, from its row's `samples`."""
    return math.sqrt(row[key] * (100 - row[key]) / row['samples'])


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Return the distinguishing parts of paths: runs/a/best.pth and runs/b/best.pth become a and b."""
    parts = [list(Path(path).resolve().parts) for path in paths]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
            for part in parts:
                del part[end]
    return [str(Path(*part)) for part in parts]


def draw_sizes(rows: Sequence[Mapping[str, Any]], train_size: Sequence[int] | None = None) -> Any:
    """Draw accuracy, throughput and memory of one model over the image size.

    Args:
        rows: Results of `evaluate` for each size, with `peak_memory_mb` and the keys of `size_label`; native shapes
            come last.
        train_size: (H, W) in pixels that the model was trained at, which is marked; None marks none.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    labels = [size_label(row).replace(' ', '\n') for row in rows]
    single = sum('height' in row for row in rows)
    figure = new_figure(11, 3.5)
    accuracy, speed, memory = figure.subplots(1, 3)
    for key, name in (('top1', 'top-1'), ('top5', 'top-5')):
        if key not in rows[0]:
            continue
        points = [row[key] for row in rows]
        errors = [standard_error(row, key) for row in rows]
        line = accuracy.errorbar(labels[:single], points[:single], errors[:single], fmt='o-', capsize=3, label=name)[0]
        rest = labels[single:], points[single:], errors[single:]
        accuracy.errorbar(*rest, fmt='D', capsize=3, color=line.get_color())
    trained = train_size and size_label(dict(zip(('height', 'width'), train_size, strict=True)))
    if trained in labels[:single]:
        accuracy.axvline(labels.index(trained), color='0.5', linestyle=':', label='size of training')
    accuracy.set(xlabel='image size (pixels)', ylabel='accuracy and standard error (%)')
    accuracy.set_ylim(bottom=0)
    accuracy.legend()
    speed.bar(labels, [row['images_per_second'] for row in rows])
    speed.set(xlabel='image size (pixels)', ylabel='images/s, forward pass')
    memory.bar(labels, [row['peak_memory_mb'] for row in rows])
    memory.set(xlabel='image size (pixels)', ylabel='peak memory (MiB)')
    if len(labels) > 8:
        for axes in (accuracy, speed, memory):
            axes.tick_params(axis='x', labelrotation=90)
    return figure
