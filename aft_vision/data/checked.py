"""The data sets of the loaders, which report or skip images that cannot be decoded."""

import logging
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset
from torch.utils.data import Dataset
from torchvision.datasets import DatasetFolder

from aft_vision.data.augment import eval_transform, train_transform
from aft_vision.data.images import LOSSES, CorruptImageError, Decoding, TransformError, open_image

# If more images than this are skipped in a row, the data set is broken, not an image.
MAX_SKIPPED_IN_A_ROW = 50
REMEDY = 'data.on_corrupt_image=skip leaves such images out'

_logger = logging.getLogger(__name__)


def shared_flags(count: int) -> torch.Tensor:
    """Return flags that the loading processes share."""
    return torch.zeros(count, dtype=torch.bool).share_memory_()


@contextmanager
def naming(image: Callable[[], str]) -> Iterator[None]:
    """Turn an error in changing an image, which does not know its file, into a TransformError.

    Args:
        image: Returns the name of the image.
    """
    try:
        yield
    except (CorruptImageError, TransformError):
        raise
    except Exception as error:
        prefix = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
        raise TransformError(f'{image()}: {prefix}{error}') from error


class ImageData:
    """The members that every data set of the loaders has.

    Attributes:
        transform: Of an image; None changes nothing.
        train_transform, eval_transform: Build a transform for the images as this data set has them.
        targets: Class of every image; None if the data set does not list them.
        named: Flags of the images that have been named in the log; None where the first one is an error.
        decoding: Options of reading images.
        reported: Flags of LOSSES that have been logged; None logs the first of each in a process.
    """

    transform: Any = None
    train_transform: Callable[..., Any] = staticmethod(train_transform)
    eval_transform: Callable[..., Any] = staticmethod(eval_transform)
    targets: np.ndarray | None = None
    named: torch.Tensor | None = None
    decoding: Decoding = Decoding()
    reported: torch.Tensor | None = None

    def open_image(self, file: Any, name: str | None = None) -> Image.Image:
        """Read an image with the options of the data set, whose loading processes log a loss once."""
        return open_image(file, name, self.decoding, None if self.reported is None else self._report)

    def _report(self, loss: str, message: str) -> None:
        flag = LOSSES.index(loss)
        if not self.reported[flag]:  # type: ignore[index]
            self.reported[flag] = True  # type: ignore[index]
            _logger.warning('%s', message)

    def name_once(self, flag: int, error: CorruptImageError) -> None:
        """Raise the error of an image, or, where it is skipped, log it once."""
        if self.named is None:
            raise type(error)(f'{error}; {REMEDY}') from error
        if not self.named[flag]:
            self.named[flag] = True
            _logger.warning('skipped: %s', error)


class CheckedDataset(ImageData, Dataset, ABC):
    """A map-style data set that names images that cannot be decoded.

    A subclass has `_read`, which returns an image and its class or raises a CorruptImageError, and `name_of`.

    Attributes:
        on_corrupt: `raise`: raise a CorruptImageError; `next`: take the next image instead; `none`: return None.
        last: Index of the image that was read last.
    """

    on_corrupt = 'raise'
    last = 0

    def skip_corrupt(self, instead: str) -> None:
        """Skip images that cannot be decoded, and name each once.

        Args:
            instead: `next` or `none`, for `on_corrupt`.
        """
        self.on_corrupt, self.named = instead, shared_flags(len(self))

    def __getitem__(self, index: int) -> Any:
        for position in range(index, index + MAX_SKIPPED_IN_A_ROW):
            try:
                image, target = self._read(position % len(self))
            except CorruptImageError as error:
                self.name_once(position % len(self), error)
                if self.on_corrupt == 'none':
                    return None
            else:
                self.last = position % len(self)
                with naming(self.name_of_last):
                    return image if self.transform is None else self.transform(image), target
        raise CorruptImageError(
            f'expected images that can be decoded, got {MAX_SKIPPED_IN_A_ROW} in a row that cannot, '
            f'the first one {self.name_of(index)}'
        )

    def name_of_last(self) -> str:
        """Return the name of the image that was read last."""
        return self.name_of(self.last)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, index: int) -> tuple[Any, int]: ...

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return the name of an image for errors, which is its path if it has one."""

    def key_of(self, index: int) -> str:
        """Return the name of an image within the data set, wherever that is; without one its index."""
        return f'{index} of {len(self)}'


class CheckedImageDataset(CheckedDataset, ImageDataset):
    """timm's ImageDataset with the path in the error for an image that cannot be decoded.

    Attributes:
        archive: The file with the images; None if each is a file.
    """

    archive: Path | None = None

    def __len__(self) -> int:
        return len(self.reader)

    def _read(self, index: int) -> tuple[Image.Image, int]:
        try:
            file, target, *_ = self.reader[index]
        except (OSError, tarfile.TarError) as error:
            raise CorruptImageError(
                f'expected an image that can be read, got {self.name_of(index)}: {error}'
            ) from error
        with file:
            return self.open_image(file, self.name_of(index)), target

    def name_of(self, index: int) -> str:
        # An image that a Hugging Face data set stores as bytes may have no path.
        name = self.filename(index, absolute=True) or f'the image with index {index}'
        return name if self.archive is None else f'{name} in {self.archive}'

    def key_of(self, index: int) -> str:
        name = self.filename(index, absolute=True)
        if not name:
            return super().key_of(index)
        if self.archive is not None:
            return name
        return os.path.relpath(name, self.reader.root) if hasattr(self.reader, 'root') else name


class TorchvisionDataset(CheckedDataset):
    """A map-style data set of torchvision, whose own transform is None."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # Data sets of image files.
        if hasattr(dataset, 'loader'):
            dataset.loader = self.open_image
        labels = getattr(dataset, 'targets', getattr(dataset, 'labels', None))
        if labels is not None:
            # numpy warns about tensors.
            self.targets = np.array(labels.tolist() if isinstance(labels, torch.Tensor) else labels)

    def __len__(self) -> int:
        return len(self.dataset)

    def _read(self, index: int) -> tuple[Any, int]:
        try:
            image, target = self.dataset[index]
            if isinstance(image, Image.Image):
                # Some data sets only open the file.
                image.load()
        except (OSError, SyntaxError) as error:
            raise CorruptImageError(
                f'expected an image that can be decoded, got {self.name_of(index)}: {error}'
            ) from error
        return image, target

    def name_of(self, index: int) -> str:
        return f'image {index}'

    def key_of(self, index: int) -> str:
        if not isinstance(self.dataset, DatasetFolder):
            return super().key_of(index)
        return os.path.relpath(self.dataset.samples[index][0], self.dataset.root)


class CheckedSubset(CheckedDataset):
    """Some images of a data set whose own transform is None.

    Args:
        indices: Indices of these images in the data set.
    """

    def __init__(self, dataset: CheckedDataset, indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices
        self.targets = None if dataset.targets is None else dataset.targets[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def _read(self, index: int) -> tuple[Any, int]:
        return self.dataset._read(int(self.indices[index]))

    def name_of(self, index: int) -> str:
        return self.dataset.name_of(int(self.indices[index]))

    def key_of(self, index: int) -> str:
        return self.dataset.key_of(int(self.indices[index]))
