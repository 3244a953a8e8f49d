"""Compare runs of train.fastformer, each of several seeds: a table, and a picture of their metrics.

python -m tools.compare_seeds RUN [RUN ...] [--names NAME ...] [--metrics NAME ...] [--out DIR]

RUN is the folder of a run, with its result.json. Prints a line for each, in the order given: mean and standard
deviation over the seeds of each test metric in percent (of a loss in nats), seconds per epoch, peak memory and
parameters. Writes the same figures to DIR/compare_seeds.json, and to DIR/compare_seeds.png a panel for each metric with
mean and standard deviation of each run and a dot for each seed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser
from tools.results import add_runs, format_table, name_runs, read_result


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add_runs(parser)
    parser.add_argument(
        '--metrics', nargs='+', metavar='NAME', help='such as accuracy (default: all that the runs share)'
    )
    parser.add_argument('--title', default='', help='title of the picture, such as the data set')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.commandline import run_command
from aft_vision.files import write_json
from aft_vision.visualize import literal, new_figure, save_figure


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print the table, and write the table and the picture.

    Returns:
        The figures of each run.

    Raises:
        ValueError: a folder has no complete run, the number of names is not that of the runs, two runs have the same
            name, or a metric is missing in a run.
    """
    args = parse_args(argv)
    rows = [{'name': name, **read_seeds(folder)} for name, folder in name_runs(args).items()]
    metrics = choose_metrics(rows, args.metrics)
    print(format_seeds(rows, metrics))
    save_figure(draw_seeds(rows, metrics, args.title), args.out / 'compare_seeds.png')
    write_json(args.out / 'compare_seeds.json', rows)
    return rows


def read_seeds(folder: Path) -> dict[str, Any]:
    """Read the figures of a run.

    Returns:
        `metrics` (mean, std or None, and the values of the seeds, in [0, 1] or a loss in nats, by name),
        `seconds_per_epoch`, `memory_mb`, `parameters` and `seeds`.

    Raises:
        ValueError: the result is missing or of another kind.
    """
    keys = ('seeds', 'runs', 'seconds_per_epoch', 'memory_mb', 'parameters')
    result = read_result(folder, keys, 'train.fastformer')
    metrics = {
        key.removeprefix('test_'): {**result[key], 'values': [run[key] for run in result['runs']]}
        for key in result
        if key.startswith('test_')
    }
    return {
        'metrics': metrics,
        'seconds_per_epoch': result['seconds_per_epoch']['mean'],
        'memory_mb': result['memory_mb']['mean'],
        'parameters': result['parameters'],
        'seeds': result['seeds'],
    }


def choose_metrics(rows: Sequence[dict[str, Any]], chosen: Sequence[str] | None) -> list[str]:
    """Return the metrics that all runs have, in the order of the first, or the chosen ones if all runs have them."""
    common = [name for name in rows[0]['metrics'] if all(name in row['metrics'] for row in rows)]
    if not common:
        found = '; '.join(f'{row["name"]} with {", ".join(row["metrics"]) or "none"}' for row in rows)
        raise ValueError(f'expected runs that share a metric, got {found}')
    unknown = [name for name in chosen or () if name not in common]
    if unknown:
        raise ValueError(f'expected metrics among {", ".join(common)}, which all runs have, got {", ".join(unknown)}')
    return list(chosen or common)


def format_seeds(rows: Sequence[dict[str, Any]], metrics: Sequence[str]) -> str:
    """Format the table, with metrics in percent and losses in nats."""
    cells = [
        [
            row['name'],
            str(len(row['seeds'])),
            *(_spread(name, row['metrics'][name]) for name in metrics),
            f'{row["seconds_per_epoch"]:.1f}',
            f'{row["memory_mb"]:.0f}',
            f'{row["parameters"]:,}',
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


def draw_seeds(rows: Sequence[dict[str, Any]], metrics: Sequence[str], title: str = '') -> Any:
    """Draw a panel for each metric with mean, standard deviation and the values of the seeds of each run."""
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
    if title:
        figure.suptitle(literal(title))
    return figure


if __name__ == '__main__':
    run_command(main)
