"""Loaders of training images side by side."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from aft_vision.data import Augmentation, create_loaders

# What a loader does to an image; erasing, mixup and cutmix come after any loader and are left out.
AUGMENTATIONS = {
    'crop': Augmentation(auto_augment=None, color_jitter=0.0, repeats=1, random_erasing=0.0, mixup=0.0, cutmix=0.0),
    'deit': Augmentation(repeats=1, random_erasing=0.0, mixup=0.0, cutmix=0.0),
}


def time_loaders(
    sources: Sequence[str],
    augment: str,
    img_size: int,
    batch_size: int,
    workers: int,
    device: str,
    rounds: int,
) -> list[dict[str, Any]]:
    """Time passes over the training images of data sets, interleaved.

    Args:
        augment: Key of AUGMENTATIONS.
        img_size: Side in pixels.
        device: Where the batches arrive, normalised.
        rounds: Passes over each, after one that is not counted.

    Returns:
        One row per data set: `data`, `images`, `images_per_second` (median), and `ratio` (median of the ratios to the
        first data set in the same round) with `ratio_range`.

    Raises:
        ValueError: there is no round, or a data set is not valid.
    """
    if rounds < 1:
        raise ValueError(f'expected at least 1 round, got {rounds}')
    options: dict[str, Any] = dict(augment=AUGMENTATIONS[augment], num_workers=workers, device=device)
    loaders = [create_loaders(source, (img_size, img_size), batch_size, **options) for source in sources]
    rates: list[list[float]] = [[] for _ in sources]
    images = [0] * len(sources)
    for turn in range(rounds + 1):
        for index, each in enumerate(loaders):
            each.set_epoch(turn)
            images[index], seconds = _time_pass(each.train, torch.device(device))
            if turn:
                rates[index].append(images[index] / seconds)
    rows = []
    for source, count, found in zip(sources, images, rates, strict=True):
        ratios = [rate / first for rate, first in zip(found, rates[0], strict=True)]
        row = {'data': source, 'images': count, 'images_per_second': statistics.median(found)}
        rows.append(row | {'ratio': statistics.median(ratios), 'ratio_range': (min(ratios), max(ratios))})
    return rows


def _time_pass(loader: Any, device: torch.device) -> tuple[int, float]:
    start, count = time.perf_counter(), 0
    for images, _ in loader:
        count += len(images)
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return count, time.perf_counter() - start
