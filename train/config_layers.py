"""The layers of an experiment (`base:` files, the file, the command line), and the source of each value."""

import contextlib
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from aft_vision.errors import first_line
from aft_vision.models.transfer_source import did_you_mean
from aft_vision.plugins import import_plugins
from train.values import Argument, read_value, read_yaml

# The source of a layer and its content; later layers win.
Layer = tuple[str, Mapping[str, Any]]
COMMAND_LINE = 'command line'
# In a checkout and in a wheel they are next to the trainers.
CONFIGS = Path(__file__).resolve().parents[1] / 'configs'
# OmegaConf raises a TypeError for a list instead of a section.
MERGE_ERRORS = (OmegaConfBaseException, TypeError)


def read_layers(path: str | Path, overrides: Sequence[str] = ()) -> list[Layer]:
    """Read a file and its bases, the deepest first, and then the overrides, and import the modules that they name.

    `type_layers` gives the values a type. The value of `run.imports` includes the modules of the layers before it.

    Args:
        path: A file, or the name of one of the package, such as `finetune` or `imagenet/deit_300e`.

    Raises:
        ValueError: a file cannot be read, or an override is malformed.
    """
    return _import_modules([*_read_chain(find_config(path)), *map(_read_override, overrides)])


def section(layer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a layer, empty if it has none, or has a value that is an error of the merging."""
    content = layer.get(name)
    return content if isinstance(content, Mapping) else {}


def _import_modules(layers: Sequence[Layer]) -> list[Layer]:
    read: list[Layer] = []
    names: list[str] = []
    for source, layer in layers:
        run = section(layer, 'run')
        given = read_value(run.get('imports'), list[str], 'run.imports')
        # Anything else than a list of texts is an error of the merging.
        if isinstance(given, list) and all(isinstance(each, str) for each in given):
            names = list(dict.fromkeys([*names, *given]))
            layer = {**layer, 'run': {**run, 'imports': names}}
        read.append((source, layer))
    import_plugins(names)
    return read


def type_layers(layers: Sequence[Layer], schema: type, arguments: type | None) -> list[Layer]:
    """Return layers with every value read for the type of its key.

    Args:
        schema: The dataclass of the experiment.
        arguments: The dataclass of the `model` section; None if the types of its arguments are not known.

    Raises:
        ValueError: a value of the command line is not valid YAML.
    """
    overlay = {'pretrained_cfg_overlay': dict.fromkeys(('file', 'url', 'hf_hub_id', 'tag', 'license'), str)}
    hints = _hints(schema)
    hints['model'] = {'name': str, **(_hints(arguments) if arguments is not None else {}), **overlay}
    if 'distill' in hints:
        hints['distill'] = {**hints['distill'], 'teacher_args': overlay}
    return [(source, read_value(layer, hints)) for source, layer in layers]


def last_text(layers: Sequence[Layer], key: str, default: str) -> str:
    """Return a text of the last layer that sets it, as `section.key`, before `type_layers`, or the default."""
    for _, layer in reversed(layers):
        value: Any = layer
        for name in key.split('.'):
            # A section may be an argument of its own.
            value = read_value(value) if isinstance(value, Argument) else value
            value = value.get(name) if isinstance(value, Mapping) else None
        text = read_value(value, str, key)
        if text is not None:
            return text
    return default


def command_line_text(overrides: Sequence[str], key: str) -> str:
    """Return a text that the command line sets, as `section.key`; '' without one."""
    return last_text([*map(_read_override, overrides)], key, '')


@contextlib.contextmanager
def naming_sources(path: str | Path, layers: Sequence[Layer]) -> Iterator[None]:
    """Add to a ValueError the layer of the values that it names, or the file if no layer sets them."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if message.startswith(tuple(f'{source}: ' for source, _ in layers)):
            raise
        # The rest of the message is advice.
        said = message.split('; ')[0]
        sources = [source for source, layer in layers for key in keys_of(layer) if _names(said, key)]
        raise ValueError(f'{sources[-1] if sources else path}: {message}') from error


def merge_checked(config: Any, layers: Iterable[Mapping[str, Any]], prefix: str = '') -> Any:
    """Merge layers into a structured config, or into the defaults of a dataclass; an error names the key and its value.

    Args:
        prefix: Of the keys in errors.
    """
    layers, config = list(layers), _defaults(config) if isinstance(config, type) else config
    try:
        return OmegaConf.merge(config, *layers)
    except MERGE_ERRORS:
        # One value at a time, because not every error of OmegaConf has the key.
        for key, value in (item for layer in layers for item in layer.items()):
            sections = value.items() if isinstance(value, Mapping) and value else [('', value)]
            for inner, leaf in sections:
                try:
                    config = OmegaConf.merge(config, {key: {inner: leaf} if inner else leaf})
                except MERGE_ERRORS as error:
                    name = f'{prefix}{key}.{inner}'.removesuffix('.')
                    shown = as_yaml(leaf) if isinstance(leaf, list) else repr(leaf)
                    raise ValueError(f'{name} = {shown}: {_reason(error, leaf)}') from error
        raise


@functools.cache
def _defaults(schema: type) -> Any:
    """Return a dataclass as a config, once: it takes longer than the merging."""
    return OmegaConf.structured(schema)


def _reason(error: Exception, value: Any) -> str:
    reason = first_line(error)
    # OmegaConf names its own classes here.
    if 'is not a ListConfig' in reason:
        return f'expected a list, such as [{value}]'
    without = isinstance(error, ConfigKeyError) and 'Did you mean' not in reason
    return f'{reason}; --keys lists the keys of an experiment' if without else reason


def _names(message: str, key: str) -> bool:
    """Return whether a message is about a key; errors of transformers name arguments without the section."""
    key = key.removeprefix('model.') if message.startswith('model: ') else key
    return re.search(rf'(?<![\w.]){re.escape(key)}(?!\.?\w)', message) is not None


def keys_of(layer: Mapping[str, Any], prefix: str = '') -> Iterator[str]:
    """Yield the keys of a layer, as `section.key`, including those inside mappings."""
    for key, value in layer.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f'{prefix}{key}.')
        # An error about a mapping names its key.
        if prefix or not isinstance(value, Mapping):
            yield f'{prefix}{key}'


def find_config(path: str | Path) -> Path:
    """Return a file, or the one of the package that a name stands for.

    Raises:
        ValueError: there is neither.
    """
    for file in (Path(path), CONFIGS / f'{path}.yaml'):
        if file.is_file():
            return file
    names = [each.relative_to(CONFIGS).with_suffix('').as_posix() for each in CONFIGS.rglob('*.yaml')]
    missing = 'is a folder' if Path(path).is_dir() else 'does not exist'
    raise ValueError(
        f'expected a YAML file, or the name of a config of the package, got {path}, which {missing}'
        f'{did_you_mean(str(path).removesuffix(".yaml").removeprefix("configs/"), names)}'
    )


def _read_chain(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """Read the file and all its bases, the deepest first: files, relative to it, or names of the package."""
    if path.resolve() in above:
        raise ValueError(f'expected base files that end, got {path}, which builds on itself')
    try:
        content = read_yaml(path.read_text(encoding='utf-8'))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f'expected valid YAML in {path}, got: {error}') from error
    if not content or not isinstance(content, dict):
        got = content and ('a list' if isinstance(content, list) else content)
        raise ValueError(f'expected valid YAML in {path}, with sections of keys, got {got or "an empty file"}')
    base = read_value(content.pop('base', None), str | None)
    if base is None:
        return [(str(path), content)]
    if not isinstance(base, str):
        raise ValueError(f'expected base in {path} to be the name of a file, got {base}')
    beside, packaged = path.parent / base, CONFIGS / f'{base}.yaml'
    if not beside.exists() and not packaged.is_file():
        raise ValueError(f'expected base in {path} to be the name of a file, got {base}, which does not exist')
    below = _read_chain(beside if beside.exists() else packaged, (*above, path.resolve()))
    return [*below, (str(path), content)]


def _read_override(override: str) -> Layer:
    key, equals, value = override.partition('=')
    if not equals or not all(key.split('.')):
        raise ValueError(f'expected an override like section.key=value, got {override!r}')
    layer: Any = Argument(value)
    for name in reversed(key.split('.')):
        layer = {name: layer}
    return COMMAND_LINE, layer


def _hints(schema: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, and of the dataclasses in it."""
    return {
        each.name: _hints(typing.cast(type, each.type)) if dataclasses.is_dataclass(each.type) else each.type
        for each in dataclasses.fields(schema)
    }


def as_yaml(value: Any) -> str:
    """Format a value for a command line."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, default=list, ensure_ascii=False).replace('"', '') or "''"
