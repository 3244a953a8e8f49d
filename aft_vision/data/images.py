"""Finding and reading of image files, for the whole project."""

import io
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
# Pixels of an image, which take 0.75 GiB as RGB. The largest sensors of telephones have 200 million.
MAX_PIXELS = 2**28
# What an image may lose as RGB of 8 bits.
LOSSES = ('transparency', 'bands', 'bits')
SAMPLES_PER_PIXEL = 277
LINK = 'link to a folder above'
# Files and folders whose names begin with a dot, which programs keep for themselves: Jupyter's .ipynb_checkpoints, and
# ._1.jpg, which macOS puts next to 1.jpg. MACOS_FOLDER has the latter in zip files.
HIDDEN, MACOS_FOLDER = 'hidden', '__MACOSX'
HIDDEN_NAME = re.compile(r'(?:^|/)\.(?!\.?(?:/|$))')

_PILLOW_LIMIT = threading.Lock()
_reported: set[str] = set()
_logger = logging.getLogger(__name__)


class CorruptImageError(ValueError):
    """An image that cannot be decoded; the message names its path."""


class TransformError(ValueError):
    """An error in changing an image that was decoded; the message names its path."""


class LargeImageError(CorruptImageError):
    """An image of more pixels than allowed; the message names the key that allows it."""


class Decoding(NamedTuple):
    """Options of reading images.

    Attributes:
        max_pixels: Largest number of pixels; a larger JPEG is decoded at a half, a fourth or an eighth of its sides.
        bits: Bits of the pixels that files of 16 bits use, from 8 to 16.
    """

    max_pixels: int = MAX_PIXELS
    bits: int = 16


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


def open_image(
    file: str | Path | bytes | IO[bytes],
    name: str | None = None,
    decoding: Decoding | None = None,
    report: Callable[[str, str], None] | None = None,
) -> Image.Image:
    """Read the first frame of an image as RGB, rotated by its EXIF orientation, 16 bits scaled to 8.

    Args:
        file: A path, the content of a file, or a stream of it.
        name: Its name in errors; its path by default.
        decoding: Options; None for the default ones.
        report: Takes one of LOSSES and a message if something is lost; None logs the first of each in this process.

    Raises:
        LargeImageError: it has more pixels than allowed.
        CorruptImageError: it cannot be decoded, or has pixels of more than 16 bits.
    """
    shown, decoding = name or _describe_file(file), decoding or Decoding()
    file = io.BytesIO(file) if isinstance(file, bytes | bytearray | memoryview) else file
    try:
        with _open_any_size(file) as image:
            _limit_pixels(image, shown, decoding.max_pixels)
            is_high = _raw_mode(image).startswith('RGB;16')
            # Before reading the orientation, because Pillow itself rotates TIFF files.
            image.load()
            turn, pixels = UPRIGHT.get(_orientation(image)), _to_rgb(image, decoding.bits, is_high)
            for loss, message in _find_losses(image, decoding.bits, is_high).items():
                (report or _report)(loss, f'{shown} {message}')
    except LargeImageError:
        raise
    # Decoders raise various errors for damaged files: OSError, SyntaxError, struct.error, DecompressionBombError.
    except Exception as error:
        raise CorruptImageError(
            f'expected an image that can be decoded, got {shown}: {_reason(error, shown)}'
        ) from error
    return pixels if turn is None else pixels.transpose(turn)


def _describe_file(file: str | Path | bytes | IO[bytes]) -> str:
    if isinstance(file, str | os.PathLike):
        return str(file)
    if isinstance(file, bytes | bytearray | memoryview):
        return f'{len(file)} bytes'
    # The name of an open file is its path; a temporary file may have a number.
    named = getattr(file, 'name', None)
    return named if isinstance(named, str) else 'a stream'


def _report(loss: str, message: str) -> None:
    if loss not in _reported:
        _reported.add(loss)
        _logger.warning('%s', message)


def _reason(error: Exception, name: str) -> str:
    # Pillow's message has the address of a file in memory.
    if not isinstance(error, UnidentifiedImageError):
        return str(error) or type(error).__name__
    if name.lower().endswith(('.tif', '.tiff')):
        return 'Pillow reads TIFF files of 1, 3 or 4 bands of 8 bits, or of 1 band of 16 bits, and this is no such file'
    return 'its format is unknown'


def _open_any_size(file: str | Path | IO[bytes]) -> Image.Image:
    """Open an image without Pillow's limit of pixels, which belongs to the whole process."""
    with _PILLOW_LIMIT:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(file)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _limit_pixels(image: Image.Image, name: str, max_pixels: int) -> None:
    """Decode a large JPEG at a part of its sides; raise a LargeImageError for any other."""
    width, height = image.size
    if width * height <= max_pixels:
        return
    factor = next((factor for factor in (2, 4, 8) if width * height <= max_pixels * factor**2), None)
    if factor is not None:
        image.draft(None, (max(width // factor, 1), max(height // factor, 1)))
    # Other formats are not changed by it.
    if image.size == (width, height):
        raise LargeImageError(
            f'expected an image of at most {max_pixels:,} pixels, got {name} of {width} x {height}, which would take '
            f'{3 * width * height / 2**20:,.0f} MiB; data.max_image_pixels={width * height}, or --max-pixels of a '
            'tool, allows it'
        )


def _raw_mode(image: Image.Image) -> str:
    """Return the layout of the pixels in a file by Pillow's name; '' if it is unknown."""
    tile: Any = getattr(image, 'tile', None)
    arguments = tile[0][-1] if tile else ''
    return str(arguments[0] if isinstance(arguments, tuple) and arguments else arguments or '')


def _find_losses(image: Image.Image, bits: int, is_high: bool) -> dict[str, str]:
    """Return what an image loses as RGB of 8 bits, by LOSSES, as the ends of sentences after its name."""
    losses = {}
    if _is_transparent(image):
        losses['transparency'] = 'has transparent pixels; all are read as opaque'
    bands = getattr(image, 'tag_v2', {}).get(SAMPLES_PER_PIXEL, 0) - image.has_transparency_data
    if image.mode == 'RGBX' or (bands > 3 and image.mode != 'CMYK'):
        losses['bands'] = f'has {max(bands, 4)} bands; only the first three are read, as red, green and blue'
    if bits == 16 and 0 < (largest := _largest_value(image, is_high)) < 4096:
        used = 8 if largest < 256 else 12
        more = '' if image.mode == 'RGB' else f'; data.bits={used}, or --bits {used} of a tool, reads the lower ones'
        losses['bits'] = f'has 16 bits but no value above {largest}, so it is almost black{more}'
    return losses


def _largest_value(image: Image.Image, is_high: bool) -> int:
    """Return the largest value of an image of 16 bits; 0 of others."""
    if image.mode.startswith('I'):
        return int(np.asarray(image).max())
    # Pillow keeps only the upper 8 bits.
    upper = int(np.asarray(image).max()) if is_high else 0
    return 256 * upper + 255 if upper else 0


def _is_transparent(image: Image.Image) -> bool:
    # Pillow cannot convert the transparent grey value of 16 bits.
    if not image.has_transparency_data or image.mode.startswith('I'):
        return False
    alpha = (image if image.mode in ('RGBA', 'LA') else image.convert('RGBA')).getchannel('A')
    return bool(np.asarray(alpha).min() < 255)


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    # A damaged EXIF block, whose parser raises almost any error, does not mean damaged pixels.
    except Exception:
        return None


def _to_rgb(image: Image.Image, bits: int, is_high: bool) -> Image.Image:
    if image.mode == 'F':
        raise ValueError('expected pixels of 8 or 16 bits, got floating-point numbers')
    if is_high and bits != 16:
        raise ValueError(f'expected one band for data.bits={bits}, got three of 16 bits, whose upper 8 Pillow reads')
    if not image.mode.startswith('I'):
        return image.convert('RGB')
    # Pillow returns 16 bits of some of these formats as 32; for others the largest value is unknown.
    if image.mode == 'I' and image.format not in ('PNG', 'PPM'):
        raise ValueError('expected unsigned pixels of 8 or 16 bits, got 32 bits or signed numbers')
    values = np.asarray(image)
    if bits != 16 and values.max() >= 2**bits:
        raise ValueError(f'expected values below {2**bits}, as data.bits={bits} says, got {values.max()}')
    # Pillow would clip these at 255.
    return Image.fromarray((values // 2 ** (bits - 8)).astype(np.uint8)).convert('RGB')


def image_suffixes() -> set[str]:
    """Return the suffixes of image files: of all formats that Pillow reads, and those added to timm's."""
    # Registers all of Pillow's formats.
    formats = Image.registered_extensions()
    readable = Image.OPEN.keys() - UNREAD
    return {*(suffix for suffix, name in formats.items() if name in readable), *get_img_extensions()}


def file_kind(path: str) -> str:
    """Return the suffix of a file in lower case, or `HIDDEN` if a name in its path begins with a dot."""
    return HIDDEN if is_hidden(path) else os.path.splitext(path)[1].lower()


def is_hidden(path: str) -> bool:
    """Return whether a name in a path begins with a dot."""
    return HIDDEN_NAME.search(path) is not None


def find_images(folder: str | Path) -> FoundImages:
    """Find all images below a folder that are not hidden; links are followed except to a parent folder."""
    images, suffixes = FoundImages([], [], Counter()), image_suffixes()
    root = Path(folder).resolve()
    above = frozenset(map(str, (root, *root.parents)))
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if _enters(entry, above))
    images.folders.extend(name for name in names if not is_hidden(name) and name != MACOS_FOLDER)
    for entry in _walk(str(folder), above):
        suffix = file_kind(entry.path[len(str(folder)) :])
        if entry.is_dir():
            images.ignored[LINK] += 1
        elif suffix in suffixes:
            images.paths.append(entry.path)
        else:
            images.ignored[suffix] += 1
    return images


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


def describe_skipped(count: int) -> str:
    """Return how many images are left out, as a sentence; '' for none."""
    named = '1 image that cannot be decoded is' if count == 1 else f'{count} images that cannot be decoded are'
    return f'{named} left out' if count else ''


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """Describe the ignored files by kind: `3 files (2 .txt, 1 .heic)`; '' for none."""
    if not ignored:
        return ''
    listed = ', '.join(f'{count} {suffix or "without a suffix"}' for suffix, count in sorted(ignored.items()))
    total = sum(ignored.values())
    return f'{total} file{"s" if total > 1 else ""} ({listed})'
