"""The command lines of the trainers; it imports nothing that takes seconds."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser with an unformatted description, --debug, and one-line errors.

    A command parses its arguments once before its slow imports too, so that --help and errors are immediate.
    """

    def __init__(self, description: str | None) -> None:
        module = getattr(sys.modules['__main__'], '__spec__', None)
        command = None if module is None else f'python -m {module.name.removesuffix(".__main__")}'
        super().__init__(command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument('--debug', action='store_true', help='show the traceback of an error')

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = sys.argv[1:] if args is None else list(args)
        found, rest = super().parse_known_args(args, namespace)
        # The rest has all overrides too, which are parsed after the options.
        if options := [each for each in rest if each.startswith('--')]:
            self.error(f'unrecognized arguments: {" ".join(options)}')
        return found, rest

    def error(self, message: str) -> NoReturn:
        # argparse does not say which option it does not know if another one is missing.
        for given in (each.partition('=')[0] for each in getattr(self, '_given', ()) if each.startswith('--')):
            near = difflib.get_close_matches(given, self._option_string_actions, n=1)
            if near and not any(option.startswith(given) for option in self._option_string_actions):
                message = f'there is no option {given}; did you mean {near[0]}?'
                break
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
