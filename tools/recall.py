"""Keep finished runs of configs/small/recall.yaml, and write the table of their page.

python -m tools.recall RUN [RUN ...] --commit COMMIT --processor NAME
python -m tools.recall

RUN is the folder of a complete run of train.recall, trained at that commit on that processor. Its setting and result
become a row of docs/results/data/recall/runs.csv, instead of an earlier row of the same run. The config.yaml of the
first run of a mixer is kept next to that file, and a key that is neither a column nor of place and speed must be as in
it. Then the table of docs/results/recall.md is written from all rows: of the learning rates of a setting, the one
with the best validation accuracy counts. Without RUN, only the table is written again.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.arguments import CommandParser
from tools.pages import add_origin, require_origin, wrap, write_blocks


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    parser.add_argument('runs', nargs='*', type=Path, metavar='RUN', help='the folder of a complete run')
    add_origin(parser, 'training')
    args = parser.parse_args(argv)
    if args.runs:
        require_origin(parser, args, 'RUN')
    return args


if __name__ == '__main__':
    parse_args()

import yaml

from aft_vision.commandline import run_command
from aft_vision.files import replacing
from tools.results import flatten_config, read_config, read_result

TRAINER = 'train.recall'
TITLES = {'attention': 'attention', 'full': 'AFT-full', 'local': 'AFT-local', 'simple': 'AFT-simple'}
# The mixers of the models whose name says it.
MIXERS = {'aft_local_char': 'local', 'aft_simple_char': 'simple', 'transformer_char': 'attention'}
# Columns of a row besides the mixer, with their keys in the config.
SETTING = {
    **{'dim': 'model.dim', 'pairs': 'data.pairs', 'context': 'data.context', 'vocab_size': 'data.vocab_size'},
    **{'max_updates': 'schedule.max_updates', 'lr': 'optim.lr', 'seed': 'run.seed'},
}
# Keys that may differ between the runs of a mixer: those of the columns, and those of place and speed.
FREE = {
    *SETTING.values(),
    *('data.eval_batch_size', 'run.dir', 'run.overwrite', 'run.resume', 'run.keep', 'run.save_minutes', 'run.device'),
    *('run.cpu_threads', 'run.grad_checkpointing', 'run.compile', 'run.timeout_minutes', 'run.tensorboard'),
    'run.throughput_batches',
}
DATA = ('pairs', 'context', 'vocab_size')
# What tells two runs apart.
RUN = ('mixer', *SETTING)
RESULT = ('valid_accuracy', 'test_accuracy', 'test_bits', 'updates', 'parameters')
COLUMNS = (*RUN, *RESULT, 'commit', 'processor')


def main(argv: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Write the rows and the page, and return all rows.

    Raises:
        ValueError: a run is not a complete one of train.recall or differs from others of its mixer in what its row
            does not say, runs.csv has other columns, or the page lacks its markers.
    """
    args = parse_args(argv)
    data = args.docs / 'data' / 'recall'
    path = data / 'runs.csv'
    rows = {key_of(row): row for row in read_rows(path)}
    known = {file.stem: (file, read_config(file, TRAINER)) for file in sorted(data.glob('*.yaml'))}
    # All are checked before the first file is written.
    for run in args.runs:
        config, row = read_run(run)
        own = (run / 'config.yaml', config)
        check_alike(*own, *known.setdefault(row['mixer'], own))
        rows[key_of(row)] = {**row, 'commit': args.commit, 'processor': args.processor}
    for mixer, (_, config) in known.items():
        with replacing(data / f'{mixer}.yaml') as written:
            written.write_text(yaml.safe_dump(config, sort_keys=False))
    kept = sorted(rows.values(), key=sort_key)
    write_rows(path, kept)
    page = args.docs / 'recall.md'
    write_blocks(page, runs=format_runs(kept))
    print(f'{path} has {len(kept)} runs; {page} is written')
    return kept


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config of a run without its folder, and its setting and result as the cells of a row.

    Raises:
        ValueError: the run is not a complete one of train.recall, or has a mixer without a column.
    """
    result = read_result(run, RESULT, TRAINER)
    path = run / 'config.yaml'
    config = read_config(path, TRAINER)
    config.setdefault('run', {})['dir'] = None
    values = flatten_config(config)
    missing = [key for key in ('model.name', *SETTING.values()) if values.get(key) is None]
    if missing:
        raise ValueError(f'expected the config of a run of {TRAINER}, got {path} without {missing[0]}')
    name = values['model.name']
    mixer = values.get('model.mixer') or MIXERS.get(name, name)
    check_mixer(mixer, path)
    setting = {column: values[key] for column, key in SETTING.items()}
    row = {'mixer': mixer, **setting, **{column: result[column] for column in RESULT}}
    return config, {column: f'{x:g}' if isinstance(x, float) else str(x) for column, x in row.items()}


def check_alike(path: Path, config: dict[str, Any], other: Path, known: dict[str, Any]) -> None:
    """Raise a ValueError unless the config of a run equals a known one in every key except the free ones."""
    found, wanted = flatten_config(config), flatten_config(known)
    for key in sorted({*wanted, *found} - FREE):
        if found.get(key) != wanted.get(key):
            raise ValueError(
                f'expected {key} to be {wanted.get(key)} as in {other}, got {found.get(key)} in {path}; leave it out'
            )


def check_mixer(mixer: str, path: Path) -> None:
    """Raise a ValueError unless the table has a column for a mixer."""
    if mixer not in TITLES:
        raise ValueError(f'expected the mixer to be one of {", ".join(TITLES)}, got {mixer} in {path}; leave it out')


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows that were kept.

    Raises:
        ValueError: the file has other columns, or a mixer that the table does not have.
    """
    if not path.is_file():
        return []
    with path.open(newline='', encoding='utf-8') as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if tuple(reader.fieldnames or ()) != COLUMNS:
        got = ', '.join(reader.fieldnames or ()) or 'none'
        raise ValueError(f'expected the columns {", ".join(COLUMNS)} in {path}, got {got}; restore the file')
    for row in rows:
        check_mixer(row['mixer'], path)
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write all rows."""
    with replacing(path) as written, written.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator='\n')
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
