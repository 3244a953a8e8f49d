"""Small models to export, whose position biases matter."""

from typing import Any

import timm
from helpers import randn
from torch import nn

TINY = dict(depth=1, embed_dim=32, patch_size=8, img_size=32, num_classes=5)


def make(name: str = 'aft_conv_tiny', **kwargs: Any) -> nn.Module:
    conv = dict(num_heads=8, kernel_size=5) if 'conv' in name else dict(num_heads=8) if 'axial' in name else {}
    model = timm.create_model(name, **{**TINY, **conv, **kwargs}).eval()
    # As the trainer records it.
    model.pretrained_cfg['input_size'] = (3, 32, 32)
    for i, parameter in enumerate(model.parameters()):
        parameter.data.copy_(randn(*parameter.shape, seed=i, scale=0.2))
    return model
