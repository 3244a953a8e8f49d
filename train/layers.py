"""The layers of an experiment (`base:` files, the file, the command line), and the source of each value."""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aft_vision.ops.common.errors import first_line
from train.suggest import unknown_key

# The source of a layer and its content; later layers win.
Layer = tuple[str, Mapping[str, Any]]
COMMAND_LINE = 'command line'
YAML_WORDS = {'None': 'null', 'True': 'true', 'False': 'false'}


def read_layers(path: str | Path, overrides: Sequence[str] = ()) -> list[Layer]:
    """Read a file and its bases, the deepest first, and then the overrides.

    Raises:
        ValueError: a file cannot be read, or an override is malformed.
    """
    return [*_read_chain(Path(path)), *map(_read_override, overrides)]


def value_at(layers: Sequence[Layer], key: str, level: int, default: Any) -> Any:
    """Return the value of `section.key` in the layers up to a level, or the default."""
    section, _, name = key.partition('.')
    given = [layer[section][name] for _, layer in layers[: level + 1] if key in _keys(layer)]
    return given[-1] if given else default


def level_of(layers: Sequence[Layer], key: str) -> int:
    """Return the index of the last layer that sets `section.key`; -1 for none; all overrides share one index."""
    levels = [
        len(layers) if source == COMMAND_LINE else index
        for index, (source, layer) in enumerate(layers)
        if key in _keys(layer)
    ]
    return max(levels, default=-1)


@contextlib.contextmanager
def naming_sources(path: str | Path, layers: Sequence[Layer]) -> Iterator[None]:
    """Add to a ValueError the layer of the values that it names, or the file if no layer sets them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f'{_source(str(error), layers) or path}: {error}') from error


def merge_checked(
    config: Any, layers: Sequence[Mapping[str, Any]], schema: type, keys: Sequence[str], prefix: str = ''
) -> Any:
    """Merge `layers` into `config`; errors name the key, the value and the nearest of `keys`."""
    for layer in layers:
        _reject_unknown(layer, schema, keys, prefix)
    layers = [_with_pairs(layer, schema) for layer in layers]
    # OmegaConf raises a TypeError for a list instead of a section.
    with contextlib.suppress(OmegaConfBaseException, TypeError):
        return OmegaConf.merge(config, *layers)
    # One value at a time, because OmegaConf's error for a tuple of the wrong length does not name the key.
    for layer in layers:
        for key, value in layer.items():
            leaves = value.items() if isinstance(value, Mapping) else [(None, value)]
            for inner, leaf in leaves:
                try:
                    config = OmegaConf.merge(config, {key: leaf if inner is None else {inner: leaf}})
                except (OmegaConfBaseException, TypeError) as error:
                    name = f'{prefix}{key}' if inner is None else f'{prefix}{key}.{inner}'
                    reason = first_line(error)
                    # OmegaConf names its own classes here.
                    reason = f'expected a list, such as [{leaf}]' if 'is not a ListConfig' in reason else reason
                    raise ValueError(f'{name} = {leaf!r}: {reason}') from error
    return config


def _reject_unknown(layer: Mapping[str, Any], schema: type, keys: Sequence[str], prefix: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key, value in layer.items():
        name = f'{prefix}{key}'
        if key not in fields:
            while isinstance(value, Mapping) and value:
                inner, value = next(iter(value.items()))
                name = f'{name}.{inner}'
            raise ValueError(unknown_key(name, value, keys))
        section = fields[key].type
        is_section = dataclasses.is_dataclass(section)
        if (is_section or name == 'model') and not isinstance(value, Mapping):
            raise ValueError(f'expected {name} to be a section of keys, got {value!r}')
        if is_section:
            _reject_unknown(value, typing.cast(type, section), keys, f'{name}.')


def _with_pairs(layer: Mapping[str, Any], schema: type) -> dict[str, Any]:
    """Replace one side in pixels by (H, W) where a pair is expected."""
    written = dict(layer)
    for field_ in dataclasses.fields(schema):
        value = written.get(field_.name)
        if dataclasses.is_dataclass(field_.type) and isinstance(value, Mapping):
            written[field_.name] = _with_pairs(value, typing.cast(type, field_.type))
        elif field_.type in (tuple[int, int], tuple[int, int] | None) and type(value) is int:
            written[field_.name] = [value, value]
    return written


def _source(message: str, layers: Sequence[Layer]) -> str | None:
    """Return the last layer that sets a key of a message, and the key unless it is the first in the message."""
    # The rest of the message is advice.
    said = message.split('; ')[0]
    found = []
    for level, (source, layer) in enumerate(layers):
        for key in _keys(layer):
            # Errors of transformers name arguments without the section.
            name = key.removeprefix('model.') if said.startswith('model: ') else key
            place = re.search(rf'(?<![\w.]){re.escape(name)}(?!\.?\w)', said)
            if place is not None:
                found.append((level, -place.start(), source, key))
    if not found:
        return None
    _, before, source, key = max(found)
    return source if before == max(each[1] for each in found) else f'{source} ({key})'


def _keys(layer: Mapping[str, Any], prefix: str = '') -> Iterator[str]:
    for key, value in layer.items():
        yield f'{prefix}{key}'
        if isinstance(value, Mapping):
            yield from _keys(value, f'{prefix}{key}.')


def _read_chain(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """Read the file and all its bases, the deepest first."""
    if not path.is_file():
        missing = 'is a folder' if path.is_dir() else 'does not exist'
        raise ValueError(f'expected a YAML file, got {path}, which {missing}')
    if path.resolve() in above:
        raise ValueError(f'expected base files that end, got {path}, which builds on itself')
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ValueError(f'expected valid YAML in {path}, got: {error}') from error
    if not isinstance(content, dict):
        raise ValueError(f'expected sections of keys in {path}, got a {type(content).__name__}')
    if not content:
        raise ValueError(f'expected sections of keys in {path}, got an empty file')
    base = content.pop('base', None)
    if not isinstance(base, str | None):
        raise ValueError(f'expected base in {path} to be the name of a file, got {base!r}')
    below = _read_chain(path.parent / base, (*above, path.resolve())) if base is not None else []
    return [*below, (str(path), typing.cast(dict[str, Any], content))]


def _read_override(override: str) -> Layer:
    if '=' not in override:
        raise ValueError(f'expected an override like section.key=value, got {override!r}')
    try:
        layer = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except yaml.YAMLError as error:
        raise ValueError(f'expected a YAML value after = in the override {override!r}, got: {error}') from error
    return COMMAND_LINE, typing.cast(dict[str, Any], layer)


def as_yaml(value: Any) -> str:
    """Format a value for a command line."""
    if value is None or isinstance(value, bool):
        return YAML_WORDS[str(value)]
    if isinstance(value, (tuple, list)):
        return f'[{", ".join(map(as_yaml, value))}]'
    if isinstance(value, dict):
        return f'{{{", ".join(f"{name}: {as_yaml(each)}" for name, each in value.items())}}}'
    return repr(value) if value == '' else str(value)
