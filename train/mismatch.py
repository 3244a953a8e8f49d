"""The keys of the `model` section in which an experiment differs from the weights that it starts from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from timm.models import get_model_args
from torch import Tensor

from aft_vision.models.checkpoint import ForeignFileError, load_model, load_source, read_record
from aft_vision.models.state_dict import find_sizes
from train.model_section import WEIGHT_KEYS, build_on_meta, is_recipe

# Arguments that the data decide, or that weights are resampled to, and one that an exported folder always states.
NOT_COMPARED = ('num_classes', 'in_chans', 'img_size', 'context', 'vocab_size', 'device', 'global_pool', *WEIGHT_KEYS)


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
        phrases: list[str] = []
        # The error says more than the reason why its explanation fails.
        with suppress(ValueError, OSError):
            start = start or (model.get('pretrained_cfg_overlay') or {}).get('file')
            phrases = list(_differing_keys({**model, **find_sizes(own())}, _arguments_of(model['name'], start)))
        raise ValueError('; '.join([str(error), *phrases])) from error


def _differing_keys(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a phrase for each argument with another value, the name first; a value that is not stated is a default.

    If the weights state no name, only their sizes are compared.
    """
    for key in dict.fromkeys(['name', *theirs, *ours] if 'name' in theirs else theirs):
        values = [each.get(key, 'the default') for each in (ours, theirs)]
        here, there = (list(value) if isinstance(value, tuple) else value for value in values)
        if key not in NOT_COMPARED and not is_recipe(key) and here != there:
            yield f'model.{key} = {here}, where the weights have {there}'


def _arguments_of(name: str, start: str | Path | None) -> dict[str, Any]:
    """Return the arguments of the model of weights: those that its checkpoint states, and the sizes of its tensors."""
    if start is None:
        return {'name': name, **find_sizes(build_on_meta({'name': name}).state_dict())}
    try:
        content = read_record(start)
    except ForeignFileError:
        return find_sizes(load_source(start).state_dict)
    if content:
        return {'name': content['model_name'], **content['model_kwargs'], **find_sizes(content['state_dict'])}
    trained = load_model(start)
    cfg: Any = trained.pretrained_cfg
    return {'name': cfg['architecture'], **get_model_args(trained), **find_sizes(trained.state_dict())}
