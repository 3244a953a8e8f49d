"""Pillow's own results are expected, bit by bit."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers import as_batch, photographs
from PIL import Image, ImageFilter
from timm.data import auto_augment

from aft_vision.data.tensor_ops import NUMBERS, OPERATIONS, affine, blur, blur_weights, posterize

FILL = (124, 116, 104)
FACTORS = [0.0, 0.1, 0.37, 0.999, 1.0, 1.3, 1.81, 3.7]
LEVELS = {
    'auto_contrast': [None],
    'equalize': [None],
    'invert': [None],
    'solarize': [0, 1, 77, 128, 255, 256],
    'solarize_add': [0, 1, 55, 110, 128],
    'posterize': [1, 2, 4, 7, 8, 9],
    'color': FACTORS,
    'desaturate': [0.0, 0.5, 0.83, 1.0],
    'contrast': FACTORS,
    'brightness': FACTORS,
    'sharpness': FACTORS,
}
# The six numbers take coordinates of the result to those of the source.
MATRICES = {
    'nothing': (1, 0, 0, 0, 1, 0),
    'a_shear_along_x': (1, 0.27, 0, 0, 1, 0),
    'a_shear_along_y': (1, 0, 0, -0.3, 1, 0),
    'whole_pixels': (1, 0, 7, 0, 1, -3),
    'parts_of_pixels': (1, 0, -20.16, 0, 1, 9.7),
    'a_turn': (0.891, 0.454, -7.3, -0.454, 0.891, 13.1),
    'everything_outside': (1, 0, 1000, 0, 1, 0),
}


def images(size: tuple[int, int] = (53, 40)) -> list[Image.Image]:
    """Photographs, and what has no contrast, one channel without any, or all of it."""
    rng = np.random.default_rng(0)
    width, height = size
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    flat = noise.copy()
    flat[..., 1] = 200
    return [
        *photographs(3, size),
        Image.new('RGB', size, (0, 130, 255)),
        Image.fromarray(flat),
        Image.fromarray(noise),
        Image.fromarray(rng.integers(100, 104, noise.shape, dtype=np.uint8)),
    ]


def numbers(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (NUMBERS - len(row))] for row in rows], dtype=torch.float64)


def pairs(levels: Sequence[float | None], size: tuple[int, int] = (53, 40)) -> tuple[list, list, torch.Tensor]:
    """Each image with each level: images, levels, numbers."""
    both = [(image, level) for image in images(size) for level in levels]
    return [image for image, _ in both], [level for _, level in both], numbers([[level or 0.0] for _, level in both])


@pytest.mark.parametrize('name', LEVELS)
def test_colours_are_those_of_pillow(name: str):
    pictures, levels, rows = pairs(LEVELS[name])
    function = getattr(auto_augment, name)
    expected = [
        function(image) if level is None else function(image, level)
        for image, level in zip(pictures, levels, strict=True)
    ]
    assert torch.equal(OPERATIONS[name](as_batch(pictures), rows), as_batch(expected))


@pytest.mark.parametrize('name', LEVELS)
@pytest.mark.parametrize('size', [(1, 1), (2, 3), (3, 2)])
def test_colours_of_tiny_images_are_those_of_pillow(name: str, size: tuple[int, int]):
    pictures, levels, rows = pairs(LEVELS[name][-1:], size)
    arguments = [] if levels[0] is None else levels[:1]
    expected = [getattr(auto_augment, name)(image, *arguments) for image in pictures]
    assert torch.equal(OPERATIONS[name](as_batch(pictures), rows), as_batch(expected))


@pytest.mark.parametrize('matrix', MATRICES.values(), ids=MATRICES)
def test_a_warp_and_what_it_leaves_empty_are_those_of_pillow(matrix: tuple[float, ...]):
    pictures = images()
    options = {'resample': Image.Resampling.BICUBIC, 'fillcolor': FILL}
    expected = [image.transform(image.size, Image.Transform.AFFINE, matrix, **options) for image in pictures]
    rows = numbers([(*matrix, *FILL)] * len(pictures))
    assert torch.equal(affine(as_batch(pictures), rows), as_batch(expected))


def test_images_of_a_batch_are_warped_by_their_own_matrices():
    batch = as_batch(images())
    rows = numbers([(*matrix, *FILL) for matrix in MATRICES.values()])
    together = affine(batch, rows)
    for index, image in enumerate(together):
        assert torch.equal(image, affine(batch[index : index + 1], rows[index : index + 1])[0])


@pytest.mark.parametrize('size', [(53, 40), (1, 1), (2, 3)])
def test_a_blur_is_that_of_pillow(size: tuple[int, int]):
    pictures, radii, _ = pairs([0.1, 0.4, 0.999, 1.0, 1.37, 1.7, 1.9999, 2.0], size)
    expected = [image.filter(ImageFilter.GaussianBlur(r)) for image, r in zip(pictures, radii, strict=True)]
    rows = numbers([blur_weights(radius) for radius in radii])
    assert torch.equal(blur(as_batch(pictures), rows), as_batch(expected))


def test_no_bits_are_black():
    batch = as_batch(images())
    assert not posterize(batch, numbers([[bits] for bits in (0, 0, -1, -8, -9, -100, 0)])).any()
