"""Sheets of small images: samples, and completions below their given parts (AFT Fig. 4)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from aft_vision.data.images import CorruptImageError, open_image
from aft_vision.visualize.photographs import SkippedImages

# Colours of missing pixels, and between images.
HIDDEN, PAPER = 128, 255


def image_sheet(images: Tensor, columns: int | None = None, scale: int = 4) -> Image.Image:
    """Arrange images (N, 3, H, W) uint8 in rows, enlarged by an integer factor.

    Args:
        columns: images per row; None makes the sheet about square.
        scale: factor of enlargement, and pixels between images.

    Raises:
        ValueError: there are no images, or columns or scale is below 1.
    """
    columns = max(1, round(len(images) ** 0.5)) if columns is None else columns
    if len(images) == 0 or columns < 1 or scale < 1:
        raise ValueError(
            f'expected images, columns and a scale of at least 1, got {len(images)}, {columns} and {scale}'
        )
    large = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    grid = make_grid(large, nrow=columns, padding=scale, pad_value=PAPER)
    return Image.fromarray(grid.permute(1, 2, 0).cpu().numpy())


def completion_sheet(
    images: Tensor, mask: Tensor, completed: Tensor, scale: int = 4, show_originals: bool = False
) -> Image.Image:
    """Arrange given parts on top and completions below, with one column per image (AFT Fig. 4).

    Args:
        images: (P, 3, H, W) uint8.
        mask: (H, W), (P, H, W) or (P, 3, H, W) bool, True where a pixel is given.
        completed: (P * n, 3, H, W) uint8, the completions of one image in consecutive rows.
        scale: factor of enlargement.
        show_originals: add a row with the original images.

    Raises:
        ValueError: the number of completions is not a multiple of the number of images.
    """
    if len(images) == 0 or len(completed) % len(images) != 0:
        raise ValueError(f'expected a multiple of {len(images)} completions, got {len(completed)}')
    given = mask if mask.ndim == 4 else mask.unsqueeze(-3)
    rows = [torch.where(given, images, HIDDEN), *completed.unflatten(0, (len(images), -1)).transpose(0, 1)]
    if show_originals:
        rows.append(images)
    return image_sheet(torch.cat(rows), columns=len(images), scale=scale)


def load_pixels(paths: Sequence[str | Path], img_size: tuple[int, int], skipped: SkippedImages | None = None) -> Tensor:
    """Read image files as (N, 3, H, W) uint8, unchanged.

    Args:
        skipped: Receives files that cannot be decoded; None makes them errors.

    Raises:
        CorruptImageError: a file is not an image, or none is.
        ValueError: an image has another size.
    """
    pixels = []
    for path in paths:
        try:
            pixels.append(torch.from_numpy(np.array(open_image(path))))
        except CorruptImageError as error:
            if skipped is None:
                raise
            skipped.add(Path(path), error)
            continue
        size = tuple(pixels[-1].shape[:2])
        if size != tuple(img_size):
            raise ValueError(
                f'expected an image of {img_size[0]} x {img_size[1]} pixels (H x W), '
                f'got {size[0]} x {size[1]} in {path}'
            )
    if not pixels:
        raise CorruptImageError(f'expected an image that can be decoded, got none of {len(paths)}')
    return torch.stack(pixels).permute(0, 3, 1, 2)
