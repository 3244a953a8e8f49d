"""The table of docs/results/ablations.md, from the runs that `tools.publish --ablation` keeps."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tools.imagenette_page import Row, describe_origin, format_p, pair_runs, read_rows
from tools.pages import spread, wrap, write_blocks
from tools.paired import mcnemar

PAGE, DATA = 'ablations.md', 'imagenette_ablations'


class Change(NamedTuple):
    """A change of the recipe, of one row.

    Attributes:
        title: In the table.
        reference: Name of the row without the change; '' compares with none.
        paper: Top-1 in percent of the paper's models on ImageNet, of the reference and with the change.
    """

    title: str
    reference: str
    paper: str


CHANGES = {
    'conv_k11': Change('kernel 11, the default', '', '80.8'),
    'conv_k3': Change('kernel 3', 'conv_k11', '80.8, 79.9 (Table 11)'),
    'conv_k7': Change('kernel 7', 'conv_k11', '80.8, 80.8 (Table 11)'),
    'conv_k15': Change('kernel 15', 'conv_k11', '80.8, 81.0 (Table 11)'),
    'conv_k7_raw': Change('kernel 7 without Eq. 8', 'conv_k7', '80.8, 79.4 (Table 10)'),
    'conv_k7_window': Change('kernel 7, no weight outside it', 'conv_k7', '80.8, 79.9 (Sec. 5.3)'),
    'conv_noquery': Change('no query', 'conv_k11', '80.8, 79.3 (Table 12)'),
    'conv_entropy': Change('entropy of the kernels in the loss', 'conv_k11', '80.8, 80.9 (Sec. 8)'),
    'conv_gumbel': Change('one offset a head, by Gumbel samples', 'conv_k11', '80.8, 79.9 (Sec. 8)'),
    'conv_transfer': Change('from the weights of DeiT', 'conv_k11', '81.6, 83.4 (Table 8)'),
}


def write_page(docs: Path) -> None:
    """Write the block between the markers of the page; without runs that are kept, nothing.

    Raises:
        ValueError: the page lacks a marker.
    """
    rows = {row.name: row for row in read_rows(docs / 'data' / DATA)}
    if rows:
        write_blocks(docs / PAGE, runs=format_rows(rows))


def format_rows(rows: Mapping[str, Row]) -> str:
    """Format the table, and what it was measured on."""
    lines = [
        '| | runs | top-1 % | of the average % | difference | p, images | paper, without and with it |',
        '|---|---|---|---|---|---|---|',
        *(format_row(rows[name], rows.get(change.reference)) for name, change in CHANGES.items() if name in rows),
    ]
    runs = [run for row in rows.values() for run in row.runs]
    about = (
        'Top-1 of the last epoch; the difference is that of the averages in points, from the row without the change; '
        f'p is the exact test of McNemar for each seed, of the averages in float16. {describe_origin(runs, DATA)}'
    )
    return '\n'.join([*lines, '', wrap(about), ''])


def format_row(row: Row, reference: Row | None) -> str:
    """Format a line of the table."""
    change = CHANGES[row.name]
    cells = [change.title, str(len(row.runs))]
    cells += [spread(row.values(lambda run: run.top1)), spread(row.values(lambda run: run.average))]
    pairs = pair_runs(row, reference)
    if pairs:
        cells.append(f'{statistics.fmean(run.average - other.average for run, other in pairs):+.2f}')
        cells.append(', '.join(format_p(mcnemar(run.right, other.right)) for run, other in pairs))
    else:
        cells += ['-', '-']
    return f'| {" | ".join([*cells, change.paper])} |'
