"""Loaders of labelled images, with DeiT's augmentation in training and centre crop in evaluation."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ScheduledTransformDataset
from timm.data.loader import PrefetchLoader, fast_collate
from timm.data.naflex_loader import NaFlexPrefetchLoader
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import Compose

from aft_vision.data.augment import Augmentation, native_mixup, train_stages
from aft_vision.data.checked import naming
from aft_vision.data.datasets import (
    Source,
    Split,
    check_same_classes,
    open_eval_split,
    open_train_split,
    with_evaluation_images,
)
from aft_vision.data.layout import EVAL_SPLITS
from aft_vision.data.native import NativeShape
from aft_vision.data.sampling import EpochSampler, SeededDataset, Shard, SizeSchedule
from aft_vision.data.shards import WebDataset
from aft_vision.data.streams import StreamLoader
from aft_vision.data.teacher_outputs import TaughtDataset, TeacherOutputs

_logger = logging.getLogger(__name__)
# Fewer training images in a class are said, and so are as many times more in another class.
FEW_IMAGES, UNEVEN = 10, 5
# Classes that the message lists.
MAX_SMALLEST = 5
# Ctrl-C, and the signals that a scheduler sends before it stops a job.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Loaders(NamedTuple):
    """The two loaders of a data set, and the class names in the order of their indices.

    Attributes:
        description: Number of images and classes of each split.
        outputs: Outputs of a teacher for crops of the training images; their numbers are the training targets.
    """

    train: Any
    validation: Any
    class_names: list[str]
    description: str = ''
    outputs: TeacherOutputs | None = None

    @property
    def classes_of_outputs(self) -> np.ndarray:
        """Return the class of each image of `outputs`; 0 of images that are not for training."""
        taught: Any = self.train.dataset.dataset
        classes = np.zeros(len(taught.outputs.names), np.int64)
        classes[taught.rows] = taught.dataset.targets
        return classes

    @property
    def is_stream(self) -> bool:
        """Return whether the training images can only be read from the start of an epoch."""
        return isinstance(getattr(self.train, 'dataset', None), WebDataset)

    def set_epoch(self, epoch: int, first_update: int = 0, size: int | None = None) -> None:
        """Set the order, the random changes and the start of the next pass over the training images.

        Args:
            size: Index of the image size of the whole pass, -1 for the last; None for the schedule.

        Raises:
            ValueError: the pass starts within the epoch, but the data set can only be read from its start.
        """
        sampler: Any = getattr(self.train, 'sampler', None)
        if isinstance(sampler, EpochSampler):
            sampler.set_epoch(epoch, first_update, size)
            return
        if first_update:
            raise ValueError(f'a streamed data set begins at the start of its epoch, not at update {first_update}')
        dataset: Any = getattr(self.train, 'dataset', None)
        if isinstance(dataset, WebDataset):
            dataset.set_epoch(epoch)


class Preprocessing(NamedTuple):
    """The preprocessing of images; resizing is bicubic, except for FFCV files.

    Attributes:
        size: (H, W) in pixels, or the shape of each image itself.
        crop_pct: Side of the evaluation crop relative to the resized image, in (0, 1]; a native shape has no crop.
        mean, std: Per channel, of pixels in [0, 1].
    """

    size: tuple[int, int] | NativeShape
    crop_pct: float = 0.875
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN
    std: Sequence[float] = IMAGENET_DEFAULT_STD


def create_loaders(
    source: Source | str | Path,
    train_size: tuple[int, int] | NativeShape | SizeSchedule,
    batch_size: int,
    *,
    evaluation: Preprocessing | None = None,
    eval_batch_size: int | None = None,
    augment: Augmentation | None = None,
    shard: Shard | None = None,
    seed: int = 0,
    num_workers: int = 4,
    device: torch.device | str = 'cpu',
    balanced: bool = False,
    outputs: TeacherOutputs | None = None,
) -> Loaders:
    """Build the training and validation loaders of a data set.

    Order and random changes of the training images depend only on `seed`, the epoch of `Loaders.set_epoch` and the
    image, not on `num_workers` or `shard` (except for streamed data sets, whose readers decide).

    Args:
        source: A directory or tar file, or a Source for other options.
        train_size: (H, W) in pixels of the training images, the shape of each image itself, or a schedule of sizes.
        batch_size: Images per update, over all processes and accumulation steps; the last incomplete batch of an epoch
            is dropped.
        evaluation: Preprocessing of the validation images; training images have the same normalisation. The default is
            the last training size with ImageNet's mean and standard deviation.
        eval_batch_size: Images per validation batch; as in training by default.
        augment: Random changes to the training images; DeiT's by default. BatchAugmentation applies erasing, mixup and
            cutmix. Images of native shapes are mixed here, and PatchAugmentation applies the rest.
        shard: Shard of this process in every update and in the validation images; everything by default.
        num_workers: Decoding processes per loader; 0 decodes in this process.
        device: Device of the normalised batches.
        balanced: Draw the images of each class equally often in training, small classes several times.
        outputs: Outputs of a teacher for crops of the training images, whose numbers are then the training targets.

    Returns:
        Loaders of (image (B, 3, H, W), class index (B,)), B in training being batch_size / (accumulate * world_size).
        Native shapes make the dicts of timm's NaFlex collator; the targets of mixed ones are (B, classes).

    Raises:
        ValueError: the data set is missing or empty, a split or the images of a class are missing, the classes of the
            splits differ, an update is larger than the training split or cannot be divided evenly, or the data set does
            not support an option.
    """
    shard = shard or Shard()
    source = _divided(as_source(source), shard)
    sizes = train_size if isinstance(train_size, SizeSchedule) else SizeSchedule((train_size,))
    images = shard.micro_batch_size(batch_size)
    train = open_train_split(source, seed=seed)
    validation = open_eval_split(source)
    check_same_classes(train.class_names, validation.class_names)
    if shard.rank == 0:
        _warn(source, train, validation)
        _warn_of_small_classes(train, balanced)
    read = _Reading(evaluation or Preprocessing(sizes.sizes[-1]), num_workers, torch.device(device))
    training = _train_loader(train, sizes, augment or Augmentation(), batch_size, seed, shard, read, balanced, outputs)
    validating = _eval_loader(validation, eval_batch_size or images, shard, read)
    description = f'training: {train.describe()}; validation: {validation.describe()}'
    return Loaders(training, validating, train.class_names, description, outputs)


def create_eval_loader(
    source: Source | str | Path,
    preprocessing: Preprocessing | tuple[int, int],
    batch_size: int,
    *,
    shard: Shard | None = None,
    num_workers: int = 4,
    device: torch.device | str = 'cpu',
    training: bool = False,
) -> tuple[Any, list[str]]:
    """Build only the validation loader, with the arguments and errors of `create_loaders`.

    Args:
        preprocessing: Preprocessing of the images; (H, W) means ImageNet's at this size.
        training: Read the training images in the same way, without augmentation, to compute their features.

    Returns:
        The loader, with every image of this process once in file order, and the class names by index.
    """
    shard = shard or Shard()
    source = _divided(as_source(source), shard)
    split = open_eval_split(source, training=training)
    if shard.rank == 0:
        _warn(source, split)
    if not isinstance(preprocessing, Preprocessing):
        preprocessing = Preprocessing(preprocessing)
    read = _Reading(preprocessing, num_workers, torch.device(device))
    return _eval_loader(split, batch_size, shard, read), split.class_names


def as_source(source: Source | str | Path) -> Source:
    """Convert a path to a Source."""
    return source if isinstance(source, Source) else Source(dir=str(source))


def _divided(source: Source, shard: Shard) -> Source:
    divided = with_evaluation_images(source)
    if divided is not source and shard.rank == 0:
        _logger.warning(
            '%s has none of the splits %s: %g of the images of each class are for evaluation, the others for training',
            source.name or source.dir,
            ', '.join(EVAL_SPLITS),
            divided.val_share,
        )
    return divided


def _warn(source: Source, *splits: Split) -> None:
    name = source.name or source.dir
    # With held-out images, both splits come from one folder.
    for ignored in dict.fromkeys(split.ignored for split in splits if split.ignored):
        _logger.warning('ignored in %s, because they are hidden or no images: %s', name, ignored)
    if nested := next((split.nested for split in splits if split.nested), ''):
        _logger.warning('the class of an image is its outermost folder, as of %s', nested)
    if len(splits[0].class_names) == 1:
        _logger.warning('%s has one class, %s, so every prediction is right', name, splits[0].class_names[0])


def _warn_of_small_classes(train: Split, balanced: bool) -> None:
    """Log the smallest classes if they have few images, or far fewer than the largest one."""
    if train.is_stream or train.dataset.targets is None:
        return
    counts = np.bincount(train.dataset.targets, minlength=len(train.class_names))
    order = np.argsort(counts, kind='stable')
    low, high = counts[order[0]], counts[order[-1]]
    if low >= FEW_IMAGES and high < UNEVEN * low:
        return
    smallest = ', '.join(f'{train.class_names[index]} ({counts[index]})' for index in order[:MAX_SMALLEST])
    sizes = f'from {low} to {high} training images, the fewest: {smallest}' if low < high else f'{low} training images'
    advise = high >= UNEVEN * low and not balanced
    advice = '; data.class_weights=balanced draws each class equally often' if advise else ''
    _logger.warning('a class has %s%s', sizes, advice)


class _Reading(NamedTuple):
    """Options shared by both loaders: normalisation and number of processes."""

    preprocessing: Preprocessing
    num_workers: int
    device: torch.device


def _check_stream(augment: Augmentation, sizes: SizeSchedule) -> None:
    if len(sizes.sizes) > 1:
        raise ValueError(f'expected one image size for a streamed data set, got {len(sizes.sizes)}')
    if augment.repeats > 1:
        raise ValueError(f'augment.repeats must be 1 for a streamed data set, got {augment.repeats}')
    if augment.mixes and isinstance(sizes.sizes[0], NativeShape):
        raise ValueError(
            'expected augment.mix_prob to be 0 for a streamed data set of native shapes, which are mixed before '
            f'batching, got {augment.mix_prob}'
        )


def _train_loader(
    split: Split,
    sizes: SizeSchedule,
    augment: Augmentation,
    batch_size: int,
    seed: int,
    shard: Shard,
    read: _Reading,
    balanced: bool,
    outputs: TeacherOutputs | None,
) -> PrefetchLoader | NaFlexPrefetchLoader:
    dataset, images, of_both = split.dataset, shard.micro_batch_size(batch_size), read.preprocessing
    if balanced and (split.is_stream or dataset.targets is None):
        raise ValueError(
            'expected a data set whose classes are known before it is read for balanced classes, got another'
        )
    taught = None if outputs is None else _taught(split, sizes, augment, of_both, outputs)
    transforms = [dataset.train_transform(size, augment, of_both.mean, of_both.std) for size in sizes.sizes]
    if split.is_stream:
        _check_stream(augment, sizes)
        dataset.transform = transforms[0]
        dataset.divide(shard, batch_size)
        return _loader(dataset, images, read, sizes.sizes)
    dataset.transform = None
    classes = dataset.targets if balanced else None
    sampler = EpochSampler(len(dataset), batch_size, seed, augment.repeats, shard, sizes, classes)
    mix = native_mixup(augment, len(split.class_names)) if isinstance(sizes.sizes[0], NativeShape) else None
    seeded = SeededDataset(taught or _NamedTransforms(dataset, transforms), seed, mix)
    return _loader(seeded, images, read, sizes.sizes, sampler=sampler)


def _taught(
    split: Split, sizes: SizeSchedule, augment: Augmentation, read: Preprocessing, outputs: TeacherOutputs
) -> TaughtDataset:
    rows, squares = outputs.find(split), [size for size in sizes.sizes if not isinstance(size, NativeShape)]
    if len(squares) < len(sizes.sizes):
        raise ValueError('expected images of one shape for the outputs of a teacher, got their own shapes')
    stages = [train_stages(size, augment, read.mean, read.std)[1:] for size in squares]
    transforms = [Compose([*automatic, *to_tensor]) for automatic, to_tensor in stages]
    return TaughtDataset(split.dataset, transforms, squares, outputs, rows)


class _NamedTransforms(ScheduledTransformDataset):
    """timm's data set of several transforms, whose errors name the image."""

    def __getitem__(self, index: tuple[int, int]) -> Any:
        dataset: Any = self.dataset
        with naming(dataset.name_of_last):
            return super().__getitem__(index)


def _eval_loader(split: Split, batch_size: int, shard: Shard, read: _Reading) -> PrefetchLoader | NaFlexPrefetchLoader:
    dataset, sizes = split.dataset, (read.preprocessing.size,)
    dataset.transform = dataset.eval_transform(read.preprocessing.size, read.preprocessing.crop_pct)
    if not split.is_stream:
        return _loader(shard.of_evaluation(dataset), batch_size, read, sizes)
    dataset.divide(shard, batch_size)
    return _loader(dataset, batch_size, read, sizes)


def _loader(
    dataset: Dataset,
    batch_size: int,
    read: _Reading,
    sizes: Sequence[tuple[int, int] | NativeShape],
    **options: Any,
) -> PrefetchLoader | NaFlexPrefetchLoader:
    native = max((size for size in sizes if isinstance(size, NativeShape)), key=lambda s: s.max_tokens, default=None)
    collate = _collate if native is None else partial(_collate_native, native)
    num_workers = read.num_workers
    if isinstance(dataset, WebDataset):
        num_workers = dataset.limit_workers(num_workers)
        make: Any = partial(StreamLoader, dataset, batch_size, collate)
    else:
        make = partial(DataLoader if 'sampler' in options else _EvalLoader, dataset, batch_size, collate_fn=collate)
    loader = make(
        num_workers=num_workers,
        pin_memory=read.device.type == 'cuda',
        persistent_workers=num_workers > 0,
        worker_init_fn=survive_signals,
        **options,
    )
    mean, std = tuple(read.preprocessing.mean), tuple(read.preprocessing.std)
    prefetch = PrefetchLoader if native is None else NaFlexPrefetchLoader
    return prefetch(loader, mean=mean, std=std, device=read.device)


class _EvalLoader(DataLoader):
    """A loader that says at the end of a pass how many images were skipped."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        read = 0
        for batch in super().__iter__():
            read += len(batch[1])
            yield batch
        images = len(self.dataset)  # type: ignore[arg-type]
        if read < images:
            _logger.warning('skipped: %d of %d images of the evaluation', images - read, images)


def survive_signals(worker: int) -> None:
    """Keep signals that stop training from ending a loading process, unless they come from the training process.

    Torchrun sends them to a process group, schedulers to all processes of a job. The update that they interrupt needs
    its images, and the training process ends its loading processes itself.
    """
    os.setpgrp()
    # macOS cannot tell who sent a signal.
    if hasattr(signal, 'sigwaitinfo'):
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    """End this process at a signal of the process that started it."""
    parent = multiprocessing.parent_process()
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != (os.getppid() if parent is None else parent.pid):
        pass
    os._exit(0)


def _collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch uint8 images without skipped ones; the batch is empty if all were skipped."""
    kept = [sample for sample in samples if sample is not None]
    if not kept:
        return torch.zeros(0, 3, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    # torch's collate writes tensors to shared memory; timm's supports arrays.
    return default_collate(kept) if isinstance(kept[0][0], torch.Tensor) else fast_collate(kept)


def _collate_native(shape: NativeShape, samples: list[Any]) -> tuple[dict[str, Any], torch.Tensor]:
    kept = [sample for sample in samples if sample is not None]
    # timm's loader cannot normalise a batch without images; only the targets say that it is empty.
    return shape.collate(kept) if kept else (shape.blank(1), torch.zeros(0, dtype=torch.int64))
