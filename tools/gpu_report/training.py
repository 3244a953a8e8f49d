"""Train two models on a folder of images by DeiT's recipe, for as many epochs as fit into a time, the same for both.

python -m tools.gpu_report.training --data IMAGENETTE --seconds 480 --out build/gpu/runs --json FILE

Two epochs of each model show how long an epoch takes. The images are read from FFCV files, which are written first,
where FFCV is installed, else from where they are. 224 px, batches of 256, bfloat16, compiled. Accuracies are those of
the weights after the last epoch: with so few epochs they compare the two models, and not with those of papers.
"""

import argparse
import csv
import hashlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from train.command_line import CommandParser

MODELS = ('aft_conv_small', 'deit_small_patch16_224')
RECIPE = (
    '--config configs/imagenet/deit_300e.yaml data.batch_size=256 ema.decay=null run.overwrite=true '
    'run.throughput_batches=0 run.tensorboard=false'
)
TINY_MODELS = ('aft_conv_nano', 'deit_tiny_patch16_224')
TINY_RECIPE = (
    '--config configs/smoke/one_epoch.yaml data.batch_size=400 model.depth=1 model.embed_dim=32 model.num_heads=2 '
    'run.overwrite=true run.tensorboard=false'
)
# The share of the remaining time that may be planned: evaluations and checkpoints take some too.
MAX_PLANNED_SHARE = 0.85


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('--data', help='a folder or tar file with train/CLASS and val/CLASS')
    parser.add_argument('--seconds', type=float, default=480.0, help='for all of it (default: 480)')
    parser.add_argument('--out', type=Path, required=True, help='folder of the runs')
    parser.add_argument('--json', type=Path, required=True, metavar='FILE', help='where to write the measurements')
    parser.add_argument('--dry-run', action='store_true', help='tiny models on the photographs of the tests, on a CPU')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.files import write_json
from tools.machine import count_cores


def main(argv: Sequence[str] | None = None) -> None:
    """Write the measurements after the trials, and after each run.

    Raises:
        ValueError: there are no images, or there is no time after the trials.
        ImportError: what training needs is not installed.
        CalledProcessError: a training ended with an error.
    """
    args = parse_args(argv)
    if not args.data and not args.dry_run:
        raise ValueError('expected images to train on, got none; give --data')
    if importlib.util.find_spec('omegaconf') is None:
        raise ImportError("training needs omegaconf: pip install 'aft-vision[train]'")
    end = time.monotonic() + args.seconds
    find_data(args)
    models = TINY_MODELS if args.dry_run else MODELS
    rows: list[dict[str, Any]] = []

    def add(name: str, epochs: int) -> None:
        rows.append(train(name, epochs, args))
        write_json(args.json, {'rows': rows})

    for name in models:
        add(name, 1 if args.dry_run else 2)
    epochs = 1 if args.dry_run else plan_epochs(rows, end - time.monotonic())
    if not epochs:
        raise ValueError('expected time for an epoch of each model after the trials, got too little; raise --limit')
    for name in models:
        add(name, epochs)
    cells = [[f'{x:.4g}' if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    print(*('\t'.join(line) for line in ([*rows[0]], *cells)), sep='\n')


def plan_epochs(trials: Sequence[dict[str, Any]], seconds: float) -> int:
    """Return how many epochs of all models fit into so many seconds, less what a trial took besides training.

    Compilation is a part of a trial's first epoch; later runs find its result.
    """
    epoch = sum(trial['epoch_seconds'] for trial in trials)
    start = sum(trial['seconds'] - trial['train_seconds'] for trial in trials)
    return max(0, int((MAX_PLANNED_SHARE * seconds - start) / epoch))


def find_data(args: argparse.Namespace) -> None:
    """Write the images as FFCV files, which are then those to train on, where FFCV is installed."""
    if args.data and importlib.util.find_spec('ffcv') is not None:
        folder = args.out / f'ffcv-{hashlib.sha256(str(args.data).encode()).hexdigest()[:8]}'
        if not (folder / 'val.json').exists():
            start(['tools.write_ffcv', '--data', args.data, '--out', str(folder), '--overwrite', '--quiet'])
        args.data = str(folder)


def train(name: str, epochs: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train a model, and measure it; values of an epoch are medians over all but the first, which compiles."""
    folder, begun = args.out / f'{name}_{epochs}', time.monotonic()
    words = [*(TINY_RECIPE if args.dry_run else RECIPE).split(), f'model.name={name}', f'schedule.epochs={epochs}']
    words += [f'data.dir={args.data}', f'data.num_workers={min(count_cores(), 16)}'] if args.data else []
    start(['train.imagenet', '--quiet', *words, f'run.dir={folder}'])
    with (folder / 'summary.csv').open() as file:
        logged = list(csv.DictReader(file))
    later, last = logged[1:] or logged, logged[-1]
    return {
        'model': name,
        'epochs': epochs,
        'top1': float(last['eval_top1']),
        'train_loss': float(last['train_loss']),
        'images_per_second': median(float(row['train_images_per_second']) for row in later),
        'epoch_seconds': median(float(row['train_seconds']) for row in later),
        'train_seconds': sum(float(row['train_seconds']) for row in logged),
        'memory_mb': float(last['train_memory_mb']),
        'seconds': time.monotonic() - begun,
        'data': args.data,
    }


def start(words: Sequence[str]) -> None:
    """Run a module of this repository to its end."""
    subprocess.run([sys.executable, '-m', *words], check=True, stdout=sys.stderr)


if __name__ == '__main__':
    run_command(main)
