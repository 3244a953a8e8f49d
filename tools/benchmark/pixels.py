"""Memory of dense features against the size of the image: AFT and attention side by side."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from aft_vision.visualize import new_figure
from tools.benchmark.memory import peak_memory, saved_memory
from tools.benchmark.models import create_dense, has_fused_attention, materialise_attention
from tools.machine import autocast

Size = tuple[int, int]
MODELS = ('aft_conv_tiny', 'aft_full_tiny', 'deit_tiny_patch16_224')
SIZES: tuple[Size, ...] = ((224, 224), (384, 384), (512, 512), (512, 683), (768, 768), (1024, 768), (1024, 1024))
# What is measured, and the words for it.
QUANTITIES = {
    'inference_bytes': 'peak of the forward pass',
    'training_bytes': 'peak of forward and backward',
    'saved_bytes': 'kept for the backward',
}


def measure_pixels(
    models: Sequence[str] = MODELS,
    sizes: Sequence[Size] = SIZES,
    batch_size: int = 1,
    training: bool = False,
    device: torch.device | str = 'cpu',
    dtype: str = 'float32',
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure the memory of dense features (`features_only`, the last three maps) at image sizes.

    Args:
        models: Names; one with fused attention is measured with materialised attention too.
        sizes: (H, W) in pixels; padded to whole patches.
        batch_size: Images at once.
        training: Measure forward and backward too.
        dtype: Key of PRECISIONS.

    Returns:
        A row for each model, attention and size: `label`, `pixels` of the batch, and QUANTITIES in bytes beyond
        weights, their gradients and the images.

    Raises:
        ValueError: there are fewer than two sizes to fit a line through.
    """
    if len({height * width for height, width in sizes}) < 2:
        raise ValueError(f'expected at least 2 image sizes of different area, got {list(sizes)}')
    place = torch.device(device)
    rows = []
    for name in models:
        model = create_dense(name, place)
        for attention in ('fused', 'materialised') if has_fused_attention(model) else (None,):
            if attention == 'materialised':
                materialise_attention(model)
            label = f'{name}, {attention} attention' if attention else name
            ordered = sorted(sizes, key=lambda size: size[0] * size[1])
            for height, width in tqdm(
                ordered, desc=label, unit='size', leave=False, disable=None if progress else True
            ):
                images = torch.randn(batch_size, 3, height, width, device=place)
                with autocast(place, dtype):
                    found = _measure(model, images, training)
                row = dict(label=label, model=name, attention=attention, height=height, width=width)
                rows.append({**row, 'pixels': batch_size * height * width, **found})
    return rows


def _measure(model: nn.Module, images: Tensor, training: bool) -> dict[str, int]:
    model.eval()
    with torch.inference_mode():
        found = {'inference_bytes': peak_memory(lambda: model(images), images.device)}
    if training:
        model.train()
        # The gradients of the weights are made by the first call, and added to by the next.
        found['training_bytes'] = peak_memory(_step(model, images), images.device)
        found['saved_bytes'] = saved_memory(lambda: model(images), [images, *model.parameters(), *model.buffers()])
        model.zero_grad()
    return found


def _step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    return lambda: sum(features.float().mean() for features in model(images)).backward()


def fit_pixels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit memory against pixels by least squares.

    Returns:
        A fit for each quantity and label: `exponent` (of the line through the logarithms), `bytes_per_pixel` (of the
        line through the values), and `slope_ratio` of the latter to the first model with fused attention, or to the
        first model where there is none.
    """
    labels = list(dict.fromkeys(row['label'] for row in rows))
    baseline = next((row['label'] for row in rows if row['attention'] == 'fused'), labels[0])
    fits = []
    for quantity in [name for name in QUANTITIES if name in rows[0]]:
        slopes, exponents = {}, {}
        for label in labels:
            pixels, values = np.array([(row['pixels'], row[quantity]) for row in rows if row['label'] == label]).T
            slopes[label] = float(np.polyfit(pixels, values, 1)[0])
            exponents[label] = float(np.polyfit(np.log(pixels), np.log(values), 1)[0])
        fits += [
            {
                'quantity': quantity,
                'label': label,
                'exponent': exponents[label],
                'bytes_per_pixel': slopes[label],
                'baseline': baseline,
                'slope_ratio': slopes[label] / slopes[baseline],
            }
            for label in labels
        ]
    return fits


def format_pixels(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]]) -> str:
    """A table in MiB for each quantity, with the fits at the end of its lines."""
    lines = []
    for quantity in dict.fromkeys(fit['quantity'] for fit in fits):
        own = [fit for fit in fits if fit['quantity'] == quantity]
        sizes = [f'{row["height"]}x{row["width"]}' for row in rows if row['label'] == own[0]['label']]
        lines += [f'{QUANTITIES[quantity]}, MiB; slopes against {own[0]["baseline"]}']
        lines += [' '.join([f'{"":46}', *(f'{size:>9}' for size in sizes), 'exponent  bytes/pixel  slope'])]
        for fit in own:
            values = [row[quantity] / 2**20 for row in rows if row['label'] == fit['label']]
            cells = ' '.join([f'{fit["label"]:46}', *(f'{value:9.1f}' for value in values)])
            lines.append(f'{cells} {fit["exponent"]:8.3f} {fit["bytes_per_pixel"]:12.1f} {fit["slope_ratio"]:6.2f}')
        lines.append('')
    return '\n'.join(lines).rstrip()


def plot_pixels(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw memory over pixels with logarithmic axes, a panel for each quantity.

    Raises:
        ImportError: matplotlib is not installed.
    """
    quantities = list(dict.fromkeys(fit['quantity'] for fit in fits))
    figure = new_figure(6.5 * len(quantities), 5)
    panels = figure.subplots(1, len(quantities), squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        for fit in [fit for fit in fits if fit['quantity'] == quantity]:
            points = [(row['pixels'] / 1e6, row[quantity] / 2**20) for row in rows if row['label'] == fit['label']]
            label = f'{fit["label"]}: exponent {fit["exponent"]:.2f}'
            axes.plot(*zip(*points, strict=True), marker='o', markersize=4, label=label)
        axes.set(xscale='log', yscale='log', title=QUANTITIES[quantity])
        axes.set(xlabel='image size (megapixels)', ylabel='memory beyond weights and images (MiB)')
        axes.grid(alpha=0.3, which='both')
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
