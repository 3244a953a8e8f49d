"""Tar files of WebDataset: the members of a sample follow each other and differ in their endings.

`ShardFile` is one such file; a `Shard` is the part of the data that one process reads, as in all loaders.
"""

import io
import json
import logging
import multiprocessing
import os
import random
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from timm.data.readers.reader_wds import SAMPLE_INITIAL_SIZE, SAMPLE_SHUFFLE_SIZE
from timm.data.readers.shared_count import SharedCount
from timm.data.readers.targets import get_field, has_field
from torch.utils.data import IterableDataset, get_worker_info

from aft_vision.data.checked import ImageData, naming, shared_flags
from aft_vision.data.images import CorruptImageError, image_suffixes, is_hidden
from aft_vision.data.sampling import ORDER, SAMPLE, Shard, derive_seed, restored_generators, seed_generators

INFO_FILES = ('_info.json', 'info.json')
IMAGE, CLASS = 'image', 'class'
# Flags of what has been named.
NUM_FLAGS = 2**20

_logger = logging.getLogger(__name__)


class StrictTarInfo(tarfile.TarInfo):
    """A header of a tar file that must be whole; `tarfile` takes a damaged or missing one for the end of the file."""

    @classmethod
    def fromtarfile(cls, file: Any) -> 'StrictTarInfo':
        try:
            return super().fromtarfile(file)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f'{error} at byte {file.offset}') from error


class Sample(NamedTuple):
    """An image of a stream and its class, as they are in its files.

    Attributes:
        name: Name of the image in errors.
    """

    name: str
    image: io.BytesIO
    label: Any


class ShardFile(NamedTuple):
    """A tar file of a WebDataset.

    Attributes:
        images: Their number; None if the data set does not say it.
    """

    url: str
    images: int | None


class WebDataset(ImageData, IterableDataset):
    """A split of WebDataset shards, which can only be read in its own order.

    Args:
        name: Name of the split in errors.
        files: Its tar files.
        images: Number of images; 0 if it is unknown.
        input_key: Ending of the images, or several with ';' between them; None for any ending of images.
        target_key: Field of `.json` members that has the class; None for `.cls` members.
        is_training: Read in random order, and change images at random.
        seed: Seed of the order and of the changes, in [0, 2**32).

    Attributes:
        target_transform: Of a class; None changes nothing.
    """

    target_transform: Any = None

    def __init__(
        self,
        name: str,
        files: Sequence[ShardFile],
        images: int,
        input_key: str | None,
        target_key: str | None,
        is_training: bool,
        seed: int,
    ) -> None:
        self.name, self.files, self.images, self.target_key = name, files, images, target_key
        self.is_training, self.seed = is_training, seed
        self.shard, self.used = Shard(), images
        # The loading processes see it, which live longer than an epoch.
        self._epoch = SharedCount()
        self._skipped = multiprocessing.Value('q', 0)
        endings = image_suffixes() if input_key is None else input_key.lower().split(';')
        self.kinds = {f'.{ending.strip().lstrip(".")}': IMAGE for ending in endings}
        self.kinds['.json' if target_key else '.cls'] = CLASS

    @property
    def is_divisible(self) -> bool:
        """Return whether several processes can share the images exactly."""
        return all(file.images is not None for file in self.files)

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
                f'expected one process for {self.name}, which does not say how many images each of its files has, got '
                f'{shard.world_size}; shard_lengths in {INFO_FILES[0]}, the number of images of each file, let '
                'several processes divide them'
            )
        self.shard = shard
        self.used = self.images // batch_size * batch_size if self.is_training else self.images

    def limit_workers(self, number: int) -> int:
        """Return how many of a number of loading processes can have a file each, and log if they are fewer."""
        files = max(len(self.files) // self.shard.world_size, 1)
        if number > files and self.shard.rank == 0:
            _logger.warning(
                '%d instead of data.num_workers=%d processes read %s: each needs a file of its own, and it has %d',
                files,
                number,
                self.name,
                len(self.files),
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
        for index, (name, image, label) in enumerate(self._read()):
            with naming(partial(str, name)):
                target = label if self.target_transform is None else self.target_transform(label)
                changed = image if self.transform is None else self._transformed(image, index)
            yield changed, target

    def _transformed(self, image: Any, index: int) -> Any:
        if not self.is_training:
            return self.transform(image)
        with restored_generators():
            seed_generators(derive_seed(SAMPLE, self.seed, self.epoch, self.shard.rank, this_worker()[0], index))
            return self.transform(image)

    def _decode(self, samples: Iterator[Sample]) -> Iterator[tuple[str, Any, int]]:
        for name, file, label in samples:
            try:
                image = self.open_image(file, name)
            except CorruptImageError as error:
                self.report(error)
            else:
                yield name, image, _as_class(label, name)

    def skip_corrupt(self, instead: str) -> None:
        """Leave out images that cannot be decoded and what cannot be read of a file; name each once."""
        self.named = shared_flags(NUM_FLAGS)

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
        with self._skipped.get_lock():
            self._skipped.value += images
        # Images have no number here. Two of them may share a flag; their count is reported all the same. The cause
        # may be told in other words in the next epoch.
        self.name_once(zlib.crc32(str(error).partition(': ')[0].encode()) % NUM_FLAGS, error)

    def _read(self) -> Iterator[tuple[str, Any, int]]:
        """Yield the names of the images of this process, the images and their classes."""
        samples = self._samples()
        if self.is_training:
            worker, _ = this_worker()
            rng = random.Random(derive_seed(ORDER, self.seed, self.epoch, self.shard.rank, worker))
            shuffle = require_webdataset().shuffle(SAMPLE_SHUFFLE_SIZE, initial=SAMPLE_INITIAL_SIZE, rng=rng)
            samples = shuffle(samples)
        return self._decode(samples)

    def _samples(self) -> Iterator[Sample]:
        worker, workers = this_worker()
        for file, first, end in self._ranges()[worker::workers]:
            left = self.images if end is None else end - first
            try:
                for sample in self._read_range(file, first, end):
                    yield sample
                    left -= 1
            except CorruptImageError as error:
                self.report(error, left)

    def _ranges(self) -> list[tuple[ShardFile, int, int | None]]:
        """Return the files of this process, with the position of its first sample in each, and that after its last."""
        order: Iterable[int] = range(len(self.files))
        if self.is_training:
            order = np.random.default_rng((ORDER, self.seed, self.epoch)).permutation(len(self.files))
        files = [self.files[i] for i in order]
        if not self.is_divisible:
            return [(file, 0, None) for file in files]
        begins = accumulate((file.images or 0 for file in files), initial=0)
        first, end = self.bounds
        ranges = [
            (file, max(first - begin, 0), min(end - begin, file.images or 0))
            for file, begin in zip(files, begins, strict=False)
        ]
        return [(file, low, high) for file, low, high in ranges if low < high]

    def _read_range(self, file: ShardFile, first: int, end: int | None) -> Iterator[Sample]:
        count = 0
        for sample in self._read_file(file.url):
            if first <= count and (end is None or count < end):
                yield sample
            count += 1
            if count == end != file.images:
                return
        if file.images not in (None, count):
            raise ValueError(
                f'expected {file.images} images in {file.url}, as its data set says, got {count}; correct the '
                f'shard_lengths in {INFO_FILES[0]}'
            )

    def _read_file(self, url: str) -> Iterator[Sample]:
        """Yield the samples of a file."""
        stem, members = '', dict[str, tuple[str, bytes]]()
        for name, ending, content in self._members(url):
            part = self.kinds[ending]
            if members and name[: -len(ending)] != stem:
                yield self._sample(members, url)
                members = {}
            if part in members:
                raise ValueError(
                    f'expected one {part} in each sample, got {members[part][0]} and {name} in {url}; data.input_key '
                    'says which ending the images have'
                )
            stem, members[part] = name[: -len(ending)], (name, content)
        if members:
            yield self._sample(members, url)

    def _members(self, url: str) -> Iterator[tuple[str, str, bytes]]:
        """Yield the name, its ending and the content of the members that are images or classes."""
        position = url
        try:
            with (
                require_webdataset().gopen(url) as stream,
                tarfile.open(fileobj=stream, mode='r|*', tarinfo=StrictTarInfo) as tar,
            ):
                for member in tar:
                    # The headers of all members would stay in memory.
                    tar.members = []  # type: ignore[attr-defined]
                    position = f'{url}, damaged in or after {member.name}'
                    ending = self._ending(member.name)
                    if not ending or member.isdir() or is_hidden(member.name):
                        continue
                    if not member.isfile():
                        raise ValueError(f'expected files in {url}, got the link {member.name}')
                    content: Any = tar.extractfile(member)
                    yield member.name, ending, content.read()
        except (OSError, EOFError, tarfile.TarError) as error:
            raise CorruptImageError(f'expected a whole tar file, got {position}: {error}') from error

    def _ending(self, name: str) -> str:
        """Return the longest ending of an image or a class that a name has; '' for other members."""
        return max((ending for ending in self.kinds if name.lower().endswith(ending)), key=len, default='')

    def _sample(self, members: dict[str, tuple[str, bytes]], url: str) -> Sample:
        if len(members) < len({IMAGE, CLASS}):
            ((name, _),) = members.values()
            *_, of_class = self.kinds
            raise ValueError(
                f'expected an image and its class ({of_class}) in each sample, got only {name} of one in {url}; '
                'data.input_key says which ending the images have, data.target_key which field of .json the class is'
            )
        (image, content), (name, label) = members[IMAGE], members[CLASS]
        return Sample(f'{image} in {url}', io.BytesIO(content), self._label(label, f'{name} in {url}'))

    def _label(self, content: bytes, name: str) -> Any:
        if not self.target_key:
            return content
        fields = json.loads(content)
        if not has_field(fields, self.target_key):
            raise ValueError(
                f'expected the field data.target_key, {self.target_key}, in {name}, got {", ".join(fields)}'
            )
        return get_field(fields, self.target_key)


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


def require_webdataset() -> Any:
    """Import webdataset, which opens the shards at a path or a URL.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import webdataset
    except ImportError as error:
        raise ImportError(f"wds/ needs webdataset: pip install 'aft-vision[webdataset]' ({error})") from error
    return webdataset


def open_shards(
    root: str, split: str, input_key: str | None, target_key: str | None, is_training: bool, seed: int
) -> WebDataset:
    """Open a split of WebDataset shards.

    Args:
        root: Folder or URL of the shards and of timm's `_info.json`.
        split: A split of `_info.json`, or shards such as `train-{0000..0009}.tar`; `|NUMBER` after it is the number of
            its images.
        input_key, target_key, is_training, seed: As in WebDataset.

    Raises:
        ValueError: there is no such split, or the number of images is not the sum over the files.
        ImportError: webdataset is not installed.
    """
    splits, (name, stated) = _read_splits(root), split_name_and_count(split)
    info = splits.get(name, {})
    if not info and '.tar' not in name:
        raise ValueError(
            f'expected a split of {INFO_FILES[0]} in {root}, which has {", ".join(splits) or "none"}, or shards such '
            f"as '{name}-{{0000..0009}}.tar|1000', 10 files with 1000 images, got {split}"
        )
    names = info['filenames'] if info else require_webdataset().shardlists.expand_urls(name)
    known = {
        file: count
        for each in splits.values()
        for file, count in zip(each['filenames'], each.get('shard_lengths', ()), strict=False)
    }
    files = [ShardFile(os.path.join(root, file), known.get(file)) for file in names]
    counts = [file.images for file in files if file.images is not None]
    images, described = stated or info.get('num_samples') or sum(counts), f'the split {name} of {root}'
    if len(counts) == len(files) and images != sum(counts):
        raise ValueError(
            f'expected {sum(counts)} images in {described}, as its shard_lengths sum to, got {images}; correct '
            f'{INFO_FILES[0]} or the number in the name of the split'
        )
    return WebDataset(described, files, images, input_key, target_key or info.get('alt_label'), is_training, seed)


def _read_splits(root: str) -> dict[str, dict[str, Any]]:
    """Return the splits of timm's info file; {} without a file."""
    for name in INFO_FILES:
        path = os.path.join(root, name)
        try:
            with require_webdataset().gopen(path) as file:
                content = file.read()
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and os.path.isdir(root):
                raise
            continue
        try:
            splits = json.loads(content)['splits']
            return {split: {**each, 'filenames': list(each['filenames'])} for split, each in splits.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'expected splits with their filenames in {path}, got: {error!r}') from error
    return {}
