"""The keys of an experiment, as its dataclasses declare and describe them."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from train.arguments import CommandParser

DESCRIPTION = 'Print the keys of every experiment as a page of Markdown, which the site of make docs has.'

# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    CommandParser(DESCRIPTION).parse_args()

from aft_vision.commandline import run_command
from train.layers import as_yaml
from train.model_section import decoder_schema, meanings_of, model_schema

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


def list_keys(schema: type, arguments: type | None = None) -> list[Key]:
    """List the keys of an experiment, section by section.

    Args:
        schema: The dataclass of the experiment; a field that is a dataclass is a section.
        arguments: The dataclass of the `model` section, whose fields hold what there is to say of them.
    """
    keys = []
    for section in dataclasses.fields(schema):
        default = _default(section)
        if not dataclasses.is_dataclass(default):
            meaning = 'the name of the model, and its keyword arguments' if section.name == 'model' else ''
            keys.append(Key(section.name, as_yaml(default), '', meanings_of(schema).get(section.name, meaning)))
            if section.name == 'model' and arguments is not None:
                # A model of texts has no name.
                if 'preset' not in {each.name for each in dataclasses.fields(arguments)}:
                    keys.append(Key('model.name', 'required', '', 'The name of a model, which the defaults depend on.'))
                keys += [Key(f'model.{each.name}', **each.metadata) for each in dataclasses.fields(arguments)]
            continue
        meanings = meanings_of(type(default))
        for field in dataclasses.fields(default):
            limits = ', '.join(str(field.metadata[name]) for name in ('unit', 'range') if field.metadata.get(name))
            default_text, meaning = as_yaml(_default(field)), meanings.get(field.name, '')
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
    # A trainer of images needs no library of texts.
    from train.fastformer.schema import text_model_schema
    from train.fastformer.tasks import TASKS
    from train.schema import Config
    from train.sequence_schema import CharConfig, PixelConfig

    texts = {f'Texts: task={name}': (task.schema, text_model_schema()) for name, task in TASKS.items()}
    decoder = decoder_schema()
    images = {'Images': (Config, model_schema()), 'Pixels': (PixelConfig, decoder), 'Characters': (CharConfig, decoder)}
    parts = [PAGE_HEAD]
    for title, schemas in {**images, **texts}.items():
        parts.append(f'## {title}\n\n{_format_table(list_keys(*schemas))}')
    return '\n\n'.join(parts) + '\n'


def _format_table(keys: list[Key]) -> str:
    rows = ['| key | default | unit, range | meaning |', '|---|---|---|---|']
    for key in keys:
        meaning = key.meaning.replace('|', '\\|')
        rows.append(f'| `{key.name}` | `{key.default}` | {key.limits} | {meaning} |')
    return '\n'.join(rows)


def _default(field: 'dataclasses.Field[Any]') -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the page."""
    CommandParser(DESCRIPTION).parse_args(argv)
    print(format_page(), end='')


if __name__ == '__main__':
    run_command(main)
