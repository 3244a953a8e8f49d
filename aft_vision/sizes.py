"""Image sizes of models: default, training and supported sizes, and resizing."""

from collections.abc import Mapping, Sequence
from typing import Any

from timm.data import resolve_model_data_config
from timm.models import get_model_input_config, get_model_traits
from torch import nn

from aft_vision.layers import token_mixers


def default_size(model: nn.Module) -> tuple[int, int]:
    """Return (H, W) in pixels of the images that a model was created for or resized to."""
    _, height, width = get_model_input_config(model)['input_size']
    return height, width


def training_size(model: nn.Module, checkpoint: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Return (H, W) in pixels of the images that a model was trained on.

    Args:
        checkpoint: Content of its file, from `read_checkpoint`. A trainer's checkpoint has the config with
            `data.img_size`; without it, the model's default input size is returned.
    """
    of_run = (checkpoint or {}).get('config', {}).get('data', {}).get('img_size')
    height, width = of_run or resolve_model_data_config(model)['input_size'][-2:]
    return height, width


def has_fixed_input_size(model: nn.Module) -> bool:
    """Return whether the model accepts one image size only."""
    return bool(get_model_input_config(model)['fixed_input_size'])


def check_channels(model: Any, *supported: int) -> None:
    """Raise a ValueError unless a model takes images of one of these numbers of channels."""
    first = (getattr(model, 'pretrained_cfg', None) or {}).get('first_conv')
    layer = dict(model.named_modules()).get(first) if isinstance(first, str) else None
    found = getattr(layer, 'in_channels', None) or resolve_model_data_config(model)['input_size'][0]
    if found not in supported:
        raise ValueError(
            f'expected a model of images of {" or ".join(map(str, supported))} channels, got one of {found}'
        )


def check_image_size(model: nn.Module, size: Sequence[int], pads: bool = True) -> None:
    """Raise a ValueError unless a model takes images of size (H, W) in pixels; with pads=False, without padding."""
    patch_embed: Any = getattr(model, 'patch_embed', None)
    patch = getattr(patch_embed, 'patch_size', None)
    if not isinstance(patch, tuple) or (pads and getattr(patch_embed, 'dynamic_img_pad', False)):
        return
    if any(side % step for side, step in zip(size, patch, strict=True)):
        nearest = tuple(max(round(side / step), 1) * step for side, step in zip(size, patch, strict=True))
        raise ValueError(
            f'expected an image size of multiples of the patch size {patch}, got {tuple(size)}; '
            f'the nearest is {nearest}'
        )


def check_resizable(model: nn.Module, size: Sequence[int]) -> None:
    """Raise a ValueError if a model has a fixed input size other than (H, W) in pixels and no `set_input_size`."""
    if _has_other_fixed_size(model, size) and not hasattr(model, 'set_input_size'):
        raise ValueError(f'expected a model that can be resized, got a {type(model).__name__}, which cannot')


def resize_model(model: nn.Module, size: Sequence[int] | None) -> Any:
    """Resize a model of another fixed input size in place by timm's `set_input_size`; leave others unchanged.

    Args:
        size: (H, W) in pixels; None keeps the model's size.

    Returns:
        The model itself.

    Raises:
        ValueError: images of that size are not whole patches, or the model has another fixed size and cannot be
            resized.
    """
    if size is None:
        return model
    check_image_size(model, size)
    check_resizable(model, size)
    if _has_other_fixed_size(model, size):
        resizable: Any = model
        resizable.set_input_size(img_size=tuple(size))
    return model


def takes_any_size(model: nn.Module) -> bool:
    """Return whether an AFT model takes every height and width, and no parameter depends on a grid."""
    mixers = token_mixers(model)
    tables = any('num_tokens' in mixer.parameters_of_init() for mixer in mixers)
    positions = tables or getattr(model, 'pos_embed', None) is not None
    return bool(mixers) and not positions and not has_fixed_input_size(model)


def record_size(model: nn.Module, size: Sequence[int]) -> None:
    """Make (H, W) in pixels the default size of a model that takes any size.

    Where the architecture names none, that of `pretrained_cfg` is the default.
    """
    resizable: Any = model
    if takes_any_size(model) and get_model_traits(model).get('img_size') is not None:
        resizable.set_input_size(img_size=tuple(size))


def _has_other_fixed_size(model: nn.Module, size: Sequence[int]) -> bool:
    return has_fixed_input_size(model) and default_size(model) != tuple(size)
