"""CIFAR10 as sequences of sub-pixels: its files, the raster order, and the augmentation of AFT Sec. 5.1."""

import pickle
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10

from aft_vision.data.ranges import check_ranges, within

# (H, W, channels) of an image, and the sub-pixels of it.
SHAPE = (32, 32, 3)
TOKENS = 32 * 32 * 3


@dataclass(frozen=True)
class PixelAugmentation:
    """Random changes to a training image with sub-pixels from 0 to 255 (AFT Sec. 5.1).

    Attributes:
        hflip: Probability of a horizontal flip.
        shift: A uniform integer from -shift to shift is added to all sub-pixels of an image, which are then clipped to
            [0, 255].
    """

    hflip: float = within('[0, 1]', 0.5)
    shift: int = within('[0, 255]', 10)

    def __post_init__(self) -> None:
        check_ranges(self, 'augment')

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Augment an image (H, W, 3) uint8; both random numbers are always drawn."""
        flip, shift = rng.random(), rng.integers(-self.shift, self.shift, endpoint=True)
        if flip < self.hflip:
            image = image[:, ::-1]
        return np.clip(image.astype(np.int16) + shift, 0, 255).astype(np.uint8)


def read_cifar10(path: str | Path, split: str) -> np.ndarray:
    """Read the images of CIFAR10; nothing is downloaded.

    Args:
        path: The folder `cifar-10-batches-py` (the Python version, which torchvision reads too), a folder with it in
            it, or an .npz with the arrays x_train and x_test of shape (N, 32, 32, 3) and uint8, exact to the bit.
        split: `train` or `test`.

    Returns:
        (N, 32, 32, 3) uint8.

    Raises:
        ValueError: the files are missing, damaged or of another length, or the images have another shape.
    """
    path = Path(path)
    if split not in ('train', 'test'):
        raise ValueError(f'expected the split train or test, got {split!r}')
    if path.is_file():
        return _check_images(_read_npz(path, f'x_{split}'), path)
    for folder in (path, path / CIFAR10.base_folder):
        if folder.name == CIFAR10.base_folder and folder.is_dir():
            return _read_python(folder, split)
    raise ValueError(
        f'expected CIFAR10 in {path}: {CIFAR10.base_folder} or an .npz, got '
        f'{"none of them" if path.exists() else "nothing of this name"}'
    )


def _read_python(folder: Path, split: str) -> np.ndarray:
    try:
        images = CIFAR10(folder.parent, train=split == 'train', download=False).data
    # torchvision checks the checksums of all files, including the other split.
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f'expected the whole CIFAR10 in {folder}, with the published checksums, got: {error}'
        ) from error
    return _check_images(images, folder)


def _read_npz(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path) as content:
            return content[name]
    # numpy treats other files as pickles, and returns the array of an .npy.
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f'expected a whole .npz with the array {name}, got {path}: {error}') from error


def _check_images(images: np.ndarray, source: Path) -> np.ndarray:
    if images.shape[1:] != SHAPE:
        raise ValueError(f'expected images of shape {SHAPE} in {source}, got {images.shape[1:]}')
    if images.dtype != np.uint8:
        raise ValueError(f'expected images of uint8 in {source}, got {images.dtype}')
    if not len(images):
        raise ValueError(f'expected at least 1 image in {source}, got 0')
    return images
