"""The `model` section of an experiment: valid arguments of a model and their ranges."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, Literal

import timm
import torch
from omegaconf import OmegaConf
from timm.data import resolve_data_config, resolve_model_data_config
from timm.models import PretrainedCfg
from torch import nn

from aft_vision.commandline import print_once
from aft_vision.data.ranges import Range, check_range
from aft_vision.errors import IMPORT_HINT
from aft_vision.layers.base import CAUSAL_MIXERS, MIXERS, TokenMixer, mixer_arguments
from aft_vision.models.checkpoint import load_model
from aft_vision.models.decoder import AFTDecoder
from aft_vision.models.decoders import DECODERS, create_decoder
from aft_vision.models.transfer_source import build_model
from train.config_layers import COMMAND_LINE, YAML_WORDS, Layer, merge_checked
from train.schema import require, unknown

RESERVED_MODEL_KEYS = {
    'num_classes': 'the data set determines the number of classes',
    'in_chans': 'files are read as red, green and blue, and other bands are not supported',
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
# Arguments of timm.create_model about initial weights; a checkpoint does not need them.
WEIGHT_KEYS = {'pretrained': bool, 'pretrained_cfg_overlay': Any}
WEIGHT_MEANINGS = {
    'pretrained': "Whether training starts from timm's weights of that name.",
    'pretrained_cfg_overlay': "Changes to timm's configuration of those weights, such as `{file: FILE}`.",
}
# Keys of `data` that null takes from the weights or the model.
PREPROCESSING_KEYS = ('img_size', 'crop_pct')
# The text of `--keys` for an argument whose default depends on the model, and for one without a description.
OF_NAME, OF_TIMM = '(of model.name)', "As in timm's VisionTransformer."
# An entry of the section `Args` or `Attributes` of a docstring.
ENTRY = re.compile(
    r'^    (?P<names>[a-z0-9_]+(?:, [a-z0-9_]+)*): (?P<text>.*?)(?=^    \S|^\S|\Z)', re.MULTILINE | re.DOTALL
)
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
    ViT or DeiT has those of the latter. Any other model is built on the meta device.

    Raises:
        ValueError: the name is missing or not registered, or a keyword argument is unknown or of the wrong type or
            range.
    """
    kwargs = dict(model)
    name = kwargs.pop('name', None)
    if not isinstance(name, str):
        raise ValueError(f'expected model.name, the name of a registered model, got {name!r}')
    if not timm.is_model(name):
        raise ValueError(f'{unknown("model.name", name, timm.list_models(), "a registered model")}; {IMPORT_HINT}')
    _check_reserved(kwargs, RESERVED_MODEL_KEYS)
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
    kwargs = dict(model)
    name = kwargs.pop('name', None)
    if not isinstance(name, str):
        raise ValueError(f'expected model.name, the name of a pixel or character model, got {name!r}')
    if name not in DECODERS:
        raise ValueError(unknown('model.name', name, DECODERS, 'a pixel or character model'))
    _check_reserved(kwargs, RESERVED_DECODER_KEYS)
    return {'name': name, **check_arguments(kwargs, decoder_schema(), CAUSAL_MIXERS)}


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
    filled = list(layers)
    known: dict[str, Any] = {}
    for index, (source, layer) in enumerate(layers):
        data: Any = layer.get('data')
        keys = PREPROCESSING_KEYS if isinstance(data, Mapping) else ()
        missing = [key for key in keys if key in data and data[key] is None]
        if missing:
            known = known or _known_preprocessing(layers)
            filled[index] = (source, {**layer, 'data': {**data, **{key: known[key] for key in missing}}})
    return filled


def _known_preprocessing(layers: Sequence[Layer]) -> dict[str, Any]:
    sections = [
        {key: layer[key] for key in ('model', 'run') if isinstance(layer.get(key), Mapping)} for _, layer in layers
    ]
    merged: Any = OmegaConf.merge({'model': {}, 'run': {}}, *sections)
    start, name = merged.run.get('init_from'), merged.model.get('name')
    if start is not None:
        found = resolve_model_data_config(load_model(start))
    else:
        cfg = timm.get_pretrained_cfg(str(name)) or PretrainedCfg()
        found = resolve_data_config(pretrained_cfg={**cfg.to_dict(), **_overlay(merged.model)})
    return {'img_size': list(found['input_size'][-2:]), 'crop_pct': found['crop_pct']}


def _overlay(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `model.pretrained_cfg_overlay` after checking that it is a mapping."""
    overlay = model.get('pretrained_cfg_overlay')
    require('model.pretrained_cfg_overlay', overlay, isinstance(overlay, Mapping | None), 'keys such as {file: FILE}')
    return overlay or {}


def drop_foreign_arguments(
    layers: Sequence[Layer], takes: Callable[[str, str, Any], bool], is_recipe: Callable[[str], bool], default: str
) -> list[Layer]:
    """Drop arguments of the files that are those of another model, and print one line with them.

    If the command line names another model than the files, only arguments of the recipe remain of theirs. If a file
    names another one than its base, those remain that the model takes.

    Args:
        takes: Returns whether a model takes an argument with a value, by name.
        is_recipe: Returns whether an argument belongs to the recipe, and not to the architecture that a name means.
        default: Name of the model where no file names one.
    """
    models = [layer['model'] if isinstance(layer.get('model'), Mapping) else {} for _, layer in layers]
    named = [index for index, model in enumerate(models) if isinstance(model.get('name'), str)]
    of_files = [models[index]['name'] for index in named if layers[index][0] != COMMAND_LINE] or [default]
    if not named or {*of_files, *(models[index]['name'] for index in named)} == {models[named[-1]]['name']}:
        return list(layers)
    name, why = models[named[-1]]['name'], 'has no such argument'
    # The tag of a name says which weights, not which architecture.
    is_other = layers[named[-1]][0] == COMMAND_LINE and _architecture(of_files[-1]) != _architecture(name)
    if is_other:
        why = f'is another model than {of_files[-1]}; they stay if the command line sets them'

    def is_foreign(key: str, value: Any) -> bool:
        return key not in ('name', *WEIGHT_KEYS) and ((is_other and not is_recipe(key)) or not takes(name, key, value))

    return [*leave_out(layers[: named[-1]], is_foreign, f'{name} {why}'), *layers[named[-1] :]]


def leave_out(layers: Sequence[Layer], is_foreign: Callable[[str, Any], bool], why: str) -> list[Layer]:
    """Return layers without some arguments of the model in files, and print one line with these and the reason."""
    kept, dropped = [], []
    for source, layer in layers:
        model = layer['model'] if source != COMMAND_LINE and isinstance(layer.get('model'), Mapping) else {}
        foreign = [key for key, value in model.items() if is_foreign(key, value)]
        if foreign:
            layer = {**layer, 'model': {key: value for key, value in model.items() if key not in foreign}}
            dropped.append(f'{", ".join(f"model.{key}" for key in foreign)} of {source}')
        kept.append((source, layer))
    if dropped:
        print_once(f'note: {" and ".join(dropped)} left out: {why}')
    return kept


def _architecture(name: str) -> str:
    return name.partition('.')[0]


def is_recipe_of_images(key: str) -> bool:
    """Return whether an argument of a classifier is no part of the architecture: a rate of dropping, or open sizes."""
    return 'drop' in key or key.startswith('dynamic_img_')


def is_recipe_of_sequences(key: str) -> bool:
    """Return whether an argument is not one of the mixer: the names of pixel and character models say no size."""
    return key not in ('mixer', 'mixer_args', *mixer_arguments(CAUSAL_MIXERS.values()))


def model_takes(name: str, key: str, value: Any) -> bool:
    """Return whether a registered model has a keyword argument; True if the model is not registered."""
    if not timm.is_model(name):
        return True
    schema = family_schema(name)
    if schema is not None:
        return key in {field.name for field in dataclasses.fields(schema)}
    try:
        build_on_meta({'name': name, key: value})
    except ValueError as error:
        return not isinstance(error.__cause__, TypeError)
    return True


def decoder_takes(name: str, key: str, value: Any) -> bool:
    """Return whether a pixel or character model has an argument; True for any other name."""
    if name not in DECODERS or key not in ('mixer_args', *mixer_arguments(CAUSAL_MIXERS.values())):
        return True
    taken = type(create_decoder(name, depth=1, device='meta').blocks[0].attn).arguments()
    return taken.keys() >= set(value or ()) if key == 'mixer_args' else key in taken


def _check_reserved(kwargs: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    for key in reserved.keys() & kwargs.keys():
        raise ValueError(f'model.{key} = {kwargs[key]!r} is not for an experiment: {reserved[key]}')


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

    classes: tuple[type, ...] = (VisionTransformer, AFTVisionTransformer)
    if module in VIT_MODULES:
        return _schema((VisionTransformer,), (), tuple(WEIGHT_KEYS.items()))
    if module == AFTPyramid.__module__:
        classes = (AFTPyramid,)
    return _schema(classes, tuple(MIXERS.values()), tuple(WEIGHT_KEYS.items()))


def decoder_schema() -> type:
    """Return the keyword arguments of a pixel or character model as a dataclass."""
    return _schema((AFTDecoder,), tuple(CAUSAL_MIXERS.values()), ())


@cache
def _schema(classes: tuple[type, ...], mixers: tuple[type[TokenMixer], ...], more: tuple[tuple[str, Any], ...]) -> type:
    """Return arguments of models, of mixers, and more, as a dataclass; types unknown to OmegaConf become Any."""
    arguments = {**mixer_arguments(mixers), **dict(more)}
    of_mixers = {name: text for name, text in meanings_of(*mixers).items() if name in arguments}
    meanings = {**WEIGHT_MEANINGS, **of_mixers, **meanings_of(*classes)}
    reserved = {*RESERVED_MODEL_KEYS, *RESERVED_DECODER_KEYS}
    for cls in classes:
        hints = typing.get_type_hints(typing.cast(Any, cls).__init__)
        for parameter in inspect.signature(cls).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.name not in reserved:
                arguments[parameter.name] = hints.get(parameter.name, Any)
    return dataclasses.make_dataclass(
        'Model',
        [
            (name, supported(hint), described(name, hint, OF_NAME, meanings.get(name, OF_TIMM)))
            for name, hint in arguments.items()
        ],
    )


def meanings_of(*classes: type) -> dict[str, str]:
    """Collect the descriptions of attributes and arguments from the docstrings of classes and their bases, for YAML."""
    found: dict[str, str] = {}
    bases = [base for cls in classes for base in reversed(cls.__mro__)]
    documented = [each for base in bases for each in (base, vars(base).get('__init__'))]
    for each in documented:
        *_, entries = re.split(r'^(?:Attributes|Args):\n', inspect.cleandoc(each.__doc__ or ''), flags=re.MULTILINE)
        for entry in ENTRY.finditer(entries):
            for name in entry['names'].split(', '):
                text = ' '.join(entry['text'].split())
                found[name] = re.sub(r'\b(?:None|True|False)\b', lambda word: YAML_WORDS[word[0]], text)
    return found


def described(name: str, hint: Any, default: str, meaning: str) -> Any:
    """Make the field of a model argument, None by default, with its description for `list_keys`."""
    numeric = supported(hint) not in (bool | None, str | None)
    limits = str(allowed_range(name) or '') if numeric else ''
    nullable = type(None) in typing.get_args(hint)
    return field(
        default=None, metadata={'default': default, 'limits': limits, 'meaning': meaning, 'nullable': nullable}
    )


def supported(hint: Any) -> Any:
    """Return the type, or None, if OmegaConf supports it; otherwise Any."""
    scalars = {int, float, bool, str, type(None)}
    # OmegaConf has no Sequence.
    parts = set(typing.get_args(hint)) if typing.get_origin(hint) not in (Literal, Sequence) else set()
    if hint in scalars or (parts and parts <= scalars):
        return hint | None
    return Any
