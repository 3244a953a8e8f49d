"""Options that the command lines of the tools share."""

import argparse
import ast
import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from train.command_line import expand_home

# Next to the checkpoints of a run: its experiment and metrics, and what an exported folder is loaded from.
MODEL_FILES = ('config.yaml', 'summary.csv', 'config.json', 'model.safetensors')
DTYPES = ('float32', 'bfloat16', 'float16')


class KeyValues(argparse.Action):
    """A dict of KEY=VALUE arguments with Python literals, or else strings, as values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        arguments = {}
        for text in values:
            key, equals, value = text.partition('=')
            if not equals:
                parser.error(f'argument {option}: expected KEY=VALUE, got {text!r}')
            arguments[key] = expand_home(value)
            with contextlib.suppress(ValueError, SyntaxError):
                arguments[key] = ast.literal_eval(value)
        # The option may be given more than once.
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **arguments})


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add --size, parsed to (H, W) or None."""
    parser.add_argument('--size', type=parse_size, help='a side in pixels, or HEIGHTxWIDTH (default: as trained)')


def add_license(parser: argparse.ArgumentParser) -> None:
    """Add --license, the licence of the weights that are written, or None."""
    parser.add_argument('--license', help='licence of the weights for the model card (default: that of the source)')


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, for `use_device`."""
    parser.add_argument('--device', default='auto', help='default: CUDA if available')


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Add the options of reading images."""
    parser.add_argument('--max-pixels', type=parse_positive, help='data.max_image_pixels (default: 268435456)')
    parser.add_argument('--bits', type=int, choices=range(8, 17), metavar='8..16', help='data.bits (default: 16)')


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tools.data.create_data_loader`."""
    add = parser.add_argument
    add('--data', required=True, help='a folder or tar file, or the root of the data set of --name')
    add('--name', default='', help='a data set that timm reads, such as torch/cifar10 (default: none)')
    split = parser.add_mutually_exclusive_group().add_argument
    split('--split', help='the split (default: val, validation or test, the first that exists)')
    share_help = 'the share of the training images that data.val_share held out in training'
    split('--val-share', type=parse_share, help=share_help)
    add('--val-seed', type=parse_count, default=0, help='data.val_seed of that training (default: 0)')
    add('--num-classes', type=parse_positive, help='number of classes, for a data set without this information')
    match_help = 'how classes are those of the model: by name, of which some are enough, or by order (default: name)'
    add('--match-classes', choices=('name', 'place'), default='name', help=match_help)
    add('--batch-size', type=int, default=64, help='images per batch (default: 64)')
    add('--crop-pct', type=float, help='crop relative to the resized image (default: as in training)')
    add('--workers', type=parse_count, default=2, help='decoding processes (default: 2)')
    add_decoding(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options for the checkpoint and the sampling rules."""
    add = parser.add_argument
    add('--checkpoint', type=Path, required=True, help='a checkpoint of the model')
    add('--temperature', type=float, default=1.0, help='divides the logits; 0 takes the most likely token (default: 1)')
    add('--top-k', type=int, help='sample from this many most likely tokens (default: all)')
    add('--top-p', type=float, help='sample from the most likely tokens with this total probability (default: all)')
    add('--seed', type=int, default=0, help='seed of the first sample; the others count up from it (default: 0)')
    add_device(parser)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite, for `check_new`."""
    parser.add_argument('--overwrite', action='store_true', help='replace existing files')


def check_new(args: argparse.Namespace, *paths: Path) -> None:
    """Raise a FileExistsError if a file or folder exists and --overwrite is not given."""
    present = [str(path) for path in paths if path.exists()]
    if present and not args.overwrite:
        raise FileExistsError(f'expected new files, got {", ".join(present)}, which exist; give --overwrite')


def parse_count(text: str, least: int = 0) -> int:
    """Parse a number from `least` on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f'expected a number from {least} on, got {text!r}')
    return int(text)


parse_positive = partial(parse_count, least=1)


def parse_share(text: str) -> float:
    """Parse a share of images, above 0 and below 1."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f'expected a share above 0 and below 1, got {text!r}')


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Parse `224`, `384x256`, or the range `192:384:16`, end included, to a list of (H, W)."""
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
    """Parse `224` or `384x256` to (H, W)."""
    parts = text.lower().split('x')
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f'expected a size like 224 or 384x256, got {text!r}')
    return int(parts[0]), int(parts[-1])


def decoding(args: argparse.Namespace, data: Mapping[str, Any] | None = None) -> Any:
    """Return the Decoding of the options of `add_decoding`, by default the Decoding of the section `data` of a run."""
    from aft_vision.data import Decoding

    data, default = data or {}, Decoding()
    return Decoding(
        args.max_pixels or data.get('max_image_pixels', default.max_pixels),
        args.bits or data.get('bits', default.bits),
    )


def check_out(out: Path | None, *sources: Path | None) -> None:
    """Raise a ValueError if a result would overwrite what it is made from, or hide or replace the model of a run."""
    # The package takes seconds to import, which --help does not need.
    from aft_vision.files import BEST, LAST, find_checkpoint

    if out is None:
        return
    for source in sources:
        if source is None:
            continue
        read = [source, find_checkpoint(source)]
        # The other files of a run or an exported folder belong to its model.
        read += [source / name for name in (BEST, LAST, *MODEL_FILES) if (source / name).is_file()]
        if out.resolve() in {path.resolve() for path in read}:
            raise ValueError(f'expected another place than that of {source}, which is read, got --out {out}')
    for name in (BEST, LAST):
        # A folder with an exported model is read as that model.
        if (out / name).is_file():
            raise ValueError(f'expected another folder than that of a run, got --out {out}, whose {name} it would hide')
        if out.name == 'export' and out.with_name(name).is_file():
            raise ValueError(f'expected another folder than the export of a run, got --out {out}')
