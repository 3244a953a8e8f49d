"""Data sets that report or skip images that cannot be decoded."""

import logging
import tarfile
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from PIL import Image
from timm.data import ImageDataset
from torch.utils.data import Dataset

from aft_vision.data.images import CorruptImageError, open_image

# If more images than this are skipped in a row, the data set is broken, not an image.
MAX_SKIPPED_IN_A_ROW = 50

_logger = logging.getLogger(__name__)


class CheckedDataset(Dataset, ABC):
    """A map-style data set that names images that cannot be decoded.

    A subclass has `_read`, which returns an image and its class or raises a CorruptImageError, `_name`, and
    `transform`.

    Attributes:
        on_corrupt: `raise`: raise a CorruptImageError; `next`: take the next image instead; `none`: return None.
    """

    on_corrupt = 'raise'
    transform: Any = None

    def __getitem__(self, index: int) -> Any:
        for position in range(index, index + MAX_SKIPPED_IN_A_ROW):
            try:
                image, target = self._read(position % len(self))
            except CorruptImageError as error:
                if self.on_corrupt == 'raise':
                    raise
                _logger.warning('skipped: %s', error)
                if self.on_corrupt == 'none':
                    return None
            else:
                return image if self.transform is None else self.transform(image), target
        raise CorruptImageError(
            f'expected images that can be decoded, got {MAX_SKIPPED_IN_A_ROW} in a row that cannot, '
            f'the first one {self._name(index)}'
        )

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, index: int) -> tuple[Any, int]: ...

    @abstractmethod
    def _name(self, index: int) -> str: ...


class CheckedImageDataset(CheckedDataset, ImageDataset):
    """timm's ImageDataset with the path in the error for an image that cannot be decoded."""

    def __len__(self) -> int:
        return len(self.reader)

    def _read(self, index: int) -> tuple[Image.Image, int]:
        try:
            file, target, *_ = self.reader[index]
        except (OSError, tarfile.TarError) as error:
            raise CorruptImageError(f'expected an image that can be read, got {self._name(index)}: {error}') from error
        with file:
            return open_image(file, self._name(index)), target

    def _name(self, index: int) -> str:
        # An image that a Hugging Face data set stores as bytes may have no path.
        return self.filename(index, absolute=True) or f'the image with index {index}'


class PartOfDataset(CheckedDataset):
    """Some images of a map-style data set whose own transform is None.

    Args:
        indices: Indices of these images in the data set.
    """

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def _read(self, index: int) -> tuple[Any, int]:
        place = int(self.indices[index])
        return self.dataset._read(place) if isinstance(self.dataset, CheckedDataset) else self.dataset[place]

    def _name(self, index: int) -> str:
        place = int(self.indices[index])
        return self.dataset._name(place) if isinstance(self.dataset, CheckedDataset) else f'image {place}'
