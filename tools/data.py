"""The evaluation loader of a tool, from its options."""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import nn

from aft_vision.data import NativeShape, Preprocessing, Source, create_eval_loader
from aft_vision.data.datasets import WHOLE
from aft_vision.data.layout import MissingSplitError
from aft_vision.evaluate import find_classes, known_classes
from aft_vision.sizes import check_channels
from tools.arguments import decoding

# Flags of the images that have been named as skipped: a tool opens its data for each size.
_named: dict[Source, torch.Tensor] = {}


def create_data_loader(
    model: nn.Module, size: tuple[int, int] | NativeShape, args: argparse.Namespace, device: torch.device
) -> tuple[Any, list[str], list[int] | None]:
    """Build the evaluation loader of the command line, with the preprocessing of the model's training.

    Args:
        size: (H, W) of the images in pixels, or the shape of each image itself.
        args: Parsed options of `add_data_arguments`.

    Returns:
        The loader and the class names, as `create_eval_loader`, and the outputs of these classes, as `find_classes`.

    Raises:
        ValueError: the data set or an option is not valid, or its classes are not the model's.
    """
    trained = resolve_model_data_config(model)
    check_channels(model, 3)
    source = Source(
        dir=args.data,
        name=args.name,
        eval_split=args.split,
        val_share=args.val_share,
        val_seed=args.val_seed,
        num_classes=args.num_classes,
        max_image_pixels=decoding(args).max_pixels,
        bits=decoding(args).bits,
        on_corrupt_image='skip',
    )
    crop_pct = trained['crop_pct'] if args.crop_pct is None else args.crop_pct
    preprocessing = Preprocessing(size, crop_pct, trained['mean'], trained['std'])
    options: dict[str, Any] = dict(num_workers=args.workers, device=device)
    name = args.name or args.data
    try:
        loader, class_names = create_eval_loader(source, preprocessing, args.batch_size, **options)
    except MissingSplitError as error:
        message = f'{error}{_advice(error.remedies)}'
        # Class folders of a test set, in no split.
        if error.remedies.keys() != {'val_share'} or args.split:
            raise ValueError(message) from error
        try:
            whole = replace(source, eval_split=WHOLE)
            loader, class_names = create_eval_loader(whole, preprocessing, args.batch_size, **options)
        except ValueError:
            raise ValueError(message) from error
        _note(f'{name} has no splits: all of it is evaluated; --val-share takes what a training held out')
    loader.dataset.named = _named.setdefault(source, loader.dataset.named)
    classes, known = find_classes(model, class_names, name, args.match_classes == 'place'), known_classes(model) or []
    if classes is not None and len(classes) < len(known):
        _note(f'{name} has {len(classes)} of the {len(known)} classes of the model: only these are compared')
    return loader, class_names, classes


@cache
def _note(line: str) -> None:
    """Print a line to stderr once: a tool opens its data for each size."""
    print(line, file=sys.stderr)


def _advice(remedies: Mapping[str, Any]) -> str:
    if 'eval_split' in remedies:
        return f'; --split {remedies["eval_split"]} evaluates that'
    if 'train_split' in remedies or 'val_share' not in remedies:
        return ''
    return '; --val-share 0.1 evaluates a tenth of the training images'
