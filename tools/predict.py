"""Classify images.

python -m tools.predict IMAGE ... --checkpoint FILE_OR_DIR [--size 224] [--top 5] [--json]
python -m tools.predict IMAGE ... --model NAME
python -m tools.predict FOLDER --checkpoint FILE_OR_DIR --out predictions.csv

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder; NAME is a model of timm with published
weights, or `local-dir:FOLDER`. An IMAGE is a file, or a folder that is searched for images. Each is resized and cropped
with the preprocessing of the model, to its training size or to --size: a side in pixels or HEIGHTxWIDTH.

Prints the most likely classes of each image with their probabilities in percent; with --json a list of {"image": ...,
"classes": [{"class": ..., "probability": ...}, ...]} with probabilities in [0, 1]. --out writes this list to a .json
file in place of the table, or to a .csv file with a row for each image: image, class, probability, and of the --top
classes after the first class_2, probability_2 and so on. A line at the end counts the images by their most likely
class. After an interruption PATH.part has the items of the list that were done, one in a line. Images that cannot be
decoded are named after all others, with exit status 2.
"""

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tools.arguments import add_decoding, add_device, add_size, check_out, decoding, parse_positive
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('images', type=Path, nargs='+', metavar='IMAGE', help='image files, or folders with images')
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument('--checkpoint', type=Path, help='a checkpoint file, a run or an exported folder')
    source.add_argument('--model', help='a timm model name, whose published weights are loaded')
    add_size(parser)
    add_decoding(parser)
    parser.add_argument('--top', type=parse_positive, default=5, help='classes of each image (default: 5)')
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    parser.add_argument('--out', type=Path, help='write a .csv or .json file instead of printing a table')
    add_device(parser)
    args = parser.parse_args(argv)
    if args.out is not None and args.out.suffix.lower() not in ('.csv', '.json'):
        parser.error(f'expected a .csv or .json file, got --out {args.out}')
    return args


if __name__ == '__main__':
    parse_args()

import timm
import torch
from tqdm import tqdm

from aft_vision.data import CorruptImageError
from aft_vision.data.class_names import list_names
from aft_vision.devices import use_device
from aft_vision.files import keeping_rows
from aft_vision.models.checkpoint import load_model
from aft_vision.models.transfer_source import build_model, did_you_mean
from aft_vision.sizes import resize_model
from aft_vision.visualize import list_photographs, load_image, predictions


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print or write the classes of each image.

    Returns:
        For each image its path and its classes with probabilities in [0, 1], the most likely first.

    Raises:
        ValueError: the model, the size or the device is not valid, or --out is read or a folder.
        CorruptImageError: images cannot be decoded; the classes of all others are printed or written first.
    """
    args = parse_args(argv)
    if args.out is not None and args.out.is_dir():
        raise ValueError(f'expected a file, got the folder {args.out}')
    check_out(args.out, args.checkpoint, *args.images)
    device = use_device(args.device)
    photographs = list_photographs(args.images)
    model = resize_model(load_model(args.checkpoint) if args.checkpoint else load_published(args.model), args.size)
    model = model.to(device).eval()
    rows: list[dict[str, Any]] = []
    damaged: list[str] = []
    is_table = not (args.json or args.out)
    write = partial(write_rows, rows, is_json=args.out is not None and args.out.suffix.lower() == '.json')
    with nullcontext(lambda row: None) if args.out is None else keeping_rows(args.out, write) as keep:
        for file in tqdm(photographs, unit='image', leave=False, disable=True if is_table else None):
            try:
                images = load_image(file, model, args.size, decoding(args))
            except CorruptImageError as error:
                damaged.append(str(error))
                continue
            classes = predictions(model, model(images.to(device)), args.top)
            rows.append(
                {'image': str(file), 'classes': [{'class': name, 'probability': chance} for name, chance in classes]}
            )
            keep(rows[-1])
            if is_table:
                print('\n'.join([str(file), *(f'{100 * chance:7.1f} %  {name}' for name, chance in classes)]))
    if args.json:
        print(json.dumps(rows, indent=2))
    if len(rows) > 1:
        # With --json, standard output is the list alone.
        print(count_classes(rows), file=sys.stderr if args.json else None)
    if damaged:
        raise CorruptImageError(f'{len(damaged)} of {len(damaged) + len(rows)} images: {"; ".join(damaged)}')
    return rows


def write_rows(rows: Sequence[dict[str, Any]], path: Path, is_json: bool) -> None:
    """Write the classes of images to a file in JSON or as comma-separated values."""
    if is_json:
        path.write_text(json.dumps(rows, indent=2) + '\n')
        return
    most = max((len(row['classes']) for row in rows), default=1)
    columns = [
        f'{name}{end}' for end in ('', *(f'_{k}' for k in range(2, most + 1))) for name in ('class', 'probability')
    ]
    with path.open('w', newline='', encoding='utf-8', errors='backslashreplace') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(['image', *columns])
        for row in rows:
            writer.writerow([row['image'], *(cell for each in row['classes'] for cell in each.values())])


def count_classes(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many images have each class as the most likely one, as a sentence."""
    counts = Counter(row['classes'][0]['class'] for row in rows)
    return f'{len(rows)} images: {list_names([f"{count} {name}" for name, count in counts.most_common()], 10)}'


def load_published(name: str) -> Any:
    """Load a model of timm with its weights.

    Raises:
        ValueError: there is no such model, or no weights.
        ConnectionError: the weights cannot be downloaded.
    """
    if ':' not in name and not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        hint = near or '; hf-hub:NAME is one of the hub, --checkpoint takes a file, a run or an exported folder'
        raise ValueError(f'expected a model of timm with weights, got {name}{hint}')
    return build_model(name, pretrained=True)


if __name__ == '__main__':
    run_command(main)
