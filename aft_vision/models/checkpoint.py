"""Checkpoints of image classifiers: the trained model of one, and a model that starts from its weights."""

import contextlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import PretrainedCfg, beit, vision_transformer, vision_transformer_relpos
from torch import nn

from aft_vision.files import check_folder, find_checkpoint
from aft_vision.layers import token_mixers
from aft_vision.models.aft_vit import AFTVisionTransformer, checkpoint_filter_fn
from aft_vision.models.decoders import DECODERS
from aft_vision.models.deit_transfer import deit_to_aft, unwrap_state_dict
from aft_vision.models.state_dict import StateDictError, load_matching_state_dict
from aft_vision.models.transfer_report import describe_transfer
from aft_vision.models.transfer_source import build_model, did_you_mean, find_stated_grid, load_folder, set_license
from aft_vision.models.weight_files import load_torch_file
from aft_vision.sizes import record_size

_logger = logging.getLogger(__name__)

# A state dict does not show whether a block norms before or after attention, so check the class.
PRE_NORM_BLOCKS = (vision_transformer.Block, vision_transformer_relpos.RelPosBlock, beit.Block)
CHECKPOINT_KEYS = {'model_name': str, 'model_kwargs': dict, 'state_dict': dict}


class Weights(NamedTuple):
    """The weights of a checkpoint, for a model that starts from them.

    Attributes:
        source: The checkpoint, for errors.
        num_classes: Of their model; 0 if it is not known.
        pretrained_cfg: The one of their model, with their preprocessing, class names and licence.
        of_aft: Whether their model is an AFT model.
        grid: Their token grid (H, W), if known.
    """

    source: str
    state_dict: dict[str, torch.Tensor]
    num_classes: int
    pretrained_cfg: Mapping[str, Any]
    of_aft: bool
    grid: tuple[int, int] | None


class ForeignFileError(ValueError):
    """An error of a file of torch that is no checkpoint of this package."""


def load_model(checkpoint: str | Path, device: torch.device | str = 'cpu', **kwargs: Any) -> nn.Module:
    """Rebuild the trained model of a checkpoint.

    Args:
        checkpoint: A file of the trainer (`last.pth`, `best.pth`), the folder of a run, for its `best.pth`, a
            directory exported with `timm.models.save_for_hf`, or the name of a model of timm with weights.
        kwargs: Arguments of the model instead of those that it was trained with, such as resample_bias=True.

    Returns:
        The model in eval mode.

    Raises:
        ValueError: the path does not exist, is not a checkpoint, is damaged, or has weights that do not match its
            model.
        ConnectionError: published weights cannot be downloaded; those inside the package need no network.
    """
    if not Path(checkpoint).exists() and timm.models.is_model_pretrained(str(checkpoint)):
        return build_model(str(checkpoint), pretrained=True, **kwargs).to(device).eval()
    checkpoint = find_checkpoint(checkpoint)
    if checkpoint.is_dir():
        return load_folder(checkpoint, **kwargs).to(device).eval()
    content = read_checkpoint(checkpoint)
    if content['model_name'] in DECODERS:
        raise ValueError(
            f'expected an image classifier, got {checkpoint} with {content["model_name"]}, a pixel or character model'
        )
    try:
        model = build_model(content['model_name'], **{**content['model_kwargs'], **kwargs})
    except ValueError as error:
        raise ValueError(f'{checkpoint}: {error}') from error
    load_matching_state_dict(model, content['state_dict'], source=str(checkpoint))
    # The preprocessing and the class names, as in an export.
    cfg: Any = model.pretrained_cfg
    recorded = _recorded_cfg(content)
    cfg.update(recorded)
    if 'input_size' in recorded and 'img_size' not in kwargs:
        record_size(model, recorded['input_size'][-2:])
    set_license(model, content.get('license'))
    return model.to(device).eval()


def _recorded_cfg(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessing and the class names that a trainer's checkpoint has, as entries of `pretrained_cfg`."""
    names = {'label_names': content['class_names']} if content.get('class_names') else {}
    return {**(content.get('data_config') or {}), **names}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a trainer's checkpoint onto the CPU without executing code from it.

    Raises:
        ValueError: the file does not exist, is damaged, or is not a checkpoint.
    """
    path = find_checkpoint(path)
    if not path.is_file():
        raise ValueError(
            f'expected a checkpoint file, an exported directory or a model with weights, got {path}, which does '
            'not exist'
        )
    content = load_torch_file(path)
    is_complete = isinstance(content, dict) and all(isinstance(content.get(k), t) for k, t in CHECKPOINT_KEYS.items())
    if not is_complete:
        entries = ', '.join(list(map(str, content))[:5]) if isinstance(content, dict) else type(content).__name__
        raise ForeignFileError(
            f'expected a checkpoint with {", ".join(CHECKPOINT_KEYS)}, got {path} with {entries}; '
            'aft-vision transfer-deit converts the weights of a DeiT or ViT'
        )
    return content


def read_record(checkpoint: str | Path) -> dict[str, Any]:
    """Read a trainer's checkpoint; return {} for an exported folder or a name in timm, which have none.

    Raises:
        ValueError: the file is damaged or not a checkpoint.
    """
    return read_checkpoint(checkpoint) if find_checkpoint(checkpoint).is_file() else {}


def read_pretrained_cfg(checkpoint: str | Path) -> dict[str, Any]:
    """Read the preprocessing and class names of a checkpoint, as in `load_model`, without building its model.

    Raises:
        ValueError: as `load_model`.
    """
    path = find_checkpoint(checkpoint)
    if path.is_dir():
        check_folder(path)
        config = json.loads((path / 'config.json').read_bytes())
        return dict(config.get('pretrained_cfg', config))
    is_name = not path.exists() and timm.models.is_model_pretrained(str(checkpoint))
    content = {} if is_name else read_checkpoint(path)
    known = timm.get_pretrained_cfg(content.get('model_name', str(checkpoint))) or PretrainedCfg()
    return {**known.to_dict(), **_recorded_cfg(content)}


def initialize_model(
    model: nn.Module, checkpoint: Weights | str | Path, reset_head: bool = False, transfer: bool = True
) -> None:
    """Initialise a model from a checkpoint, and resample parameters that depend on the image size.

    The licence of the checkpoint's weights becomes the model's.

    Args:
        checkpoint: Weights, or a checkpoint as in `load_model`, for a model of the same architecture. An AFT model also
            takes a DeiT or ViT of the same width and depth, whose weights are transferred (AFT Table 8). The name of
            the checkpoint's model decides.
        reset_head: Keep the model's own classifier.
        transfer: False accepts only the same architecture.

    Raises:
        ValueError: as `load_model`, or the checkpoint has another number of classes and the head is not reset.
    """
    weights = checkpoint if isinstance(checkpoint, Weights) else read_weights(checkpoint)
    source, state_dict, grid = weights.source, weights.state_dict, weights.grid
    cfg: Any = model.pretrained_cfg
    classifiers = (cfg['classifier'],) if isinstance(cfg['classifier'], str) else cfg['classifier']
    own = model.state_dict()
    heads = {key: own[key] for name in classifiers for key in (f'{name}.weight', f'{name}.bias') if key in own}
    # Before the filter, because a transfer keeps the model's own head if the numbers of classes differ.
    for key, head in heads.items():
        if not reset_head and key in state_dict and state_dict[key].shape[0] != head.shape[0]:
            raise ValueError(
                f'expected a checkpoint with {head.shape[0]} classes, as the data set has, got {source} with '
                f'{state_dict[key].shape[0]}; run.reset_head=true starts with a new classifier'
            )
    is_aft = bool(token_mixers(model))
    filter_function = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    try:
        if is_aft and transfer and not weights.of_aft:
            state_dict, report = deit_to_aft(state_dict, model, grid=grid)
            _logger.warning(describe_transfer(report, model))
        # The filter of an AFT model takes other keys for those of a ViT.
        elif isinstance(model, AFTVisionTransformer) and state_dict.keys() == own.keys():
            state_dict = checkpoint_filter_fn(state_dict, model, grid)
        elif filter_function is not None and not is_aft:
            state_dict = filter_function(state_dict, model)
    except StateDictError as error:
        raise ValueError(f'{source}: {error}') from error
    load_matching_state_dict(model, {**state_dict, **(heads if reset_head else {})}, source=source)
    set_license(model, weights.pretrained_cfg.get('license'))


def read_weights(checkpoint: str | Path) -> Weights:
    """Read the weights of a checkpoint.

    Args:
        checkpoint: As in `load_model`.

    Raises:
        ValueError, ConnectionError: as `load_model`; whether the weights match a model is not checked.
    """
    content = read_record(checkpoint)
    # Building the model only to get its class would cost time.
    if content and timm.is_model(content['model_name']):
        name, kwargs, state_dict = content['model_name'], content['model_kwargs'], content['state_dict']
        known = timm.get_pretrained_cfg(name) or PretrainedCfg()
        cfg: Any = {**known.to_dict(), **_recorded_cfg(content), 'license': content.get('license')}
        of_aft = timm.models.model_entrypoint(name).__module__.startswith('aft_vision.')
        classes = kwargs.get('num_classes', known.num_classes)
        return Weights(str(checkpoint), state_dict, classes, cfg, of_aft, find_stated_grid(state_dict, kwargs))
    # A model takes random numbers, which what starts from its weights must not depend on.
    with torch.random.fork_rng(devices=[]):
        model: Any = load_model(checkpoint)
    return _weights_of(checkpoint, model)


def _weights_of(source: str | Path, model: Any) -> Weights:
    grid = getattr(getattr(model, 'patch_embed', None), 'grid_size', None)
    of_aft = bool(token_mixers(model))
    return Weights(str(source), model.state_dict(), model.num_classes, model.pretrained_cfg, of_aft, grid)


def load_source(source: str | Path) -> Weights:
    """Read weights for a transfer without executing code from a file.

    Args:
        source: One of: a timm model name, whose weights are downloaded; a `.safetensors` file; a `torch.save` file of
            a state dict, or of a dict with one under `model` or `state_dict`, such as the trainer's best.pth and
            DeiT's files; the folder of a run, which means its best.pth; an exported folder. A moving average
            (`state_dict_ema`) is ignored.

    Returns:
        The weights. A file that states no model has neither its `pretrained_cfg` nor its classes.

    Raises:
        ValueError: the model or file does not exist, is damaged or contains more than weights, or the model's blocks
            do not norm before attention and MLP.
    """
    path, name = find_checkpoint(source), str(source)
    if path.is_file():
        with contextlib.suppress(ForeignFileError):
            return read_weights(path)
        return Weights(name, unwrap_state_dict(load_torch_file(path)), 0, {}, False, None)
    if not path.is_dir() and not name.startswith(('hf-hub:', 'hf_hub:')) and not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(
            f'expected a model of timm, a file or an exported folder, got {name}, which does not exist{hint}'
        )
    try:
        model: Any = load_folder(path) if path.is_dir() else build_model(name, pretrained=True)
    except ConnectionError as error:
        raise ValueError(f'{error}; --source FILE takes weights that are on this machine') from error
    blocks = getattr(model, 'blocks', None)
    if blocks and not isinstance(blocks[0], PRE_NORM_BLOCKS):
        raise ValueError(
            f'expected a ViT whose blocks norm before attention and MLP, got {model.pretrained_cfg["architecture"]} '
            f'with {type(blocks[0]).__name__}'
        )
    return _weights_of(source, model)
