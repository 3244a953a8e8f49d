"""Finding and reading of image files, for the whole project."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from timm.data import get_img_extensions

# Formats that Pillow knows without reading their pixels itself: data sets, videos, drawings of other programs.
UNREAD = {'BUFR', 'GRIB', 'HDF5', 'WMF', 'MPEG', 'EPS'}
# Transposition for each value of the EXIF orientation.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LINK = 'link to a folder above'
# Files and folders whose names begin with a dot, which programs keep for themselves: Jupyter's .ipynb_checkpoints, and
# ._1.jpg, which macOS puts next to 1.jpg. MACOS_FOLDER has the latter in zip files.
HIDDEN, MACOS_FOLDER = 'hidden', '__MACOSX'
HIDDEN_NAME = re.compile(r'(?:^|/)\.(?!\.?(?:/|$))')


class CorruptImageError(ValueError):
    """An image that cannot be decoded; the message names its path."""


class FoundImages(NamedTuple):
    """The images below a folder.

    Attributes:
        paths: Paths of the images, unordered.
        folders: Names of the direct subfolders, except hidden ones and `MACOS_FOLDER`.
        ignored: Number of other files by `file_kind`; links to a parent folder count as `LINK`.
    """

    paths: list[str]
    folders: list[str]
    ignored: Counter[str]


def open_image(file: str | Path | IO[bytes], name: str | None = None) -> Image.Image:
    """Read the first frame of an image as RGB, rotated by its EXIF orientation, 16 bits scaled to 8.

    Args:
        name: Its name in errors; its path by default.

    Raises:
        CorruptImageError: it cannot be decoded, or has pixels of more than 16 bits.
    """
    try:
        with Image.open(file) as image:
            # Before reading the orientation, because Pillow itself rotates TIFF files.
            image.load()
            turn, pixels = UPRIGHT.get(_orientation(image)), _to_rgb(image)
    # Decoders raise various errors for damaged files: OSError, SyntaxError, struct.error, DecompressionBombError.
    except Exception as error:
        # Pillow's message has the address of a file in memory.
        reason = 'its format is unknown' if isinstance(error, UnidentifiedImageError) else error
        raise CorruptImageError(f'expected an image that can be decoded, got {name or file}: {reason}') from error
    return pixels if turn is None else pixels.transpose(turn)


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    # A damaged EXIF block, whose parser raises almost any error, does not mean damaged pixels.
    except Exception:
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == 'F':
        raise ValueError('expected pixels of 8 or 16 bits, got floating-point numbers')
    if not image.mode.startswith('I'):
        return image.convert('RGB')
    # Pillow returns 16 bits of some of these formats as 32; for others the largest value is unknown.
    if image.mode == 'I' and image.format not in ('PNG', 'PPM'):
        raise ValueError('expected unsigned pixels of 8 or 16 bits, got 32 bits or signed numbers')
    # Pillow would clip these at 255.
    return Image.fromarray((np.asarray(image) // 256).astype(np.uint8)).convert('RGB')


def image_suffixes() -> set[str]:
    """Return the suffixes of image files: of all formats that Pillow reads, and those added to timm's."""
    # Registers all of Pillow's formats.
    kinds = Image.registered_extensions()
    readable = Image.OPEN.keys() - UNREAD
    return {*(suffix for suffix, kind in kinds.items() if kind in readable), *get_img_extensions()}


def file_kind(path: str) -> str:
    """Return the suffix of a file in lower case, or `HIDDEN` if a name in its path begins with a dot."""
    return HIDDEN if is_hidden(path) else os.path.splitext(path)[1].lower()


def is_hidden(path: str) -> bool:
    """Return whether a name in a path begins with a dot."""
    return HIDDEN_NAME.search(path) is not None


def find_images(folder: str | Path) -> FoundImages:
    """Find all images below a folder that are not hidden; links are followed except to a parent folder."""
    found, suffixes = FoundImages([], [], Counter()), image_suffixes()
    place = Path(folder).resolve()
    above = frozenset(map(str, (place, *place.parents)))
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if _enters(entry, above))
    found.folders.extend(name for name in names if not is_hidden(name) and name != MACOS_FOLDER)
    for entry in _walk(str(folder), above):
        kind = file_kind(entry.path[len(str(folder)) :])
        if entry.is_dir():
            found.ignored[LINK] += 1
        elif kind in suffixes:
            found.paths.append(entry.path)
        else:
            found.ignored[kind] += 1
    return found


def _walk(folder: str, above: frozenset[str]) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a folder except the folders themselves.

    Args:
        above: The resolved folder and its parents.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if _enters(entry, above):
                yield from _walk(entry.path, above | {os.path.realpath(entry.path)})
            else:
                yield entry


def _enters(entry: os.DirEntry[str], above: frozenset[str]) -> bool:
    return entry.is_dir() and os.path.realpath(entry.path) not in above


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """Describe the ignored files by kind: `3 files (2 .txt, 1 .heic)`; '' for none."""
    if not ignored:
        return ''
    kinds = ', '.join(f'{count} {kind or "without a suffix"}' for kind, count in sorted(ignored.items()))
    total = sum(ignored.values())
    return f'{total} file{"s" if total > 1 else ""} ({kinds})'
