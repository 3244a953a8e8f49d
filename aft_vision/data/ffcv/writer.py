"""Writer of FFCV files (.beton) for any map-style data set.

This uses FFCV's format and encoder, but not its writing processes, because FFCV waits forever if one of them fails. The
processes of a DataLoader encode the images and pass errors on.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

# First, because it checks that FFCV can be imported.
from aft_vision.data.ffcv.loader import BetonDataset  # isort: skip
from ffcv.fields import IntField, RGBImageField
from ffcv.libffcv import resize_crop
from ffcv.memory_allocator import MemoryAllocator
from ffcv.writer import MIN_PAGE_SIZE, DatasetWriter

from aft_vision.data.checked import CheckedDataset
from aft_vision.data.datasets import Split
from aft_vision.data.images import CorruptImageError
from aft_vision.data.ranges import check_ranges, within
from aft_vision.data.sampling import SAMPLE, derive_seed
from aft_vision.files import replacing

# The side in pixels of the largest square that fits into a page of 2**30 bytes; FFCV does not read back larger pages.
MAX_SIDE = 18918


@dataclass(frozen=True)
class BetonOptions:
    """The format of stored images.

    Attributes:
        max_resolution: Longest side in pixels; larger images are resized (OpenCV's INTER_AREA). None keeps all sizes.
        jpeg_quality: Of JPEG.
        raw_share: Fraction of the images, drawn at random, to store as pixels: faster to read, but larger.
        seed: Seed of that draw.
    """

    max_resolution: int | None = within(f'[1, {MAX_SIDE}]', None)
    jpeg_quality: int = within('[1, 100]', 90)
    raw_share: float = within('[0, 1]', 0.0)
    seed: int = within('[0, 4294967296)', 0)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def page_size(self) -> int:
        """Return the bytes of a page of the file, a power of two; an image must fit into a page."""
        largest = 4 * MIN_PAGE_SIZE if self.max_resolution is None else 3 * self.max_resolution**2
        return max(MIN_PAGE_SIZE, 1 << (largest - 1).bit_length())


class Encoded(NamedTuple):
    """One encoded image: its metadata without the position, its bytes and its class."""

    metadata: np.ndarray
    content: np.ndarray
    target: int


def write_beton(
    split: Split, path: str | Path, options: BetonOptions | None = None, num_workers: int = 4, progress: bool = True
) -> int:
    """Write the images of a split to an FFCV file, and their class names to a JSON file next to it.

    Its table of images is checked before the file gets its name. It does not depend on `num_workers`.

    Args:
        split: From `open_train_split` or `open_eval_split`; its transform must be None.
        path: Ends in `.beton`.

    Returns:
        The number of images, without those that the split skips.

    Raises:
        ValueError: the split is a stream, of FFCV files or without an image, or the path does not end in .beton.
        CorruptImageError: an image cannot be decoded or is too large, and the split does not skip it.
        OSError: the file cannot be written; the previous file is unchanged.
    """
    path, options = Path(path), options or BetonOptions()
    if path.suffix != '.beton':
        raise ValueError(f'expected a path that ends in .beton, got {path}')
    if isinstance(split.dataset, BetonDataset):
        raise ValueError('expected a data set of images, got FFCV files: give the images of which they were written')
    if split.is_stream:
        raise ValueError('expected a data set whose images can be had at random positions, got a stream')
    dataset = _EncodedDataset(split.dataset, options)
    with replacing(path.with_suffix('.json')) as description, replacing(path) as temporary:
        written = _write(dataset, temporary, num_workers, progress)
        # It checks the table of the images.
        BetonDataset(temporary, len(split.class_names))
        content = {'class_names': split.class_names, 'images': written, **asdict(options)}
        description.write_text(json.dumps(content, indent=2) + '\n')
    return written


class _EncodedDataset(Dataset):
    """Images as FFCV stores them; None for one that the data set skips."""

    def __init__(self, dataset: CheckedDataset, options: BetonOptions) -> None:
        self.dataset, self.options = dataset, options

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Encoded | None:
        sample = self.dataset[index]
        if sample is None:
            return None
        image, target = sample
        draw = np.random.default_rng(derive_seed(SAMPLE, self.options.seed, index)).random()
        field = RGBImageField(
            write_mode='raw' if draw < self.options.raw_share else 'jpg',
            max_resolution=self.options.max_resolution,
            jpeg_quality=self.options.jpeg_quality,
        )
        metadata, stored = np.zeros(1, field.metadata_type), []

        def allocate(size: int) -> tuple[int, np.ndarray]:
            stored.append(np.empty(size, np.uint8))
            return 0, stored[0]

        try:
            field.encode(metadata, _shrink(np.array(image.convert('RGB')), self.options.max_resolution), allocate)
            if len(stored[0]) > self.options.page_size:
                raise ValueError(f'{len(stored[0])} bytes are more than a page of the file, {self.options.page_size}')
        # OpenCV and numpy raise various errors for images whose sides FFCV cannot store.
        except Exception as error:
            name = self.dataset.name_of(index)
            refused = f'expected an image that FFCV can store, got {name}: {error}; set max_resolution'
            self.dataset.name_once(index, CorruptImageError(refused))
            return None
        return Encoded(metadata, stored[0], int(target))


def _shrink(image: np.ndarray, longest: int | None) -> np.ndarray:
    """Resize an image (H, W, 3) whose shorter side FFCV would shrink to nothing, so that a pixel of it is left."""
    height, width = image.shape[:2]
    if longest is None or longest * min(height, width) >= max(height, width):
        return image
    small = np.empty((1, longest, 3) if width > height else (longest, 1, 3), np.uint8)
    resize_crop(image, 0, height, 0, width, small)
    return small


def _write(dataset: _EncodedDataset, path: Path, num_workers: int, progress: bool) -> int:
    """Write every image that is not skipped, and return their number."""
    page_size = dataset.options.page_size
    writer = DatasetWriter(str(path), {'image': RGBImageField(), 'label': IntField()}, page_size, num_workers=1)
    writer.num_samples = len(dataset)
    writer.prepare()
    written = 0
    # FFCV keeps the table of the images in shared memory.
    metadata = np.frombuffer(writer.metadata_sm.buf, writer.metadata_type)
    try:
        allocator = MemoryAllocator(str(path), writer.data_region_start, page_size)
        with allocator:
            for image in _encode(dataset, num_workers, progress, path.name):
                allocator.set_current_sample(written)
                pointer, space = allocator.malloc(len(image.content))
                space[:] = image.content
                image.metadata['data_ptr'] = pointer
                metadata[written] = (image.metadata[0], image.target)
                written += 1
        if not written:
            raise ValueError('expected a data set with images, got none')
        writer.header['num_samples'] = written
        writer.finalize(allocator.allocations)
    finally:
        del metadata
        writer.metadata_sm.close()
        writer.metadata_sm.unlink()
    return written


def _encode(dataset: _EncodedDataset, num_workers: int, progress: bool, name: str) -> Iterator[Encoded]:
    loader = DataLoader(dataset, batch_size=8, num_workers=num_workers, collate_fn=list)
    with tqdm(total=len(dataset), desc=name, unit='image', disable=None if progress else True) as bar:
        for images in loader:
            yield from (image for image in images if image is not None)
            bar.update(len(images))
