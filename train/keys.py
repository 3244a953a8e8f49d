"""The keys of an experiment, as its dataclasses declare and describe them."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from train.arguments import CommandParser

DESCRIPTION = 'Print the keys of every experiment as a page of Markdown: docs/config_keys.md.'

# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    CommandParser(DESCRIPTION).parse_args()

from aft_vision.commandline import run_command

ENTRY = re.compile(
    r'^    (?P<names>[a-z0-9_]+(?:, [a-z0-9_]+)*): (?P<text>.*?)(?=^    \S|\Z)', re.MULTILINE | re.DOTALL
)

PAGE_HEAD = """# Keys of an experiment

Each is a key of a YAML file below configs/, or `section.key=value` on a command line; the trainer prints them with
`--keys`. Made by `python -m train.keys`."""


class Key(NamedTuple):
    """A key of an experiment.

    Attributes:
        name: `section.name`.
        default: As YAML writes it.
        limits: Unit and range of a number; '' for anything else.
        meaning: In words.
    """

    name: str
    default: str
    limits: str
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
            keys.append(Key(section.name, _as_yaml(default), '', _meanings(schema).get(section.name, meaning)))
            continue
        meanings = _meanings(type(default))
        for field in dataclasses.fields(default):
            limits = ', '.join(str(field.metadata[name]) for name in ('unit', 'range') if field.metadata.get(name))
            default_text, meaning = _as_yaml(_default(field)), meanings.get(field.name, '')
            keys.append(Key(f'{section.name}.{field.name}', default_text, limits, meaning))
    return keys


def format_keys(keys: list[Key], width: int = 120) -> str:
    """Format keys as text: a line with name, default, unit and range, below it the meaning."""
    lines = []
    for key in keys:
        lines.append(f'{key.name}={key.default}' + (f'  ({key.limits})' if key.limits else ''))
        lines += textwrap.wrap(key.meaning, width, initial_indent='    ', subsequent_indent='    ')
    return '\n'.join(lines)


def format_page() -> str:
    """Format the keys of every trainer as a page of Markdown."""
    from train.fastformer.tasks import TASKS
    from train.schema import Config
    from train.sequence_schema import CharConfig, PixelConfig

    texts = {f'Texts: task={name}': task.schema for name, task in TASKS.items()}
    parts = [PAGE_HEAD]
    for title, schema in {'Images': Config, 'Pixels': PixelConfig, 'Characters': CharConfig, **texts}.items():
        parts.append(f'## {title}\n\n{_format_table(list_keys(schema))}')
    return '\n\n'.join(parts) + '\n'


def _format_table(keys: list[Key]) -> str:
    rows = ['| key | default | unit, range | meaning |', '|---|---|---|---|']
    for key in keys:
        meaning = key.meaning.replace('|', '\\|')
        rows.append(f'| `{key.name}` | `{key.default}` | {key.limits} | {meaning} |')
    return '\n'.join(rows)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page."""
    CommandParser(DESCRIPTION).parse_args(argv)
    print(format_page(), end='')


if __name__ == '__main__':
    run_command(main)
