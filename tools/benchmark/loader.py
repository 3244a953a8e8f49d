"""Loaders of training images next to each other, and next to those that they replace: timm's and FFCV's own."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timm.data import create_dataset, create_loader

from aft_vision.cores import count_cores, cpu_seconds
from aft_vision.data import Augmentation, create_loaders
from aft_vision.timing import compare_rounds
from tools.benchmark.printer import Report

# A random crop and a flip: what all of the loaders can do to an image.
CROP = Augmentation(auto_augment=None, color_jitter=0.0, repeats=1, random_erasing=0.0, mixup=0.0, cutmix=0.0)
# The batches of an epoch.
Epoch = Callable[[int], Iterable[Any]]


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the loaders of data sets."""
    workers = count_cores() if args.workers is None else args.workers
    rows = measure_loaders(args.data, args.img_size, args.batch_size, workers, args.rounds)
    head = 'images/s of uint8 batches, ratios to the first; CPU time of an image, and over that of the loader that ours'
    return Report(rows, f'{head} replaces')


def measure_loaders(
    sources: Sequence[str], img_size: int, batch_size: int, workers: int, rounds: int
) -> list[dict[str, Any]]:
    """Time passes over the training images of data sets, interleaved, by our loaders and by those that they replace.

    Args:
        rounds: Passes over each, after one that is not counted.

    Returns:
        A row for each loader: `ratio` is to the first in the same round, `cpu_milliseconds` are of an image in all
        processes, and, where ours replaces another, `cpu_ratio` is that to the other's.

    Raises:
        ValueError: a data set is not valid.
    """
    passes: dict[str, Epoch] = {}
    for source in sources:
        passes |= find_loaders(source, img_size, batch_size, workers)
    # Seconds, and seconds of the cores, of an image in every round.
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    cores: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(rounds + 1):
        for name, batches in passes.items():
            start, used = time.perf_counter(), cpu_seconds()
            count = sum(len(targets) for _, targets in batches(turn))
            if turn:
                seconds[name].append((time.perf_counter() - start) / count)
                cores[name].append((cpu_seconds() - used) / count)
    rows = []
    for name in passes:
        timing = compare_rounds(seconds[name], seconds[next(iter(passes))])
        row = {'name': name, 'per_second': 1 / timing.seconds, 'ratio': timing.ratio}
        row |= {'ratio_quartiles': timing.quartiles, 'cpu_milliseconds': 1e3 * median(cores[name])}
        for replaced in (other for other in passes if other.startswith(f'{name}, ')):
            # Ours over theirs: less is better.
            cost = compare_rounds(cores[replaced], cores[name])
            row |= {'cpu_ratio': cost.ratio, 'cpu_quartiles': cost.quartiles}
        rows.append(row)
    return rows


def find_loaders(source: str, img_size: int, batch_size: int, workers: int) -> dict[str, Epoch]:
    """Return the uint8 batches of an epoch by our loader, and by timm's or FFCV's own where it is of their kind.

    Raises:
        ValueError: the data set is not valid.
    """
    loaders = create_loaders(source, (img_size, img_size), batch_size, augment=CROP, num_workers=workers)

    def ours(epoch: int) -> Iterable[Any]:
        loaders.set_epoch(epoch)
        return loaders.train.loader

    epochs: dict[str, Epoch] = {source: ours}
    folder = Path(source) / 'train'
    if folder.is_dir():
        options: dict[str, Any] = dict(color_jitter=0.0, interpolation='bicubic', persistent_workers=workers > 0)
        images = create_dataset('', source, split='train', is_training=True)
        options |= dict(is_training=True, num_workers=workers, device=torch.device('cpu'))
        timms = create_loader(images, (3, img_size, img_size), batch_size, **options)
        epochs[f"{source}, timm's loader"] = lambda epoch: timms.loader
    elif (path := folder.with_suffix('.beton')).is_file():
        epochs[f"{source}, FFCV's Loader"] = _ffcv_loader(path, img_size, batch_size, workers)
    return epochs


def _ffcv_loader(path: Path, img_size: int, batch_size: int, workers: int) -> Epoch:
    """Return FFCV's own Loader, which compiles its steps in the first epoch."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    threads, crop = torch.get_num_threads(), RandomResizedCropRGBImageDecoder((img_size, img_size))
    steps = {'image': [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()], 'label': [IntDecoder(), ToTensor()]}
    order = OrderOption.RANDOM
    loader = Loader(str(path), batch_size, num_workers=max(1, workers), order=order, pipelines=steps)

    def batches(epoch: int) -> Iterable[Any]:
        try:
            yield from loader
        finally:
            # FFCV gives torch as many threads as it has itself.
            torch.set_num_threads(threads)

    return batches
