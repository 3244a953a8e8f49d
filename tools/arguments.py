"""What the command lines of the tools have in common."""

import argparse
from pathlib import Path


def add_size(parser: argparse.ArgumentParser) -> None:
    """Take --size, as (H, W) or None."""
    parser.add_argument('--size', type=parse_size, help='a side in pixels, or HEIGHTxWIDTH (default: as trained)')


def add_device(parser: argparse.ArgumentParser) -> None:
    """Take --device, for `resolve_device`."""
    parser.add_argument('--device', default='auto', help='default: CUDA where there is one')


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
    if checkpoint is not None and out.resolve() == checkpoint.resolve():
        raise ValueError(f'expected another place than that of the checkpoint, got --out {out}')
