"""Images of their own shapes, as the dicts of patches of timm's NaFlex loader."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_transforms import Patchify

# Images (B, 3, H, W), or the dict of timm's collator.
Inputs = torch.Tensor | dict[str, Any]


@dataclass(frozen=True)
class NativeShape:
    """The shape of each image itself, at the largest size with a limited number of patches.

    Attributes:
        max_tokens: Limit of the patches of an image, at least 1.
        patch_size: (height, width) in pixels.
    """

    max_tokens: int
    patch_size: tuple[int, int]

    @property
    def square(self) -> tuple[int, int]:
        """Return (H, W) in pixels of the largest image with as many rows of patches as columns."""
        side = math.isqrt(self.max_tokens)
        return side * self.patch_size[0], side * self.patch_size[1]

    def collate(self, samples: Sequence[tuple[torch.Tensor, Any]]) -> tuple[dict[str, Any], torch.Tensor]:
        """Batch images (3, H, W), whose sides are whole patches, and their targets by timm's collator."""
        patchify = Patchify(self.patch_size)
        return NaFlexCollator(self.max_tokens)([(patchify(image), target) for image, target in samples])

    def blank(self, count: int) -> dict[str, Any]:
        """Build a batch of this many black images of one patch."""
        return self.collate([(torch.zeros(3, *self.patch_size), 0)] * count)[0]


def move(inputs: Inputs, device: torch.device | str, **options: Any) -> Any:
    """Move images, or the tensors of a dict of patches, to a device, with the options of `Tensor.to`."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device, **options)
    return {key: x.to(device, **options) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
