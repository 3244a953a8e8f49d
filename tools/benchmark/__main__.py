"""Measure models and operations against their alternatives, and what a training run consists of.

python -m tools.benchmark --table {7,8} [--batch-size 32] [--img-size PX] [--rounds 5]
python -m tools.benchmark --memory [--models NAME ...] [--sizes 224 512x683 ...] [--training] [--png FILE]
python -m tools.benchmark --onehot [--rounds 15]
python -m tools.benchmark --goals [--rows 4 5 14] [--rounds 15]
python -m tools.benchmark --decode [--compile] [--rounds 5]
python -m tools.benchmark --loader IMAGENET IMAGENET_FFCV [--augment deit] [--workers 8]

--table prints a table of the AFT paper with this machine's figures beside the printed ones: exact parameters, images/s
in inference, and the memory that is allocated at most beyond weights and images. Models have random weights, are in
eval mode, and fused by `timm.utils.reparameterize_model`, as one deploys them. Ratios are to the DeiT of the same size:
above 1 is faster than it, or takes more memory. DeiT has fused attention, and is shown with materialised attention too,
which is what the paper compared with. Lambda networks are not in timm, so they have the printed figures alone.

--memory measures dense features (`features_only`) at image sizes, and fits the memory as a power of the number of
pixels (the exponent) and as a line (bytes per pixel, and their ratio to DeiT's). With --training, also the peak of
forward and backward, and what is kept for the backward. Counts allocator events, so a loaded machine gives the same
figures, and needs no --allow-load. The scratch that oneDNN and MKL allocate for themselves is not counted.

--onehot times ops.aft_onehot (Eq. 10) against ops.aft_conv with the same kernel, zero but for one entry a head, and
against ops.aft_simple, the bound: forward, and forward with backward.

--goals measures what this project promises, against fused attention and timm's DeiT, each figure with a floor and a
goal, and exits with 1 if a figure is below its floor. Ratios are times: above 1 is faster than the alternative. Figures
that need a device which is not here are open. Always on the CPU; five minutes on two cores with 7 rounds.

--decode times one token of the pixel models of Table 2 (L = 24, d = 256) with the state of what came before, at several
positions of the 3,072 and for 1 and 16 images at once: the Transformer with its cache of keys and values, AFT-local and
AFT-simple. The time of a whole image is the trapezoid sum of that. --compile compiles the step first.

--loader reads the training images of each data set (a folder, a tar file, or a folder of FFCV files), one after the
other in every round, and prints images/s twice: of reading, up to the uint8 batches that the loading processes give,
and of batches that are ready, normalised on the device. With each comes the ratio to the first data set: the median
over the rounds, and its range. Times are those of whole passes, without the start of the loading processes. With
--augment deit and a device that is not the CPU, the automatic augmentation of FFCV's images is part of getting ready.

Times of --table, --onehot, --goals and --decode are medians; ratios are taken within a round, where the alternatives
run one after the other in one process, and come with their quartiles over the rounds; those of --decode are of the
medians.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aft_vision.evaluate import resolve_device
from tools.arguments import parse_size
from tools.benchmark import decode, goals, loaders, onehot, pixels, tables
from tools.benchmark.paper import TABLES
from tools.machine import PRECISIONS, check_load, describe_machine

Result = dict[str, Any]


def run_table(args: argparse.Namespace, device: torch.device) -> Result:
    """Print a table of the paper."""
    table = TABLES[args.table]
    size = args.img_size or table.img_size
    rows = tables.measure_table(
        args.table, args.batch_size, size, device, args.dtype, args.rounds, progress=sys.stderr.isatty()
    )
    print(
        f'AFT Table {args.table}: inference at {size} px, batch of {args.batch_size}; ratios to the DeiT of that size'
    )
    print(tables.format_table(args.table, rows))
    return {'rows': rows}


def run_memory(args: argparse.Namespace, device: torch.device) -> Result:
    """Print, and draw if wanted, memory against pixels."""
    rows = pixels.measure_pixels(
        args.models, args.sizes, args.batch_size, args.training, device, args.dtype, progress=sys.stderr.isatty()
    )
    fits = pixels.fit_pixels(rows)
    print(f'dense features, batch of {args.batch_size}, beyond weights and images')
    print(pixels.format_pixels(rows, fits))
    if args.png is not None:
        pixels.plot_pixels(rows, fits, args.png)
    return {'rows': rows, 'fits': fits}


def run_onehot(args: argparse.Namespace, device: torch.device) -> Result:
    """Print the times of the one-offset operation."""
    rows = onehot.measure_onehot(device, args.dtype, args.rounds, onehot.SHAPES, progress=sys.stderr.isatty())
    print(f'grid {onehot.GRID}, kernel {onehot.KERNEL_SIZE}; ratios of the time of the convolution to that of the form')
    print(onehot.format_onehot(rows))
    return {'rows': rows}


def run_goals(args: argparse.Namespace, device: torch.device) -> Result:
    """Print the promises and what is measured of them."""
    chosen = [goal for goal in goals.make_goals() if args.rows is None or goal.row in args.rows]
    rows = goals.measure_goals(chosen, args.rounds, progress=sys.stderr.isatty())
    print(goals.format_goals(rows))
    return {'rows': rows}


def run_decode(args: argparse.Namespace, device: torch.device) -> Result:
    """Print the times of decoding."""
    rows = decode.measure_decode(device, args.rounds, compiled=args.compile, progress=sys.stderr.isatty())
    print('one token at a position of the sequence; ratios are of the time of an image with the Transformer to it')
    print(decode.format_decode(rows))
    return {'rows': rows}


def run_loader(args: argparse.Namespace, device: torch.device) -> Result:
    """Print the throughput of loaders."""
    rows = loaders.time_loaders(
        args.loader, args.augment, args.img_size, args.batch_size, args.workers, str(device), args.rounds
    )
    print(loaders.format_loaders(rows))
    return {'rows': rows}


class Section(NamedTuple):
    """What is measured: the options that it takes, with their defaults, and whether other processes disturb it."""

    run: Callable[[argparse.Namespace, torch.device], Result]
    options: dict[str, Any]
    is_timed: bool = True


SECTIONS = {
    'table': Section(run_table, dict(batch_size=32, img_size=None, rounds=5, dtype='float32')),
    'memory': Section(
        run_memory,
        dict(batch_size=1, models=pixels.MODELS, sizes=pixels.SIZES, training=False, dtype='float32', png=None),
        is_timed=False,
    ),
    'onehot': Section(run_onehot, dict(rounds=15, dtype='float32')),
    'goals': Section(run_goals, dict(rounds=15, rows=None)),
    'decode': Section(run_decode, dict(rounds=5, compile=False)),
    'loader': Section(run_loader, dict(batch_size=64, img_size=224, rounds=5, workers=os.cpu_count(), augment='crop')),
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `section` is the chosen key of SECTIONS, and its options have their defaults."""
    parser = argparse.ArgumentParser(
        prog='python -m tools.benchmark', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument('--table', type=int, choices=sorted(TABLES), help='a table of the AFT paper')
    chosen.add_argument('--memory', action='store_true', default=None, help='memory against pixels')
    chosen.add_argument('--onehot', action='store_true', default=None, help='the one-offset operation')
    chosen.add_argument('--goals', action='store_true', default=None, help='what this project promises')
    chosen.add_argument('--decode', action='store_true', default=None, help='one token at a time, with a state')
    chosen.add_argument('--loader', nargs='+', metavar='DATA', help='data sets; the first is compared to')
    _add_options(parser)
    args = parser.parse_args(argv)
    args.section = next(name for name in SECTIONS if getattr(args, name) is not None)
    own = SECTIONS[args.section].options
    for name in {name for section in SECTIONS.values() for name in section.options}:
        if getattr(args, name) is None:
            setattr(args, name, own.get(name))
        elif name not in own:
            parser.error(f'--{name.replace("_", "-")} is no option of --{args.section}')
    return args


def _add_options(parser: argparse.ArgumentParser) -> None:
    size = dict(type=int, metavar='PX')
    parser.add_argument('--batch-size', type=int, help='(default: 32 for --table, 1 for --memory, 64 for --loader)')
    parser.add_argument('--img-size', **size, help="(default: the table's; 224 for --loader)")  # type: ignore[arg-type]
    parser.add_argument('--rounds', type=int, help='passes over each (default: 15 for --onehot and --goals, else 5)')
    parser.add_argument('--rows', type=int, nargs='+', metavar='N', help='of --goals (default: all)')
    parser.add_argument('--dtype', choices=PRECISIONS, help='float32, or autocast to another (default: float32)')
    parser.add_argument('--models', nargs='+', metavar='NAME', help='of --memory (default: tiny AFT and DeiT)')
    parser.add_argument(
        '--sizes', nargs='+', type=parse_size, metavar='SIZE', help='of --memory: a side in pixels, or HEIGHTxWIDTH'
    )
    parser.add_argument('--training', action='store_true', default=None, help='of --memory: forward and backward too')
    parser.add_argument('--compile', action='store_true', default=None, help='of --decode: compile the step')
    parser.add_argument('--png', type=Path, metavar='FILE', help='of --memory: draw the curves (needs matplotlib)')
    parser.add_argument(
        '--augment', choices=sorted(loaders.AUGMENTATIONS), help='of --loader (default: crop, and flip)'
    )
    parser.add_argument('--workers', type=int, help='of --loader: loading processes (default: one per core)')
    parser.add_argument(
        '--device', default='cpu', help='where to measure; auto is CUDA where there is one (default: cpu)'
    )
    parser.add_argument('--threads', type=int, help="of torch on the CPU (default: torch's own choice)")
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write the figures here')
    parser.add_argument('--allow-load', action='store_true', help='measure although other processes use the machine')


def main(argv: Sequence[str] | None = None) -> Result:
    """Print what was chosen, and write it as JSON if wanted.

    Returns:
        `machine`, `settings`, `rows`, and for --memory `fits`.

    Raises:
        ValueError: a data set, a model, the device or another option is not valid.
        RuntimeError: other processes load the machine.
        SystemExit: a figure of --goals is below its floor.
    """
    args = parse_args(argv)
    section = SECTIONS[args.section]
    device = resolve_device(args.device)
    if section.is_timed and not args.allow_load:
        check_load()
    settings = {name: value for name, value in vars(args).items() if value is not None}
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or threads)
    try:
        machine = describe_machine(device, args.dtype or 'float32')
        print(machine)
        result = {'machine': machine, 'settings': settings, **section.run(args, device)}
    finally:
        # Whoever calls this from Python goes on with the threads of before.
        torch.set_num_threads(threads)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2, default=str) + '\n')
    if any(row.get('verdict') == 'below' for row in result['rows']):
        raise SystemExit(1)
    return result


if __name__ == '__main__':
    main()
