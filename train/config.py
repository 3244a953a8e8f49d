"""Typed experiments: dataclasses <- `base:` file <- file <- `section.key=value`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm.optim
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aft_vision.errors import first_line
from aft_vision.files import replacing
from train.adjust import adjust_to_command_line
from train.config_layers import (
    COMMAND_LINE,
    Layer,
    keys_of,
    last_text,
    merge_checked,
    naming_sources,
    read_layers,
    type_layers,
)
from train.model_section import (
    check_decoder,
    check_model,
    decoder_schema,
    drop_foreign_arguments,
    family_schema,
    fill_preprocessing,
    stays_for_classifier,
    stays_for_decoder,
)
from train.schema import Config, unknown


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
        layers = type_layers(layers, schema, family_schema(name) if images else decoder_schema())
    fields: dict[str, Any] = {each.name: each for each in dataclasses.fields(schema)}
    default = fields['model'].default_factory()['name']
    layers = drop_foreign_arguments(layers, stays_for_classifier if images else stays_for_decoder, default)
    layers = fill_preprocessing(layers) if images else layers
    with naming_sources(path, layers):
        built = build_config(layers, schema, list_optimizers())
        return dataclasses.replace(built, model=(check_model if images else check_decoder)(built.model))


def list_optimizers() -> list[str]:
    """Return the names of timm's optimizers, except second-order ones: the trainer keeps no graph of gradients."""
    names = map(str, timm.optim.list_optimizers())
    return [name for name in names if not timm.optim.get_optimizer_info(name).second_order]


def build_config(layers: Sequence[Layer], schema: type[Any], optimizers: Iterable[str]) -> Any:
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
        changes = adjust_to_command_line(merged, files, {key for layer in given for key in keys_of(layer)})
        built: Any = OmegaConf.to_object(OmegaConf.merge(merged, OmegaConf.from_dotlist(changes)))
    except OmegaConfBaseException as error:
        key = getattr(error, 'full_key', None)
        raise ValueError(f'{f"{key}: " if key else ""}{first_line(error)}') from error
    if built.optim.name not in (names := list(optimizers)):
        raise ValueError(unknown('optim.name', built.optim.name, names, 'an optimizer'))
    return built


def continues(folder: Path, where: str | None) -> bool:
    """Return whether `run.resume` goes on with the run in a folder, instead of the run in another."""
    if where in (None, 'auto'):
        return where == 'auto'
    path = Path(str(where)).resolve()
    return folder.resolve() == (path if path.is_dir() else path.parent)


def save_config(record: Mapping[str, Any], path: str | Path) -> None:
    """Write the resolved experiment, from `dataclasses.asdict`, which `load_config` reads.

    run.overwrite, and run.resume where it continues the run in the folder of the file, are left out: they were meant
    for that folder, and the file with another run.dir repeats the run.
    """
    run = record['run']
    resume = None if continues(Path(path).parent, run['resume']) else run['resume']
    with replacing(path) as file:
        file.write_text(OmegaConf.to_yaml({**record, 'run': {**run, 'overwrite': False, 'resume': resume}}))
