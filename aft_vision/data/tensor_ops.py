"""The operations of timm's automatic augmentation on uint8 batches, a level an image, with the pixels of Pillow.

They work where the batch lies and in the arithmetic of Pillow, so that results are equal bit by bit.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import equalize_image

# What the longest operation takes: a matrix of 2 x 3 and a colour.
NUMBERS = 6 + 3


def affine(images: Tensor, numbers: Tensor) -> Tensor:
    """Warped images, bicubic.

    Args:
        images: (n, 3, H, W) uint8, as for all operations here.
        numbers: (n, NUMBERS) float64, as for all operations here; this one takes the matrix, row by row, that turns
            coordinates of the result into those of the source, and the colour of what lies outside of the source.

    Returns:
        (n, 3, H, W) uint8, as from all operations here.
    """
    n, _, height, width = images.shape
    a, b, c, d, e, f = numbers[:, :6, None, None].unbind(1)
    x = torch.arange(width, device=images.device) + 0.5
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    x, y = a * x + b * y + c, d * x + e * y + f  # (n, H, W)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    across, down = (x - 0.5 - left)[:, None], (y - 0.5 - top)[:, None]
    columns = [(left + k).clamp(0, width - 1).long() for k in (-1, 0, 1, 2)]
    rows = [(top + k).clamp(0, height - 1).long() * width for k in (-1, 0, 1, 2)]

    def pixels(place: Tensor) -> Tensor:
        place = place.view(n, 1, -1).expand(-1, 3, -1)
        return images.flatten(2).gather(2, place).view(images.shape).short()

    lines = [_cubic([pixels(row + column) for column in columns], across) for row in rows]
    values = _cubic(lines, down).clamp(0, 255).byte()
    return torch.where(inside[:, None], values, numbers[:, 6:9, None, None].byte())


def auto_contrast(images: Tensor, numbers: Tensor) -> Tensor:
    """Images whose channels are stretched to the whole range."""
    low, high = (bound.double() for bound in images.flatten(2).aminmax(dim=2))
    # A tensor, because a number divided by a tensor is the number times the tensor's rounded reciprocal.
    scale = torch.where(high > low, torch.full_like(high, 255.0) / (high - low), 1.0)
    offset = torch.where(high > low, -low * scale, 0.0)
    return (images * scale[:, :, None, None] + offset[:, :, None, None]).clamp(0, 255).byte()


def equalize(images: Tensor, numbers: Tensor) -> Tensor:
    """Images whose channels have uniform histograms."""
    return equalize_image(images)


def invert(images: Tensor, numbers: Tensor) -> Tensor:
    """Negatives."""
    return ~images


def solarize(images: Tensor, numbers: Tensor) -> Tensor:
    """Images inverted where they are at least a threshold (in [0, 256])."""
    return torch.where(images < _first(numbers).short(), images, ~images)


def solarize_add(images: Tensor, numbers: Tensor) -> Tensor:
    """Images with a number (in [0, 128]) added where they are below 128."""
    return torch.where(images < 128, images + _first(numbers).byte(), images)


def posterize(images: Tensor, numbers: Tensor) -> Tensor:
    """Images reduced to their highest bits; black at 0 of them."""
    dropped = (8 - _first(numbers).int()).clamp(0, 8)
    return images & (255 << dropped).byte()


def color(images: Tensor, numbers: Tensor) -> Tensor:
    """Images blended with their grey ones; factor 0 is grey, 1 changes nothing, as in all blends here."""
    return _blend(_grey(images), images, numbers)


def desaturate(images: Tensor, numbers: Tensor) -> Tensor:
    """Images blended with their grey ones the other way round: 1 is grey, 0 changes nothing."""
    return color(images, (1.0 - numbers).clamp(0.0, 1.0))


def contrast(images: Tensor, numbers: Tensor) -> Tensor:
    """Images blended with their mean grey."""
    grey = _grey(images)
    count = grey[0].numel()
    mean = (2 * grey.sum((1, 2, 3), keepdim=True) + count) // (2 * count)
    return _blend(mean, images, numbers)


def brightness(images: Tensor, numbers: Tensor) -> Tensor:
    """Images blended with black."""
    return _blend(torch.zeros_like(images), images, numbers)


def sharpness(images: Tensor, numbers: Tensor) -> Tensor:
    """Images blended with smooth ones: the mean of 3 x 3 pixels, where the middle counts five times; the edge stays."""
    wide = images.short()
    columns = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    total = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:] + 4 * wide[:, :, 1:-1, 1:-1]
    wide[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26
    return _blend(wide, images, numbers)


def blur(images: Tensor, numbers: Tensor) -> Tensor:
    """Images blurred by a box of five pixels, three times along each axis; the numbers are its `blur_weights`."""
    weights = numbers[:, :3, None, None, None].int().unbind(1)
    for axis in (3, 3, 3, 2, 2, 2):
        images = _box_blur(images, weights, axis)
    return images


def blur_weights(radius: float) -> tuple[int, int, int]:
    """Weights of 2**-24 of the pixels at distance 0, 1 and 2, for Pillow's Gaussian blur with a radius of at most 2."""
    # In single precision as in Pillow, except for the root and the line after it.
    one = np.float32(1)
    variance = np.float32(radius) * np.float32(radius) / np.float32(3)
    length = np.float32(math.sqrt(12.0 * float(variance) + 1.0))
    whole = np.float32(math.floor((float(length) - 1.0) / 2.0))
    part = (2 * whole + one) * (whole * (whole + one) - 3 * variance)
    part /= 6 * (variance - (whole + one) * (whole + one))
    inner = int(np.float32(2**24) / ((whole + part) * 2 + one))
    outer = (2**24 - (2 * int(whole + part) + 1) * inner) // 2
    return (inner, inner, outer) if whole + part >= 1 else (inner, outer, 0)


# Named as the functions of timm that they stand for, except those that all warps and all blurs come to.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    operation.__name__: operation
    for operation in (
        affine,
        auto_contrast,
        equalize,
        invert,
        solarize,
        solarize_add,
        posterize,
        color,
        desaturate,
        contrast,
        brightness,
        sharpness,
        blur,
    )
}


def _first(numbers: Tensor) -> Tensor:
    return numbers[:, :1, None, None]


def _cubic(taps: Sequence[Tensor], d: Tensor) -> Tensor:
    """Interpolate between the middle ones of four taps, with the coefficient -1 of Pillow."""
    p, q, r, s = taps
    value = d * (q - p - r + s)
    value += 2 * (p - q) + r - s
    value *= d
    value += r - p
    value *= d
    value += q
    return value


def _blend(plain: Tensor, images: Tensor, numbers: Tensor) -> Tensor:
    plain, factor = plain.float(), _first(numbers).float()
    return (plain + factor * (images - plain)).clamp(0, 255).byte()


def _grey(images: Tensor) -> Tensor:
    """(n, 1, H, W) int32."""
    red, green, blue = images.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16


def _box_blur(images: Tensor, weights: Sequence[Tensor], axis: int) -> Tensor:
    """Average five pixels with weights (n, 1, 1, 1) of 2**-24 by distance; the edges are repeated."""
    size = images.shape[axis]
    place = torch.arange(-2, size + 2, device=images.device).clamp(0, size - 1)
    padded = images.int().index_select(axis, place)
    a, b, c, d, e = (padded.narrow(axis, k, size) for k in range(5))
    middle, side, end = weights
    # Pillow's integers have 32 bits and no sign: what runs into the sign here is back in the byte that is taken.
    return ((c * middle + (b + d) * side + (a + e) * end + 2**23) >> 24).byte()
