"""WebDataset shards: tar files of samples whose members follow each other and differ in their endings."""

import io
import json
import os
import random
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from timm.data.readers.reader_wds import SAMPLE_INITIAL_SIZE, SAMPLE_SHUFFLE_SIZE
from timm.data.readers.targets import get_field, has_field

from aft_vision.data.images import CorruptImageError, image_suffixes, is_hidden
from aft_vision.data.sampling import ORDER, derive_seed
from aft_vision.data.streams import Sample, Stream, split_name_and_count, this_worker

INFO_FILES = ('_info.json', 'info.json')
IMAGE, CLASS = 'image', 'class'


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


class TarShard(NamedTuple):
    """A tar file of a WebDataset.

    Attributes:
        images: Their number; None if the data set does not say it.
    """

    url: str
    images: int | None


class WebDataset(Stream):
    """A split of WebDataset shards.

    Args:
        place: Name of the split in errors.
        files: Its shards.
        images: Number of images.
        input_key: Ending of the images, or several with ';' between them; None for any ending of images.
        target_key: Field of `.json` members that has the class; None for `.cls` members.
        is_training, seed: As in Stream.
    """

    def __init__(
        self,
        place: str,
        files: Sequence[TarShard],
        images: int,
        input_key: str | None,
        target_key: str | None,
        is_training: bool,
        seed: int,
    ) -> None:
        super().__init__(place, images, len(files), is_training, seed)
        self.files, self.target_key = files, target_key
        self.file_names = [file.url for file in files]
        endings = image_suffixes() if input_key is None else input_key.lower().split(';')
        self.kinds = {f'.{ending.strip().lstrip(".")}': IMAGE for ending in endings}
        self.kinds['.json' if target_key else '.cls'] = CLASS

    @property
    def is_divisible(self) -> bool:
        return all(file.images is not None for file in self.files)

    def _read(self) -> Iterator[tuple[Any, Any]]:
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

    def _ranges(self) -> list[tuple[TarShard, int, int | None]]:
        """Return the shards of this process, with the position of its first sample in each, and that after its last."""
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

    def _read_range(self, file: TarShard, first: int, end: int | None) -> Iterator[Sample]:
        count = 0
        for sample in self._read_shard(file.url):
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

    def _read_shard(self, url: str) -> Iterator[Sample]:
        """Yield the samples of a shard."""
        stem, found = '', dict[str, tuple[str, bytes]]()
        for name, ending, content in self._members(url):
            kind = self.kinds[ending]
            if found and name[: -len(ending)] != stem:
                yield self._sample(found, url)
                found = {}
            if kind in found:
                raise ValueError(
                    f'expected one {kind} in each sample, got {found[kind][0]} and {name} in {url}; data.input_key '
                    'says which ending the images have'
                )
            stem, found[kind] = name[: -len(ending)], (name, content)
        if found:
            yield self._sample(found, url)

    def _members(self, url: str) -> Iterator[tuple[str, str, bytes]]:
        """Yield the name, its ending and the content of the members that are images or classes."""
        place = url
        try:
            with (
                require_webdataset().gopen(url) as stream,
                tarfile.open(fileobj=stream, mode='r|*', tarinfo=StrictTarInfo) as tar,
            ):
                for member in tar:
                    # The headers of all members would stay in memory.
                    tar.members = []  # type: ignore[attr-defined]
                    place = f'{url}, damaged in or after {member.name}'
                    ending = self._ending(member.name)
                    if not ending or member.isdir() or is_hidden(member.name):
                        continue
                    if not member.isfile():
                        raise ValueError(f'expected files in {url}, got the link {member.name}')
                    content: Any = tar.extractfile(member)
                    yield member.name, ending, content.read()
        except (OSError, EOFError, tarfile.TarError) as error:
            raise CorruptImageError(f'expected a whole tar file, got {place}: {error}') from error

    def _ending(self, name: str) -> str:
        """Return the longest ending of an image or a class that a name has; '' for other members."""
        return max((ending for ending in self.kinds if name.lower().endswith(ending)), key=len, default='')

    def _sample(self, found: dict[str, tuple[str, bytes]], url: str) -> Sample:
        if len(found) < len({IMAGE, CLASS}):
            ((name, _),) = found.values()
            *_, of_class = self.kinds
            raise ValueError(
                f'expected an image and its class ({of_class}) in each sample, got only {name} of one in {url}; '
                'data.input_key says which ending the images have, data.target_key which field of .json the class is'
            )
        (image, content), (name, label) = found[IMAGE], found[CLASS]
        return Sample(f'{image} in {url}', io.BytesIO(content), self._label(label, f'{name} in {url}'))

    def _label(self, content: bytes, name: str) -> Any:
        if not self.target_key:
            return content
        try:
            fields = json.loads(content)
        except ValueError as error:
            raise ValueError(f'expected JSON in {name}, got: {error}') from error
        if not has_field(fields, self.target_key):
            raise ValueError(
                f'expected the field data.target_key, {self.target_key}, in {name}, got {", ".join(fields)}'
            )
        return get_field(fields, self.target_key)


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
        ValueError: there is no such split, or the number of images is not the sum of those of the shards.
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
    files = [TarShard(os.path.join(root, file), known.get(file)) for file in names]
    counts = [file.images for file in files if file.images is not None]
    images, place = stated or info.get('num_samples') or sum(counts), f'the split {name} of {root}'
    if len(counts) == len(files) and images != sum(counts):
        raise ValueError(
            f'expected {sum(counts)} images in {place}, as its shard_lengths sum to, got {images}; correct '
            f'{INFO_FILES[0]} or the number in the name of the split'
        )
    return WebDataset(place, files, images, input_key, target_key or info.get('alt_label'), is_training, seed)


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
