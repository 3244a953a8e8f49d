"""timm's automatic augmentation and colour jitter for uint8 batches, where they lie.

timm draws: its own objects are called on a record that stands for an image and lists what they would do to it. The list
has one row of numbers a step, so that loading processes can draw and default collation makes batches of it. Then all
images that drew the same operation are changed at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from timm.data.auto_augment import NAME_TO_OP, AutoAugment, RandAugment
from torch import Tensor
from torchvision.transforms import ColorJitter

from aft_vision.data.augment import Augmentation, automatic_steps, operations_of
from aft_vision.data.tensor_ops import NUMBERS, OPERATIONS, blur_weights

# A step is the operation's place in OPERATIONS, from 1 on, and its numbers.
ROW = 1 + NUMBERS
# Images of a group that are changed at a time; a warp takes 14 MB of memory for one of 224 px.
CHUNK = 32


class TensorAugment:
    """Automatic augmentation and colour jitter of uint8 batches: timm's draws, Pillow's pixels.

    The images are equal bit by bit to those that timm's own transform gives with the same seeds.

    Args:
        img_size: Height and width of the images, in pixels.
        mean: Of the pixels, in [0, 1]; the colour of what a warp leaves empty.

    Raises:
        ValueError: the policy mixes images, as AugMix does.
    """

    def __init__(self, augment: Augmentation, img_size: tuple[int, int], mean: Sequence[float]) -> None:
        self.img_size = img_size
        self.changes = automatic_steps(img_size, augment, mean)
        for change in self.changes:
            if not isinstance(change, (RandAugment, AutoAugment, ColorJitter)):
                raise ValueError(
                    'augment.auto_augment must be RandAugment, AutoAugment or 3-Augment for batches, '
                    f'got {augment.auto_augment!r}'
                )
            _record_colors(change)
        self.length = sum(_max_steps(change) for change in self.changes)

    def draw(self) -> Tensor:
        """Draw what happens to one image.

        Takes its randomness from the global generators of `random`, numpy and torch, as timm does for an image.

        Returns:
            (L, ROW) float64, a row a step, the unused ones 0. L depends on the policy alone.
        """
        record = _Record(self.img_size)
        for change in self.changes:
            if isinstance(change, ColorJitter):
                _draw_jitter(change, record)
            else:
                change(record)
        unused = [(0.0,) * ROW] * (self.length - len(record.rows))
        return torch.tensor(record.rows + unused, dtype=torch.float64).view(self.length, ROW)

    def __call__(self, images: Tensor, steps: Tensor) -> Tensor:
        """Change a batch as drawn.

        Args:
            images: (B, 3, H, W) uint8.
            steps: (B, L, ROW), a draw an image; on the CPU, because the images are grouped there.

        Returns:
            (B, 3, H, W) uint8, new.

        Raises:
            ValueError: the images are not uint8 or not of the size of the constructor, or the steps do not suit.
        """
        self._check(images, steps)
        operations = steps[:, :, 0].long()
        order = operations.argsort(dim=0, stable=True)
        plan = steps.gather(0, order[:, :, None].expand_as(steps))
        plan[:, :, 0] = order
        plan = plan.to(images.device, non_blocking=True)
        images = images.clone()
        for step in range(self.length):
            for operation, rows in _groups(operations[:, step], plan[:, step]):
                chosen = rows[:, 0].long()
                images[chosen] = operation(images[chosen], rows[:, 1:])
        return images

    def _check(self, images: Tensor, steps: Tensor) -> None:
        height, width = self.img_size
        if images.dtype != torch.uint8 or images.shape[1:] != (3, height, width):
            raise ValueError(
                f'images must be torch.uint8 of shape (B, 3, {height}, {width}), '
                f'got {images.dtype} of shape {tuple(images.shape)}'
            )
        if steps.shape != (len(images), self.length, ROW):
            raise ValueError(
                f'steps must have shape {(len(images), self.length, ROW)} to match the images and the policy, '
                f'got {tuple(steps.shape)}'
            )


class _Record:
    """Stands for an image in the operations of timm, and lists what they do."""

    def __init__(self, img_size: tuple[int, int]) -> None:
        height, width = img_size
        self.size = width, height
        self.rows: list[tuple[float, ...]] = []

    def add(self, operation: str, *numbers: float) -> '_Record':
        padding = (0.0,) * (NUMBERS - len(numbers))
        self.rows.append((1 + list(OPERATIONS).index(operation), *numbers, *padding))
        return self

    def transform(self, size: Any, method: Any, matrix: Sequence[float], fillcolor: Any, resample: Any) -> '_Record':
        return self.add('affine', *matrix, *fillcolor)

    def rotate(self, degrees: float, **options: Any) -> '_Record':
        # Pillow's matrix, which keeps 15 digits, in Pillow's order of operations.
        angle = -math.radians(degrees % 360.0)
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        x, y = self.size[0] / 2, self.size[1] / 2
        matrix = cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y
        return self.transform(self.size, None, matrix, **options)

    def filter(self, kernel: Any) -> '_Record':
        return self.add('blur', *blur_weights(kernel.radius))


def _record_colors(change: Any) -> None:
    """Let timm's colour operations record themselves; its warps and blurs call methods, which the record has."""
    for op in operations_of(change):
        name = NAME_TO_OP[op.name].__name__
        if name in OPERATIONS:
            op.aug_fn = partial(_record, name)


def _record(operation: str, record: _Record, *numbers: float, **options: Any) -> _Record:
    return record.add(operation, *numbers)


def _draw_jitter(jitter: ColorJitter, record: _Record) -> None:
    """Record what the forward of torchvision's ColorJitter does; timm gives it no hue."""
    order, *factors = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    for index in order.tolist():
        if factors[index] is not None:
            record.add(('brightness', 'contrast', 'color')[index], factors[index])


def _max_steps(change: Any) -> int:
    if isinstance(change, RandAugment):
        return change.num_layers
    if isinstance(change, AutoAugment):
        return max(len(ops) for ops in change.policy)
    return sum(bounds is not None for bounds in (change.brightness, change.contrast, change.saturation))


def _groups(operations: Tensor, plan: Tensor) -> Iterator[tuple[Callable[[Tensor, Tensor], Tensor], Tensor]]:
    """Yield each operation with the rows of at most CHUNK of its images.

    Args:
        operations: (B,) places in OPERATIONS from 1 on, in the order of the images.
        plan: (B, ROW) in the order of the operations, where the image replaces the operation.
    """
    groups = plan.split(operations.bincount(minlength=1 + len(OPERATIONS)).tolist())
    for operation, rows in zip(OPERATIONS.values(), groups[1:], strict=True):
        for chunk in rows.split(CHUNK) if len(rows) else ():
            yield operation, chunk
