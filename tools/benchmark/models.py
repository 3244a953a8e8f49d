"""The models that are measured, with random weights."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.models import is_model_in_modules
from timm.utils import reparameterize_model
from torch import nn

# Files of timm, and ours, whose models take `img_size`, `dynamic_img_size` and `dynamic_img_pad`.
VIT_FILES = ('aft_vit', 'deit', 'vision_transformer')


def create_classifier(
    name: str,
    img_size: int | Sequence[int],
    device: torch.device,
    materialised: bool = False,
    training: bool = False,
) -> nn.Module:
    """Build a classifier as it is deployed, in eval mode and fused, or as it is trained.

    Args:
        img_size: Side, or height and width, in pixels.
        materialised: As of `materialise_attention`.
    """
    kwargs: dict[str, Any] = {'img_size': img_size} if is_model_in_modules(name, VIT_FILES) else {}
    model = timm.create_model(name, **kwargs).to(device).train(training)
    if materialised:
        materialise_attention(model)
    return model if training else reparameterize_model(model, inplace=True)


def check_model(name: str) -> None:
    """Raise a ValueError, with names that are close, if timm has no model of that name."""
    if not timm.is_model(name):
        close = ', '.join(get_close_matches(name, timm.list_models(), n=3, cutoff=0.0))
        raise ValueError(f'expected the name of a model that timm has, such as {close}, got {name!r}')


def create_dense(name: str, device: torch.device) -> nn.Module:
    """Build a feature extractor, `features_only`, that takes images of any size.

    Raises:
        ValueError: timm has no model of that name.
    """
    check_model(name)
    kwargs: dict[str, Any] = {}
    if is_model_in_modules(name, VIT_FILES):
        kwargs = dict(dynamic_img_size=True, dynamic_img_pad=True)
    return timm.create_model(name, features_only=True, **kwargs).to(device)


def has_fused_attention(model: nn.Module) -> bool:
    """Whether attention in the model is `F.scaled_dot_product_attention`."""
    return any(getattr(module, 'fused_attn', False) for module in model.modules())


def materialise_attention(model: nn.Module) -> None:
    """Make attention form its (h, T, T) weights, as every attention did when the AFT paper was written.

    Raises:
        ValueError: the model has no fused attention.
    """
    if not has_fused_attention(model):
        raise ValueError(f'expected a model with fused attention, got a {type(model).__name__} without')
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, 'fused_attn')]
    for attention in attentions:
        attention.fused_attn = False
