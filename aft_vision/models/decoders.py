"""The pixel and character models by name, and their checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from aft_vision.files import BEST, find_checkpoint, name_latest, replacing
from aft_vision.models import char, pixel
from aft_vision.models.decoder import AFTDecoder
from aft_vision.models.state_dict import load_matching_state_dict
from aft_vision.models.weight_files import load_torch_file

# The kind of tokens and the function of each model.
DECODERS = {
    'aft_local_pixel': ('pixel', pixel.aft_local_pixel),
    'aft_simple_pixel': ('pixel', pixel.aft_simple_pixel),
    'transformer_pixel': ('pixel', pixel.transformer_pixel),
    'aft_local_char': ('char', char.aft_local_char),
    'aft_simple_char': ('char', char.aft_simple_char),
    'transformer_char': ('char', char.transformer_char),
}


def create_decoder(name: str, **kwargs: Any) -> AFTDecoder:
    """Build a pixel or character model by name.

    Args:
        name: a key of DECODERS.
        kwargs: passed to `AFTDecoder`; the defaults are the main row of the paper's table.

    Raises:
        ValueError: the name or an argument is unknown.
    """
    if name not in DECODERS:
        raise ValueError(f'the model must be one of {", ".join(DECODERS)}, got {name!r}')
    task, build = DECODERS[name]
    try:
        model = build(**kwargs)
    except TypeError as error:
        raise ValueError(f'{name}: {error}') from error
    # A checkpoint may be loaded on a machine without that device.
    kept = {key: value for key, value in kwargs.items() if key != 'device'}
    model.task, model.model_args = task, {'name': name, 'kwargs': kept}
    return model


def save_decoder(model: AFTDecoder, path: str | Path, **extra: Any) -> None:
    """Write a model made by `create_decoder` to a file that `load_decoder` reads.

    Args:
        extra: more entries of the file, of types that torch.load(weights_only=True) accepts, or numbers and arrays of
            numpy, which become Python's numbers and lists, as in the model's arguments.

    Raises:
        ValueError: the model was not made by `create_decoder`.
    """
    if model.model_args is None:
        raise ValueError('expected a model made by create_decoder, got one without a name')
    data = {**extra, 'model_args': model.model_args, 'task': model.task}
    with replacing(path) as written:
        torch.save({**_without_numpy(data), 'state_dict': model.state_dict()}, written)


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if type(value) is dict:
        return {key: _without_numpy(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return value


def load_decoder(path: str | Path, device: torch.device | str = 'cpu') -> AFTDecoder:
    """Load the model of a checkpoint, in evaluation mode.

    Raises:
        ValueError: the file is missing or not a checkpoint of a decoder, or its weights do not match its arguments.
    """
    path = find_checkpoint(path)
    if not path.is_file():
        reason = f'has no {BEST}{name_latest(path)}' if path.is_dir() else 'does not exist'
        raise ValueError(
            f'expected a checkpoint of a pixel or character model, or the folder of its run, got {path}, which {reason}'
        )
    data = load_torch_file(path)
    wanted = {'state_dict', 'model_args', 'task'}
    if not isinstance(data, dict) or not wanted <= data.keys():
        entries = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f'expected a checkpoint of a pixel or character model with {sorted(wanted)}, got {entries}')
    args = data['model_args']
    model = create_decoder(args['name'], **args['kwargs'])
    load_matching_state_dict(model, data['state_dict'], path)
    return model.to(device).eval()
