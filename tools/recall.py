"""Keep finished runs of configs/small/recall.yaml, and write the table of their page.

python -m tools.recall RUN [RUN ...] --commit COMMIT --processor NAME
python -m tools.recall

RUN is the folder of a complete run of train.recall, trained at that commit on that processor. Its setting and result
become a row of docs/results/data/recall/runs.csv, instead of an earlier row of the same run. Then, or without RUN only,
the table of docs/results/recall.md is written from all rows: of the learning rates of a setting, the one with the best
validation accuracy counts.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser

DOCS = Path('docs/results')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('runs', nargs='*', type=Path, metavar='RUN', help='the folder of a complete run')
    add('--commit', help='commit that the runs were trained at')
    add('--processor', help='processor that the runs were trained on')
    add('--docs', type=Path, default=DOCS, help=f'folder of the results pages (default: {DOCS})')
    args = parser.parse_args(argv)
    if args.runs and not (args.commit and args.processor):
        parser.error('a RUN needs --commit and --processor, where it was trained')
    return args


# Before the slow imports, so that --help and errors of the command line are immediate.
if __name__ == '__main__':
    parse_args()

import yaml

from aft_vision.commandline import run_command
from tools.imagenette_page import replace_block, wrap
from tools.results import read_result

TITLES = {'attention': 'attention', 'full': 'AFT-full', 'local': 'AFT-local', 'simple': 'AFT-simple'}
# The mixers of the models whose name says it.
MIXERS = {'aft_local_char': 'local', 'aft_simple_char': 'simple', 'transformer_char': 'attention'}
DATA, MODEL = ('pairs', 'context', 'vocab_size'), ('mixer', 'dim')
# What tells two settings apart, apart from the learning rate, and two runs.
SETTING = (*MODEL, *DATA)
RUN = (*SETTING, 'max_updates', 'lr', 'seed')
RESULT = ('valid_accuracy', 'test_accuracy', 'test_bits', 'updates', 'parameters')
ORIGIN = ('commit', 'processor')


def main(argv: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Write the rows and the page, and return all rows.

    Raises:
        ValueError: a run is not a complete one of train.recall, or the page lacks its markers.
    """
    args = parse_args(argv)
    path = args.docs / 'data' / 'recall' / 'runs.csv'
    rows = {key_of(row): row for row in read_rows(path)}
    for run in args.runs:
        row = {**read_run(run), 'commit': args.commit, 'processor': args.processor}
        rows[key_of(row)] = row
    kept = sorted(rows.values(), key=sort_key)
    write_rows(path, kept)
    page = args.docs / 'recall.md'
    page.write_text(replace_block(page.read_text(encoding='utf-8'), 'runs', format_runs(kept)), encoding='utf-8')
    print(f'{path} has {len(kept)} runs; {page} is written')
    return kept


def read_run(run: Path) -> dict[str, str]:
    """Return the setting and the result of a run as the cells of a row, without its origin."""
    result = read_result(run, RESULT, 'train.recall')
    config = yaml.safe_load((run / 'config.yaml').read_text())
    model = config['model']
    found: dict[str, Any] = {
        **{name: config['data'][name] for name in DATA},
        **{name: result[name] for name in RESULT},
        'mixer': model.get('mixer') or MIXERS[model['name']],
        'dim': model['dim'],
        'max_updates': config['schedule']['max_updates'],
        'lr': config['optim']['lr'],
        'seed': config['run']['seed'],
    }
    return {name: f'{value:g}' if isinstance(value, float) else str(value) for name, value in found.items()}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows that were kept."""
    if not path.is_file():
        return []
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write all rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, (*RUN, *RESULT, *ORIGIN), lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def key_of(row: dict[str, str], names: Sequence[str] = RUN) -> tuple[str, ...]:
    """Return the cells that tell a row apart."""
    return tuple(row[name] for name in names)


def sort_key(row: dict[str, str]) -> tuple[Any, ...]:
    """Return the place of a row: by data, width, mixer in the order of the table, and learning rate."""
    numbers = (float(row[name]) for name in (*DATA, 'dim'))
    return (*numbers, list(TITLES).index(row['mixer']), *(float(row[name]) for name in RUN[-3:]))


def choose(rows: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return the row of the best validation accuracy; of equal ones that with fewer updates."""
    return max(rows, key=lambda row: (float(row['valid_accuracy']), -int(row['updates'])))


def format_runs(rows: Sequence[dict[str, str]]) -> str:
    """Format the table, and what it was measured on."""
    if not rows:
        return 'No run has been kept yet.\n'
    lines = [
        '| pairs | tokens | symbols | width | ' + ' | '.join(TITLES.values()) + ' | one of the values |',
        '|---|---|---|---|' + '---|' * len(TITLES) + '---|',
    ]
    for setting in dict.fromkeys(key_of(row, (*DATA, 'dim')) for row in rows):
        found = [row for row in rows if key_of(row, (*DATA, 'dim')) == setting]
        cells = [format_cell([row for row in found if row['mixer'] == mixer]) for mixer in TITLES]
        pairs = int(setting[0])
        lines.append(f'| {" | ".join([*setting, *cells, f"{100 / pairs:.1f}, {math.log2(pairs):.2f} bits"])} |')
    origin = '; '.join(sorted({f'{row["processor"]}, commit {row["commit"]}' for row in rows}))
    about = (
        'Right answers of the test examples in percent and bits per answer, by the weights with the best validation; '
        'in brackets the learning rate, chosen by validation of those tried, and the updates. "One of the values" is a '
        f'guess among the values of a sequence. All {len(rows)} runs: '
        f'[runs.csv](data/recall/runs.csv). {origin}.'
    )
    return '\n'.join([*lines, '', wrap(about), ''])


def format_cell(rows: Sequence[dict[str, str]]) -> str:
    """Format the result of a mixer in a setting."""
    if not rows:
        return '-'
    best = choose(rows)
    figures = f'{float(best["test_accuracy"]):.1f}, {float(best["test_bits"]):.2f} bits'
    return f'{figures} ({float(best["lr"]):g}, {best["updates"]})'


if __name__ == '__main__':
    run_command(main)
