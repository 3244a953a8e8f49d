"""Options and parsers that the command lines of the tools share."""

import argparse
import ast
import contextlib
import sys
from pathlib import Path
from typing import Any, NoReturn

DTYPES = ('float32', 'bfloat16', 'float16')


class CommandParser(argparse.ArgumentParser):
    """A parser with the description as it is written, with --debug, and with errors of one line."""

    def __init__(self, description: str | None) -> None:
        module = getattr(sys.modules['__main__'], '__spec__', None)
        command = None if module is None else f'python -m {module.name.removesuffix(".__main__")}'
        super().__init__(command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument('--debug', action='store_true', help='show the traceback of an error')

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message}; --help shows the usage\n')


class KeyValues(argparse.Action):
    """A dict of KEY=VALUE arguments, whose values are Python literals or else strings."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        found = {}
        for text in values:
            key, equals, value = text.partition('=')
            if not equals:
                parser.error(f'argument {option}: expected KEY=VALUE, got {text!r}')
            found[key] = value
            with contextlib.suppress(ValueError, SyntaxError):
                found[key] = ast.literal_eval(value)
        setattr(namespace, self.dest, found)


def add_size(parser: argparse.ArgumentParser) -> None:
    """Take --size, as (H, W) or None."""
    parser.add_argument('--size', type=parse_size, help='a side in pixels, or HEIGHTxWIDTH (default: as trained)')


def add_device(parser: argparse.ArgumentParser) -> None:
    """Take --device, for `resolve_device`."""
    parser.add_argument('--device', default='auto', help='default: CUDA where there is one')


def add_data_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Take the options of `tools.data.create_data_loader`; --data may be missing where it is not required."""
    add = parser.add_argument
    default = '' if required else ' (default: no images)'
    add('--data', required=required, help=f'a folder or tar file, or the root of the data set of --name{default}')
    add('--name', default='', help='a data set that timm reads, such as torch/cifar10 (default: none)')
    split = parser.add_mutually_exclusive_group().add_argument
    split('--split', help='the split (default: val, validation or test, whichever is there)')
    split('--val-share', type=float, help='the share of the training images that data.val_share held apart in training')
    add('--val-seed', type=int, default=0, help='data.val_seed of that training (default: 0)')
    add('--num-classes', type=int, help='of a data set that does not say so itself')
    add('--skip-corrupt', action='store_true', help='leave out images that cannot be decoded')
    add('--batch-size', type=int, default=64, help='images per batch (default: 64)')
    add('--crop-pct', type=float, help='crop relative to the resized image (default: what the model was trained with)')
    add('--workers', type=parse_count, default=2, help='decoding processes (default: 2)')


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint and the rules of drawing."""
    add = parser.add_argument
    add('--checkpoint', type=Path, required=True, help='a checkpoint of the model')
    add('--temperature', type=float, default=1.0, help='divides the logits; 0 takes the likeliest token (default: 1)')
    add('--top-k', type=int, help='draw from this many of the likeliest tokens (default: all)')
    add('--top-p', type=float, help='draw from the likeliest tokens that add up to this chance (default: all)')
    add('--seed', type=int, default=0, help='of the first drawing, which the others count up from (default: 0)')
    add_device(parser)


def parse_count(text: str) -> int:
    """Read a number that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected a number from 0 on, got {text!r}')
    return int(text)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Read `224`, `384x256`, or the range `192:384:16` with its end included, as a list of (H, W)."""
    if ':' not in text:
        return [parse_size(text)]
    parts = text.split(':')
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f'expected a range of sizes like 192:384:16, got {text!r}')
    start, stop, step = map(int, parts)
    if stop < start:
        raise argparse.ArgumentTypeError(f'expected an ascending range of sizes, got {text!r}')
    return [(side, side) for side in range(start, stop + 1, step)]


def parse_size(text: str) -> tuple[int, int]:
    """Read `224` or `384x256` as (H, W)."""
    parts = text.lower().split('x')
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f'expected a size like 224 or 384x256, got {text!r}')
    return int(parts[0]), int(parts[-1])


def check_out(out: Path, checkpoint: Path | None) -> None:
    """Raise a ValueError if a result would be written over the checkpoint that it is made of."""
    # The package takes seconds to import, and --help does not need it.
    from aft_vision.files import find_checkpoint

    if checkpoint is not None and out.resolve() in {checkpoint.resolve(), find_checkpoint(checkpoint).resolve()}:
        raise ValueError(f'expected another place than that of the checkpoint, got --out {out}')
