"""Functions shared by the tools that sample from an autoregressive model."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from aft_vision.devices import resolve_device
from aft_vision.files import replacing
from aft_vision.models import AFTDecoder, load_decoder
from tools.arguments import check_out


def load(args: argparse.Namespace, task: str) -> AFTDecoder:
    """Load the model of the checkpoint.

    Raises:
        ValueError: it is not of that task.
    """
    model = load_decoder(args.checkpoint, resolve_device(args.device))
    if model.task != task:
        raise ValueError(f'expected a {task} model in {args.checkpoint}, got a {model.task} model')
    return model


def check_picture(out: Path, *sources: Path) -> None:
    """Raise a ValueError if a picture would overwrite what it is made from, or has a suffix of no format."""
    check_out(out, *sources)
    if Image.registered_extensions().get(out.suffix.lower()) not in Image.SAVE:
        raise ValueError(f'expected the file of a picture, such as {out.with_suffix(".png")}, got --out {out}')


def rules(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Session.complete`, without the seeds."""
    return dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, progress=sys.stderr.isatty())


def draw_images(draw: Callable[[list[int]], Tensor], count: int, args: argparse.Namespace) -> Tensor:
    """Sample images in batches; with --folder write each batch there when it is done.

    Args:
        draw: Returns images (n, 3, H, W) uint8 with these numbers, each with the seed --seed plus its number.
        count: Number of images.

    Returns:
        (count, 3, H, W) uint8.

    Raises:
        ValueError: --out is one of the files in the folder.
    """
    paths = [] if args.folder is None else [args.folder / f'{args.seed + i:04}.png' for i in range(count)]
    if args.out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f'expected another file than those in --folder, got --out {args.out}, which is one of them')
    batches = []
    for start in range(0, count, args.batch_size):
        batches.append(draw(list(range(count))[start : start + args.batch_size]).cpu())
        for image, path in zip(batches[-1], paths[start:], strict=False):
            with replacing(path) as part:
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(part, 'PNG')
    return torch.cat(batches)
