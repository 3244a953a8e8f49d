"""Models of timm and of exported folders, built with errors that name them."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from aft_vision.errors import IMPORT_HINT, first_line, shorten
from aft_vision.files import check_folder


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest name, or '' if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f'; did you mean {near[0]}?' if near else ''


def build_model(name: str, **kwargs: Any) -> nn.Module:
    """Build a timm model, with its weights if pretrained=True.

    The licence in its `pretrained_cfg` covers its weights: random ones, and a file of the caller without
    a licence, have none.

    Args:
        name: Name in timm, `hf-hub:USER/NAME` or `local-dir:FOLDER`.
        kwargs: Passed to `timm.create_model`.

    Raises:
        ValueError: there is no such model, or it cannot be built with these arguments or these weights.
        ConnectionError: the weights cannot be downloaded.
    """
    try:
        overlay = kwargs.get('pretrained_cfg_overlay') or {}
        is_local = name.startswith('local-dir:') or overlay.get('file') or overlay.get('state_dict')
        model = timm.create_model(name, **kwargs)
    # These are not about the arguments.
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    # timm checks neither arguments nor weights: an assertion, a division by zero, an error of safetensors.
    except Exception as error:
        # The hub's errors are OSErrors too.
        if isinstance(error, OSError) and kwargs.get('pretrained') and not is_local:
            raise ConnectionError(
                f'expected the weights of {name} from the network or the cache of the hub, got: {first_line(error)}'
            ) from error
        given = ', '.join(f'{key}={shorten(repr(value), 200)}' for key, value in kwargs.items()) or 'no arguments'
        # torch lists what does not fit line by line.
        reason = shorten(str(error), 500) or type(error).__name__
        # torch suggests to execute the file's code.
        if 'weights_only' in reason or 'weights only' in reason.lower():
            reason = 'its file of weights is damaged or holds more than tensors'
        reason += f'; {IMPORT_HINT}' if reason.startswith('Unknown model') else ''
        raise ValueError(f'expected a model that can be built, got {name} with {given}: {reason}') from error
    if not kwargs.get('pretrained') or overlay.get('file') or overlay.get('state_dict'):
        set_license(model, overlay.get('license'))
    return model


def set_license(model: nn.Module, license: str | None) -> None:
    """Record the licence of a model's weights in its `pretrained_cfg`, for its exports; None is an unknown one."""
    cfg = getattr(model, 'pretrained_cfg', None)
    if cfg is not None:
        cfg.pop('license', None)
        cfg.update({} if license is None else {'license': license})


def load_folder(path: Path, **kwargs: Any) -> nn.Module:
    """Load the model of an exported folder; keyword arguments replace those that it was built with.

    Raises:
        ValueError: the folder has no exported model, a damaged one, or one that takes no such arguments.
    """
    check_folder(path)
    return build_model(f'local-dir:{path}', pretrained=True, **kwargs)


def find_stated_grid(state_dict: Mapping[str, Tensor], model_kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the token grid (H, W) for the `img_size` of a checkpoint's model, None if it has none."""
    size, patches = model_kwargs.get('img_size'), state_dict.get('patch_embed.proj.weight')
    if size is None or patches is None:
        return None
    height, width = to_2tuple(size)
    return height // patches.shape[-2], width // patches.shape[-1]
