"""Memory of dense features against the size of the image: AFT and attention next to each other."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tools.benchmark.memory import peak_memory, saved_memory
from tools.benchmark.models import create_dense, has_fused_attention, materialise_attention
from tools.benchmark.printer import Report, plot_curves
from tools.benchmark.scaling import fit_rows
from tools.machine import autocast

MODELS = ('aft_conv_tiny', 'aft_full_tiny', 'deit_tiny_patch16_224')
SIZES = ((224, 224), (384, 384), (512, 512), (512, 683), (768, 768), (1024, 768), (1024, 1024))


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure memory at image sizes, and fit it as a power of the pixels and as a line."""
    models, sizes = args.models or MODELS, args.sizes or SIZES
    rows = measure_pixels(models, sizes, args.batch_size, args.training, device, args.dtype)
    fits = fit_pixels(rows)
    head = f'dense features, batch of {args.batch_size}, beyond weights and images'
    return Report(rows, head, fits, partial(plot_curves, rows, fits, 'pixels', head))


def measure_pixels(
    models: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    batch_size: int = 1,
    training: bool = False,
    device: torch.device | str = 'cpu',
    dtype: str = 'float32',
) -> list[dict[str, Any]]:
    """Measure the memory of dense features (`features_only`, the last three maps) at image sizes.

    Args:
        models: Names; one with fused attention is measured with materialised attention too.
        sizes: (H, W) in pixels; padded to whole patches.
        training: Measure forward and backward too.

    Returns:
        A row for each model, attention, size and direction: `name`, `fused` (True, False, or None without attention),
        `size`, `pixels` of the batch, `direction`, `peak_bytes` beyond weights, their gradients and the images, and in
        training `saved_bytes`.

    Raises:
        ValueError: there are fewer than two sizes to fit a line through.
    """
    if len({height * width for height, width in sizes}) < 2:
        raise ValueError(f'expected at least 2 image sizes of different area, got {list(sizes)}')
    place = torch.device(device)
    rows = []
    for name in models:
        model = create_dense(name, place)
        for fused in (True, False) if has_fused_attention(model) else (None,):
            if fused is False:
                materialise_attention(model)
            title = {True: f'{name}, fused', False: f'{name}, materialised', None: name}[fused]
            for size in sorted(sizes, key=lambda size: size[0] * size[1]):
                images = torch.randn(batch_size, 3, *size, device=place)
                label = {'name': title, 'fused': fused, 'size': size, 'pixels': batch_size * size[0] * size[1]}
                with autocast(place, dtype):
                    rows += [{**label, **found} for found in _measure(model, images, training)]
    return rows


def fit_pixels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit memory against pixels by least squares.

    Returns:
        The fits of `fit_rows` over all sizes, with `bytes_per_pixel`, the slope of the line through the values, and
        `slope_ratio` of it to that of the first model with fused attention, or to the first model where there is none.
    """
    baseline = next((row['name'] for row in rows if row['fused']), rows[0]['name'])
    fits = fit_rows(rows, 'pixels', ('peak_bytes', 'saved_bytes'), upper=False)
    for fit in fits:
        own = [row for row in rows if (row['name'], row['direction']) == (fit['name'], fit['direction'])]
        line = np.polyfit([row['pixels'] for row in own], [row[fit['quantity']] for row in own], 1)
        fit['bytes_per_pixel'] = float(line[0])
    for fit in fits:
        kind = (baseline, fit['direction'], fit['quantity'])
        first = next(each for each in fits if (each['name'], each['direction'], each['quantity']) == kind)
        fit['slope_ratio'] = fit['bytes_per_pixel'] / first['bytes_per_pixel']
    return fits


def _measure(model: nn.Module, images: Tensor, training: bool) -> list[dict[str, Any]]:
    model.eval()
    with torch.inference_mode():
        rows = [{'direction': 'forward', 'peak_bytes': peak_memory(lambda: model(images), images.device)}]
    if training:
        model.train()
        # The gradients of the weights are made by the first call, and added to by the next.
        peak = peak_memory(_step(model, images), images.device)
        kept = saved_memory(lambda: model(images), [images, *model.parameters(), *model.buffers()])
        rows.append({'direction': 'training', 'peak_bytes': peak, 'saved_bytes': kept})
        model.zero_grad()
    return rows


def _step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    return lambda: sum(features.float().mean() for features in model(images)).backward()
