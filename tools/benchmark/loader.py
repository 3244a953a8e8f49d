"""Loaders of training images next to each other."""

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from aft_vision.data import Augmentation, create_loaders
from aft_vision.timing import compare_rounds, synchronize
from tools.benchmark.printer import Report

# What a loader does to an image; erasing, mixup and cutmix come after any loader and are left out.
AUGMENTATIONS = {
    'crop': Augmentation(auto_augment=None, color_jitter=0.0, repeats=1, random_erasing=0.0, mixup=0.0, cutmix=0.0),
    'deit': Augmentation(repeats=1, random_erasing=0.0, mixup=0.0, cutmix=0.0),
}


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the loaders of data sets."""
    workers = os.cpu_count() or 1 if args.workers is None else args.workers
    rows = measure_loaders(args.data, args.augment, args.img_size, args.batch_size, workers, str(device), args.rounds)
    return Report(rows, 'images/s of reading uint8 batches, and of batches ready on the device; ratios to the first')


def measure_loaders(
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
        Two rows for each data set, `what` is 'read' (uint8 batches, as the loading processes give them) and 'ready' (on
        the device, normalised): `name`, `per_second` images, and `ratio` to the first data set in the same round with
        `ratio_quartiles`.

    Raises:
        ValueError: there is no round, or a data set is not valid.
    """
    if rounds < 1:
        raise ValueError(f'expected at least 1 round, got {rounds}')
    options: dict[str, Any] = dict(augment=AUGMENTATIONS[augment], num_workers=workers, device=device)
    loaders = [create_loaders(source, (img_size, img_size), batch_size, **options) for source in sources]
    stages = {'read': [each.train.loader for each in loaders], 'ready': [each.train for each in loaders]}
    # Seconds of an image in every round.
    seconds: dict[str, list[list[float]]] = {stage: [[] for _ in sources] for stage in stages}
    for turn in range(rounds + 1):
        for index, each in enumerate(loaders):
            each.set_epoch(turn)
            for stage, passes in stages.items():
                once = _seconds_of_an_image(passes[index], torch.device(device))
                seconds[stage][index] += [once] if turn else []
    rows = []
    for stage, found in seconds.items():
        for source, own in zip(sources, found, strict=True):
            timing = compare_rounds(own, found[0])
            figures = {'per_second': 1 / median(own), 'ratio': timing.ratio, 'ratio_quartiles': timing.quartiles}
            rows.append({'what': stage, 'name': source, **figures})
    return rows


def _seconds_of_an_image(loader: Any, device: torch.device) -> float:
    start, count = time.perf_counter(), 0
    for _, targets in loader:
        count += len(targets)
    synchronize(device)
    return (time.perf_counter() - start) / count
