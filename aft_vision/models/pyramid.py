"""ViTDet's feature pyramid of a plain backbone, for detectors and other dense tasks.

@article{li2022exploring,
  title={Exploring Plain Vision Transformer Backbones for Object Detection},
  author={Li, Yanghao and Mao, Hanzi and Girshick, Ross and He, Kaiming},
  journal={arXiv preprint arXiv:2203.16527},
  year={2022}
}
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Format, LayerNorm2d, to_2tuple
from torch import Tensor, nn

from aft_vision.models.aft_vit import AFTVisionTransformer


class SimpleFeaturePyramid(nn.Module):
    """Feature maps of several strides, all computed from the last map of a plain backbone (ViTDet Sec. 3).

    Finer maps come from 2 x 2 deconvolutions, each of which halves the channels, with norm and GELU between them.
    Coarser maps come from max pooling. A 1 x 1 and a 3 x 3 convolution, each followed by a norm, give every map
    `out_channels`.

    It is a backbone for torchvision's detectors. Detectors whose default anchors are for five maps, such as
    `FasterRCNN`, need `extra_level=True`. A detector pads its images to multiples of 32, so use strides that divide 32
    and a backbone that takes any image size.

    Args:
        backbone: Made by `timm.create_model(..., features_only=True, out_indices=(-1,))`: one map (B, C, H / r, W / r),
            whose reduction r is a power of two and at least 4.
        out_channels: Channels of every map.
        strides: Pixels per position of the maps: powers of two, ascending.
        extra_level: Add a map 'pool' with twice the last stride: every other position of the last map.

    Attributes:
        out_channels: As given; detectors read it.
        strides: Strides of the maps in the order of the output, including the extra level.

    Raises:
        ValueError: the backbone has more than one map, or a reduction or stride is out of range.
    """

    def __init__(
        self,
        backbone: nn.Module,
        out_channels: int = 256,
        strides: Sequence[int] = (4, 8, 16, 32),
        extra_level: bool = False,
    ) -> None:
        super().__init__()
        reduction, channels = _describe_single(backbone)
        if not strides or list(strides) != sorted(set(strides)) or not all(map(_is_power_of_two, strides)):
            raise ValueError(f'strides must be ascending powers of two, got {tuple(strides)}')
        self.backbone = backbone
        self.out_channels = out_channels
        self.strides = (*strides, *([2 * strides[-1]] if extra_level else []))
        self.extra_level = extra_level
        self.stages = nn.ModuleList(_stage(channels, out_channels, reduction, stride) for stride in strides)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> OrderedDict[str, Tensor]:
        """Compute the maps of a batch of images.

        Args:
            x: (B, 3, H, W) images of a size that the backbone takes; with `dynamic_img_pad=True` it pads to whole
                patches. If H or W is not a multiple of the last stride, the coarser maps drop incomplete positions.
            attn_mask: (B, H / patch, W / patch) bool, True where a patch counts, as `padding_mask` makes it; for AFT
                backbones.

        Returns:
            '0', '1', ... in the order of the strides, then 'pool': (B, out_channels, H / stride, W / stride).

        Raises:
            ValueError: attn_mask is given, and the backbone is not an AFT model.
        """
        features = self._features(x, attn_mask)
        maps = OrderedDict((str(level), stage(features)) for level, stage in enumerate(self.stages))
        if self.extra_level:
            maps['pool'] = F.max_pool2d(maps[str(len(self.stages) - 1)], kernel_size=1, stride=2)
        return maps

    def _features(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        backbone: Any = self.backbone
        if attn_mask is None:
            (features,) = backbone(x)
        elif isinstance(getattr(backbone, 'model', None), AFTVisionTransformer):
            # timm's wrapper passes only the images.
            (features,) = backbone.model.forward_intermediates(
                x, indices=backbone.out_indices, norm=backbone.norm, intermediates_only=True, attn_mask=attn_mask
            )
        else:
            raise ValueError(f'attn_mask needs an AFT backbone, got a {type(backbone).__name__}')
        return features.permute(0, 3, 1, 2) if getattr(backbone, 'output_fmt', None) == Format.NHWC else features


def padding_mask(
    image_sizes: Sequence[tuple[int, int]],
    padded_size: tuple[int, int],
    patch_size: int | tuple[int, int] = 16,
    device: torch.device | str | None = None,
) -> Tensor:
    """Build a mask over the patches of images that are padded at the right and at the bottom.

    A patch that is partly padding contains pixels of the image, so it counts.

    Args:
        image_sizes: (H, W) of each image in pixels.
        padded_size: (H, W) of the batch in pixels.
        patch_size: In pixels.

    Returns:
        (B, rows, columns) bool, the `attn_mask` of the AFT models.

    Raises:
        ValueError: an image is larger than the batch.
    """
    (height, width), (rows, columns) = padded_size, to_2tuple(patch_size)
    if any(size[0] > height or size[1] > width for size in image_sizes):
        raise ValueError(f'expected images of at most {height} x {width} pixels, got {list(image_sizes)}')
    sizes = torch.tensor(image_sizes, device=device).reshape(-1, 2)
    above = torch.arange(0, height, rows, device=device) < sizes[:, :1]
    left = torch.arange(0, width, columns, device=device) < sizes[:, 1:]
    return above[:, :, None] & left[:, None, :]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _describe_single(backbone: nn.Module) -> tuple[int, int]:
    # Return the reduction and channels of its only map.
    info: Any = getattr(backbone, 'feature_info', None)
    reductions = info.reduction() if hasattr(info, 'reduction') else []
    if len(reductions) != 1 or reductions[0] < 4 or not _is_power_of_two(reductions[0]):
        raise ValueError(
            'expected a backbone of timm.create_model(..., features_only=True, out_indices=(-1,)) whose stride is a '
            f'power of two and at least 4, got a {type(backbone).__name__} with maps of the strides {reductions}'
        )
    return reductions[0], info.channels()[0]


def _stage(channels: int, out_channels: int, reduction: int, stride: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    while reduction > stride:
        if layers:
            layers += [LayerNorm2d(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels, reduction = channels // 2, reduction // 2
    if stride > reduction:
        layers.append(nn.MaxPool2d(stride // reduction))
    layers += [
        nn.Conv2d(channels, out_channels, kernel_size=1, bias=False),
        LayerNorm2d(out_channels),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(out_channels),
    ]
    return nn.Sequential(*layers)
