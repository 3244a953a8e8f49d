"""Loaders of training images side by side."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from aft_vision.data import Augmentation, create_loaders
from aft_vision.timing import synchronize

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
        One row per data set: `data`, images/s `read` (uint8 batches, as the loading processes give them) and `ready`
        (on the device, normalised), both medians; and of each the median `..._ratio` to the first data set in the same
        round, with its `..._ratio_range`.

    Raises:
        ValueError: there is no round, or a data set is not valid.
    """
    if rounds < 1:
        raise ValueError(f'expected at least 1 round, got {rounds}')
    options: dict[str, Any] = dict(augment=AUGMENTATIONS[augment], num_workers=workers, device=device)
    loaders = [create_loaders(source, (img_size, img_size), batch_size, **options) for source in sources]
    stages = {'read': [each.train.loader for each in loaders], 'ready': [each.train for each in loaders]}
    rates: dict[str, list[list[float]]] = {stage: [[] for _ in sources] for stage in stages}
    for turn in range(rounds + 1):
        for index, each in enumerate(loaders):
            each.set_epoch(turn)
            for stage, passes in stages.items():
                count, seconds = _time_pass(passes[index], torch.device(device))
                if turn:
                    rates[stage][index].append(count / seconds)
    rows = []
    for index, source in enumerate(sources):
        row: dict[str, Any] = {'data': source}
        for stage, found in rates.items():
            ratios = [rate / first for rate, first in zip(found[index], found[0], strict=True)]
            row[stage] = statistics.median(found[index])
            row[f'{stage}_ratio'] = statistics.median(ratios)
            row[f'{stage}_ratio_range'] = (min(ratios), max(ratios))
        rows.append(row)
    return rows


def format_loaders(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f'{"data set":36} {"read":>9} {"ratio":>6} {"range":>14} {"ready":>9} {"ratio":>6} {"range":>14}']
    for row in rows:
        cells = [f'{row["data"][-36:]:36}']
        for stage in ('read', 'ready'):
            low, high = row[f'{stage}_ratio_range']
            cells.append(f'{row[stage]:9.0f} {row[f"{stage}_ratio"]:6.2f} {f"{low:.2f} to {high:.2f}":>14}')
        lines.append(' '.join(cells))
    return '\n'.join(lines)


def _time_pass(loader: Any, device: torch.device) -> tuple[int, float]:
    start, count = time.perf_counter(), 0
    for _, targets in loader:
        count += len(targets)
    synchronize(device)
    return count, time.perf_counter() - start
