"""The keys of an experiment, from its dataclasses and their docstrings."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from train.config_layers import as_yaml
from train.model_section import allowed_range
from train.schema import default_of

# The text for an argument whose default depends on the model, and for one without a description.
OF_NAME, OF_TIMM = '(of model.name)', "As in timm's VisionTransformer."
# An entry of the section `Args` or `Attributes` of a docstring.
ENTRY = re.compile(
    r'^    (?P<names>[a-z0-9_]+(?:, [a-z0-9_]+)*): (?P<text>.*?)(?=^    \S|^\S|\Z)', re.MULTILINE | re.DOTALL
)


class Key(NamedTuple):
    """A key of an experiment.

    Attributes:
        name: `section.name`.
        default: As written in YAML.
        limits: Unit and range of a number; '' for other types.
        meaning: Description.
    """

    name: str
    default: str
    limits: str
    meaning: str


def list_keys(schema: type, arguments: type | None = None) -> list[Key]:
    """List the keys of an experiment, section by section.

    Args:
        schema: The dataclass of the experiment; a field that is a dataclass is a section.
        arguments: The dataclass of the `model` section, of `arguments_schema`.
    """
    keys: list[Key] = []
    for section in dataclasses.fields(schema):
        default = default_of(section)
        if dataclasses.is_dataclass(default):
            keys += _section_keys(section.name, type(default))
            continue
        meaning = 'the name of the model, and its keyword arguments' if section.name == 'model' else ''
        keys.append(Key(section.name, as_yaml(default), '', meanings_of(schema).get(section.name, meaning)))
        if section.name == 'model' and arguments is not None:
            keys += _model_keys(arguments)
    return keys


def _section_keys(section: str, schema: type) -> Iterator[Key]:
    meanings = meanings_of(schema)
    for each in dataclasses.fields(schema):
        limits = ', '.join(str(each.metadata[name]) for name in ('unit', 'range') if each.metadata.get(name))
        yield Key(f'{section}.{each.name}', as_yaml(default_of(each)), limits, meanings.get(each.name, ''))


def _model_keys(arguments: Any) -> Iterator[Key]:
    # Text models have no name, and defaults of their own.
    if arguments.defaults is None:
        yield Key('model.name', 'required', '', 'The name of a model, which the defaults depend on.')
    meanings = {**meanings_of(*arguments.documented), **arguments.meanings}
    for each in dataclasses.fields(arguments):
        limits = '' if each.type in (bool | None, str | None) else str(allowed_range(each.name) or '')
        default = OF_NAME if arguments.defaults is None else arguments.defaults.get(each.name, 'null')
        yield Key(f'model.{each.name}', default, limits, meanings.get(each.name, OF_TIMM))


def meanings_of(*classes: type) -> dict[str, str]:
    """Collect the descriptions of attributes and arguments from the docstrings of classes and their bases, for YAML."""
    meanings: dict[str, str] = {}
    bases = [base for cls in classes for base in reversed(cls.__mro__)]
    for documented in (each for base in bases for each in (base, vars(base).get('__init__'))):
        docstring = inspect.cleandoc(documented.__doc__ or '')
        for entry in ENTRY.finditer(re.split(r'^(?:Attributes|Args):\n', docstring, flags=re.MULTILINE)[-1]):
            text = ' '.join(entry['text'].split())
            text = re.sub(r'\b(?:None|True|False)\b', lambda word: as_yaml(ast.literal_eval(word[0])), text)
            meanings |= dict.fromkeys(entry['names'].split(', '), text)
    return meanings


def format_keys(keys: list[Key]) -> str:
    """Format keys as text: a line with name, default, unit and range, followed by the meaning."""
    lines = []
    for key in keys:
        lines.append(f'{key.name}={key.default}' + (f'  ({key.limits})' if key.limits else ''))
        lines += textwrap.wrap(key.meaning, 120, initial_indent='    ', subsequent_indent='    ')
    return '\n'.join(lines)
