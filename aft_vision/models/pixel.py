"""Models of images as sub-pixels in raster order, R, G, B within a pixel (AFT Sec. 5.1, Tables 2 and 3)."""

import math
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor

from aft_vision.models.decoder import AFTDecoder


class PixelDecoder(AFTDecoder):
    """An `AFTDecoder` of the 3 * H * W sub-pixels of images.

    Args:
        img_size: side in pixels, or (H, W).
        context: 3 * H * W, or None; without img_size, the image is a square.
        kwargs: passed to `AFTDecoder`.

    Raises:
        ValueError: context does not match img_size, or as `AFTDecoder`.
    """

    def __init__(
        self, img_size: int | tuple[int, int] | None = None, context: int | None = None, **kwargs: Any
    ) -> None:
        if img_size is None:
            img_size = 32 if context is None else math.isqrt(max(0, context) // 3)
        height, width = to_2tuple(img_size)
        if context not in (None, 3 * height * width):
            raise ValueError(
                f'context must be {3 * height * width}, the sub-pixels of {height} x {width} pixels, got {context}'
            )
        super().__init__(context=3 * height * width, **kwargs)
        self.img_size = (height, width)

    def check_images(self, images: Tensor) -> Tensor:
        """Return the images if their shape and data type fit the model.

        Raises:
            ValueError: they are not (B, 3, H, W) uint8.
        """
        expected = (3, *self.img_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(f'images must have shape (B, {", ".join(map(str, expected))}), got {tuple(images.shape)}')
        if images.dtype != torch.uint8:
            raise ValueError(f'images must be uint8, got {images.dtype}')
        return images

    def to_images(self, tokens: Tensor) -> Tensor:
        """Convert tokens (B, 3 * H * W) to images (B, 3, H, W) uint8."""
        return tokens_to_images(tokens, self.img_size)

    def sample_images(self, num_samples: int = 1, **rules: Any) -> Tensor:
        """Sample images, (num_samples, 3, H, W) uint8.

        Args:
            rules: passed to `Session.complete`: temperature, top_k, top_p, seed, generator, progress.
        """
        return self.to_images(self.sample(num_samples, **rules))

    def complete_images(self, images: Tensor, mask: Tensor, num_samples: int = 1, **rules: Any) -> Tensor:
        """Sample the missing pixels of images, in raster order (AFT Fig. 4).

        A sampled pixel sees all pixels before it in raster order, given or sampled, and none after it.

        Args:
            images: (P, 3, H, W) uint8.
            mask: (H, W), (P, H, W) or (P, 3, H, W) bool, True where a pixel or sub-pixel is given.
            num_samples: samples per image.
            rules: passed to `Session.complete`: temperature, top_k, top_p, seed, generator, progress.

        Returns:
            (P * num_samples, 3, H, W) uint8, the samples of one image in consecutive rows.

        Raises:
            ValueError: a shape or another argument is out of range.
        """
        tokens = images_to_tokens(self.check_images(images))
        given = mask_to_tokens(mask, len(images), self.img_size)
        return self.to_images(self.complete(tokens, given, num_samples, **rules))


def images_to_tokens(images: Tensor) -> Tensor:
    """Convert images (B, 3, H, W) uint8 to tokens (B, 3 * H * W) int64, in raster order, R, G, B within a pixel."""
    return images.permute(0, 2, 3, 1).flatten(1).long()


def tokens_to_images(tokens: Tensor, img_size: tuple[int, int]) -> Tensor:
    """Convert tokens (B, 3 * H * W) to images (B, 3, H, W) uint8.

    Raises:
        ValueError: the number of tokens does not match the image size.
    """
    height, width = img_size
    if tokens.ndim != 2 or tokens.shape[1] != 3 * height * width:
        raise ValueError(
            f'expected {3 * height * width} tokens for {height} x {width} pixels, got shape {tuple(tokens.shape)}'
        )
    return tokens.unflatten(1, (height, width, 3)).permute(0, 3, 1, 2).to(torch.uint8)


def mask_to_tokens(mask: Tensor, batch: int, img_size: tuple[int, int]) -> Tensor:
    """Convert a mask over pixels or sub-pixels to a mask over tokens, (B, 3 * H * W) bool.

    Raises:
        ValueError: mask is not a bool (H, W), (B, H, W) or (B, 3, H, W).
    """
    shapes = [img_size, (batch, *img_size), (batch, 3, *img_size)]
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        raise ValueError(
            f'mask must be a bool tensor of shape {" or ".join(map(str, shapes))}, True where a pixel is given, '
            f'got {mask.dtype} of shape {tuple(mask.shape)}'
        )
    if mask.ndim < 4:
        mask = mask.unsqueeze(-3).expand(batch, 3, *img_size)
    return mask.permute(0, 2, 3, 1).flatten(1)


MASKS = ('top-half', 'bottom-half', 'left-half', 'right-half')


def half_mask(name: str, img_size: tuple[int, int]) -> Tensor:
    """Build a mask (H, W) bool that is True on half of an image.

    Args:
        name: the half that is True: one of MASKS.
        img_size: (H, W) in pixels.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in MASKS:
        raise ValueError(f'the mask must be one of {", ".join(MASKS)}, got {name!r}')
    (height, width), mask = img_size, torch.zeros(img_size, dtype=torch.bool)
    halves = {
        'top-half': mask[: height // 2],
        'bottom-half': mask[height // 2 :],
        'left-half': mask[:, : width // 2],
        'right-half': mask[:, width // 2 :],
    }
    halves[name].fill_(True)
    return mask


def aft_local_pixel(**kwargs: Any) -> PixelDecoder:
    """AFT-local-256, L = 24, d = 256: 2.74 bits per dim (AFT Table 2)."""
    model_args = dict(mixer='local', dim=256, depth=24, window=256, bias_dim=64, dropout=0.1)
    return PixelDecoder(**dict(model_args, **kwargs))


def aft_simple_pixel(**kwargs: Any) -> PixelDecoder:
    """AFT-simple, L = 24, d = 256: 2.89 bits per dim (AFT Table 2)."""
    model_args = dict(mixer='simple', dim=256, depth=24, dropout=0.1)
    return PixelDecoder(**dict(model_args, **kwargs))


def transformer_pixel(**kwargs: Any) -> PixelDecoder:
    """The Transformer, L = 24, d = 256, h = 2: 2.86 bits per dim (AFT Table 2)."""
    model_args = dict(mixer='attention', dim=256, depth=24, num_heads=2, dropout=0.1)
    return PixelDecoder(**dict(model_args, **kwargs))
