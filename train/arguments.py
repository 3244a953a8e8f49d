"""The command lines of the trainers; it imports nothing that takes seconds."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from aft_vision_cli.commandline import CommandParser


def parse_args(
    description: str | None, example: str, argv: Sequence[str] | None = None, evaluates: bool = True
) -> argparse.Namespace:
    """Parse the command line of a trainer.

    Args:
        example: The config to suggest if none is given.
        evaluates: Whether the trainer has --eval.
    """
    parser = CommandParser(description)
    parser.add_argument('--config', type=Path, help='the YAML experiment, or the name of one of the package')
    if evaluates:
        parser.add_argument('--eval', action='store_true', help='evaluate, and train nothing')
    parser.add_argument('--keys', action='store_true', help='print every key of an experiment and exit')
    parser.add_argument('--quiet', action='store_true', help='no progress bar')
    parser.add_argument('overrides', nargs='*', metavar='section.key=value', help='changes to the experiment')
    args = parser.parse_intermixed_args(argv)
    if args.config is None and not args.keys:
        parser.error(f'expected an experiment, got none; try --config {example}')
    if args.imports:
        # The run remembers them.
        args.overrides.append(f'run.imports={json.dumps(args.imports)}')
    return args
