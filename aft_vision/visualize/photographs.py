"""Photographs as input of a model and for pictures."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from PIL.Image import Image
from timm.data import create_transform, resolve_input_data_config
from torch import Tensor, nn

from aft_vision.data.augment import crop_thin_images
from aft_vision.data.class_names import class_names
from aft_vision.data.images import (
    CorruptImageError,
    Decoding,
    describe_ignored,
    describe_skipped,
    find_images,
    open_image,
)
from aft_vision.sizes import check_channels, default_size
from aft_vision.visualize.figure import evenly_spaced

DISPLAY = 448
BATCH = 16

_logger = logging.getLogger(__name__)


class Photograph(NamedTuple):
    """One image.

    Attributes:
        path: Path of the file; an empty one of bytes, and of a stream without a name.
        images: (1, C, H, W), normalised, for the model.
        pixels: (H', W', 3) uint8, the same crop in higher resolution.
    """

    path: Path
    images: Tensor
    pixels: Tensor


class SkippedImages:
    """The photographs that cannot be decoded and are left out, each named once in the log.

    Attributes:
        paths: Their paths.
    """

    def __init__(self) -> None:
        self.paths: set[Path] = set()

    def add(self, path: Path, error: CorruptImageError) -> None:
        """Leave out a photograph, and name it if it is new."""
        if path not in self.paths:
            self.paths.add(path)
            _logger.warning('skipped: %s', error)

    def kept(self, paths: Iterable[Path]) -> list[Path]:
        """Return the paths that are not left out."""
        return [path for path in paths if path not in self.paths]

    def describe(self) -> str:
        """Return how many are left out, as a sentence; '' for none."""
        return describe_skipped(len(self.paths))


def find_photographs(folder: str | Path | Sequence[Path], at_most: int) -> list[Path]:
    """Return up to `at_most` images below a folder, evenly spaced over the sorted paths, so that classes mix.

    Hidden files and files that are no images are counted in a warning, once for each folder.

    Args:
        folder: The folder, or the images themselves.

    Raises:
        ValueError: there are no images, or at_most is below 1.
    """
    if at_most < 1:
        raise ValueError(f'expected at least 1 image to take, got {at_most}')
    if not isinstance(folder, str | Path):
        return [folder[index] for index in evenly_spaced(len(folder), at_most)]
    is_folder = Path(folder).is_dir()
    files: list[Path] = []
    if is_folder:
        images = find_images(folder)
        files = sorted(map(Path, images.paths))
        _warn(str(folder), describe_ignored(images.ignored))
    if not files:
        reason = 'which has none' if is_folder else 'which is no folder'
        raise ValueError(f'expected a folder with images, got {folder}, {reason}')
    return [files[index] for index in evenly_spaced(len(files), at_most)]


def list_photographs(paths: Sequence[Path]) -> list[Path]:
    """Return image files, and all images below folders.

    Raises:
        ValueError: a file or folder does not exist, or a folder has no images.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ValueError(f'expected image files or folders, got {", ".join(missing)}, which do not exist')
    return [file for path in paths for file in (find_photographs(path, sys.maxsize) if path.is_dir() else [path])]


def find_readable(
    folder: str | Path | Sequence[Path], at_most: int, skipped: SkippedImages, decoding: Decoding | None = None
) -> list[Path]:
    """Return photographs as `find_photographs`, with the next one in place of each that cannot be decoded.

    Raises:
        ValueError: as `find_photographs`.
        CorruptImageError: none can be decoded.
    """
    files = find_photographs(folder, sys.maxsize)
    chosen: set[int] = set()
    for start in evenly_spaced(len(files), at_most):
        for index in chain(range(start, len(files)), range(start)):
            if index in chosen or files[index] in skipped.paths:
                continue
            try:
                open_image(files[index], decoding=decoding)
            except CorruptImageError as error:
                skipped.add(files[index], error)
                continue
            chosen.add(index)
            break
    if not chosen:
        source = folder if isinstance(folder, str | Path) else files[0].parent
        raise CorruptImageError(f'expected an image that can be decoded in {source}, got none of {len(files)}')
    return [files[index] for index in sorted(chosen)]


@cache
def _warn(folder: str, ignored: str) -> None:
    # A report looks through its folder several times.
    if ignored:
        _logger.warning('ignored in %s, because they are hidden or no images: %s', folder, ignored)


def load_photograph(
    file: str | Path | bytes | IO[bytes],
    model: nn.Module,
    size: Sequence[int] | None = None,
    decoding: Decoding | None = None,
) -> Photograph:
    """Read an image as in evaluation: resized, cropped and normalised by the model's preprocessing.

    Args:
        file: A path, the content of a file, or a stream of it, such as an upload.
        size: (H, W) in pixels; None means the model's size.
        decoding: Options of reading the file; None for the default ones.

    Raises:
        CorruptImageError: the file cannot be decoded.
        ValueError: the model takes images of other than 1 or 3 channels.
    """
    check_channels(model, 1, 3)
    image, config = open_image(file, decoding=decoding), resolve_input_data_config(model)
    height, width = default_size(model) if size is None else size
    step = max(1, DISPLAY // max(height, width))
    shown = _crop(image, config, (height * step, width * step))
    named = file if isinstance(file, str | os.PathLike) else getattr(file, 'name', None)
    path = Path(named) if isinstance(named, str | os.PathLike) else Path()
    # Grey for a model of one channel.
    return Photograph(path, _normalise(image, config, (height, width)), shown.expand(3, -1, -1).permute(1, 2, 0))


def load_image(
    file: str | Path | bytes | IO[bytes],
    model: nn.Module,
    size: Sequence[int] | None = None,
    decoding: Decoding | None = None,
) -> Tensor:
    """Read an image only for the model: the `images` (1, C, H, W) of `load_photograph`, which takes longer.

    Args:
        file: As in `load_photograph`.
        size: (H, W) in pixels; None means the model's evaluation size.
        decoding: Options of reading the file; None for the default ones.

    Raises:
        CorruptImageError: the file cannot be decoded.
    """
    check_channels(model, 1, 3)
    height, width = default_size(model) if size is None else size
    return _normalise(open_image(file, decoding=decoding), resolve_input_data_config(model), (height, width))


def _normalise(image: Image, config: dict[str, Any], size: tuple[int, int]) -> Tensor:
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ('mean', 'std'))
    return ((_crop(image, config, size) / 255 - mean) / std)[None]


def _crop(image: Image, config: dict[str, Any], size: tuple[int, int]) -> Tensor:
    # (C, H, W) uint8, by timm's transform for the model.
    channels = config['input_size'][0]
    options = {**config, 'input_size': (channels, *size)}
    transform = crop_thin_images(create_transform(**options, use_prefetcher=True))
    return transform(image.convert('L') if channels == 1 else image)


def load_batches(
    paths: Sequence[Path],
    model: nn.Module,
    size: Sequence[int] | None = None,
    skipped: SkippedImages | None = None,
    decoding: Decoding | None = None,
) -> Iterator[Tensor]:
    """Yield images (B, C, H, W) as by `load_image`, on the device of the model, BATCH at a time.

    Args:
        skipped: Receives images that cannot be decoded; None makes them errors.
    """
    device = next(model.parameters()).device
    for start in range(0, len(paths), BATCH):
        batch = []
        for path in paths[start : start + BATCH]:
            try:
                batch.append(load_image(path, model, size, decoding))
            except CorruptImageError as error:
                if skipped is None:
                    raise
                skipped.add(path, error)
        if batch:
            yield torch.cat(batch).to(device)


@torch.no_grad()
def predictions(model: Any, logits: Tensor, count: int = 5) -> list[tuple[str, float]]:
    """Return the most likely classes of one image with their probabilities.

    Args:
        logits: (1, classes).

    Raises:
        ValueError: the model has no classifier, or label names of another number.
    """
    if not model.num_classes:
        raise ValueError('expected a model with a classifier, got one with num_classes=0')
    chance, index = logits[0].float().softmax(0).topk(min(count, logits.shape[1]))
    names = class_names(model)
    return [(names[i], p) for i, p in zip(index.tolist(), chance.tolist(), strict=True)]
