"""Images from FFCV files (.beton), decoded and resized by FFCV's library.

This uses FFCV's file format, reader and codecs, but not its Loader. The processes of a DataLoader read the images, in
the order and with the random changes of a folder of the same images.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from aft_vision.data.augment import Augmentation, train_stages
from aft_vision.data.checked import CheckedDataset
from aft_vision.data.images import CorruptImageError
from aft_vision.data.native import NativeShape

_threads = torch.get_num_threads()
try:
    import numba

    # FFCV's import sets the number of numba's threads, which starts them. On one core, a process that forks after that
    # never ends: at its exit numba waits for a task of TBB, which the fork has dropped.
    with mock.patch('numba.set_num_threads'):
        from ffcv.pipeline import compiler
    compiler.set_num_threads = numba.set_num_threads
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.libffcv import imdecode, resize_crop
    from ffcv.reader import Reader
except (ImportError, OSError) as error:
    raise ImportError(
        'FFCV files need FFCV: apt-get install libopencv-dev libturbojpeg0-dev pkg-config, then '
        f"pip install 'aft-vision[ffcv]' ({error})"
    ) from error
# Importing FFCV sets torch to a single thread.
torch.set_num_threads(_threads)

RAW = int(IMAGE_MODES['raw'])


class TrainTransform:
    """Random crop, flip and automatic augmentation with the draws of timm's transform for the same seed.

    FFCV resizes the crop with OpenCV's INTER_AREA, while timm's resizing is bicubic.

    Args:
        img_size: (H, W) in pixels.
        mean: Mean pixel per channel, in [0, 1]; the fill colour of rotations.
        std: As of timm's transform, whose tensor is not used.
    """

    def __init__(
        self,
        img_size: tuple[int, int] | NativeShape,
        augment: Augmentation,
        mean: Sequence[float],
        std: Sequence[float] = (1.0,) * 3,
    ) -> None:
        (self.crop, *_), automatic, _ = train_stages(_one_size(img_size), augment, mean, std)
        self.hflip = augment.hflip
        # timm also has a colour jitter of strength 0.
        self.steps = automatic if augment.changes_colors else []

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        """Transform an image.

        Args:
            image: (H, W, 3), uint8.

        Returns:
            (3, height, width), uint8.
        """
        # Drawing the crop uses only the size of the image.
        shape = torch.empty((3, *image.shape[:2]), device='meta')
        top, left, height, width = self.crop.get_params(shape, self.crop.scale, self.crop.ratio)
        # torchvision draws nothing for a flip that never happens.
        flip = self.hflip > 0 and bool(torch.rand(1) < self.hflip)
        changed = _resize(image, (top, left, height, width), self.crop.size, flip)
        if self.steps:
            picture = to_pil_image(changed)
            for step in self.steps:
                picture = step(picture)
            changed = pil_to_tensor(picture)
        return changed


class EvalTransform:
    """The centre crop of DeiT's evaluation, resized by FFCV.

    Args:
        img_size: (H, W) in pixels.
        crop_pct: Side of the crop relative to the image, in (0, 1].
    """

    def __init__(self, img_size: tuple[int, int] | NativeShape, crop_pct: float) -> None:
        if not 0 < crop_pct <= 1:
            raise ValueError(f'crop_pct must be in (0, 1], got {crop_pct}')
        self.img_size, self.crop_pct = _one_size(img_size), crop_pct

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        """Crop and resize an image (H, W, 3), uint8, to (3, height, width)."""
        factor = self.crop_pct * min(side / wanted for side, wanted in zip(image.shape, self.img_size, strict=False))
        height, width = (max(round(factor * wanted), 1) for wanted in self.img_size)
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return _resize(image, (top, left, height, width), self.img_size)


class BetonDataset(CheckedDataset):
    """The images of an FFCV file, as uint8 arrays (H, W, 3) or transformed by `transform`, and their classes.

    Args:
        num_classes: Number of classes of a file that `write_beton` did not write, whose class names are unknown; None
            means the largest class is the last.

    Attributes:
        class_names: In the order of their indices.

    Raises:
        ValueError: the file is missing, truncated or of another format, or its classes are not the expected ones.
    """

    train_transform, eval_transform = TrainTransform, EvalTransform

    def __init__(self, path: str | Path, num_classes: int | None = None) -> None:
        self.path = Path(path)
        reader = _read_header(self.path)
        images, labels = (
            [f'f{index}' for index, handler in enumerate(reader.handlers.values()) if isinstance(handler, field)]
            for field in (RGBImageField, IntField)
        )
        if len(images) != 1 or len(labels) != 1:
            raise ValueError(f'expected a field of images and one of integers in {path}, got {reader.field_names}')
        self.images, self.labels = reader.metadata[images[0]], reader.metadata[labels[0]]
        self.sizes = self._find_sizes(reader.alloc_table)
        self.class_names = self._find_class_names(num_classes)
        self.targets = np.array(self.labels)
        self._bytes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps the file itself, because pickling the mapping would copy the whole file.
        return {**self.__dict__, '_bytes': None}

    def _find_sizes(self, allocations: np.ndarray) -> np.ndarray:
        """Return the sizes of all images in bytes, after checking that all are inside the file."""
        order = np.argsort(allocations['ptr'])
        starts = allocations['ptr'][order]
        rows = np.searchsorted(starts, self.images['data_ptr']).clip(max=max(len(starts) - 1, 0))
        if not len(starts) or not np.array_equal(starts[rows], self.images['data_ptr']):
            raise ValueError(f'expected a whole .beton file, got {self.path}: its table of images is not complete')
        sizes = allocations['size'][order][rows]
        raw = self.images['mode'] == RAW
        pixels = 3 * self.images['height'].astype(np.uint64) * self.images['width']
        if (starts + allocations['size'][order]).max() > self.path.stat().st_size or (sizes != pixels)[raw].any():
            raise ValueError(f'expected a whole .beton file, got {self.path}: its table of images is damaged')
        return sizes

    def _find_class_names(self, num_classes: int | None) -> list[str]:
        description = self.path.with_suffix('.json')
        known = self._read_class_names(description) if description.is_file() else None
        names = known or [str(label) for label in range(num_classes or int(self.labels.max()) + 1)]
        if num_classes not in (None, len(names)):
            raise ValueError(f'expected {len(names)} classes, as in {description}, got {num_classes}')
        if not 0 <= self.labels.min() <= self.labels.max() < len(names):
            span = f'{self.labels.min()} to {self.labels.max()}'
            raise ValueError(f'expected classes from 0 to {len(names) - 1} in {self.path}, got {span}')
        return names

    def _read_class_names(self, description: Path) -> list[str]:
        try:
            content = json.loads(description.read_text())
            names, images = content['class_names'], content['images']
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'expected the description of {self.path}, got {description}: {error!r}') from error
        if images != len(self):
            raise ValueError(f'expected the description of the {len(self)} images of {self.path}, got one of {images}')
        return names

    def content(self, index: int) -> np.ndarray:
        """Return the stored bytes of an image: JPEG or pixels."""
        if self._bytes is None:
            # A view of the mapping; numpy's memmap itself is slow to slice.
            self._bytes = np.asarray(np.memmap(self.path, np.uint8, mode='r'))
        start = int(self.images['data_ptr'][index])
        return self._bytes[start : start + int(self.sizes[index])]

    def _read(self, index: int) -> tuple[np.ndarray, int]:
        mode, width, height, _ = self.images[index].item()
        content = self.content(index)
        if mode == RAW:
            return content.reshape(height, width, 3), int(self.labels[index])
        image = np.empty((height, width, 3), np.uint8)
        # FFCV's own loader ignores this return value.
        if imdecode(content, image, height, width, height, width, 0, 0, 1, 1, False, False):
            raise CorruptImageError(f'expected an image that can be decoded, got {self.name_of(index)}')
        return image, int(self.labels[index])

    def name_of(self, index: int) -> str:
        return f'image {index} of {self.path}'


def _read_header(path: Path) -> Reader:
    if not path.is_file():
        raise ValueError(f'expected a .beton file, got {path}, which is not one')
    try:
        reader = Reader(str(path))
    # FFCV raises almost any error on foreign bytes.
    except Exception as error:
        raise ValueError(f'expected a whole .beton file, got {path}: {error or type(error).__name__}') from error
    if not len(reader.metadata) or len(reader.metadata) != reader.num_samples:
        raise ValueError(f'expected a whole .beton file with images, got {path} with {len(reader.metadata)}')
    return reader


def _one_size(size: tuple[int, int] | NativeShape) -> tuple[int, int]:
    if isinstance(size, NativeShape):
        raise ValueError(
            'expected a folder or tar file of images of native shapes, got FFCV files: give the images themselves'
        )
    return size


def _resize(
    image: np.ndarray, box: tuple[int, int, int, int], size: tuple[int, int], flip: bool = False
) -> torch.Tensor:
    """Resize the box (top, left, height, width) of an image (H, W, 3) to `size`, and flip it: (3, H, W)."""
    top, left, height, width = box
    resized = np.empty((*size, 3), np.uint8)
    resize_crop(image, top, top + height, left, left + width, resized)
    if flip:
        resized = resized[:, ::-1]
    # One copy by numpy: torch would wake all of its threads for it.
    return torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1)))
