"""Loaders of training images next to each other, and next to those that they replace: timm's and FFCV's own."""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from timm.data import create_dataset, create_loader

from aft_vision.data import Augmentation, create_loaders
from aft_vision.timing import compare_rounds
from tools.benchmark.printer import Report
from tools.machine import cpu_seconds

# A random crop and a flip: what all of the loaders can do to an image.
CROP = Augmentation(auto_augment=None, color_jitter=0.0, repeats=1, random_erasing=0.0, mixup=0.0, cutmix=0.0)
# The batches of an epoch.
Epoch = Callable[[int], Iterable[Any]]


class Options(NamedTuple):
    """Options of every loader: the side of the images in pixels, images of a batch, and loading processes."""

    img_size: int
    batch_size: int
    workers: int


def run(args: argparse.Namespace, device: torch.device) -> Report:
    """Measure the loaders of data sets."""
    workers = os.cpu_count() or 1 if args.workers is None else args.workers
    rows = measure_loaders(args.data, Options(args.img_size, args.batch_size, workers), args.rounds)
    head = 'images/s of uint8 batches, ratios to the first; CPU time of an image, and over that of the loader that ours'
    return Report(rows, f'{head} replaces')


def measure_loaders(sources: Sequence[str], options: Options, rounds: int) -> list[dict[str, Any]]:
    """Time passes over the training images of data sets, interleaved, by our loaders and by those that they replace.

    Args:
        rounds: Passes over each, after one that is not counted.

    Returns:
        A row for each loader: `name`, `per_second` images of uint8 batches, `ratio` to the first in the same round with
        `ratio_quartiles`, `cpu_milliseconds` of an image in all processes, and, where ours replaces another,
        `cpu_ratio` of that to the other's with `cpu_quartiles`.

    Raises:
        ValueError: there is no round, or a data set is not valid.
    """
    if rounds < 1:
        raise ValueError(f'expected at least 1 round, got {rounds}')
    passes = {name: batches for source in sources for name, batches in find_loaders(source, options).items()}
    # Seconds, and seconds of the cores, of an image in every round.
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    for turn in range(rounds + 1):
        for name, batches in passes.items():
            once = _time_pass(batches(turn))
            found[name] += [once] if turn else []
    seconds, cores = ({name: [each[i] for each in own] for name, own in found.items()} for i in range(2))
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


def find_loaders(source: str, options: Options) -> dict[str, Epoch]:
    """Return the uint8 batches of an epoch by our loader, and by timm's or FFCV's own where it is of their kind.

    Raises:
        ValueError: the data set is not valid.
    """
    size = (options.img_size, options.img_size)
    loaders = create_loaders(source, size, options.batch_size, augment=CROP, num_workers=options.workers)

    def ours(epoch: int) -> Iterable[Any]:
        loaders.set_epoch(epoch)
        return loaders.train.loader

    found: dict[str, Epoch] = {source: ours}
    place = Path(source) / 'train'
    if place.is_dir():
        found[f"{source}, timm's loader"] = _timm_loader(source, options)
    elif place.with_suffix('.beton').is_file():
        found[f"{source}, FFCV's Loader"] = _ffcv_loader(place.with_suffix('.beton'), options)
    return found


def _timm_loader(source: str, options: Options) -> Epoch:
    """Return timm's loader of uint8 batches."""
    loader = create_loader(
        create_dataset('', source, split='train', is_training=True),
        (3, options.img_size, options.img_size),
        options.batch_size,
        is_training=True,
        color_jitter=0.0,
        interpolation='bicubic',
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        device=torch.device('cpu'),
    )
    return lambda epoch: loader.loader


def _ffcv_loader(path: Path, options: Options) -> Epoch:
    """Return FFCV's own Loader, which compiles its steps in the first epoch."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    threads, size = torch.get_num_threads(), options.img_size
    image = [RandomResizedCropRGBImageDecoder((size, size)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    loader = Loader(
        str(path),
        options.batch_size,
        num_workers=max(1, options.workers),
        order=OrderOption.RANDOM,
        pipelines={'image': image, 'label': [IntDecoder(), ToTensor()]},
    )

    def batches(epoch: int) -> Iterable[Any]:
        try:
            yield from loader
        finally:
            # FFCV gives torch as many threads as it has itself.
            torch.set_num_threads(threads)

    return batches


def _time_pass(batches: Iterable[Any]) -> tuple[float, float]:
    """Return the seconds, and the seconds of the cores, of an image in a pass."""
    start, used, count = time.perf_counter(), cpu_seconds(), 0
    for _, targets in batches:
        count += len(targets)
    return (time.perf_counter() - start) / count, (cpu_seconds() - used) / count
