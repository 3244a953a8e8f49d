"""Image sizes of models: which ones they are for and take, and how one of fixed size is changed."""

from collections.abc import Mapping, Sequence
from typing import Any

from timm.data import resolve_model_data_config
from timm.models import get_model_input_config
from torch import nn


def default_size(model: nn.Module) -> tuple[int, int]:
    """(H, W) in pixels of the images that a model was made for, or resized to."""
    _, height, width = get_model_input_config(model)['input_size']
    return height, width


def training_size(model: nn.Module, checkpoint: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """(H, W) in pixels of the images that a model was trained on.

    Args:
        checkpoint: What `read_checkpoint` gives of its file. One of the trainer has the config of its run, and there it
            is `data.img_size`; without, it is the input size that comes with the model.
    """
    of_run = (checkpoint or {}).get('config', {}).get('data', {}).get('img_size')
    height, width = of_run or resolve_model_data_config(model)['input_size'][-2:]
    return height, width


def has_fixed_input_size(model: nn.Module) -> bool:
    """Return whether the model accepts one image size only."""
    return bool(get_model_input_config(model)['fixed_input_size'])


def check_image_size(model: nn.Module, size: Sequence[int]) -> None:
    """Raise a ValueError unless a model takes images of that size, (H, W) in pixels, whole."""
    patch_embed: Any = getattr(model, 'patch_embed', None)
    patch = getattr(patch_embed, 'patch_size', None)
    if not isinstance(patch, tuple) or getattr(patch_embed, 'dynamic_img_pad', False):
        return
    if any(side % step for side, step in zip(size, patch, strict=True)):
        nearest = tuple(max(round(side / step), 1) * step for side, step in zip(size, patch, strict=True))
        raise ValueError(
            f'expected an image size of multiples of the patch size {patch}, got {tuple(size)}; '
            f'the nearest is {nearest}'
        )


def check_resizable(model: nn.Module, size: Sequence[int]) -> None:
    """Raise a ValueError if a model has another fixed input size than (H, W) in pixels and no `set_input_size`."""
    if _is_made_for_another(model, size) and not hasattr(model, 'set_input_size'):
        raise ValueError(f'expected a model that can be resized, got a {type(model).__name__}, which cannot')


def resize_model(model: nn.Module, size: Sequence[int] | None) -> Any:
    """Change a model of another fixed input size by timm's `set_input_size`, in place; any other stays as it is.

    Args:
        size: (H, W) in pixels; None keeps that of the model.

    Returns:
        The model itself.

    Raises:
        ValueError: patches do not fill images of that size, or the model has another fixed size and cannot be resized.
    """
    if size is None:
        return model
    check_image_size(model, size)
    check_resizable(model, size)
    if _is_made_for_another(model, size):
        resizable: Any = model
        resizable.set_input_size(img_size=tuple(size))
    return model


def _is_made_for_another(model: nn.Module, size: Sequence[int]) -> bool:
    return has_fixed_input_size(model) and default_size(model) != tuple(size)
