"""Functions shared by the tools that sample from an autoregressive model."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from aft_vision.devices import resolve_device
from aft_vision.files import replacing
from aft_vision.models import AFTDecoder, load_decoder
from tools.arguments import check_out

# The PNG entry that records how the image was sampled.
SETTINGS = 'aft_vision'


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


def draw_images(
    draw: Callable[[list[int]], Tensor],
    count: int,
    args: argparse.Namespace,
    tensors: Sequence[Tensor],
    sources: Tensor | None = None,
) -> Tensor:
    """Sample images in batches; with --folder write each batch there and keep existing images.

    Args:
        draw: returns images (n, 3, H, W) uint8 with these numbers, each with the seed --seed plus its number.
        count: number of images.
        tensors: the weights and all other inputs of every image, besides the sampling options.
        sources: (count, ...), the input of each image.

    Returns:
        (count, 3, H, W) uint8.

    Raises:
        ValueError: an image of the folder was sampled with other weights or options.
    """
    paths = [] if args.folder is None else [args.folder / f'{args.seed + i:04}.png' for i in range(count)]
    texts: list[str] = []
    if args.out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f'expected another file than those in --folder, got --out {args.out}, which is one of them')
    if paths:
        settings = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, content=content_hash(tensors))
        own = [None if sources is None else content_hash([sources[i]]) for i in range(count)]
        texts = [json.dumps({**settings, 'source': source}) for source in own]
    found = {i: read_drawn(path, texts[i]) for i, path in enumerate(paths) if path.exists()}
    missing = [i for i in range(count) if i not in found]
    for start in range(0, len(missing), args.batch_size):
        part = missing[start : start + args.batch_size]
        for i, image in zip(part, draw(part).cpu(), strict=True):
            found[i] = image
            if paths:
                write_drawn(image, paths[i], texts[i])
    return torch.stack([found[i] for i in range(count)])


def read_drawn(path: Path, settings: str) -> Tensor:
    """Read an image (3, H, W) of `write_drawn`.

    Raises:
        ValueError: it has other settings.
    """
    with Image.open(path) as image:
        if image.info.get(SETTINGS) != settings:
            raise ValueError(
                f'expected {path} to be drawn with these weights and options, got an image drawn in another way '
                '(choose another --folder)'
            )
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def write_drawn(image: Tensor, path: Path, settings: str) -> None:
    """Write an image (3, H, W) uint8 with its settings, atomically."""
    info = PngImagePlugin.PngInfo()
    info.add_text(SETTINGS, settings)
    with replacing(path) as part:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(part, 'PNG', pnginfo=info)


def content_hash(tensors: Sequence[Tensor]) -> str:
    """Hash the types, shapes and values of tensors."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f'{x.dtype} {tuple(x.shape)}'.encode())
        found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
