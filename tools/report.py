"""Write a web page about a trained model: its accuracy on your photographs, its training, what it has learned.

python -m tools.report --checkpoint RUN
python -m tools.report --checkpoint FILE_OR_DIR --images FOLDER --out DIR/report.html
python -m tools.report --checkpoint FILE_OR_DIR --only biases --layers 1 3 5 7 9 11
python -m tools.report --checkpoint FILE_OR_DIR --only keys --images FILE --out keys.png
python -m tools.report --checkpoint FILE_OR_DIR --only attention --images FILE --query 4 5 --out attention.png

FILE_OR_DIR is a run or a checkpoint of train.imagenet, or an exported folder; FOLDER is searched for images, which the
model should not have been trained on. The default is the validation images of the run. Those that cannot be decoded are
named and left out. Where their folders are named after classes, the page begins with the accuracy of each class and its
interval, the confusion matrix, and the photographs that the model gets most wrong. The curves of training are on it
where summary.csv is next to the checkpoint, and the accuracy by image size where eval_resolution.json of
tools.eval_resolution is and is not older. It shows the predictions for --max-images photographs, evenly spaced over the
sorted paths.

Of an AFT model with one grid of tokens it also has the keys (AFT Fig. 9 to 12) and the implicit attention (Eq. 3) of
one token of each of these photographs, the position biases (Fig. 1, 3, 6 to 8) and how sparse they are, and the average
relative attention (Fig. 5). With --before, the biases of an earlier checkpoint are next to them; with --vit, the
attention of a ViT. The page is one file and asks nothing of a network (needs matplotlib).

--only writes one picture as a PNG: the position biases, or of one photograph the keys or the attention of a token, with
the likeliest classes. A row of it is a layer and a column a head, or a channel of a model without heads. Rows, columns,
layers and heads count from 1; layers with softmax attention count too. --exponentiated draws exp(w) instead of
exp(w) - 1, as Fig. 3.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tools.arguments import add_decoding, add_device, add_size, check_out, decoding, parse_positive
from train.command_line import CommandParser, run_command

PICTURES = ('biases', 'keys', 'attention')
# What takes an option that not all take: pictures of --only, and the page, which is None.
TAKERS = {
    'images': (None, 'keys', 'attention'),
    'before': (None, 'biases'),
    'vit': (None,),
    'max_images': (None,),
    'average_images': (None,),
    'accuracy_images': (None,),
    'query': (None, 'attention'),
    'max_pixels': (None, 'keys', 'attention'),
    'bits': (None, 'keys', 'attention'),
    'heads': PICTURES,
    'layers': PICTURES,
    'exponentiated': ('biases',),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--checkpoint', type=Path, required=True, help='a checkpoint file, a run or an exported folder')
    parser.add_argument(
        '--images', type=Path, help='a folder with images (default: validation images of the run), or a photograph'
    )
    parser.add_argument('--only', choices=PICTURES, help='write this picture instead of the page')
    parser.add_argument('--before', type=Path, help='a checkpoint whose position biases go on the left')
    parser.add_argument('--vit', help="a checkpoint of a ViT, or timm's name of one with published weights")
    parser.add_argument('--max-images', type=int, default=4, help='photographs that are shown (default: 4)')
    parser.add_argument(
        '--average-images', type=int, default=256, help='images that attention is averaged over (default: 256)'
    )
    parser.add_argument(
        '--accuracy-images', type=int, default=2000, help='images that accuracy is measured on (default: 2000)'
    )
    add_size(parser)
    add_decoding(parser)
    parser.add_argument(
        '--query', type=int, nargs=2, metavar=('ROW', 'COL'), help='token whose attention is drawn (default: centre)'
    )
    parser.add_argument(
        '--max-heads', type=parse_positive, default=16, help='heads per layer that are drawn (default: 16)'
    )
    parser.add_argument('--heads', type=int, nargs='+', help='heads to draw (default: evenly spaced ones)')
    parser.add_argument('--layers', type=int, nargs='+', help='layers to draw (default: all)')
    parser.add_argument('--exponentiated', action='store_true', help='draw exp(w) instead of exp(w) - 1')
    add_device(parser)
    parser.add_argument('--out', type=Path, help='the file (default: report.html or KIND.png next to the checkpoint)')
    args = parser.parse_args(argv)
    if args.images is None and args.only in ('keys', 'attention'):
        parser.error(f'--images is missing: a photograph for --only {args.only}')
    for option, takers in TAKERS.items():
        if args.only not in takers and getattr(args, option) != parser.get_default(option):
            names = ' or '.join(f'--only {name}' if name else 'the page' for name in takers)
            got = f', got --only {args.only}' if args.only else ''
            parser.error(f'--{option.replace("_", "-")} belongs to {names}{got}')
    if args.only and args.images and args.images.is_dir():
        parser.error(f'expected a photograph, got the folder {args.images}')
    return args


if __name__ == '__main__':
    parse_args()

import timm
import torch
import yaml
from tqdm import tqdm

from aft_vision import __version__
from aft_vision.data.datasets import Source, open_eval_split, with_evaluation_images
from aft_vision.devices import use_device
from aft_vision.files import find_checkpoint, replacing_output
from aft_vision.models.checkpoint import load_model, read_record
from aft_vision.resolution import draw_sizes
from aft_vision.sizes import resize_model
from aft_vision.visualize import (
    Report,
    Section,
    SkippedImages,
    capture_mixers,
    describe_targets,
    draw_attention,
    draw_key_maps,
    draw_position_biases,
    figure_png,
    find_photographs,
    find_readable,
    load_photograph,
    predictions,
    read_history,
    render_page,
    report_sections,
    save_figure,
)
from aft_vision.visualize.page import picture


def main(argv: Sequence[str] | None = None) -> Path:
    """Write the page or the picture, and return its path.

    Raises:
        ValueError: a checkpoint, the images, the size, the query, a head, a layer, the device or the run's config.yaml
            is not valid, or --out is a folder.
    """
    args = parse_args(argv)
    folder = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    name = f'{args.only}.png' if args.only else 'report.html'
    out = args.out or folder / name
    if out.is_dir():
        raise ValueError(f'expected a file, got the folder {out}: try --out {out / name}')
    check_out(out, args.checkpoint, args.before, args.images, Path(args.vit) if args.vit else None)
    if args.only:
        save_figure(draw_picture(args), out)
        print(f'the picture is in {out}')
        return out
    words = sys.argv[1:] if argv is None else argv
    report = load_report(args, folder, shlex.join(['aft-vision', 'report', *words]))
    sections = [*report_sections(report)]
    sizes = folder / 'eval_resolution.json'
    if sizes.is_file() and is_older(sizes, args.checkpoint):
        print(f'{sizes} is older than {args.checkpoint} and left out; aft-vision eval --overwrite replaces it')
    elif sizes.is_file():
        # Before the model and its pictures.
        first = next((index for index, section in enumerate(sections) if section.title == 'Model'), 0)
        sections.insert(first, Section('Image sizes', partial(sizes_section, sizes)))
    parts = []
    with tqdm(sections, unit='section', disable=None) as progress:
        for section in progress:
            progress.set_description(section.title)
            parts.append((section.title, section.build()))
    with replacing_output(out) as file:
        file.write_text(render_page(f'Report on {report.name}', parts), encoding='utf-8', errors='replace')
    left_out = report.skipped.describe()
    print(f'the report is in {out}{f"; {left_out}" if left_out else ""}')
    return out


def is_older(table: Path, checkpoint: Path) -> bool:
    """Return whether a table was written before the weights of a checkpoint file, run or exported folder."""
    weights = find_checkpoint(checkpoint)
    weights = weights / 'config.json' if weights.is_dir() else weights
    return weights.exists() and table.stat().st_mtime_ns < weights.stat().st_mtime_ns


def sizes_section(path: Path) -> str:
    """Draw the accuracies by image size that tools.eval_resolution wrote, with their checkpoint and data."""
    table = json.loads(path.read_text())
    alt = f'Accuracy, speed and memory at {len(table["sizes"])} image sizes'
    caption = f'{table["checkpoint"]} on {table["data"]}, from {path.name}.'
    return picture(figure_png(draw_sizes(table['sizes'], table['train_size'])), alt, caption)


def draw_picture(args: argparse.Namespace) -> Any:
    """Draw the picture of --only."""
    device = use_device(args.device)
    model = resize_model(load_model(args.checkpoint, device), args.size)
    heads, layers = ([x - 1 for x in numbers] if numbers else None for numbers in (args.heads, args.layers))
    options: dict[str, Any] = dict(heads=heads, max_heads=args.max_heads)
    if args.only == 'biases':
        before = load_model(args.before, device) if args.before else None
        options |= dict(before=before, layers=layers, exponentiated=args.exponentiated)
        return draw_position_biases(model, **options)
    photograph = load_photograph(args.images, model, args.size, decoding(args))
    logits, inputs = capture_mixers(model, photograph.images.to(device))
    text = '\n'.join(f'{100 * chance:5.1f}%  {name}' for name, chance in predictions(model, logits))
    options |= dict(chosen_layers=layers, text=text)
    if args.only == 'keys':
        return draw_key_maps(photograph, inputs, **options)
    height, width = inputs[0].grid
    row, column = args.query or (height // 2 + 1, width // 2 + 1)
    return draw_attention(photograph, model, (row - 1, column - 1), **options)


def load_report(args: argparse.Namespace, folder: Path, command: str) -> Report:
    """Load all that the report is made of."""
    device = use_device(args.device)
    model = resize_model(load_model(args.checkpoint, device), args.size)
    summary, config = (
        next((parent / name for parent in (folder, folder.parent) if (parent / name).is_file()), None)
        for name in ('summary.csv', 'config.yaml')
    )
    experiment = read_config(config) if config else {}
    images = args.images or find_validation_images(experiment)
    skipped, how = SkippedImages(), decoding(args, None if args.images else experiment['data'])
    return Report(
        model=model,
        photographs=find_readable(images, args.max_images, skipped, how),
        skipped=skipped,
        averaged=find_photographs(images, args.average_images),
        labelled=find_photographs(images, args.accuracy_images),
        folder=args.images or Path(experiment['data']['dir']),
        decoding=how,
        size=args.size,
        before=load_model(args.before, device) if args.before else None,
        vit=resize_model(load_model(args.vit, device), args.size) if args.vit else None,
        history=read_history(summary) if summary else (),
        targets=describe_targets(experiment),
        facts={**recorded_facts(args.checkpoint), **describe_origin(command)},
        query=(args.query[0] - 1, args.query[1] - 1) if args.query else None,
        max_heads=args.max_heads,
    )


def read_config(path: Path) -> dict[str, Any]:
    """Read the sections of an experiment.

    Raises:
        ValueError: the file is not one of sections.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict) or not all(isinstance(section, dict) for section in config.values()):
        raise ValueError(f'expected the config of a run of train.imagenet, got no sections in {path}')
    return config


def find_validation_images(experiment: Mapping[str, Any]) -> list[Path]:
    """Return the files of the validation images of a run, also of those that it held out.

    Raises:
        ValueError: the experiment has no such files.
    """
    data = experiment.get('data')
    if not data:
        raise ValueError('expected a run with its config.yaml, or --images FOLDER, got neither')
    try:
        source = Source(**{each.name: data[each.name] for each in fields(Source) if each.name in data})
        dataset = open_eval_split(with_evaluation_images(source)).dataset
    except ValueError as error:
        raise ValueError(f'expected the validation images of the run, or --images FOLDER: {error}') from error
    files = [Path(dataset.name_of(index)) for index in range(len(dataset))] if hasattr(dataset, 'name_of') else []
    # The images of a named data set may be files of a library's cache.
    if source.name or not (files and files[0].is_file()):
        name = source.name or source.dir
        raise ValueError(f'expected --images FOLDER, as the images of the run are not files but in {name}, got none')
    return files


def describe_origin(command: str) -> dict[str, str]:
    """Return what made the page: the command, the versions and the date."""
    versions = f'aft_vision {__version__}, timm {timm.__version__}, torch {torch.__version__}'
    return {'Command': command, 'Versions': versions, 'Date': f'{datetime.now(UTC):%Y-%m-%d %H:%M} UTC'}


def recorded_facts(checkpoint: Path) -> dict[str, str]:
    """Return what a checkpoint file says about itself."""
    facts = {'Checkpoint': str(Path(*checkpoint.resolve().parts[-2:]))}
    content = read_record(checkpoint)
    if 'best_top1' in content:
        # The last checkpoint of a run has its own epoch, not the epoch of the best weights.
        when = '' if 'optimizer' in content else f', after {content["epoch"]} epochs'
        facts['Top-1'] = f'{content["best_top1"]:.2f}%, the best of the run{when}'
    return facts


if __name__ == '__main__':
    run_command(main)
