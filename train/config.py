"""Typed experiments: dataclasses <- `base:` file <- file <- `section.key=value`."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import timm.optim
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aft_vision.errors import first_line
from aft_vision.files import replacing
from train.adjust import adjust_to_command_line
from train.config_layers import (
    COMMAND_LINE,
    Layer,
    convert_layers,
    keys_of,
    last_text,
    merge_checked,
    naming_sources,
    read_layers,
)
from train.model_section import (
    check_decoder,
    check_model,
    decoder_schema,
    decoder_takes,
    drop_foreign_arguments,
    family_schema,
    fill_preprocessing,
    is_recipe_of_images,
    is_recipe_of_sequences,
    model_takes,
)
from train.schema import Config, Experiment, unknown

Kind = TypeVar('Kind', bound=Experiment)


@overload
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config: ...


@overload
def load_config(path: str | Path, overrides: Sequence[str], schema: type[Kind]) -> Kind: ...


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[Any] = Config) -> Any:
    """Read, merge and check one experiment.

    Values of the files that contradict the command line are changed with a note: a warm-up longer than the epochs, a
    minimal rate above the peak, arguments of another model.

    Args:
        path: YAML file; its `base:` names another one, relative to it, that it builds on.
        overrides: `section.key=value`, applied last.
        schema: The dataclass of the experiment; image classification by default.

    Raises:
        ValueError: an unknown key, a value of the wrong type or range, or an unreadable file. The message names the
            file or `command line`, the key, the value and the nearest valid name.
    """
    images = issubclass(schema, Config)
    layers = read_layers(path, overrides)
    with naming_sources(path, layers):
        name = last_text(layers, 'model.name', '')
        layers = convert_layers(layers, schema, family_schema(name) if images else decoder_schema())
    takes, is_recipe = (model_takes, is_recipe_of_images) if images else (decoder_takes, is_recipe_of_sequences)
    layers = drop_foreign_arguments(layers, takes, is_recipe, default_model_name(schema))
    layers = fill_preprocessing(layers) if images else layers
    with naming_sources(path, layers):
        built = build_config(layers, schema, list_optimizers())
        return dataclasses.replace(built, model=(check_model if images else check_decoder)(built.model))


def default_model_name(schema: type[Experiment]) -> str:
    """Return the name of the model that a file without `model.name` is about; the schema itself may demand more."""
    defaults: Any = {each.name: each.default_factory for each in dataclasses.fields(schema)}
    return str(defaults['model']()['name'])


def list_optimizers() -> list[str]:
    """Return the names of timm's optimizers without those of second order: AFT's operators are differentiated once."""
    names = map(str, timm.optim.list_optimizers())
    return [name for name in names if not timm.optim.get_optimizer_info(name).second_order]


def build_config(layers: Sequence[Layer], schema: type[Kind], optimizers: Iterable[str]) -> Kind:
    """Merge layers into an experiment; the `model` section is not checked.

    Args:
        layers: From `read_layers`.
        schema: The dataclass of the experiment.
        optimizers: Valid values of optim.name.

    Raises:
        ValueError: an unknown key, or a value of the wrong type or range.
    """
    given = [layer for source, layer in layers if source == COMMAND_LINE]
    files = merge_checked(schema, [layer for source, layer in layers if source != COMMAND_LINE])
    merged = merge_checked(files, given)
    try:
        merged = OmegaConf.unsafe_merge(
            merged, adjust_to_command_line(merged, files, {key for layer in given for key in keys_of(layer)})
        )
        built = typing.cast(Any, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(_reason(error)) from error
    names = list(optimizers)
    if built.optim.name not in names:
        raise ValueError(unknown('optim.name', built.optim.name, names, 'an optimizer'))
    return built


def continues(folder: Path, where: str | None) -> bool:
    """Return whether `run.resume` goes on with the run in a folder, instead of with that of another."""
    if where in (None, 'auto'):
        return where == 'auto'
    place = Path(str(where)).resolve()
    return folder.resolve() == (place if place.is_dir() else place.parent)


def save_config(record: Mapping[str, Any], path: str | Path) -> None:
    """Write the resolved experiment, from `dataclasses.asdict`, which `load_config` reads.

    run.overwrite, and run.resume where it continues the run in the folder of the file, are left out: they were meant
    for that folder, and the file with another run.dir repeats the run.
    """
    run = record['run']
    resume = None if continues(Path(path).parent, run['resume']) else run['resume']
    with replacing(path) as file:
        file.write_text(OmegaConf.to_yaml({**record, 'run': {**run, 'overwrite': False, 'resume': resume}}))


def _reason(error: OmegaConfBaseException) -> str:
    key = getattr(error, 'full_key', None)
    return f'{f"{key}: " if key else ""}{first_line(error)}'
