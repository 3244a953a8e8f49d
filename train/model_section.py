"""The `model` section of an experiment: valid arguments of a model and their ranges."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import timm
import torch
from omegaconf import OmegaConf
from timm.data import resolve_data_config
from timm.models import PretrainedCfg
from torch import nn

from aft_vision.data.ranges import Range, check_range
from aft_vision.errors import IMPORT_HINT
from aft_vision.layers.base import CAUSAL_MIXERS, MIXERS, TokenMixer, mixer_arguments
from aft_vision.models.checkpoint import read_pretrained_cfg
from aft_vision.models.decoder import AFTDecoder
from aft_vision.models.decoders import DECODERS
from aft_vision.models.transfer_source import build_model
from train.command_line import print_once
from train.config_layers import COMMAND_LINE, Layer, merge_checked, section
from train.schema import require, unknown

# Arguments that something else decides; classifiers have no `context`, and decoders no `num_classes`.
RESERVED_KEYS = {
    'num_classes': 'the data set determines the number of classes',
    'in_chans': 'files are read as red, green and blue, and other bands are not supported',
    'context': 'the data decide how long a sequence is, by data.context where it is text',
    'vocab_size': 'the data decide how many symbols there are',
    'device': 'run.device says where the model is',
    'dtype': 'run.amp says what it computes in',
}
NONE = type(None)
VIT_MODULES = ('timm.models.vision_transformer', 'timm.models.deit')
# Arguments of timm.create_model about initial weights; a checkpoint does not need them.
WEIGHT_KEYS = {'pretrained': bool, 'pretrained_cfg_overlay': Any}
WEIGHT_MEANINGS = {
    'pretrained': "Whether training starts from timm's weights of that name.",
    'pretrained_cfg_overlay': "Changes to timm's configuration of those weights, such as `{file: FILE}`.",
}
# Keys of `data` that null takes from the weights or the model.
PREPROCESSING_KEYS = ('img_size', 'crop_pct')
# Ranges of arguments of any model by name; the first match counts.
ARGUMENT_RANGES = [
    (r'(^|_)(rate|drop|dropout|prob)$', Range('[0, 1)')),
    (r'(^|_)(tau|ratio|eps|range|std)$', Range('(0, inf)')),
    (r'^(reg_tokens|num_\w+_tokens)$', Range('[0, inf)')),
    (r'(^|_)(dims?|depths?|heads|layers|sizes?|length|window|kernel|stride|context|width)$', Range('[1, inf)')),
]


def check_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Check `{name: ..., **kwargs}` against the signature of the model without building it.

    An `aft_*` model has the keyword arguments of its class and of timm's VisionTransformer if that is the base; a plain
    ViT or DeiT has only the latter. Any other model is built on the meta device.

    Raises:
        ValueError: the name is missing or not registered, or a keyword argument is unknown or of the wrong type or
            range.
    """
    name, kwargs = _split_name(model, 'a registered model')
    if not timm.is_model(name):
        raise ValueError(f'{unknown("model.name", name, timm.list_models(), "a registered model")}; {IMPORT_HINT}')
    _overlay(kwargs)
    schema = family_schema(name)
    if schema is not None:
        return {'name': name, **check_arguments(kwargs, schema, MIXERS)}
    check_numbers(kwargs)
    if kwargs.keys() - WEIGHT_KEYS:
        try:
            build_on_meta(model)
        except ValueError as error:
            raise ValueError(f'model: {error}') from error
    return {'name': name, **kwargs}


def check_decoder(model: Mapping[str, Any]) -> dict[str, Any]:
    """Check the `model` section of a pixel or character model, as `check_model` does for a classifier."""
    name, kwargs = _split_name(model, 'a pixel or character model')
    if name not in DECODERS:
        raise ValueError(unknown('model.name', name, DECODERS, 'a pixel or character model'))
    return {'name': name, **check_arguments(kwargs, decoder_schema(), CAUSAL_MIXERS)}


def _split_name(model: Mapping[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """Split a `model` section into the name and the arguments, of which none may be reserved."""
    kwargs = dict(model)
    name = kwargs.pop('name', None)
    if not isinstance(name, str):
        raise ValueError(f'expected model.name, the name of {what}, got {name!r}')
    refuse_reserved(kwargs, RESERVED_KEYS)
    return name, kwargs


def refuse_reserved(kwargs: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Raise a ValueError for an argument that something else than the `model` section decides, with the reason."""
    for key in reserved.keys() & kwargs.keys():
        raise ValueError(f'model.{key} = {kwargs[key]} is not for an experiment: {reserved[key]}')


def check_arguments(
    kwargs: Mapping[str, Any], schema: type, mixers: Mapping[str, type[TokenMixer]] = MIXERS
) -> dict[str, Any]:
    """Return the keyword arguments of a model in the types of a dataclass's fields.

    As in `timm.create_model`, None stands for the default, so it is left out where the model cannot have it.

    Raises:
        ValueError: one is unknown, or of the wrong type or range.
    """
    try:
        checked = merge_checked(schema, [kwargs], prefix='model.')
    except ValueError as error:
        # The arguments of a mixer that is not registered are unknown.
        if isinstance(kwargs.get('mixer'), str) and kwargs['mixer'] not in mixers:
            raise ValueError(f'{error}; model.mixer = {kwargs["mixer"]!r} is not registered: {IMPORT_HINT}') from error
        raise
    content = typing.cast(dict[str, Any], OmegaConf.to_container(checked))
    check_numbers({key: content[key] for key in kwargs})
    nullable = {each.name for each in dataclasses.fields(schema) if each.metadata['nullable']}
    return {key: content[key] for key in kwargs if content[key] is not None or key in nullable}


def check_numbers(kwargs: Mapping[str, Any]) -> None:
    """Raise a ValueError for a number outside the range of its argument's name."""
    for key, value in kwargs.items():
        allowed = allowed_range(key) or Range('(-inf, inf)')
        numbers = value if isinstance(value, (list, tuple)) else [value]
        numbers = [number for number in numbers if isinstance(number, (int, float)) and not isinstance(number, bool)]
        check_range(f'model.{key}', numbers[0] if numbers and numbers == [value] else numbers, allowed)


def allowed_range(argument: str) -> Range | None:
    """Return the range of an argument of any model by its name; None if it is unlimited."""
    return next((allowed for names, allowed in ARGUMENT_RANGES if re.search(names, argument)), None)


def build_on_meta(model: Mapping[str, Any]) -> nn.Module:
    """Build the model `{name: ..., **kwargs}` without weights, on the meta device.

    Raises:
        ValueError: timm cannot build it with these keyword arguments.
    """
    kwargs = {key: value for key, value in model.items() if key not in WEIGHT_KEYS}
    name = kwargs.pop('name')
    with torch.device('meta'):
        return build_model(name, **kwargs)


def fill_preprocessing(layers: Sequence[Layer]) -> list[Layer]:
    """Replace null in `data.img_size` and `data.crop_pct` by the values of `run.init_from`, otherwise of the model.

    Raises:
        ValueError: `run.init_from` is not a checkpoint or an exported folder.
    """
    known = cache(partial(_known_preprocessing, layers))

    def filled(layer: Mapping[str, Any]) -> Mapping[str, Any]:
        missing = [key for key, value in section(layer, 'data').items() if key in PREPROCESSING_KEYS and value is None]
        return {**layer, 'data': {**layer['data'], **{key: known()[key] for key in missing}}} if missing else layer

    return [(source, filled(layer)) for source, layer in layers]


def _known_preprocessing(layers: Sequence[Layer]) -> dict[str, Any]:
    merged: Any = OmegaConf.merge(*({key: section(layer, key) for key in ('model', 'run')} for _, layer in layers))
    start = merged.run.get('init_from')
    if start is None:
        known = timm.get_pretrained_cfg(str(merged.model.get('name'))) or PretrainedCfg()
        cfg = {**known.to_dict(), **_overlay(merged.model)}
    config = resolve_data_config(pretrained_cfg=cfg if start is None else read_pretrained_cfg(start))
    return {'img_size': list(config['input_size'][-2:]), 'crop_pct': config['crop_pct']}


def _overlay(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `model.pretrained_cfg_overlay` after checking that it is a mapping."""
    overlay = model.get('pretrained_cfg_overlay')
    require('model.pretrained_cfg_overlay', overlay, isinstance(overlay, Mapping | None), 'keys such as {file: FILE}')
    return overlay or {}


def drop_foreign_arguments(
    layers: Sequence[Layer], stays: Callable[[str, str, Any], bool], default: str
) -> list[Layer]:
    """Drop arguments of the files before a layer that names another model, and print one line with them.

    Args:
        stays: Returns whether an argument with a value stays for the model of a name.
        default: Name of the model where no file names one.
    """
    name = None
    for index, (source, layer) in enumerate(layers):
        named, before = section(layer, 'model').get('name'), name or (default if source == COMMAND_LINE else None)
        if not isinstance(named, str):
            continue
        # The tag of a name says which weights, not which architecture.
        if before is not None and before.partition('.')[0] != named.partition('.')[0]:
            why = f'{named} is another model than {before}; set them with it to keep them'
            layers = [*leave_out(layers[:index], partial(stays, named), why), *layers[index:]]
        name = named
    return list(layers)


def leave_out(layers: Sequence[Layer], stays: Callable[[str, Any], bool], why: str) -> list[Layer]:
    """Return layers without some arguments of the model in files, and print one line with these and the reason."""
    kept, dropped = [], []
    for source, layer in layers:
        model = section(layer, 'model') if source != COMMAND_LINE else {}
        foreign = [key for key, value in model.items() if key not in ('name', *WEIGHT_KEYS) and not stays(key, value)]
        if foreign:
            layer = {**layer, 'model': {key: value for key, value in model.items() if key not in foreign}}
            dropped.append(f'{", ".join(f"model.{key}" for key in foreign)} of {source}')
        kept.append((source, layer))
    if dropped:
        print_once(f'note: {" and ".join(dropped)} left out: {why}')
    return kept


def stays_for_classifier(name: str, key: str, value: Any) -> bool:
    """Return whether an argument is a rate of dropping or an open size, and a classifier takes it, if registered."""
    is_recipe = 'drop' in key or key.startswith('dynamic_img_')
    if is_recipe and timm.is_model(name):
        try:
            check_model({'name': name, key: value})
        except ValueError:
            return False
    return is_recipe


def stays_for_decoder(name: str, key: str, value: Any) -> bool:
    """Return whether an argument is not one of the mixer: the names of pixel and character models say no size."""
    return key not in ('mixer', 'mixer_args', *mixer_arguments(CAUSAL_MIXERS.values()))


def family_schema(name: str) -> type | None:
    """Return the keyword arguments of a model if it is a ViT or an AFT model, or no registered one."""
    if not timm.is_model(name):
        return model_schema()
    module = timm.models.model_entrypoint(name).__module__
    return model_schema(module) if module.startswith('aft_vision.') or module in VIT_MODULES else None


def model_schema(module: str = 'aft_vision') -> type:
    """Return the keyword arguments of the models of a module as a dataclass; by default of our vision transformers."""
    from timm.models.vision_transformer import VisionTransformer

    from aft_vision.models import AFTPyramid, AFTVisionTransformer

    if module in VIT_MODULES:
        return _schema((VisionTransformer,), (), True)
    classes = (AFTPyramid,) if module == AFTPyramid.__module__ else (VisionTransformer, AFTVisionTransformer)
    return _schema(classes, tuple(MIXERS.values()), True)


def decoder_schema() -> type:
    """Return the keyword arguments of a pixel or character model as a dataclass."""
    return _schema((AFTDecoder,), tuple(CAUSAL_MIXERS.values()), False)


@cache
def _schema(classes: tuple[type, ...], mixers: tuple[type[TokenMixer], ...], has_weights: bool) -> type:
    arguments = {**mixer_arguments(mixers), **(WEIGHT_KEYS if has_weights else {})}
    for cls in classes:
        hints = typing.get_type_hints(typing.cast(Any, cls).__init__)
        for parameter in inspect.signature(cls).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in RESERVED_KEYS:
                arguments[parameter.name] = hints.get(parameter.name, Any)
    return arguments_schema(arguments, (*mixers, *classes), WEIGHT_MEANINGS)


def arguments_schema(
    arguments: Mapping[str, Any],
    documented: Iterable[type],
    meanings: Mapping[str, str],
    defaults: Mapping[str, str] | None = None,
) -> type:
    """Return a dataclass of the arguments of a model, each None by default; types unknown to OmegaConf become Any.

    Args:
        arguments: The type of each argument.
        documented: Classes whose docstrings describe them, for `--keys`.
        meanings: Descriptions of those that have none there.
        defaults: Their defaults in YAML; None if they depend on the name of the model.
    """
    fields = [
        (name, supported(hint), dataclasses.field(default=None, metadata={'nullable': NONE in typing.get_args(hint)}))
        for name, hint in arguments.items()
    ]
    about = {'documented': tuple(documented), 'meanings': meanings, 'defaults': defaults}
    return dataclasses.make_dataclass('Model', fields, namespace=about)


def supported(hint: Any) -> Any:
    """Return the type, or None, if OmegaConf supports it; otherwise Any."""
    scalars = {int, float, bool, str, NONE}
    # OmegaConf has no Sequence.
    parts = set(typing.get_args(hint)) if typing.get_origin(hint) not in (Literal, Sequence) else set()
    return hint | None if hint in scalars or (parts and parts <= scalars) else Any
