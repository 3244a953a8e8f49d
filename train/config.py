"""Experiments as typed documents: dataclasses <- `base:` file <- file <- `section.key=value`."""

import contextlib
import dataclasses
import difflib
import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import timm
import timm.optim
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aft_vision.models.autoregressive import AFTDecoder
from aft_vision.models.decoders import DECODERS
from train.schema import Config, Experiment

Kind = TypeVar('Kind', bound=Experiment)

RESERVED_MODEL_KEYS = {
    'num_classes': 'the data set decides how many classes there are',
    'in_chans': 'images have three channels',
    'device': 'run.device says where the model is',
    'dtype': 'run.amp says what it computes in',
}
RESERVED_DECODER_KEYS = {
    'context': 'the data decide how long a sequence is, by data.context where it is text',
    'vocab_size': 'the data decide how many symbols there are',
    'device': 'run.device says where the model is',
    'dtype': 'run.amp says what it computes in',
}
VIT_MODULES = ('timm.models.vision_transformer', 'timm.models.deit')
# Arguments of timm.create_model that say where the first weights come from; a checkpoint does not need them.
WEIGHT_KEYS = {'pretrained': bool, 'pretrained_cfg_overlay': Any}


@overload
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config: ...


@overload
def load_config(path: str | Path, overrides: Sequence[str], schema: type[Kind]) -> Kind: ...


def load_config(path: str | Path, overrides: Sequence[str] = (), schema: type[Any] = Config) -> Any:
    """Read, merge and check one experiment.

    Args:
        path: YAML file; its `base:` names another one, relative to it, that it builds on.
        overrides: `section.key=value`, the last word.
        schema: The dataclass of the experiment; image classification by default.

    Raises:
        ValueError: an unknown key, a value of the wrong type or range, or a file that cannot be read. The message
            holds the key, the value and the nearest valid name.
    """
    built = build_config(path, read_layers(path, overrides), schema, map(str, timm.optim.list_optimizers()))
    check = check_model if schema is Config else check_decoder
    return dataclasses.replace(built, model=check(built.model, str(path)))


def read_layers(path: str | Path, overrides: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """What a file and those below it say, and what the overrides change: content by source, the last one wins.

    Raises:
        ValueError: a file cannot be read, or an override is not one.
    """
    return [*_read_chain(Path(path)), *map(_read_override, overrides)]


def build_config(
    path: str | Path, layers: Sequence[tuple[str, Mapping[str, Any]]], schema: type[Kind], optimizers: Iterable[str]
) -> Kind:
    """The experiment that layers give together, whose `model` section is not checked yet.

    Args:
        path: The file, for the messages of errors.
        layers: From `read_layers`.
        schema: The dataclass of the experiment.
        optimizers: The names that optim.name may have.

    Raises:
        ValueError: an unknown key, or a value of the wrong type or range.
    """
    merged = merge_checked(OmegaConf.structured(schema), layers, schema)
    try:
        built = typing.cast(Any, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ValueError(f'{path}: {str(error).splitlines()[0]}') from error
    names = list(optimizers)
    if built.optim.name not in names:
        raise ValueError(f'{path}: {unknown("optim.name", built.optim.name, names, "an optimizer")}')
    return built


def save_config(config: Experiment, path: str | Path) -> None:
    """Write the resolved experiment; `load_config` of the file gives it back."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def check_model(model: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Check `{name: ..., **kwargs}` against the signature of the model, building nothing.

    The keyword arguments of an `aft_*` model are those of its class and of timm's VisionTransformer, and of a plain
    ViT or DeiT those of the latter; for another model only the name is checked.

    Raises:
        ValueError: the name is missing or not registered, or a keyword argument is unknown or of the wrong type.
    """
    kwargs = dict(model)
    name = kwargs.pop('name', None)
    if not isinstance(name, str):
        raise ValueError(f'{source}: expected model.name, the name of a registered model, got {name!r}')
    if not timm.is_model(name):
        raise ValueError(f'{source}: {unknown("model.name", name, timm.list_models(), "a registered model")}')
    for key in RESERVED_MODEL_KEYS.keys() & kwargs.keys():
        raise ValueError(
            f'{source}: model.{key} = {kwargs[key]!r} is not for an experiment: {RESERVED_MODEL_KEYS[key]}'
        )
    module = timm.models.model_entrypoint(name).__module__
    if module.startswith('aft_vision.') or module in VIT_MODULES:
        kwargs = check_arguments(kwargs, _model_schema(module), source)
    return {'name': name, **kwargs}


def check_decoder(model: Mapping[str, Any], source: str) -> dict[str, Any]:
    """As `check_model`, of a pixel or character model."""
    kwargs = dict(model)
    name = kwargs.pop('name', None)
    if not isinstance(name, str):
        raise ValueError(f'{source}: expected model.name, the name of a pixel or character model, got {name!r}')
    if name not in DECODERS:
        raise ValueError(f'{source}: {unknown("model.name", name, DECODERS, "a pixel or character model")}')
    for key in RESERVED_DECODER_KEYS.keys() & kwargs.keys():
        raise ValueError(
            f'{source}: model.{key} = {kwargs[key]!r} is not for an experiment: {RESERVED_DECODER_KEYS[key]}'
        )
    return {'name': name, **check_arguments(kwargs, _schema((AFTDecoder,), {}, RESERVED_DECODER_KEYS), source)}


def check_arguments(kwargs: Mapping[str, Any], schema: type, source: str) -> dict[str, Any]:
    """The keyword arguments of a model in the types of a dataclass's fields; a ValueError names the wrong one."""
    checked = merge_checked(OmegaConf.structured(schema), [(source, kwargs)], schema, prefix='model.')
    content = typing.cast(dict[str, Any], OmegaConf.to_container(checked))
    return {key: content[key] for key in kwargs}


def merge_checked(config: Any, layers: Sequence[tuple[str, Mapping[str, Any]]], schema: type, prefix: str = '') -> Any:
    """Lay `layers` over `config`, each with its source; errors name it, the key, the value and the nearest name."""
    for source, layer in layers:
        _reject_unknown(layer, schema, source, prefix)
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.merge(config, *(dict(layer) for _, layer in layers))
    # Now one value at a time, because OmegaConf's error for a tuple of the wrong length does not say whose it is.
    for source, layer in layers:
        for key, value in layer.items():
            leaves = value.items() if isinstance(value, Mapping) else [(None, value)]
            for inner, leaf in leaves:
                try:
                    config = OmegaConf.merge(config, {key: leaf if inner is None else {inner: leaf}})
                except OmegaConfBaseException as error:
                    name = f'{prefix}{key}' if inner is None else f'{prefix}{key}.{inner}'
                    raise ValueError(f'{source}: {name} = {leaf!r}: {str(error).splitlines()[0]}') from error
    return config


def _reject_unknown(layer: Mapping[str, Any], schema: type, source: str, prefix: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for key, value in layer.items():
        if key not in fields:
            raise ValueError(f'{source}: {unknown(f"{prefix}{key}", value, fields, "a key", prefix)}')
        section = fields[key].type
        is_section = dataclasses.is_dataclass(section)
        if (is_section or f'{prefix}{key}' == 'model') and not isinstance(value, Mapping):
            raise ValueError(f'{source}: expected {prefix}{key} to be a section of keys, got {value!r}')
        if is_section:
            _reject_unknown(value, typing.cast(type, section), source, f'{prefix}{key}.')


def unknown(key: str, value: Any, valid: Iterable[str], kind: str, prefix: str = '') -> str:
    """The message of an error: the value is none of the valid ones, and which is the nearest."""
    names = list(valid)
    is_key = kind == 'a key'
    wanted = key.removeprefix(prefix) if is_key else str(value)
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0)
    return f'{key} = {value!r} is not {kind}; the nearest is {prefix if is_key else ""}{nearest[0]}'


def _model_schema(module: str) -> type:
    """The keyword arguments of a family of timm's models."""
    from timm.models.vision_transformer import VisionTransformer

    from aft_vision.models.aft_vit import AFTVisionTransformer

    classes = (VisionTransformer,) if module in VIT_MODULES else (VisionTransformer, AFTVisionTransformer)
    return _schema(classes, WEIGHT_KEYS, RESERVED_MODEL_KEYS)


def _schema(classes: Sequence[type], more: Mapping[str, Any], reserved: Mapping[str, str]) -> type:
    """The keyword arguments of classes, and more, as a dataclass; a type OmegaConf does not know becomes Any."""
    arguments = dict(more)
    for cls in classes:
        hints = typing.get_type_hints(typing.cast(Any, cls).__init__)
        for parameter in inspect.signature(cls).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in reserved:
                arguments[parameter.name] = hints.get(parameter.name, Any)
    return dataclasses.make_dataclass(
        'Model', [(name, supported(hint), field(default=None)) for name, hint in arguments.items()]
    )


def supported(hint: Any) -> Any:
    """A type that OmegaConf knows, or None; Any for other types."""
    scalars = {int, float, bool, str, type(None)}
    parts = set(typing.get_args(hint)) if typing.get_origin(hint) is not Literal else set()
    if hint in scalars or (parts and parts <= scalars):
        return hint | None
    return Any


def _read_chain(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """The file and everything it builds on, the deepest base first."""
    if not path.is_file():
        raise ValueError(f'expected a YAML file, got {path}, which does not exist')
    if path.resolve() in above:
        raise ValueError(f'expected base files that end, got {path}, which builds on itself')
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ValueError(f'expected valid YAML in {path}, got: {error}') from error
    if not isinstance(content, dict):
        raise ValueError(f'expected sections of keys in {path}, got a {type(content).__name__}')
    base = content.pop('base', None)
    if not isinstance(base, str | None):
        raise ValueError(f'expected base in {path} to be the name of a file, got {base!r}')
    below = _read_chain(path.parent / base, (*above, path.resolve())) if base is not None else []
    return [*below, (str(path), typing.cast(dict[str, Any], content))]


def _read_override(override: str) -> tuple[str, dict[str, Any]]:
    if '=' not in override:
        raise ValueError(f'expected an override like section.key=value, got {override!r}')
    try:
        layer = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except yaml.YAMLError as error:
        raise ValueError(f'expected a YAML value after = in the override {override!r}, got: {error}') from error
    return 'command line', typing.cast(dict[str, Any], layer)
