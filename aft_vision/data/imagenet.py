"""Loaders for an ImageFolder: `ROOT/train/CLASS/*.jpg` and `ROOT/{val,validation,test}/CLASS/*.jpg`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageDataset, create_dataset, create_loader
from timm.data.auto_augment import posterize

TRAIN_FOLDERS = ('train',)
EVAL_FOLDERS = ('val', 'validation', 'test')


@dataclass(frozen=True)
class Augmentation:
    """Random changes to the training images; the defaults are DeiT's.

    Attributes:
        scale: Smallest and largest area of the random crop, as a fraction of the image.
        hflip: Probability of a horizontal flip.
        color_jitter: Strength of the colour jitter; timm leaves it out when `auto_augment` is set.
        auto_augment: timm's RandAugment or AutoAugment policy; None for none.
        random_erasing: Probability of erasing a random rectangle.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    hflip: float = 0.5
    color_jitter: float = 0.3
    auto_augment: str | None = 'rand-m9-mstd0.5-inc1'
    random_erasing: float = 0.25

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                f'augmentation scale must be (low, high) with 0 < low <= high <= 1, got {tuple(self.scale)}'
            )
        for name in ('hflip', 'random_erasing'):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f'augmentation {name} must be a probability in [0, 1], got {getattr(self, name)}')


class Loaders(NamedTuple):
    """The two loaders of a data set, and the class names in the order of their indices."""

    train: Any
    validation: Any
    class_names: list[str]


def find_split(root: str | Path, folders: Sequence[str] = EVAL_FOLDERS) -> Path:
    """Return the first of `folders` that exists in the data set directory `root`.

    Raises:
        ValueError: `root` is missing, not a directory or empty, or has none of the folders.
    """
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f'expected a data set directory with the folders train and val, got {root}, which is not one')
    found = sorted(path.name for path in root.iterdir())
    if not found:
        raise ValueError(f'expected a data set directory with the folders train and val, got {root}, which is empty')
    for folder in folders:
        if (root / folder).is_dir():
            return root / folder
    raise ValueError(f'expected a folder {" or ".join(folders)} in {root}, got only {", ".join(found)}')


def create_loaders(
    root: str | Path,
    img_size: tuple[int, int],
    batch_size: int,
    *,
    eval_batch_size: int | None = None,
    augment: Augmentation | None = None,
    crop_pct: float = 0.875,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
    num_workers: int = 4,
    device: torch.device | str = 'cpu',
) -> Loaders:
    """Make the training and validation loaders of an ImageFolder.

    Args:
        root: Directory with `train` and one of `val`, `validation`, `test`.
        img_size: (H, W) in pixels, of both.
        batch_size: Images per training batch; the last incomplete batch of an epoch is dropped.
        eval_batch_size: Images per validation batch; `batch_size` by default.
        augment: Random changes to the training images; DeiT's by default.
        crop_pct: Side of the validation crop relative to the resized image, in (0, 1].
        mean, std: Per channel, of pixels in [0, 1].
        num_workers: Decoding processes per loader; 0 decodes in this process.
        device: Where the batches arrive, normalised.

    Returns:
        Loaders of (image (B, 3, H, W), class index (B,)).

    Raises:
        ValueError: the directory is missing or empty, a split or the images of a class are missing, the class
            folders of the splits differ, or a batch is larger than the training split.
    """
    train_set = _open_split(find_split(root, TRAIN_FOLDERS))
    validation_set = _open_split(find_split(root, EVAL_FOLDERS))
    class_names = _class_names(train_set)
    _check_same_classes(class_names, _class_names(validation_set))
    if not 0 < batch_size <= len(train_set):
        raise ValueError(
            f'batch size must be in [1, {len(train_set)}], the number of training images in {root}, got {batch_size}'
        )
    augment = augment or Augmentation()
    shared: dict[str, Any] = dict(
        mean=tuple(mean), std=tuple(std), num_workers=num_workers, device=torch.device(device)
    )
    train = create_loader(
        train_set,
        input_size=(3, *img_size),
        batch_size=batch_size,
        is_training=True,
        interpolation='bicubic',
        scale=augment.scale,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        re_prob=augment.random_erasing,
        re_mode='pixel',
        **shared,
    )
    _allow_posterize_to_no_bits(train_set.transform)
    validation = _eval_loader(validation_set, img_size, eval_batch_size or batch_size, crop_pct, shared)
    return Loaders(train, validation, class_names)


def create_eval_loader(
    root: str | Path,
    img_size: tuple[int, int],
    batch_size: int,
    *,
    crop_pct: float = 0.875,
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
    num_workers: int = 4,
    device: torch.device | str = 'cpu',
) -> tuple[Any, list[str]]:
    """Make the validation loader alone; arguments and errors as `create_loaders`.

    Returns:
        The loader, every image once and in file order, and the class names in the order of their indices.
    """
    dataset = _open_split(find_split(root, EVAL_FOLDERS))
    shared: dict[str, Any] = dict(
        mean=tuple(mean), std=tuple(std), num_workers=num_workers, device=torch.device(device)
    )
    return _eval_loader(dataset, img_size, batch_size, crop_pct, shared), _class_names(dataset)


def _eval_loader(
    dataset: ImageDataset, img_size: tuple[int, int], batch_size: int, crop_pct: float, shared: dict[str, Any]
) -> Any:
    """DeiT's evaluation: the shorter side to int(size / crop_pct), bicubic, then the centre crop."""
    if not 0 < crop_pct <= 1:
        raise ValueError(f'crop_pct must be in (0, 1], got {crop_pct}')
    if batch_size < 1:
        raise ValueError(f'evaluation batch size must be at least 1, got {batch_size}')
    return create_loader(
        dataset,
        input_size=(3, *img_size),
        batch_size=batch_size,
        is_training=False,
        interpolation='bicubic',
        crop_pct=crop_pct,
        crop_mode='center',
        **shared,
    )


def _allow_posterize_to_no_bits(transform: Any) -> None:
    """Keep the Posterize of RandAugment and AutoAugment working with Pillow 13.

    At the largest magnitude timm keeps 0 bits. Pillow made such an image black up to version 12, as in the runs that
    the published accuracies come from; version 13 raises.
    """
    for step in transform.transforms:
        for op in [*getattr(step, 'ops', ()), *chain.from_iterable(getattr(step, 'policy', ()))]:
            if op.name.startswith('Posterize'):
                op.aug_fn = _posterize


def _posterize(image: Any, bits_to_keep: int, **kwargs: Any) -> Any:
    return posterize(image, bits_to_keep, **kwargs) if bits_to_keep > 0 else image.point(lambda value: 0)


def _open_split(folder: Path) -> ImageDataset:
    """Open one split, after checking that every class folder holds an image."""
    class_folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not class_folders:
        raise ValueError(f'expected one folder per class in {folder}, got none')
    try:
        dataset = create_dataset('', root=str(folder), search_split=False)
    except RuntimeError as error:
        raise ValueError(f'expected images in the class folders of {folder}, got none') from error
    without_images = sorted(set(class_folders) - set(dataset.reader.class_to_idx))
    if without_images:
        raise ValueError(f'expected images in every class folder of {folder}, got none in {", ".join(without_images)}')
    return dataset


def _class_names(dataset: ImageDataset) -> list[str]:
    class_to_idx = dataset.reader.class_to_idx
    return sorted(class_to_idx, key=class_to_idx.__getitem__)


def _check_same_classes(train: list[str], validation: list[str]) -> None:
    if train == validation:
        return
    only_train = sorted(set(train) - set(validation))
    only_validation = sorted(set(validation) - set(train))
    raise ValueError(
        f'expected the same class folders in both splits, got {len(train)} for training and {len(validation)} for '
        f'validation; only in training: {only_train[:5]}; only in validation: {only_validation[:5]}'
    )
