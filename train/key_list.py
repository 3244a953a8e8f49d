"""The keys of an experiment, from its dataclasses and their docstrings."""

import dataclasses
import textwrap
from typing import Any, NamedTuple

from train.config_layers import as_yaml
from train.model_section import meanings_of


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
        arguments: The dataclass of the `model` section, with descriptions in its fields.
    """
    keys = []
    for section in dataclasses.fields(schema):
        default = _default(section)
        if not dataclasses.is_dataclass(default):
            meaning = 'the name of the model, and its keyword arguments' if section.name == 'model' else ''
            keys.append(Key(section.name, as_yaml(default), '', meanings_of(schema).get(section.name, meaning)))
            if section.name == 'model' and arguments is not None:
                # Text models have no name.
                if 'preset' not in {each.name for each in dataclasses.fields(arguments)}:
                    keys.append(Key('model.name', 'required', '', 'The name of a model, which the defaults depend on.'))
                for each in dataclasses.fields(arguments):
                    described = (each.metadata[name] for name in ('default', 'limits', 'meaning'))
                    keys.append(Key(f'model.{each.name}', *described))
            continue
        meanings = meanings_of(type(default))
        for field in dataclasses.fields(default):
            limits = ', '.join(str(field.metadata[name]) for name in ('unit', 'range') if field.metadata.get(name))
            default_text, meaning = as_yaml(_default(field)), meanings.get(field.name, '')
            keys.append(Key(f'{section.name}.{field.name}', default_text, limits, meaning))
    return keys


def format_keys(keys: list[Key]) -> str:
    """Format keys as text: a line with name, default, unit and range, followed by the meaning."""
    lines = []
    for key in keys:
        lines.append(f'{key.name}={key.default}' + (f'  ({key.limits})' if key.limits else ''))
        lines += textwrap.wrap(key.meaning, 120, initial_indent='    ', subsequent_indent='    ')
    return '\n'.join(lines)


def _default(field: 'dataclasses.Field[Any]') -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
