"""Evaluate one checkpoint at several image sizes.

python -m tools.eval_resolution --checkpoint FILE_OR_DIR --data DIR --sizes 224 288 384x256

FILE_OR_DIR is a checkpoint of train.imagenet (best.pth) or an exported folder; DIR is a folder or tar file with a val,
validation or test split, or with --name the root of a data set of torchvision, Hugging Face or WebDataset by timm's
name. A size is a side in pixels or HEIGHTxWIDTH. A model of fixed input size is resized with its `set_input_size`.

Prints top-1, top-5, images/s of the forward pass and peak memory (of the device, or of the process on a CPU), and
writes eval_resolution.json and eval_resolution.png (needs matplotlib).
"""

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import nn

from aft_vision.data import Source, create_eval_loader
from aft_vision.evaluate import (
    check_classes,
    check_image_size,
    evaluate,
    has_fixed_input_size,
    load_model,
    peak_memory_mb,
    reset_peak_memory,
    resolve_device,
)
from aft_vision.visualize import new_figure


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file or an exported folder')
    parser.add_argument('--data', required=True, help='a folder or tar file, or the root of the data set of --name')
    parser.add_argument('--name', default='', help='a data set that timm reads, such as torch/cifar10 (default: none)')
    parser.add_argument('--split', help='the split (default: val, validation or test, whichever is there)')
    parser.add_argument('--num-classes', type=int, help='of a data set that does not say so itself')
    parser.add_argument('--skip-corrupt', action='store_true', help='leave out images that cannot be decoded')
    parser.add_argument('--sizes', type=parse_size, nargs='+', required=True, help='a side in pixels, or HEIGHTxWIDTH')
    parser.add_argument('--batch-size', type=int, default=64, help='images per batch (default: 64)')
    parser.add_argument(
        '--crop-pct', type=float, help='crop relative to the resized image (default: what the model was trained with)'
    )
    parser.add_argument('--workers', type=int, default=2, help='decoding processes (default: 2)')
    parser.add_argument('--device', default='auto', help='default: CUDA where there is one')
    parser.add_argument('--out', type=Path, help='folder of the results (default: beside the checkpoint)')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print one line per image size.

    Returns:
        The rows of the table, in ascending order of area.

    Raises:
        ValueError: the checkpoint, the data set, the device or a size is not valid, or the classes differ.
    """
    args = parse_args(argv)
    device = resolve_device(args.device)
    model = load_model(args.checkpoint)
    for size in args.sizes:
        check_size(model, size)
    rows = []
    print(f'{"size":>9}  {"top-1 %":>7}  {"top-5 %":>7}  {"images/s":>8}  {"peak MB":>7}')
    for size in sorted(set(args.sizes), key=lambda size: size[0] * size[1]):
        metrics = evaluate_at(model, size, args, device)
        row = {'height': size[0], 'width': size[1], **metrics}
        rows.append(row)
        print(
            f'{size[0]:>4}x{size[1]:<4}  {row["top1"]:>7.2f}  {row["top5"]:>7.2f}  '
            f'{row["images_per_second"]:>8.1f}  {row["peak_memory_mb"]:>7.0f}'
        )
    out = args.out or (args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent)
    out.mkdir(parents=True, exist_ok=True)
    result = {'checkpoint': str(args.checkpoint), 'data': args.name or args.data, 'device': str(device), 'sizes': rows}
    (out / 'eval_resolution.json').write_text(json.dumps(result, indent=2) + '\n')
    plot(rows, out / 'eval_resolution.png')
    print(f'eval_resolution.json and eval_resolution.png are in {out}')
    return rows


def parse_size(text: str) -> tuple[int, int]:
    """Read `224` or `384x256` as (H, W)."""
    parts = text.lower().split('x')
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f'expected a size like 224 or 384x256, got {text!r}')
    return int(parts[0]), int(parts[-1])


def evaluate_at(
    model: nn.Module, size: tuple[int, int], args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Evaluate a copy of the model at one size (H, W)."""
    trained = resolve_model_data_config(model)
    source = Source(
        dir=args.data,
        name=args.name,
        eval_split=args.split,
        num_classes=args.num_classes,
        on_corrupt_image='skip' if args.skip_corrupt else 'raise',
    )
    loader, class_names = create_eval_loader(
        source,
        size,
        args.batch_size,
        crop_pct=args.crop_pct or trained['crop_pct'],
        mean=trained['mean'],
        std=trained['std'],
        num_workers=args.workers,
        device=device,
    )
    check_classes(model, class_names, args.name or args.data)
    # A copy, because resizing position parameters from one size to the next would add up their errors.
    resized: Any = copy.deepcopy(model)
    if has_fixed_input_size(resized):
        resized.set_input_size(img_size=size)
    resized.to(device)
    reset_peak_memory(device)
    metrics = evaluate(resized, loader, device, progress=sys.stderr.isatty())
    return {**metrics, 'peak_memory_mb': peak_memory_mb(device)}


def check_size(model: nn.Module, size: tuple[int, int]) -> None:
    """Raise a ValueError if the model cannot be evaluated at a size (H, W)."""
    check_image_size(model, size)
    if has_fixed_input_size(model) and not hasattr(model, 'set_input_size'):
        raise ValueError(f'expected a model that can be resized, got a {type(model).__name__}, which cannot')


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy, throughput and memory over the image size."""
    labels = [f'{row["height"]}x{row["width"]}' for row in rows]
    figure = new_figure(11, 3.5)
    accuracy, speed, memory = figure.subplots(1, 3)
    accuracy.plot(labels, [row['top1'] for row in rows], marker='o', label='top-1')
    accuracy.plot(labels, [row['top5'] for row in rows], marker='o', label='top-5')
    accuracy.set(xlabel='image size (pixels)', ylabel='accuracy (%)')
    accuracy.set_ylim(bottom=0)
    accuracy.legend()
    speed.bar(labels, [row['images_per_second'] for row in rows])
    speed.set(xlabel='image size (pixels)', ylabel='images/s, forward pass')
    memory.bar(labels, [row['peak_memory_mb'] for row in rows])
    memory.set(xlabel='image size (pixels)', ylabel='peak memory (MB)')
    figure.savefig(path, dpi=150)


if __name__ == '__main__':
    main()
