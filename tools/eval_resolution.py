"""Evaluate checkpoints at several image sizes.

python -m tools.eval_resolution --checkpoint FILE_OR_DIR --data DIR
python -m tools.eval_resolution --checkpoint FILE_OR_DIR --data DIR --sizes 224 288 384x256
python -m tools.eval_resolution --checkpoint FILE_OR_DIR --data DIR --sizes 192:384:16
python -m tools.eval_resolution --checkpoint A B C --data DIR --sizes 128:224:32 --out OUT
python -m tools.eval_resolution --checkpoint FILE_OR_DIR --data DIR --native --max-tokens 196 576

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder; DIR is a folder or tar file of class
folders, in a val, validation or test split if it has splits, or with --name the root of a data set of torchvision,
Hugging Face or WebDataset by timm's name. A size is a side in pixels, HEIGHTxWIDTH, or START:STOP:STEP for every side
from START to STOP, including STOP; without --sizes it is that of training. A fixed-size model is resized with its
`set_input_size`.

--model-arg replaces arguments that the models were trained with, such as resample_bias=True of AFT-axial, or
dynamic_img_pad=True, which accepts sizes that are not multiples of the patch size.

--native adds a row for images at their own shapes, for each N of --max-tokens: whole, at the largest size with at most
N patches, in batches of timm's NaFlex. The largest square of at most N patches, by the patch size of
each model, is added to its sizes.

A folder of class folders without splits is evaluated as a whole, also if it has only some of the classes of the model,
as ImageNet-A, ImageNet-R (200 classes) and ImageNet-V2 (folders 0 to 999) do: their outputs are compared among
themselves. --real-labels takes the labels of ReaL for the validation images of ImageNet: the answer must be one of
those of an image, and images without a label are left out.

Prints top-1 with its standard error, top-5 of more than five classes, images/s of the forward pass and peak memory (of
the device, or of the process on a CPU), and writes eval_resolution.json and eval_resolution.png (needs matplotlib).
Several checkpoints make eval_resolution_grid.json, with a table for each. Earlier results are replaced with --overwrite
only. Images that cannot be decoded are named, counted and left out.
"""

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from tools.arguments import KeyValues, add_data_arguments, add_device, add_overwrite, check_new, parse_sizes
from train.command_line import CommandParser, run_command

VALIDATION_NAME = re.compile(r'ILSVRC2012_val_(\d{8})(?:_n\d{8})?')


def by_area(sizes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort sizes (H, W) in ascending order of area, each once."""
    return sorted(set(sizes), key=lambda size: (size[0] * size[1], size))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('--checkpoint', type=Path, nargs='+', required=True, help='checkpoint files, runs or exported folders')
    add_data_arguments(parser)
    add(
        '--model-arg',
        nargs='+',
        action=KeyValues,
        default={},
        metavar='NAME=VALUE',
        help='arguments of the models instead of those of training',
    )
    add('--sizes', type=parse_sizes, nargs='+', default=[], help='in pixels (default: as trained)')
    add('--native', action='store_true', help='evaluate images at their own shapes, next to the centre crop')
    add('--max-tokens', type=int, nargs='+', default=[], help='patches per image of --native')
    add('--real-labels', type=Path, metavar='FILE', help="labels of ReaL (real.json) for ImageNet's validation images")
    add_device(parser)
    add('--out', type=Path, help='folder of the results (default: next to the first checkpoint)')
    add_overwrite(parser)
    args = parser.parse_args(argv)
    args.sizes = by_area(size for sizes in args.sizes for size in sizes)
    if len({path.resolve() for path in args.checkpoint}) < len(args.checkpoint):
        parser.error(f'--checkpoint takes each once, got {" ".join(map(str, args.checkpoint))}')
    if args.native != bool(args.max_tokens) or any(tokens < 1 for tokens in args.max_tokens):
        parser.error('--native needs --max-tokens, numbers of patches of at least 1, and --max-tokens needs --native')
    return args


if __name__ == '__main__':
    parse_args()

import torch
from timm.data import ImageNetInfo
from timm.task.evaluator import ClassificationEvaluator
from timm.utils import reparameterize_model
from torch import nn

from aft_vision.data import NativeShape
from aft_vision.devices import peak_memory_mb, reset_peak_memory, use_device
from aft_vision.evaluate import evaluate_all, find_classes
from aft_vision.files import write_json
from aft_vision.models.checkpoint import load_model, read_record
from aft_vision.resolution import (
    distinct_names,
    draw_sizes,
    naflex_shape,
    size_label,
    standard_error,
)
from aft_vision.sizes import check_image_size, check_resizable, resize_model, training_size
from aft_vision.visualize import save_figure
from tools.data import create_data_loader


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print one line per checkpoint and image size.

    Returns:
        The rows of the table, in ascending order of area, then native shapes; for several
        checkpoints one after the other, each row with the name of its checkpoint. The square of a native shape is a
        row of the checkpoints with that patch size.

    Raises:
        ValueError: a checkpoint, the data set, the device or a size is not valid, or the classes differ.
        FileExistsError: the folder has such a table and --overwrite is not given.
    """
    args = parse_args(argv)
    device = use_device(args.device)
    for checkpoint in args.checkpoint:
        check_sizes(load_model(checkpoint, **args.model_arg), args)
    first = args.checkpoint[0]
    out = args.out or (first if first.is_dir() else first.parent)
    several = len(args.checkpoint) > 1
    name = 'eval_resolution_grid' if several else 'eval_resolution'
    check_new(args, out / f'{name}.json', *([] if several else [out / f'{name}.png']))
    out.mkdir(parents=True, exist_ok=True)
    settings = {'data': args.name or args.data, 'model_args': args.model_arg, 'device': str(device)}
    tables: list[dict[str, Any]] = []
    titles = distinct_names(args.checkpoint)
    part = out / f'{name}.json.part'

    def keep(table: dict[str, Any]) -> None:
        # What was measured stays if a later size or checkpoint fails.
        write_json(part, {**settings, 'checkpoints': [*tables, table]})

    for title, checkpoint in zip(titles, args.checkpoint, strict=True):
        if several:
            print(title)
        tables.append({'name': title, **evaluate_checkpoint(checkpoint, args, device, keep)})
    if several:
        rows = [{'checkpoint': table['name'], **row} for table in tables for row in table['sizes']]
        result = {**settings, 'checkpoints': tables}
    else:
        rows = tables[0]['sizes']
        result = {**settings, **{key: value for key, value in tables[0].items() if key != 'name'}}
    write_json(out / f'{name}.json', result)
    part.unlink(missing_ok=True)
    if not several:
        save_figure(draw_sizes(rows, result['train_size']), out / f'{name}.png')
    print(f'{name}.json is in {out}')
    return rows


def sizes_of(model: nn.Module, args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the sizes (H, W) to evaluate a model at: those wanted, or of training, and squares of native shapes."""
    if not (args.sizes or args.native):
        # `load_model` records the size of a run.
        return [training_size(model)]
    return by_area([*args.sizes, *(naflex_shape(model, tokens).square for tokens in args.max_tokens)])


def check_sizes(model: nn.Module, args: argparse.Namespace) -> None:
    """Raise a ValueError if the model does not support one of the sizes."""
    for size in sizes_of(model, args):
        check_resizable(model, size)
        check_image_size(model, size)


def evaluate_checkpoint(
    checkpoint: Path, args: argparse.Namespace, device: torch.device, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Evaluate one checkpoint at every size and print its table.

    Args:
        keep: Called with the table after each row.
    """
    model = load_model(checkpoint, **args.model_arg)
    views: list[NativeShape | tuple[int, int]] = [*sizes_of(model, args)]
    views += [naflex_shape(model, tokens) for tokens in sorted(set(args.max_tokens))]
    rows: list[dict[str, Any]] = []
    train_size = list(training_size(model, read_record(checkpoint)))
    table: dict[str, Any] = {'checkpoint': str(checkpoint), 'train_size': train_size, 'sizes': rows}
    width = 12
    for view in views:
        row = evaluate_at(model, view, args, device)
        # Of five classes or fewer, all are among the first five.
        has_top5 = 'top5' in row
        if not rows:
            heading = f'  {"top-5 %":>7}' * has_top5
            print(f'{"size":>{width}}  {"top-1 %":>7}  {"+-":>5}{heading}  {"images/s":>8}  {"peak MiB":>8}')
        rows.append(row)
        keep(table)
        title = f'{row["height"]:>4}x{row["width"]:<4}' if 'height' in row else size_label(row)
        print(
            f'{title:>{width}}  {row["top1"]:>7.2f}  {standard_error(row):>5.2f}'
            + (f'  {row["top5"]:>7.2f}' if has_top5 else '')
            + f'  {row["images_per_second"]:>8.1f}  {row["peak_memory_mb"]:>8.0f}'
        )
    return table


def evaluate_at(
    model: nn.Module, view: NativeShape | tuple[int, int], args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Evaluate a copy of the model at native shapes or one size (H, W)."""
    # Resizing position parameters twice would resample what has been resampled.
    evaluated: nn.Module = copy.deepcopy(model)
    if isinstance(view, NativeShape):
        described = {'max_tokens': view.max_tokens}
    else:
        evaluated, described = resize_model(evaluated, view), dict(zip(('height', 'width'), view, strict=True))
    loader, _, classes = create_data_loader(model, view, args, device)
    evaluated = reparameterize_model(evaluated.to(device), inplace=True)
    reset_peak_memory(device)
    evaluator = ClassificationEvaluator(device)
    if args.real_labels:
        evaluator = RealEvaluator(device, read_real_labels(args.real_labels, loader))
        classes = find_classes(model, ImageNetInfo().label_names(), 'ImageNet', args.match_classes == 'place')
    (metrics,) = evaluate_all(
        [evaluated], loader, device, progress=sys.stderr.isatty(), evaluator=lambda: evaluator, classes=classes
    )
    return {**described, **metrics, 'peak_memory_mb': peak_memory_mb(device)}


class RealEvaluator(ClassificationEvaluator):
    """timm's evaluator of images with several right classes each; those without any are not counted.

    Args:
        labels: Classes by the target of an image, which is its number.
    """

    def __init__(self, device: torch.device, labels: Sequence[Sequence[int]]) -> None:
        super().__init__(device)
        self.labels = labels

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        right = torch.zeros(output.shape, dtype=torch.bool)
        for row, number in enumerate(target.tolist()):
            right[row, list(self.labels[number])] = True
        right = right.to(output.device)
        counted = right.any(dim=-1)
        output, right = output[counted].float(), right[counted]
        if not len(output):
            return
        # The loss of the right class that the model takes for the likeliest.
        loss = nn.functional.cross_entropy(output, output.masked_fill(~right, -torch.inf).argmax(dim=-1))
        self._accumulate_loss(loss, len(output))
        correct = right.gather(1, output.topk(min(5, output.shape[-1]), dim=-1).indices)
        self.counts[1] += correct[:, 0].sum()
        self.counts[2] += correct.any(dim=-1).sum()


def read_real_labels(path: Path, loader: Any) -> list[list[int]]:
    """Return the labels of ReaL for the images of a loader, whose targets become the numbers of the images.

    Args:
        path: A JSON list of the labels of each of the 50,000 validation images of ImageNet-1k, in the order of their
            names.

    Raises:
        ValueError: the file has another content, or the images have no names or other ones.
    """
    try:
        labels = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f'expected a list of labels in {path}, got: {error}') from error
    known = {*range(ImageNetInfo().num_classes())}
    if not isinstance(labels, list) or not all(isinstance(each, list) and known.issuperset(each) for each in labels):
        raise ValueError(f'expected a list of the labels of each image in {path}, got another JSON file')
    reader: Any = getattr(loader.dataset, 'reader', None)
    if not hasattr(reader, 'samples'):
        raise ValueError('--real-labels belongs to images in files, whose names say which they are')
    numbers = [VALIDATION_NAME.fullmatch(PurePath(name).stem) for name, _ in reader.samples]
    other = next((name for (name, _), number in zip(reader.samples, numbers, strict=True) if not number), None)
    if other is not None:
        raise ValueError(f'expected images named ILSVRC2012_val_NUMBER for --real-labels, got {other}')
    indices = [int(number[1]) - 1 for number in numbers if number]
    if not all(0 <= number < len(labels) for number in indices):
        raise ValueError(f'expected the labels of {max(indices) + 1} images in {path}, got {len(labels)}')
    reader.samples = [(name, number) for (name, _), number in zip(reader.samples, indices, strict=True)]
    return labels


if __name__ == '__main__':
    run_command(main)
