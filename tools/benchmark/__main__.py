"""Time what a training run consists of, against its alternatives.

python -m tools.benchmark --loader IMAGENET IMAGENET_FFCV [--augment deit] [--workers 8]

--loader reads the training images of each data set (a folder, a tar file, or a folder of FFCV files), one after the
other in every round, and prints images/s twice: of reading, up to the uint8 batches that the loading processes give,
and of batches that are ready, normalised on the device. With each comes the ratio to the first data set: the median
over the rounds, and its range. Times are those of whole passes, without the start of the loading processes. With
--augment deit and a device that is not the CPU, the automatic augmentation of FFCV's images is part of getting ready.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tools.benchmark.loaders import AUGMENTATIONS, time_loaders
from tools.benchmark.machine import check_load, describe_machine


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m tools.benchmark', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--loader', nargs='+', required=True, metavar='DATA', help='data sets; the first is compared to'
    )
    parser.add_argument('--augment', choices=sorted(AUGMENTATIONS), default='crop', help='(default: crop, and flip)')
    parser.add_argument('--img-size', type=int, default=224, metavar='PX', help='(default: 224)')
    parser.add_argument('--batch-size', type=int, default=64, help='(default: 64)')
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='loading processes (default: one per core)')
    parser.add_argument('--device', default='cpu', help='where the batches arrive (default: cpu)')
    parser.add_argument('--rounds', type=int, default=5, help='passes over each data set (default: 5)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write the figures here')
    parser.add_argument('--allow-load', action='store_true', help='measure although other processes use the machine')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON if wanted.

    Raises:
        ValueError: a data set or an option is not valid.
        RuntimeError: other processes load the machine.
    """
    args = parse_args(argv)
    if not args.allow_load:
        check_load()
    machine = describe_machine(args.device)
    print(machine)
    rows = time_loaders(
        args.loader, args.augment, args.img_size, args.batch_size, args.workers, args.device, args.rounds
    )
    print(f'{"data set":36} {"read":>9} {"ratio":>6} {"range":>14} {"ready":>9} {"ratio":>6} {"range":>14}')
    for row in rows:
        cells = [f'{row["data"][-36:]:36}']
        for stage in ('read', 'ready'):
            low, high = row[f'{stage}_ratio_range']
            cells.append(f'{row[stage]:9.0f} {row[f"{stage}_ratio"]:6.2f} {f"{low:.2f} to {high:.2f}":>14}')
        print(*cells)
    if args.json is not None:
        args.json.write_text(
            json.dumps({'machine': machine, 'settings': vars(args), 'rows': rows}, indent=2, default=str)
        )


if __name__ == '__main__':
    main()
