"""The keys of an experiment, as its dataclasses declare and describe them."""

import dataclasses
import inspect
import re
import textwrap
from typing import Any, NamedTuple

ENTRY = re.compile(r'^    (?P<names>[a-z_]+(?:, [a-z_]+)*): (?P<text>.*?)(?=^    \S|\Z)', re.MULTILINE | re.DOTALL)


class Key(NamedTuple):
    """A key `section.name` with its default, as YAML writes it, and its meaning, units included."""

    name: str
    default: str
    meaning: str


def list_keys(schema: type) -> list[Key]:
    """List the keys of an experiment, section by section.

    Args:
        schema: The dataclass of the experiment; a field that is a dataclass is a section.
    """
    keys = []
    for section in dataclasses.fields(schema):
        default = _default(section)
        if not dataclasses.is_dataclass(default):
            meaning = 'the name of the model, and its keyword arguments' if section.name == 'model' else ''
            keys.append(Key(section.name, _as_yaml(default), _meanings(schema).get(section.name, meaning)))
            continue
        meanings = _meanings(type(default))
        for field in dataclasses.fields(default):
            keys.append(Key(f'{section.name}.{field.name}', _as_yaml(_default(field)), meanings.get(field.name, '')))
    return keys


def format_keys(keys: list[Key], width: int = 120) -> str:
    """Format keys as text: a line with name and default, below it the meaning."""
    lines = []
    for key in keys:
        lines.append(f'{key.name}={key.default}')
        lines += textwrap.wrap(key.meaning, width, initial_indent='    ', subsequent_indent='    ')
    return '\n'.join(lines)


def format_table(keys: list[Key]) -> str:
    """Format keys as a table of Markdown."""
    rows = [f'| `{key.name}` | `{key.default}` | {key.meaning.replace("|", chr(92) + "|")} |' for key in keys]
    return '\n'.join(['| key | default | meaning |', '|---|---|---|', *rows])


def _default(field: 'dataclasses.Field[Any]') -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, (tuple, list)):
        return f'[{", ".join(map(_as_yaml, value))}]'
    if isinstance(value, dict):
        return f'{{{", ".join(f"{name}: {_as_yaml(each)}" for name, each in value.items())}}}'
    return repr(value) if value == '' else str(value)


def _meanings(schema: type) -> dict[str, str]:
    """Collect what the docstrings of a dataclass and its bases say of their attributes."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        _, _, attributes = inspect.cleandoc(base.__doc__ or '').partition('Attributes:\n')
        for entry in ENTRY.finditer(attributes):
            for name in entry['names'].split(', '):
                found[name] = ' '.join(entry['text'].split())
    return found
