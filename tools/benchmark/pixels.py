"""Memory of dense features against the size of the image: AFT and attention next to each other."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tools.benchmark.compare import DIRECTIONS, PAPER_BASELINE, compare
from tools.benchmark.models import check_model, with_paper
from tools.benchmark.printer import Report
from tools.benchmark.scaling import report_fits

CPU = torch.device('cpu')
MODELS = ('aft_conv_tiny', 'aft_full_tiny', 'deit_tiny_patch16_224')
SIZES = ((224, 224), (384, 384), (512, 512), (512, 683), (768, 768), (1024, 768), (1024, 1024))


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure memory at image sizes, and fit it as a power of the pixels and as a line."""
    rows = measure_pixels(
        args.models or MODELS, args.sizes or SIZES, args.batch_size, args.training, device, args.dtype
    )
    head = f'dense features, batch of {args.batch_size}, beyond weights and images'
    report = report_fits(rows, 'pixels', head, ('peak_bytes', 'saved_bytes'), upper=False)
    add_slopes(rows, report.fits or [])
    return report


def measure_pixels(
    models: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    batch_size: int = 1,
    training: bool = False,
    device: torch.device = CPU,
    dtype: str = 'float32',
) -> list[dict[str, Any]]:
    """Measure the memory of dense features (`features_only`, the last three maps) at image sizes.

    Args:
        models: Names; one with fused attention is measured with materialised attention too.
        sizes: (H, W) in pixels; padded to whole patches.
        training: Measure forward and backward too.

    Returns:
        The rows of `compare` with `size` and `pixels` of the batch, and without times.

    Raises:
        ValueError: there are fewer than two sizes to fit a line through, or timm has no such model.
    """
    if len({height * width for height, width in sizes}) < 2:
        raise ValueError(f'expected at least 2 image sizes of different area, got {list(sizes)}')
    rows = []
    for name in models:
        check_model(name)
        for size in sorted(sizes, key=lambda size: size[0] * size[1]):
            candidates = with_paper(name, (batch_size, 3, *size), device, dense=True)
            found = compare(candidates, device, 0, dtype=dtype, directions=DIRECTIONS[: 1 + training])
            rows += [{**row, 'size': size, 'pixels': batch_size * size[0] * size[1]} for row in found]
    return rows


def add_slopes(rows: Sequence[dict[str, Any]], fits: Sequence[dict[str, Any]]) -> None:
    """Add the slope of the least-squares line through memory and pixels to its fits.

    `bytes_per_pixel` is the slope; `slope_ratio` is its ratio to that of the first model with fused attention, or to
    the first model where there is none.
    """
    names = [row['name'] for row in rows]
    paper = next((name for name in names if name.endswith(PAPER_BASELINE)), names[0])
    baseline = paper.partition(',')[0]
    for fit in fits:
        own = [row for row in rows if (row['name'], row['direction']) == (fit['name'], fit['direction'])]
        points = np.array([(row['pixels'], row[fit['quantity']]) for row in own if fit['quantity'] in row])
        fit['bytes_per_pixel'] = float(np.polyfit(points[:, 0], points[:, 1], 1)[0])
    kinds = {(fit['name'], fit['direction'], fit['quantity']): fit for fit in fits}
    for fit in fits:
        first = kinds.get((baseline, fit['direction'], fit['quantity']))
        fit['slope_ratio'] = first and fit['bytes_per_pixel'] / first['bytes_per_pixel']
