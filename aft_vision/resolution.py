"""Classifiers at other image sizes than in training: resized copies, averaged predictions, pictures."""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, to_2tuple
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop

from aft_vision.data import NativeShape
from aft_vision.models import AFTVisionTransformer
from aft_vision.sizes import check_image_size, check_resizable, has_fixed_input_size, resize_model
from aft_vision.visualize import new_figure

Size = int | tuple[int, int]


def check_size(model: nn.Module, size: Size, pad: bool = False) -> None:
    """Check that `resized_copy` supports a size, without making the copy.

    Raises:
        ValueError: the size is below 1, the model has another fixed size and no `set_input_size`, or the image is
            neither whole patches nor padded.
    """
    if min(to_2tuple(size)) < 1:
        raise ValueError(f'expected an image size of at least 1 px, got {size}')
    check_resizable(model, to_2tuple(size))
    if not (pad and _can_pad(model)):
        check_image_size(model, to_2tuple(size))


def naflex_shape(model: nn.Module, max_tokens: int) -> NativeShape:
    """Return the shapes of images of at most this many patches, for a model of timm's NaFlex batches.

    Raises:
        ValueError: the model takes only images of one shape.
    """
    if isinstance(model, NaFlexVit):
        return NativeShape(max_tokens, to_2tuple(model.embeds.patch_size))
    if not isinstance(model, AFTVisionTransformer):
        raise ValueError(
            'expected a model of images of native shapes, an aft_* vision transformer or a naflexvit_* of timm, got '
            f'{type(model).__name__}, which takes sizes in pixels'
        )
    if has_fixed_input_size(model):
        raise ValueError(
            'expected a model of images of native shapes, got one of a fixed size: create it with dynamic_img_size=True'
        )
    if model.attn_pool is not None:
        raise ValueError(
            'expected a model of images of native shapes, got attention pooling: create it with global_pool=avg'
        )
    return NativeShape(max_tokens, to_2tuple(model.patch_embed.patch_size))


def _can_pad(model: nn.Module) -> bool:
    return isinstance(getattr(model, 'patch_embed', None), PatchEmbed)


def resized_copy(model: nn.Module, size: Size, pad: bool = False) -> nn.Module:
    """Copy a model for images of one size; the model itself is not modified.

    It is a copy because repeated resizing of position parameters would accumulate errors. A fixed-size model is resized
    by timm's `set_input_size`.

    Args:
        size: (H, W) in pixels, or the side of a square.
        pad: Let the patch embedding pad images at the right and at the bottom to whole patches, with 0, the mean of
            normalised images. Every padded patch contains pixels of the image, so all patches count and no mask is
            used.

    Raises:
        ValueError: as in `check_size`.
    """
    check_size(model, size, pad)
    height, width = to_2tuple(size)
    resized: Any = copy.deepcopy(model)
    if pad and _can_pad(model):
        resized.patch_embed.dynamic_img_pad, resized.patch_embed.strict_img_size = True, False
        steps = resized.patch_embed.patch_size
        height, width = math.ceil(height / steps[0]) * steps[0], math.ceil(width / steps[1]) * steps[1]
    return resize_model(resized, (height, width))


class AveragedPrediction(nn.Module):
    """A classifier that averages its predictions over image sizes, and over the image and its mirror image.

    Probabilities are averaged, not logits, and their logarithm is returned. Cross-entropy, top-k and `evaluate` accept
    it as logits, and its exponential sums to 1.

    The smaller images are computed from the given one by antialiased bicubic interpolation on its device, without
    decoding again. Compared with loading the file at that size, there is one more interpolation, and bicubic overshoot
    is not clipped. The prediction at the largest size is exact.

    Args:
        model: Maps images (B, 3, H, W) to logits (B, classes). It is shared if it takes any size; a fixed-size or
            padded model is copied in its current state.
        sizes: (H, W) in pixels or sides of squares; if empty, images keep their size. A size of another aspect ratio
            uses the centre of the image without distortion.
        flip: Also average over the image and its mirror image at each size.
        pad: As in `resized_copy`.

    Attributes:
        input_size: (H, W) of the input images, the largest height and width of the sizes; None without sizes.

    Raises:
        ValueError: as in `check_size`, or sizes is a number.
    """

    def __init__(self, model: nn.Module, sizes: Sequence[Size] = (), flip: bool = False, pad: bool = False) -> None:
        super().__init__()
        if isinstance(sizes, int):
            raise ValueError(f'expected several sizes, such as [{sizes}], got {sizes}')
        self.sizes: list[tuple[int, int]] = [to_2tuple(size) for size in sizes]
        self.flip = flip
        for size in self.sizes:
            check_size(model, size, pad)
        if not self.sizes:
            models = [model]
        elif has_fixed_input_size(model):
            models = [resized_copy(model, size, pad) for size in self.sizes]
        else:
            models = [resized_copy(model, self.sizes[0], pad) if pad else model] * len(self.sizes)
        self.models = nn.ModuleList(models)

    @property
    def input_size(self) -> tuple[int, int] | None:
        if not self.sizes:
            return None
        return max(height for height, _ in self.sizes), max(width for _, width in self.sizes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute log-probabilities (B, classes) of images (B, 3, H, W), in at least float32."""
        views = [resize_images(images, size) for size in self.sizes] or [images]
        predictions = []
        for model, view in zip(self.models, views, strict=True):
            for x in (view, view.flip(-1)) if self.flip else (view,):
                logits = model(x)
                predictions.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1))
        return torch.stack(predictions).logsumexp(0) - math.log(len(predictions))


def resize_images(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize the largest central part of that aspect ratio, by antialiased bicubic interpolation.

    Args:
        images: (B, C, H, W), floating point.
        size: (H, W) in pixels.

    Returns:
        (B, C, *size); the images themselves if they have that size.
    """
    if images.shape[-2:] == size:
        return images
    scale = min(images.shape[-2] / size[0], images.shape[-1] / size[1])
    part = center_crop(images, [round(size[0] * scale), round(size[1] * scale)])
    # torch does not interpolate half types on a CPU.
    part32 = part.to(torch.promote_types(part.dtype, torch.float32))
    return F.interpolate(part32, size, mode='bicubic', align_corners=False, antialias=True).to(part.dtype)


def size_label(row: Mapping[str, Any]) -> str:
    """Format the size of a row with `height` and `width`, `scales` or `max_tokens`: `384x256`, `9+18`, `native 96`."""
    if 'max_tokens' in row:
        return f'native {row["max_tokens"]}'
    sizes = row.get('scales') or [(row['height'], row['width'])]
    return '+'.join(str(height) if height == width else f'{height}x{width}' for height, width in sizes)


def standard_error(row: Mapping[str, Any], key: str = 'top1') -> float:
    """Return the standard error of an accuracy in percent, from its row's `samples`."""
    return math.sqrt(row[key] * (100 - row[key]) / row['samples'])


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Return the distinguishing parts of paths: runs/a/best.pth and runs/b/best.pth become a and b."""
    parts = [list(Path(path).resolve().parts) for path in paths]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
            for part in parts:
                del part[end]
    return [str(Path(*part)) for part in parts]


def draw_sizes(rows: Sequence[Mapping[str, Any]], train_size: Sequence[int] | None = None) -> Any:
    """Draw accuracy, throughput and memory of one model over the image size.

    Args:
        rows: Results of `evaluate` for each size, with `peak_memory_mb` and the keys of `size_label`; native shapes
            and averaged sizes come last.
        train_size: (H, W) in pixels that the model was trained at, which is marked; None marks none.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    labels = [size_label(row).replace('+', '\n+').replace(' ', '\n') for row in rows]
    single = sum('height' in row and 'scales' not in row for row in rows)
    figure = new_figure(11, 3.5)
    accuracy, speed, memory = figure.subplots(1, 3)
    for key, name in (('top1', 'top-1'), ('top5', 'top-5')):
        if key not in rows[0]:
            continue
        points = [row[key] for row in rows]
        errors = [standard_error(row, key) for row in rows]
        line = accuracy.errorbar(labels[:single], points[:single], errors[:single], fmt='o-', capsize=3, label=name)[0]
        rest = labels[single:], points[single:], errors[single:]
        accuracy.errorbar(*rest, fmt='D', capsize=3, color=line.get_color())
    trained = train_size and size_label({'scales': [train_size]})
    if trained in labels[:single]:
        accuracy.axvline(labels.index(trained), color='0.5', linestyle=':', label='size of training')
    accuracy.set(xlabel='image size (pixels)', ylabel='accuracy and standard error (%)')
    accuracy.set_ylim(bottom=0)
    accuracy.legend()
    speed.bar(labels, [row['images_per_second'] for row in rows])
    speed.set(xlabel='image size (pixels)', ylabel='images/s, forward pass')
    memory.bar(labels, [row['peak_memory_mb'] for row in rows])
    memory.set(xlabel='image size (pixels)', ylabel='peak memory (MiB)')
    if len(labels) > 8:
        for axes in (accuracy, speed, memory):
            axes.tick_params(axis='x', labelrotation=90)
    return figure
