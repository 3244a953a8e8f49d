"""Random changes to the training images: per image before batching, and per batch on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from PIL import Image
from timm.data import Mixup, NaFlexMixup, create_transform
from timm.data.auto_augment import posterize
from timm.data.naflex_random_erasing import PatchRandomErasing
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio
from torchvision.transforms import CenterCrop, Compose, Resize
from torchvision.transforms.functional import pil_modes_mapping, resize

from aft_vision.data.native import NativeShape
from aft_vision.data.ranges import check_ranges, within

# Pixels of a resized image, above which only its crop is resized: a row of 65,536 pixels at a shorter side of 256.
MAX_RESIZED_PIXELS = 2**24


@dataclass(frozen=True)
class Augmentation:
    """Random changes to the training images; the defaults are DeiT's.

    Attributes:
        scale: Smallest and largest area of the random crop, as a fraction of the image.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of the colour jitter; timm ignores it if `auto_augment` is set.
        auto_augment: timm's RandAugment or AutoAugment policy; None for none.
        repeats: Occurrences of an image in an epoch that draws it, each with other random changes. The length of an
            epoch does not change, so it draws one image in `repeats` (repeated augmentation; DeiT uses 3).
        random_erasing: Probability of erasing a random rectangle with normal noise.
        mixup: Parameter of the beta distribution of mixup; 0 for no mixup.
        cutmix: Parameter of the beta distribution of cutmix; with both, each batch uses one of them.
        mix_prob: Probability that a batch is mixed at all.
        mix_switch_prob: Probability of cutmix if both are set.
    """

    scale: tuple[float, float] = within('(0, 1]', (0.08, 1.0))
    hflip: float = within('[0, 1]', 0.5)
    color_jitter: float = within('[0, 10]', 0.3)
    auto_augment: str | None = 'rand-m9-mstd0.5-inc1'
    repeats: int = within('[1, inf)', 3)
    random_erasing: float = within('[0, 1]', 0.25)
    mixup: float = within('[0, 1e6]', 0.8)
    cutmix: float = within('[0, 1e6]', 1.0)
    mix_prob: float = within('[0, 1]', 1.0)
    mix_switch_prob: float = within('[0, 1]', 0.5)

    def __post_init__(self) -> None:
        check_ranges(self, 'augment')
        low, high = self.scale
        if low > high:
            raise ValueError(f'expected augment.scale to be (low, high) with low <= high, got {tuple(self.scale)}')
        try:
            train_transform((32, 32), self, (0.5,) * 3, (0.5,) * 3)
        except (AssertionError, KeyError, ValueError, IndexError) as error:
            raise ValueError(
                'augment.auto_augment must be a policy of timm, such as rand-m9-mstd0.5-inc1, '
                f'got {self.auto_augment!r}'
            ) from error

    @property
    def changes_colors(self) -> bool:
        """Return whether images are changed by more than crop and flip before batching."""
        return self.auto_augment is not None or self.color_jitter > 0

    @property
    def mixes(self) -> bool:
        """Return whether batches are mixed, so that targets are distributions over classes."""
        return self.mix_prob > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def mix_arguments(self) -> dict[str, Any]:
        """Return the arguments of timm's classes of mixup and cutmix."""
        alphas = {'mixup_alpha': self.mixup, 'cutmix_alpha': self.cutmix}
        return {**alphas, 'prob': self.mix_prob, 'switch_prob': self.mix_switch_prob}


class BatchAugmentation:
    """Random erasing, then mixup or cutmix, of a normalised batch on its device, for any loader.

    Uses the global generators of `random`, numpy and torch.

    Args:
        num_classes: Classes of the mixed targets.
        label_smoothing: Label smoothing of the mixed targets, in [0, 1); for unmixed targets the loss applies it.
        device: Device of the batches.
    """

    def __init__(
        self, augment: Augmentation, num_classes: int, label_smoothing: float, device: torch.device | str = 'cpu'
    ) -> None:
        self.erase = None
        if augment.random_erasing > 0:
            self.erase = RandomErasing(augment.random_erasing, mode='pixel', max_count=1, device=str(device))
        self.mix = None
        if augment.mixes:
            self.mix = Mixup(**augment.mix_arguments, label_smoothing=label_smoothing, num_classes=num_classes)

    def __call__(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Augment a batch in place.

        Args:
            images: (B, C, H, W); B must be even if batches are mixed.
            targets: (B,) class indices.

        Returns:
            The images, and the targets: (B, num_classes), smoothed, if batches are mixed, else unchanged.
        """
        if self.erase is not None:
            images = self.erase(images)
        if self.mix is None:
            return images, targets
        return self.mix(images, targets)


class PatchAugmentation:
    """Random erasing of whole patches of a normalised batch on its device, where images keep their shapes.

    Uses the global generators of `random` and torch. Its arguments are those of BatchAugmentation, but the images have
    been mixed before batching, by `native_mixup`.
    """

    def __init__(
        self, augment: Augmentation, num_classes: int, label_smoothing: float, device: torch.device | str = 'cpu'
    ) -> None:
        self.erase = None
        if augment.random_erasing > 0:
            self.erase = PatchRandomErasing(augment.random_erasing, mode='pixel', device=device)
        self.mixes, self.num_classes, self.label_smoothing = augment.mixes, num_classes, label_smoothing

    def __call__(self, batch: dict[str, Any], targets: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
        """Augment a batch in place.

        Args:
            batch: The dict of timm's NaFlex collator.
            targets: (B,) class indices, or (B, num_classes) of mixed images.

        Returns:
            The batch, and the targets: (B, num_classes), smoothed, if images are mixed, else unchanged.
        """
        if self.erase is not None:
            pixels = batch['patches'].unflatten(2, (-1, 3))
            self.erase(pixels, patch_coord=batch['patch_coord'], patch_valid=batch['patch_valid'])
        if not self.mixes:
            return batch, targets
        if targets.ndim == 1:
            targets = torch.nn.functional.one_hot(targets, self.num_classes)
        return batch, targets * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes


def native_mixup(augment: Augmentation, num_classes: int) -> NaFlexMixup | None:
    """Build timm's mixup and cutmix of images of different shapes; return None if images are not mixed.

    It pairs images of similar shapes, and mixes where both are if their centres are put together.
    """
    return NaFlexMixup(**augment.mix_arguments, num_classes=num_classes) if augment.mixes else None


def train_transform(
    img_size: tuple[int, int] | NativeShape, augment: Augmentation, mean: Sequence[float], std: Sequence[float]
) -> Any:
    """Build timm's training transform up to the uint8 tensor, without the steps that act on the batch."""
    crop_and_flip, automatic, to_tensor = train_stages(img_size, augment, mean, std)
    return Compose([to_rgb, *crop_and_flip, *automatic, *to_tensor])


def train_stages(
    img_size: tuple[int, int] | NativeShape, augment: Augmentation, mean: Sequence[float], std: Sequence[float]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the steps of timm's training transform: crop and flip, automatic augmentation and jitter, and the rest."""
    stages = create_transform(
        **_size_arguments(img_size),
        is_training=True,
        scale=augment.scale,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        interpolation='bicubic',
        # RandAugment fills with the mean colour.
        mean=tuple(mean),
        std=tuple(std),
        use_prefetcher=True,
        separate=True,
    )
    crop_and_flip, automatic, to_tensor = (stage.transforms for stage in stages)
    _allow_posterize_to_no_bits(automatic)
    return crop_and_flip, automatic, to_tensor


def eval_transform(img_size: tuple[int, int] | NativeShape, crop_pct: float) -> Any:
    """Build DeiT's evaluation transform: shorter side to int(size / crop_pct), bicubic, then centre crop, uint8.

    A native shape has no crop: the whole image is resized.
    """
    if not 0 < crop_pct <= 1:
        raise ValueError(f'crop_pct must be in (0, 1], got {crop_pct}')
    transform = create_transform(
        **_size_arguments(img_size),
        interpolation='bicubic',
        crop_pct=crop_pct,
        crop_mode='center',
        use_prefetcher=True,
    )
    return Compose([to_rgb, *crop_thin_images(transform).transforms])


def crop_thin_images(transform: Compose) -> Compose:
    """Return timm's evaluation transform with a resized crop that takes images of any shape in little memory."""
    first, crop, *others = transform.transforms
    keeps_ratio = isinstance(first, ResizeKeepRatio) or (isinstance(first, Resize) and isinstance(first.size, int))
    if not keeps_ratio or not isinstance(crop, (CenterCrop, CenterCropOrPad)):
        return transform
    return Compose([_ResizedCrop(first, crop), *others])


class _ResizedCrop:
    """The resize and the centre crop of timm, where an image that would become large is cropped first.

    With its shorter side resized to 256, an image of 1 x 40,000 pixels would have 256 x 10,240,000. Resizing only the
    part that is kept gives the same pixels up to rounding. A side that would shrink below a pixel becomes one.
    """

    def __init__(self, resize: Any, crop: Any) -> None:
        self.resize, self.crop = resize, crop

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self._resized(image)
        interpolation = self.resize.interpolation
        if height * width <= MAX_RESIZED_PIXELS:
            return self.crop(resize(image, [height, width], interpolation))
        rows, columns = self.crop.size
        top, left = round((height - rows) / 2), round((width - columns) / 2)
        y, x = image.height / height, image.width / width
        box = (left * x, top * y, (left + columns) * x, (top + rows) * y)
        return image.resize((columns, rows), pil_modes_mapping[interpolation], box)

    def _resized(self, image: Image.Image) -> tuple[int, int]:
        """Return the height and width of the whole image, resized."""
        size = self.resize.size
        if isinstance(self.resize, ResizeKeepRatio):
            height, width = self.resize.get_params(image, size, self.resize.longest)
            return max(height, 1), max(width, 1)
        longer = int(size * max(image.size) / min(image.size))
        return (size, longer) if image.height <= image.width else (longer, size)


def _size_arguments(size: tuple[int, int] | NativeShape) -> dict[str, Any]:
    if isinstance(size, NativeShape):
        # RandAugment translates by a share of the input size.
        options = {'naflex': True, 'patch_size': size.patch_size, 'max_seq_len': size.max_tokens}
        return {'input_size': (3, *size.square), **options}
    return {'input_size': (3, *size)}


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, which some of torchvision are not; converting RGB again would copy it."""
    return image if image.mode == 'RGB' else image.convert('RGB')


def _allow_posterize_to_no_bits(steps: list[Any]) -> None:
    """Make the Posterize of RandAugment and AutoAugment work with Pillow 13.

    At the largest magnitude timm keeps 0 bits. Up to version 12 Pillow made such an image black, as in the runs behind
    the published accuracies; version 13 raises an error.
    """
    for step in steps:
        # RandAugment has a list of operations, AutoAugment one of lists, and other steps have neither.
        for op in chain(getattr(step, 'ops', ()), *getattr(step, 'policy', ())):
            if op.name.startswith('Posterize'):
                op.aug_fn = _posterize


def _posterize(image: Any, bits_to_keep: int, **kwargs: Any) -> Any:
    return posterize(image, bits_to_keep, **kwargs) if bits_to_keep > 0 else image.point(lambda value: 0)
