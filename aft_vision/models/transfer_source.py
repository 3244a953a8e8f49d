"""Sources of a weight transfer: a timm model, a file or an exported folder."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data import resolve_model_data_config
from timm.layers import to_2tuple
from timm.models import beit, vision_transformer, vision_transformer_relpos
from torch import Tensor, nn

from aft_vision.errors import IMPORT_HINT, first_line, shorten
from aft_vision.files import check_folder, find_checkpoint
from aft_vision.models.deit_transfer import unwrap_state_dict
from aft_vision.models.weight_files import load_torch_file

# A state dict does not show whether a block norms before or after attention, so check the class.
PRE_NORM_BLOCKS = (vision_transformer.Block, vision_transformer_relpos.RelPosBlock, beit.Block)
PREPROCESSING = ('mean', 'std', 'interpolation', 'crop_pct')


class TransferSource(NamedTuple):
    """Weights with metadata of their model.

    Attributes:
        state_dict: Tensors under the names of the source.
        class_names: In the order of the logits.
        data_config: `mean`, `std`, `interpolation` and `crop_pct`; None if unknown.
        grid: (H, W) of the position embedding in tokens.
        license: Licence of the weights; None if unknown.
    """

    state_dict: dict[str, Tensor]
    class_names: list[str] | None = None
    data_config: dict[str, Any] | None = None
    grid: tuple[int, int] | None = None
    license: str | None = None


def load_source(source: str | Path) -> TransferSource:
    """Read weights without executing code from the file.

    Args:
        source: One of: a timm model name, whose weights are downloaded; a `.safetensors` file; a `torch.save` file of
            a state dict, or of a dict with one under `model` or `state_dict`, such as the trainer's best.pth and
            DeiT's files; the folder of a run, which means its best.pth; an exported folder. A moving average
            (`state_dict_ema`) is ignored.

    Raises:
        ValueError: the model or file does not exist, is damaged or contains more than weights, or the model's blocks
            do not norm before attention and MLP.
    """
    path = find_checkpoint(source)
    if path.is_dir():
        return _of_model(load_folder(path))
    if path.is_file():
        return _of_file(path)
    name = str(source)
    if not name.startswith(('hf-hub:', 'hf_hub:')) and not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(
            f'expected a model of timm, a file or an exported folder, got {name}, which does not exist{hint}'
        )
    try:
        return _of_model(build_model(name, pretrained=True))
    except ConnectionError as error:
        raise ValueError(f'{error}; --source FILE takes weights that are on this machine') from error


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


def _of_model(model: nn.Module) -> TransferSource:
    cfg: Any = model.pretrained_cfg
    blocks: Any = getattr(model, 'blocks', None)
    if blocks and not isinstance(blocks[0], PRE_NORM_BLOCKS):
        raise ValueError(
            f'expected a ViT whose blocks norm before attention and MLP, got {cfg["architecture"]} '
            f'with {type(blocks[0]).__name__}'
        )
    config = resolve_model_data_config(model)
    names = cfg.get('label_names')
    grid = getattr(getattr(model, 'patch_embed', None), 'grid_size', None)
    preprocessing = {key: config[key] for key in PREPROCESSING}
    return TransferSource(model.state_dict(), list(names) if names else None, preprocessing, grid, cfg.get('license'))


def _of_file(path: Path) -> TransferSource:
    content = _read(path)
    if not isinstance(content, Mapping):
        raise ValueError(f'expected a file with a state dict, got {path} with a {type(content).__name__}')
    if not isinstance(content.get('model_name'), str):
        return TransferSource(unwrap_state_dict(content))
    # A checkpoint of the trainer, which normalises images by the registered model's mean and std.
    cfg = timm.get_pretrained_cfg(content['model_name'])
    config = {key: getattr(cfg, key) for key in PREPROCESSING} if cfg else {}
    config.update({key: value for key, value in (content.get('data_config') or {}).items() if key in PREPROCESSING})
    state_dict = unwrap_state_dict(content)
    grid = find_stated_grid(state_dict, content.get('model_kwargs') or {})
    return TransferSource(state_dict, content.get('class_names'), config, grid, content.get('license'))


def find_stated_grid(state_dict: Mapping[str, Tensor], model_kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the token grid (H, W) for the `img_size` of a checkpoint's model, None if it has none."""
    size, patches = model_kwargs.get('img_size'), state_dict.get('patch_embed.proj.weight')
    if size is None or patches is None:
        return None
    height, width = to_2tuple(size)
    return height // patches.shape[-2], width // patches.shape[-1]


def _read(path: Path) -> Any:
    if path.suffix != '.safetensors':
        return load_torch_file(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f'expected a whole file of weights, got {path}: {first_line(error)}') from error
