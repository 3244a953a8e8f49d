"""Compare runs of train.pixel, train.char or train.recall: a table, and a picture of their bits.

python -m tools.compare_runs RUN [RUN ...] [--names NAME ...] [--out DIR]

RUN is the folder of a run, with its steps.csv, summary.csv and result.json. Prints a line for each, sorted by test
bits: parameters, bits on the training data (the mean of the last epoch, with dropout and augmentation) and on the test
data, updates and their rate, seconds of training, and peak memory. Writes the same figures to DIR/compare_runs.json,
and the bits by update and by seconds of training to DIR/compare_runs.png.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from tools.arguments import CommandParser
from tools.results import add_runs, format_table, name_runs, read_result


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add_runs(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.files import write_json
from aft_vision.visualize import draw_bits, save_figure

# Columns of the table: title, format, and the key of result.json.
COLUMNS = (
    ('parameters', ',d', 'parameters'),
    ('train bits', '.4f', 'train_bits_of_last_epoch'),
    ('test bits', '.4f', 'test_bits'),
    ('updates', 'd', 'updates'),
    ('updates/s', '.3f', 'updates_per_second'),
    ('seconds', '.0f', 'seconds'),
    ('MiB', '.0f', 'memory_mb'),
)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and write the table and the picture.

    Returns:
        The figures of each run, the best first.

    Raises:
        ValueError: a folder has no complete run, the number of names is not that of the runs, two runs have the same
            name, or their bits were not measured in the same way.
    """
    args = parse_args(argv)
    runs = name_runs(args)
    keys = ('measure', *(key for *_, key in COLUMNS))
    command = 'train.pixel, train.char or train.recall'
    rows = [{'name': name, **read_result(folder, keys, command)} for name, folder in runs.items()]
    measures = {row['measure']: row['name'] for row in rows}
    if len(measures) > 1:
        found = ', '.join(f'{name}: {measure}' for measure, name in measures.items())
        raise ValueError(f'expected runs whose bits were measured in the same way, got {found}')
    rows.sort(key=lambda row: (math.isnan(row['test_bits']), row['test_bits']))
    cells = [[row['name'], *(format(row[key], form) for _, form, key in COLUMNS)] for row in rows]
    print(format_table(['run', *(title for title, *_ in COLUMNS)], *cells))
    # Results of earlier versions have only `measure`.
    figure = draw_bits(runs, rows[0].get('bits_unit', rows[0]['measure']))
    save_figure(figure, args.out / 'compare_runs.png')
    write_json(args.out / 'compare_runs.json', rows)
    return rows


if __name__ == '__main__':
    run_command(main)
