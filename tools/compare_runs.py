"""Compare runs of train.pixel or train.char: a table, and a picture of their bits.

python -m tools.compare_runs RUN [RUN ...] [--names NAME ...] [--out DIR]

RUN is the folder of a run, with its steps.csv, summary.csv and result.json. Prints a line for each, by test bits:
parameters, bits on the training data (the mean of the last epoch, with dropout and augmentation) and on the test data,
updates and their rate, seconds of training, and peak memory. Writes DIR/compare_runs.json with the same figures and
DIR/compare_runs.png, the bits by update and by seconds of training.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='the folder of a run')
    parser.add_argument('--names', nargs='+', metavar='NAME', help='of the runs; those of their folders by default')
    parser.add_argument('--out', type=Path, default=Path(), metavar='DIR', help='where to write (default: here)')
    return parser.parse_args(argv)


# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.visualize import plot_bits
from tools.results import read_result

# Of the table, its width and format, and the key of result.json.
COLUMNS = (
    ('parameters', 12, ',d', 'parameters'),
    ('train bits', 12, '.4f', 'train_bits_of_last_epoch'),
    ('test bits', 11, '.4f', 'test_bits'),
    ('updates', 9, 'd', 'updates'),
    ('updates/s', 11, '.3f', 'updates_per_second'),
    ('seconds', 9, '.0f', 'seconds'),
    ('MB', 7, '.0f', 'memory_mb'),
)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and write it and the picture.

    Returns:
        The figures of each run, the best first.

    Raises:
        ValueError: a folder holds no complete run, there are not as many names as runs, two runs have one name, or
            their bits were not measured in the same way.
    """
    args = parse_args(argv)
    names = args.names or [folder.resolve().name for folder in args.runs]
    if len(names) != len(args.runs):
        raise ValueError(f'expected a name for each of {len(args.runs)} runs, got {len(names)}')
    if len(set(names)) < len(names):
        raise ValueError(f'expected runs of different names, got {", ".join(names)}; --names gives them others')
    keys = ('measure', *(key for *_, key in COLUMNS))
    rows = [
        {'name': name, **read_result(folder, keys, 'train.pixel or train.char')}
        for name, folder in zip(names, args.runs, strict=True)
    ]
    measures = {row['measure']: row['name'] for row in rows}
    if len(measures) > 1:
        found = ', '.join(f'{name}: {measure}' for measure, name in measures.items())
        raise ValueError(f'expected runs whose bits were measured in the same way, got {found}')
    rows.sort(key=lambda row: row['test_bits'])
    width = max(len(name) for name in ['run', *names])
    print(f'{"run":{width}}' + ''.join(f'{title:>{size}}' for title, size, _, _ in COLUMNS))
    for row in rows:
        print(f'{row["name"]:{width}}' + ''.join(f'{row[key]:{size}{form}}' for _, size, form, key in COLUMNS))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / 'compare_runs.json').write_text(json.dumps(rows, indent=2) + '\n')
    plot_bits(dict(zip(names, args.runs, strict=True)), args.out / 'compare_runs.png', *measures)
    return rows


if __name__ == '__main__':
    run_command(main)
