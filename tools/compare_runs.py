"""Compare runs of train.pixel, train.char and train.recall, or of train.fastformer: a table and a picture.

python -m tools.compare_runs RUN [RUN ...] [--names NAME ...] [--out DIR]

RUN is the folder of a complete run. Of pixels, characters and recall a line of the table has parameters, bits on the
training data (the mean of the last epoch, with dropout and augmentation) and on the test data, updates and their rate,
seconds of training, and peak memory, the best test bits first. The picture has the bits by update and by seconds.

Of texts a line has mean and standard deviation over the seeds of each test metric that all runs have, in percent (of a
loss in nats), seconds per epoch, peak memory and parameters. The picture has a panel for each metric, with a dot for
each seed.

The table is printed, its metrics go to DIR/compare_runs.json, and the picture to DIR/compare_runs.png.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('runs', nargs='+', type=Path, metavar='RUN', help='the folder of a run')
    add('--names', nargs='+', metavar='NAME', help='names of the runs (default: those of their folders)')
    add('--title', default='', help='title of the picture, such as the data set')
    add('--out', type=Path, default=Path(), metavar='DIR', help='output folder (default: the current one)')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.files import write_json
from aft_vision.visualize import draw_bits, literal, new_figure, save_figure

# Columns of the table of bits: title, format, and the key of result.json.
COLUMNS = (
    ('parameters', ',d', 'parameters'),
    ('train bits', '.4f', 'train_bits_of_last_epoch'),
    ('test bits', '.4f', 'test_bits'),
    ('updates', 'd', 'updates'),
    ('updates/s', '.3f', 'updates_per_second'),
    ('seconds', '.0f', 'seconds'),
    ('MiB', '.0f', 'memory_mb'),
)
# The keys of result.json that are read, by the trainers that write them.
TRAINERS = {
    'train.fastformer': ('seeds', 'runs', 'seconds_per_epoch', 'memory_mb', 'parameters'),
    'train.pixel, train.char or train.recall': ('measure', *(key for *_, key in COLUMNS)),
}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and write the table and the picture.

    Returns:
        The metrics of each run, in the order of the table.

    Raises:
        ValueError: a folder has no complete run, the number of names is not that of the runs, two runs have the same
            name, or they have no metrics in common.
    """
    args = parse_args(argv)
    runs = name_runs(args)
    results = {name: read_result(folder) for name, folder in runs.items()}
    of_texts = ['seeds' in result for result in results.values()]
    if len(set(of_texts)) > 1:
        raise ValueError(f'expected runs of one kind, got {" and ".join(TRAINERS)}; compare them apart')
    if of_texts[0]:
        rows = [{'name': name, **summarize_seeds(result)} for name, result in results.items()]
        table, figure = format_seeds(rows), draw_seeds(rows)
    else:
        rows = [{'name': name, **result} for name, result in results.items()]
        rows.sort(key=lambda row: (math.isnan(row['test_bits']), row['test_bits']))
        # Results of earlier versions have only `measure`.
        table, figure = format_bits(rows), draw_bits(runs, rows[0].get('bits_unit', rows[0]['measure']))
    if args.title:
        figure.suptitle(literal(args.title))
    print(table)
    save_figure(figure, args.out / 'compare_runs.png')
    write_json(args.out / 'compare_runs.json', rows)
    return rows


def name_runs(args: argparse.Namespace) -> dict[str, Path]:
    """Return the folders of the runs by name.

    Raises:
        ValueError: the number of names is not that of the runs, or two runs have the same name.
    """
    names = args.names or [folder.resolve().name for folder in args.runs]
    if len(names) != len(args.runs):
        raise ValueError(f'expected a name for each of {len(args.runs)} runs, got {len(names)}')
    if len(set(names)) < len(names):
        raise ValueError(f'expected runs of different names, got {", ".join(names)}; --names gives them others')
    return dict(zip(names, args.runs, strict=True))


def read_result(folder: Path) -> dict[str, Any]:
    """Read the result.json of a run.

    Raises:
        ValueError: the file is missing, damaged or of another trainer.
    """
    path = folder / 'result.json'
    if not path.is_file():
        raise ValueError(f'expected the folder of a complete run, got {folder} without result.json')
    try:
        result = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'expected a JSON file, got {path}: {error}') from error
    if not isinstance(result, dict) or not any(set(keys) <= result.keys() for keys in TRAINERS.values()):
        raise ValueError(f'expected the result of a run of {" or ".join(TRAINERS)}, got {path}, which is of none')
    return result


def format_table(*lines: Sequence[str]) -> str:
    """Format lines of cells as text: the first column left-aligned, the others right-aligned."""
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return '\n'.join(
        f'{line[0]:{first}}' + ''.join(f'  {cell:>{width}}' for cell, width in zip(line[1:], others, strict=True))
        for line in lines
    )


def format_bits(rows: Sequence[dict[str, Any]]) -> str:
    """Format the table of bits.

    Raises:
        ValueError: they were not measured in the same way.
    """
    measures = {row['measure']: row['name'] for row in rows}
    if len(measures) > 1:
        found = ', '.join(f'{name}: {measure}' for measure, name in measures.items())
        raise ValueError(f'expected runs whose bits were measured in the same way, got {found}')
    cells = [[row['name'], *(format(row[key], spec) for _, spec, key in COLUMNS)] for row in rows]
    return format_table(['run', *(title for title, *_ in COLUMNS)], *cells)


def summarize_seeds(result: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a run of texts.

    Returns:
        `metrics` (mean, std or None, and the values of the seeds, in [0, 1] or a loss in nats, by name),
        `seconds_per_epoch`, `memory_mb`, `parameters` and `seeds`.
    """
    metrics = {
        key.removeprefix('test_'): {**result[key], 'values': [run[key] for run in result['runs']]}
        for key in result
        if key.startswith('test_')
    }
    means = {key: result[key]['mean'] for key in ('seconds_per_epoch', 'memory_mb')}
    return {'metrics': metrics, **means, 'parameters': result['parameters'], 'seeds': result['seeds']}


def common_metrics(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the metrics that all runs have, in the order of the first.

    Raises:
        ValueError: there are none.
    """
    common = [name for name in rows[0]['metrics'] if all(name in row['metrics'] for row in rows)]
    if not common:
        found = '; '.join(f'{row["name"]} with {", ".join(row["metrics"]) or "none"}' for row in rows)
        raise ValueError(f'expected runs that share a metric, got {found}')
    return common


def format_seeds(rows: Sequence[dict[str, Any]]) -> str:
    """Format the table of metrics in percent and losses in nats."""
    metrics = common_metrics(rows)
    cells = [
        [
            *(row['name'], str(len(row['seeds']))),
            *(_spread(name, row['metrics'][name]) for name in metrics),
            *(f'{row["seconds_per_epoch"]:.1f}', f'{row["memory_mb"]:.0f}', f'{row["parameters"]:,}'),
        ]
        for row in rows
    ]
    return format_table(['run', 'seeds', *metrics, 's/epoch', 'MiB', 'parameters'], *cells)


def _unit(name: str) -> tuple[int, int, str]:
    """Return the factor, the decimal places and the unit of a metric."""
    return (1, 4, 'nats') if name.endswith('loss') else (100, 2, '%')


def _spread(name: str, metric: dict[str, Any]) -> str:
    scale, digits, _ = _unit(name)
    deviation = '' if metric['std'] is None else f' +- {scale * metric["std"]:.{digits}f}'
    return f'{scale * metric["mean"]:.{digits}f}{deviation}'


def draw_seeds(rows: Sequence[dict[str, Any]]) -> Any:
    """Draw a panel for each metric with mean, standard deviation and the values of the seeds of each run."""
    metrics = common_metrics(rows)
    figure = new_figure(1 + 3.6 * len(metrics), 3 + 0.3 * max(len(row['name']) for row in rows) / 4)
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        found = [row['metrics'][metric] for row in rows]
        scale, _, unit = _unit(metric)
        means = [scale * each['mean'] for each in found]
        deviations = [scale * (each['std'] or 0) for each in found]
        axes.errorbar(range(len(rows)), means, yerr=deviations, fmt='o', capsize=4, color='C0')
        values = [(place + 0.15, scale * value) for place, each in enumerate(found) for value in each['values']]
        axes.plot(*zip(*values, strict=True), '.', color='0.5', markersize=5)
        axes.set_xticks(range(len(rows)), [literal(row['name']) for row in rows], rotation=30, ha='right')
        axes.margins(x=0.1)
        axes.grid(axis='y', alpha=0.3)
        axes.set_ylabel(f'test {metric.replace("_f", "-F")} ({unit})')
    return figure


if __name__ == '__main__':
    run_command(main)
