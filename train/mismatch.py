"""The keys of the `model` section in which an experiment differs from the weights that it starts from."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from aft_vision.files import find_checkpoint
from aft_vision.models.checkpoint import ForeignFileError, load_model, read_checkpoint
from aft_vision.models.state_dict import find_sizes
from aft_vision.models.transfer_source import load_source
from train.model_section import WEIGHT_KEYS, build_on_meta, is_recipe_of_images

# Arguments that the data decide, or that weights are resampled to, and one that an exported folder always states.
NOT_COMPARED = ('num_classes', 'in_chans', 'img_size', 'context', 'vocab_size', 'device', 'global_pool')


@contextmanager
def naming_model_keys(
    model: Mapping[str, Any], own: Callable[[], Mapping[str, Tensor]], start: str | Path | None
) -> Iterator[None]:
    """Add to an error about weights that do not fit the keys of `model` that differ, each with both values.

    Args:
        model: The section.
        own: Returns the state dict of its model.
        start: The weights; None for those that `model.pretrained` loads.
    """
    try:
        yield
    except ValueError as error:
        # torch and timm raise a RuntimeError for weights that do not fit.
        if not isinstance(error.__cause__, RuntimeError):
            raise
        found: list[str] = []
        # The error says more than the reason why its explanation fails.
        with suppress(ValueError, OSError):
            weights = stated_by_name(model) if start is None else stated_by_file(start)
            found = differing_keys({**model, **find_sizes(own())}, weights)
        raise ValueError('; '.join([str(error), *found])) from error


def differing_keys(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each argument with another value, the name first; a value that is not stated is a default.

    If the weights state no name, only their sizes are compared.
    """
    keys = dict.fromkeys(['name', *theirs, *(ours if 'name' in theirs else ())])
    kept = [key for key in keys if key in theirs or 'name' in theirs]
    kept = [key for key in kept if key not in (*NOT_COMPARED, *WEIGHT_KEYS) and not is_recipe_of_images(key)]
    pairs = {key: (_plain(ours.get(key, 'the default')), _plain(theirs.get(key, 'the default'))) for key in kept}
    return [
        f'model.{key} = {here}, where the weights have {there}' for key, (here, there) in pairs.items() if here != there
    ]


def stated_by_name(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name and the sizes of the weights that `model.pretrained` loads."""
    file = (model.get('pretrained_cfg_overlay') or {}).get('file')
    if file is not None:
        return stated_by_file(file)
    name = model['name']
    return {'name': name, **find_sizes(build_on_meta({'name': name}).state_dict())}


def stated_by_file(checkpoint: str | Path) -> dict[str, Any]:
    """Return what a checkpoint or an exported folder says of its model, and the sizes of its weights."""
    place = find_checkpoint(checkpoint)
    if place.is_file():
        try:
            content = read_checkpoint(place)
        except ForeignFileError:
            return find_sizes(load_source(place).state_dict)
        return {'name': content['model_name'], **content['model_kwargs'], **find_sizes(content['state_dict'])}
    sizes = find_sizes(load_model(checkpoint).state_dict())
    if not place.is_dir():
        return {'name': str(checkpoint), **sizes}
    described = json.loads((place / 'config.json').read_text(encoding='utf-8'))
    return {'name': described['architecture'], **(described.get('model_args') or {}), **sizes}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
