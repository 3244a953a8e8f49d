"""Models beside those of timm on the page of Tiny-ImageNet: --import docs/results/front_models.py."""

from typing import Any

import timm
import torch
from timm.models import register_model
from torch import Tensor, nn

from aft_vision.layers import GridMixer, register_mixer

__all__ = ['aft_pyramid_pico_no_aft', 'deit_nano']


@register_mixer
class GatedConvolution(GridMixer):
    """`AFTAxial` with the values themselves in place of their weighted mean over all tokens."""

    name = 'gated_convolution'
    bias_names = ()

    def __init__(self, dim: int, num_heads: int | None = None, device: Any = None, dtype: Any = None, **kwargs: Any):
        # One channel of keys is the least that the projection has.
        super().__init__(dim, 1, device=device, dtype=dtype, **kwargs)
        self.reset_parameters()

    def learned_bias(self) -> Tensor:
        """Return no bias."""
        return torch.zeros(1, 1, 1)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None, mask: Tensor | None = None) -> Tensor:
        """Gate the values, and mix them with their neighbours by the convolution of the projection."""
        q, _, v = self.project_qkv(x)
        return self.project_output(torch.sigmoid(q) * v, v, grid, mask)


@register_model
def aft_pyramid_pico_no_aft(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`aft_pyramid_pico` without AFT, and with one block more in the last stage, for the same time."""
    return timm.create_model('aft_pyramid_pico', mixer='gated_convolution', depths=(1, 1, 2, 5), **kwargs)


@register_model
def deit_nano(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """DeiT with the sizes of `aft_conv_nano`: patches of 8 px, 6 blocks of 128 channels."""
    sizes = dict(patch_size=8, embed_dim=128, depth=6, num_heads=4)
    return timm.create_model('deit_tiny_patch16_224', **sizes, **kwargs)
