"""Data sets that can only be read in their own order, and their loader; shards has those of WebDataset."""

import io
import logging
import multiprocessing
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.data.readers.shared_count import SharedCount
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from aft_vision.data.checked import REMEDY, ImageData, new_flags
from aft_vision.data.images import CorruptImageError, open_image
from aft_vision.data.sampling import SAMPLE, Shard, derive_seed, restored_generators, seed_generators

# Flags of what has been named.
NUM_FLAGS = 2**20

_logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """An image of a stream and its class, as they are in its files.

    Attributes:
        name: Name of the image in errors.
    """

    name: str
    image: io.BytesIO
    label: Any


class Stream(ImageData, IterableDataset, ABC):
    """A data set of images that can only be read in its own order.

    Args:
        place: Name of the split in errors.
        images: Number of images; 0 if it is unknown.
        num_files: Number of files that different processes can read.
        is_training: Read in random order, and change images at random.
        seed: Seed of the order and of the changes, in [0, 2**32).

    Attributes:
        target_transform: Of a class; None changes nothing.
        file_names: Paths or addresses of its files.
    """

    target_transform: Any = None
    _named: torch.Tensor | None = None
    file_names: Sequence[str] = ()

    def __init__(self, place: str, images: int, num_files: int, is_training: bool, seed: int) -> None:
        self.place, self.images, self.num_files = place, images, num_files
        self.is_training, self.seed = is_training, seed
        self.shard, self.used = Shard(), images
        # The loading processes see it, which live longer than an epoch.
        self._epoch = SharedCount()
        self._skipped = multiprocessing.Value('q', 0)

    @abstractmethod
    def _read(self) -> Iterator[tuple[Any, Any]]:
        """Yield the images of this process and their classes."""

    @property
    def is_divisible(self) -> bool:
        """Return whether several processes can share the images exactly."""
        return False

    @property
    def epoch(self) -> int:
        """Return the epoch of the next pass."""
        return self._epoch.value

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._epoch.value = epoch

    def divide(self, shard: Shard, batch_size: int) -> None:
        """Set the shard of this process in an epoch, which has only whole batches in training.

        Args:
            batch_size: Images per update, over all processes.

        Raises:
            ValueError: the batch is larger than the data set, or several processes cannot share the images exactly.
        """
        if self.is_training and batch_size > self.images:
            raise ValueError(
                f'batch_size must be in [1, {self.images}], the number of training images, got {batch_size}'
            )
        if shard.world_size > 1 and not self.is_divisible:
            raise ValueError(
                f'expected one process for {self.place}, which does not say how many images each of its files has, got '
                f'{shard.world_size}; shard_lengths in _info.json, the number of images of each file, let several '
                'processes divide them'
            )
        self.shard = shard
        self.used = self.images // batch_size * batch_size if self.is_training else self.images

    def limit_workers(self, number: int) -> int:
        """Return how many of a number of loading processes can have a file each, and log if they are fewer."""
        files = max(self.num_files // self.shard.world_size, 1)
        if number > files and self.shard.rank == 0:
            _logger.warning(
                '%d instead of data.num_workers=%d processes read %s: each needs a file of its own, and it has %d',
                files,
                number,
                self.place,
                self.num_files,
            )
        return min(number, files)

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the position in an epoch of the first image of this process, and that after its last one."""
        rank, size = self.shard.rank, self.shard.world_size
        return self.used * rank // size, self.used * (rank + 1) // size

    def __len__(self) -> int:
        first, end = self.bounds
        return end - first

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for index, (image, label) in enumerate(self._read()):
            target = label if self.target_transform is None else self.target_transform(label)
            yield image if self.transform is None else self._transformed(image, index), target

    def _transformed(self, image: Any, index: int) -> Any:
        if not self.is_training:
            return self.transform(image)
        with restored_generators():
            seed_generators(derive_seed(SAMPLE, self.seed, self.epoch, self.shard.rank, this_worker()[0], index))
            return self.transform(image)

    def _decode(self, samples: Iterator[Sample]) -> Iterator[tuple[Any, int]]:
        for name, file, label in samples:
            try:
                image = open_image(file, name)
            except CorruptImageError as error:
                self.report(error)
            else:
                yield image, _as_class(label, name)

    def skip_corrupt(self, instead: str) -> None:
        """Leave out images that cannot be decoded and what cannot be read of a shard; name each once."""
        self._named = new_flags(NUM_FLAGS)

    @property
    def skipped(self) -> int:
        """Return the number of images that the loading processes have skipped since `forget_skipped`."""
        return self._skipped.value

    def forget_skipped(self) -> None:
        self._skipped.value = 0

    def report(self, error: CorruptImageError, images: int = 1) -> None:
        """Raise an error, or, where images are skipped, count them and log it once.

        Args:
            images: Number of images that are lost by it; at most so many if it is unknown.
        """
        if self._named is None:
            raise CorruptImageError(f'{error}; {REMEDY}') from error
        with self._skipped.get_lock():
            self._skipped.value += images
        # Images have no number here. Two of them may share a flag; their count is reported all the same. The cause
        # may be told in other words in the next epoch.
        flag = zlib.crc32(str(error).partition(': ')[0].encode()) % NUM_FLAGS
        if not self._named[flag]:
            self._named[flag] = True
            _logger.warning('skipped: %s', error)


def this_worker() -> tuple[int, int]:
    """Return the index of this loading process and the number of them."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def split_name_and_count(split: str) -> tuple[str, int]:
    """Return the name of a split and the number of its images after the last `|`, 0 without one.

    Raises:
        ValueError: something else comes after it.
    """
    name, mark, count = split.rpartition('|')
    if not mark:
        return split, 0
    if not count.isdecimal():
        raise ValueError(
            f'expected a number after | in the name of a split, such as train|1000, got {count!r} in {split}'
        )
    return name, int(count)


def _as_class(label: Any, name: str) -> int:
    try:
        number = int(label)
    except (TypeError, ValueError):
        number = None
    if number is None or (number != label and not isinstance(label, (str, bytes))):
        raise ValueError(f'expected a whole number as the class of {name}, got {label!r}')
    return number


@dataclass
class Rest:
    """The samples of a loading process after its last whole batch."""

    samples: list[Any]


class StreamLoader(DataLoader):
    """A loader whose batches are whole, however the images are divided among the loading processes.

    In training, a pass has the batches of an epoch: if images were skipped, others are repeated. In evaluation it has
    every image once.

    Args:
        batch_size: Images per batch of this process.
        collate: Makes a batch of a list of samples.
        options: Other options of DataLoader.

    Raises:
        ValueError: a pass had another number of images than the split, without those that were skipped.
        CorruptImageError: a pass of training has no batch.
    """

    def __init__(self, stream: Stream, batch_size: int, collate: Callable[[list[Any]], Any], **options: Any) -> None:
        super().__init__(stream, batch_size, collate_fn=partial(_collate_whole, batch_size, collate), **options)
        self.stream, self.collate = stream, collate
        # Files with their own numbers of images are compared one by one.
        self._looks_further = stream.is_training and not stream.is_divisible

    def __len__(self) -> int:
        images, size = len(self.stream), self.batch_size or 1
        return images // size if self.stream.is_training else -(-images // size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        stream, made = self.stream, 0
        while True:
            before, found = made, 0
            stream.forget_skipped()
            batches = self._batches()
            for batch in batches:
                found += len(batch[1])
                if stream.is_training and len(batch[1]) < (self.batch_size or 1):
                    continue
                if self._looks_further and made + 1 == len(self):
                    self._look_further(batches, found)
                yield batch
                made += 1
                if stream.is_training and made == len(self):
                    return
            self._compare(found)
            if not stream.is_training:
                return
            if made == before:
                raise CorruptImageError(f'expected a batch of images that can be read in {stream.place}, got {found}')

    def _look_further(self, batches: Iterator[Any], found: int) -> None:
        """Warn once if the data set goes on after the number of images that it is said to have."""
        self._looks_further = False
        place, stated = self.stream.place, self.stream.images
        for batch in batches:
            found += len(batch[1])
            if found > stated:
                _logger.warning('%s has more than the stated %d images; an epoch has only so many', place, stated)
                return

    def _compare(self, found: int) -> None:
        """Compare the images of a whole pass with those of the split; at most the skipped ones may be missing."""
        stream, missing = self.stream, len(self.stream) - found
        if not 0 <= missing <= stream.skipped:
            raise ValueError(
                f'expected {len(stream)} images in {stream.place}, got {found}; correct the number after | in the name '
                'of the split, or its description'
            )
        if missing and not stream.is_training:
            _logger.warning('skipped: %d of %d images of %s', missing, len(stream), stream.place)

    def _batches(self) -> Iterator[Any]:
        rest: list[Any] = []
        size = self.batch_size or 1
        for batch in super().__iter__():
            if not isinstance(batch, Rest):
                yield batch
                continue
            rest += batch.samples
            if len(rest) >= size:
                yield self.collate(rest[:size])
                del rest[:size]
        if rest:
            yield self.collate(rest)


def _collate_whole(batch_size: int, collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate(samples) if len(samples) == batch_size else Rest(samples)
