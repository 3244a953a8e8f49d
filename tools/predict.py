"""Classify images.

python -m tools.predict IMAGE ... --checkpoint FILE_OR_DIR [--size 224] [--top 5] [--json]
python -m tools.predict IMAGE ... --model NAME

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder; NAME is a model of timm with published
weights, or `local-dir:FOLDER`. An IMAGE is a file, or a folder that is searched for images. Each is resized and cropped
with the preprocessing of the model, to its training size or to --size: a side in pixels or HEIGHTxWIDTH.

Prints the most likely classes of each image with their probabilities in percent; with --json a list of
{"image": ..., "classes": [{"class": ..., "probability": ...}, ...]} with probabilities in [0, 1]. Images that cannot be
decoded are named after all others, with exit status 2.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import add_decoding, add_device, add_size, decoding, parse_positive
from train.command_line import CommandParser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('images', type=Path, nargs='+', metavar='IMAGE', help='image files, or folders with images')
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--checkpoint', type=Path, help='a checkpoint file, a run or an exported folder')
    source.add_argument('--model', help='a timm model name, whose published weights are loaded')
    add_size(parser)
    add_decoding(parser)
    parser.add_argument('--top', type=parse_positive, default=5, help='classes to print for each image (default: 5)')
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    add_device(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import timm
import torch

from aft_vision.commandline import run_command
from aft_vision.data import CorruptImageError
from aft_vision.devices import resolve_device
from aft_vision.models.checkpoint import load_model
from aft_vision.models.transfer_source import build_model, did_you_mean
from aft_vision.sizes import resize_model
from aft_vision.visualize import list_photographs, load_image, predictions


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print the classes of each image.

    Returns:
        For each image its path and its classes with probabilities in [0, 1], the most likely first.

    Raises:
        ValueError: the model, the size or the device is not valid.
        CorruptImageError: images cannot be decoded; the classes of all others are printed first.
    """
    args = parse_args(argv)
    device = resolve_device(args.device)
    photographs = list_photographs(args.images)
    model = resize_model(load_model(args.checkpoint) if args.checkpoint else load_published(args.model), args.size)
    model = model.to(device).eval()
    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    for file in photographs:
        try:
            images = load_image(file, model, args.size, decoding(args))
        except CorruptImageError as error:
            damaged.append(str(error))
            continue
        logits = model(images.to(device))
        found = predictions(model, logits, args.top)
        rows.append({'image': str(file), 'classes': [{'class': name, 'probability': chance} for name, chance in found]})
        if not args.json:
            print('\n'.join([str(file), *(f'{100 * chance:7.1f} %  {name}' for name, chance in found)]))
    if args.json:
        print(json.dumps(rows, indent=2))
    if damaged:
        raise CorruptImageError(f'{len(damaged)} of {len(damaged) + len(rows)} images: {"; ".join(damaged)}')
    return rows


def load_published(name: str) -> Any:
    """Load a model of timm with its weights.

    Raises:
        ValueError: there is no such model, or no weights.
        ConnectionError: the weights cannot be downloaded.
    """
    if ':' not in name and not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        path = '; hf-hub:NAME is a model of the hub, --checkpoint takes a file, a run or an exported folder'
        hint = path if '/' in name else near
        hint = '; onnxruntime runs an ONNX file, see docs/guide/export.md' if name.endswith('.onnx') else hint
        raise ValueError(f'expected a model of timm with weights, got {name}{hint}')
    return build_model(name, pretrained=True)


if __name__ == '__main__':
    run_command(main)
