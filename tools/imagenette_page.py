"""The tables and the picture of docs/results/imagenette.md, from the runs that `tools.publish` keeps."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from aft_vision.visualize import new_figure, read_history, save_figure
from tools.pages import row_title, spread, wrap, write_blocks
from tools.paired import mcnemar, paired_t
from tools.results import read_config, read_json

PAGE, PICTURE, DATA = 'imagenette.md', 'imagenette_runs.png', 'imagenette'
REFERENCE = 'deit'
MARKS = (60, 70, 75)


@dataclass(frozen=True)
class Run:
    """A published run: one seed of a row."""

    row: str
    seed: int
    config: dict[str, Any]
    history: list[dict[str, float]]
    result: dict[str, Any]

    @property
    def top1(self) -> float:
        """Return the top-1 of the last weights in percent."""
        return self.history[-1]['eval_top1']

    @property
    def average(self) -> float:
        """Return the top-1 of the moving average in percent, or of the weights if there is none."""
        return averaged_top1(self.history[-1])

    @property
    def right(self) -> list[bool]:
        """Return whether each validation image was answered right by the model of `average`."""
        answers = self.result['right']
        return [x == '1' for x in answers.get('average', answers['weights'])]

    @property
    def images_per_second(self) -> float:
        """Return the rate of training, loading included."""
        rates = [(row['train_images_per_second'], row['train_seconds']) for row in self.history]
        return sum(rate * seconds for rate, seconds in rates) / sum(seconds for _, seconds in rates)

    @property
    def memory(self) -> float:
        """Return the peak memory of the training process in MiB."""
        return max(row['train_memory_mb'] for row in self.history)

    def seconds_to(self, mark: float) -> float:
        """Return the seconds of training after which the weights or their average had this top-1; NaN if never."""
        seconds = 0.0
        for row in self.history:
            seconds += row['train_seconds']
            if max(row['eval_top1'], averaged_top1(row)) >= mark:
                return seconds
        return math.nan


@dataclass(frozen=True)
class Row:
    """The runs of a row, by seed."""

    name: str
    runs: tuple[Run, ...]

    @cached_property
    def epochs(self) -> int:
        """Return the length of the runs."""
        return int(self.runs[0].config['schedule']['epochs'])

    @property
    def title(self) -> str:
        """Return the name in the tables."""
        return row_title(self.name, str(self.epochs))

    def values(self, figure: Callable[[Run], float]) -> list[float]:
        """Return a figure of every run."""
        return [figure(run) for run in self.runs]


def averaged_top1(row: dict[str, float]) -> float:
    """Return the top-1 of the moving average after an epoch in percent, or of the weights if there is none."""
    average = row.get('eval_ema_top1', math.nan)
    return row['eval_top1'] if math.isnan(average) else average


def write_page(docs: Path) -> None:
    """Write the blocks between the markers of the page, and its picture.

    Args:
        docs: The folder of the results pages, with `data`; pictures are in `images` next to it.

    Raises:
        ValueError: the page lacks a marker.
    """
    rows = read_rows(docs / 'data' / DATA)
    search = format_search(docs / 'data' / 'imagenette_search')
    write_blocks(docs / PAGE, runs=format_runs(rows), search=search)
    if rows:
        save_figure(draw_runs(rows), docs.parent / 'images' / PICTURE)


def read_rows(data: Path) -> list[Row]:
    """Read the published runs, shorter ones first, the reference first among those of a length.

    Raises:
        ValueError: a folder is not named ROW_seedN, or has other files than those of a run.
    """
    found: dict[str, list[Run]] = {}
    for path in sorted(data.glob('*/result.json')):
        row, _, seed = path.parent.name.rpartition('_seed')
        if not (row and seed.isdecimal()):
            raise ValueError(f'expected folders with names such as conv_seed0, got {path.parent} with a result.json')
        config = read_config(path.parent / 'config.yaml', 'train.imagenet')
        history = read_history(path.parent / 'summary.csv')
        found.setdefault(row, []).append(Run(row, int(seed), config, history, read_json(path)))
    rows = [Row(name, tuple(sorted(runs, key=lambda run: run.seed))) for name, runs in found.items()]
    return sorted(rows, key=lambda row: (row.epochs, not is_reference(row), row.name))


def is_reference(row: Row) -> bool:
    """Return whether the others of the same length are compared with a row."""
    return row.name.partition('_')[0] == REFERENCE


def format_runs(rows: Sequence[Row]) -> str:
    """Format the tables of accuracy and of cost, the picture, and what they were measured on."""
    if not rows:
        return 'No run has been published yet.\n'
    accuracy = [
        '| model | epochs | runs | top-1 % | of the average % | against DeiT | p, runs | p, images |',
        '|---|---|---|---|---|---|---|---|',
        *(format_accuracy(row, rows) for row in rows),
    ]
    marks = ' | '.join(f's to {mark} %' for mark in MARKS)
    cost = [
        f'| model | epochs | parameters | learning rate | images/s | MiB | {marks} |',
        '|---|---|---|---|---|---|' + '---|' * len(MARKS),
        *(format_cost(row) for row in rows),
    ]
    runs = [run for row in rows for run in row.runs]
    images = len(runs[0].right)
    about_accuracy = (
        f'Top-1 of the last epoch on {images:,} validation images; +- is the standard deviation over runs with '
        'different seeds, and the standard error of a single figure is '
        f'{100 * math.sqrt(0.8 * 0.2 / images):.1f} points at 80 %. Against DeiT of the same seeds and epochs, of the '
        'moving averages in points: p of runs is the paired t test over seeds; p of images is the exact test of '
        'McNemar for each seed, of the moving averages in float16. The weights kept of a run are the better of the '
        'last ones and their average, on these same images.'
    )
    about_cost = (
        'images/s and MiB (peak of the process) are of training, seconds those of training alone, until the weights or '
        f'their average first had that top-1 in an evaluation. {describe_origin(runs, DATA)}'
    )
    picture = f'![Top-1 by epoch and by minutes of training](../images/{PICTURE})'
    return '\n'.join([*accuracy, '', wrap(about_accuracy), '', *cost, '', wrap(about_cost), '', picture, ''])


def describe_origin(runs: Sequence[Run], data: str) -> str:
    """Name the processors, the commits and the folders of the runs in the folder of this name."""
    results = [run.result for run in runs]
    commits, processors = (sorted(set(found)) for found in zip(*map(describe_training, results), strict=True))
    words = '; '.join(commits)
    folders = ', '.join(f'[{run.row}&nbsp;{run.seed}](data/{data}/{run.row}_seed{run.seed})' for run in runs)
    return f'{"; ".join(processors)}. {words[0].upper()}{words[1:]}. Every run: {folders}.'


def describe_training(result: dict[str, Any]) -> tuple[str, str]:
    """Return the commit and the processor of a run: those of publishing where those of training are not known."""
    commit = f'commit {result["commit"]}' if 'commit' in result else f'published at commit {result["published_at"]}'
    return commit, result['processor'] if 'processor' in result else f'published on {result["published_on"]}'


def format_accuracy(row: Row, rows: Sequence[Row]) -> str:
    """Format a line of the table of accuracy."""
    cells = [row.title, str(row.epochs), str(len(row.runs))]
    cells += [spread(row.values(lambda run: run.top1)), spread(row.values(lambda run: run.average))]
    reference = next((other for other in rows if is_reference(other) and other.epochs == row.epochs), None)
    pairs = pair_runs(row, reference)
    if not pairs or reference is row:
        return f'| {" | ".join([*cells, "-", "-", "-"])} |'
    differences = [run.average - other.average for run, other in pairs]
    images = ', '.join(format_p(mcnemar(run.right, other.right)) for run, other in pairs)
    return (
        f'| {" | ".join([*cells, f"{statistics.fmean(differences):+.2f}", format_p(paired_t(differences)), images])} |'
    )


def pair_runs(row: Row, reference: Row | None) -> list[tuple[Run, Run]]:
    """Return the runs of a row, each with that of the reference of the same seed, where there is one."""
    seeds = {run.seed: run for run in reference.runs} if reference else {}
    return [(run, seeds[run.seed]) for run in row.runs if run.seed in seeds]


def format_cost(row: Row) -> str:
    """Format a line of the table of cost."""
    rates = sorted({run.config['optim']['lr'] for run in row.runs})
    cells = [row.title, str(row.epochs), f'{row.runs[0].result["parameters"]:,}', ', '.join(f'{x:g}' for x in rates)]
    cells += [f'{statistics.fmean(row.values(lambda run: run.images_per_second)):.0f}']
    cells += [f'{max(row.values(lambda run: run.memory)):.0f}']
    for mark in MARKS:
        seconds = [run.seconds_to(mark) for run in row.runs]
        cells.append('-' if any(map(math.isnan, seconds)) else f'{statistics.fmean(seconds):.0f}')
    return f'| {" | ".join(cells)} |'


def format_p(p: float) -> str:
    """Format a p-value."""
    return '-' if math.isnan(p) else '< 0.001' if p < 0.001 else f'{p:.3f}'


def format_search(data: Path) -> str:
    """Format the table of the learning rates, whose files are named MODEL_RATE.csv."""
    lines = [
        '| model | learning rate per 512 images | top-1 of the last epoch | of its moving average |',
        '|---|---|---|---|',
    ]
    found = [(path.stem.rpartition('_'), path) for path in data.glob('*.csv')]
    for (model, _, rate), path in sorted(found, key=lambda each: (each[0][0], float(each[0][2]))):
        last = read_history(path)[-1]
        cells = [row_title(model), f'[{rate}](data/{data.name}/{path.name})']
        lines.append(f'| {" | ".join(cells)} | {last["eval_top1"]:.1f} % | {averaged_top1(last):.1f} % |')
    return '\n'.join([*lines, ''])


def draw_runs(rows: Sequence[Row]) -> Any:
    """Draw top-1 of the average by epoch and by minutes of training: a line a run, dashed if it is a longer one."""
    figure = new_figure(10, 4)
    panels = figure.subplots(1, 2, sharey=True)
    titles = [row.title for row in rows]
    for number, row in enumerate(rows):
        first = titles.index(row.title)
        style = {'color': f'C{first % 10}', 'ls': '-' if first == number else '--', 'lw': 1}
        for run in row.runs:
            minutes = accumulate(each['train_seconds'] / 60 for each in run.history)
            points = [
                (i, x, averaged_top1(each)) for i, (x, each) in enumerate(zip(minutes, run.history, strict=True), 1)
            ]
            # Not every epoch need be evaluated.
            epochs, times, top1 = zip(*(point for point in points if not math.isnan(point[-1])), strict=True)
            for axes, places in zip(panels, (epochs, times), strict=True):
                label = f'{row.title}, {row.epochs} epochs' if run is row.runs[0] else None
                axes.plot(places, top1, label=label, **style)
    for axes, label in zip(panels, ('epoch', 'minutes of training'), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel('top-1 of the averaged weights (%)')
    panels[1].legend(fontsize='small', loc='lower right')
    return figure
