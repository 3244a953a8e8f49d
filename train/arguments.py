"""The command lines of the trainers; it imports nothing that takes seconds."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser with an unformatted description, --debug, and one-line errors.

    A command parses its arguments once before its slow imports too, so that --help and errors are immediate.
    """

    def __init__(self, description: str | None) -> None:
        module = getattr(sys.modules['__main__'], '__spec__', None)
        command = None if module is None else f'python -m {module.name.removesuffix(".__main__")}'
        super().__init__(command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument('--debug', action='store_true', help='show the traceback of an error')

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message}; --help shows the usage\n')


def parse_args(
    description: str | None, example: str, argv: Sequence[str] | None = None, evaluates: bool = True
) -> argparse.Namespace:
    """Parse the command line of a trainer.

    Args:
        example: The config to suggest if none is given.
        evaluates: Whether the trainer has --eval.
    """
    parser = CommandParser(description)
    parser.add_argument('--config', type=Path, help='the YAML experiment')
    if evaluates:
        parser.add_argument('--eval', action='store_true', help='evaluate, and train nothing')
    parser.add_argument('--keys', action='store_true', help='print every key of an experiment and exit')
    parser.add_argument('--quiet', action='store_true', help='no progress bar')
    parser.add_argument('overrides', nargs='*', metavar='section.key=value', help='changes to the experiment')
    args = parser.parse_intermixed_args(argv)
    if args.config is None and not args.keys:
        parser.error(f'expected an experiment, got none; try --config {example}')
    return args
