"""Keep finished runs of configs/small/recall.yaml, and write the table of their page.

python -m tools.recall RUN [RUN ...] --commit COMMIT --processor NAME
python -m tools.recall

RUN is the folder of a complete run of train.recall, trained at that commit on that processor. Its setting and result
become a row of docs/results/data/recall/runs.csv, instead of an earlier row of the same run. The mixer, the width, the
data, the updates, the learning rate and the seed may differ from row to row; the rest is that of
configs/small/recall.yaml. Then the table of docs/results/recall.md is written from all rows: of the learning rates of a
setting, the one with the best validation accuracy counts. Without RUN, only the table is written again.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Mapping, Sequence
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


# Before the slow imports, so that --help and errors of the command line are immediate.
if __name__ == '__main__':
    parse_args()

import yaml

from aft_vision.commandline import run_command
from aft_vision.files import replacing
from tools.results import read_result

TITLES = {'attention': 'attention', 'full': 'AFT-full', 'local': 'AFT-local', 'simple': 'AFT-simple'}
# The mixers of the models whose name says it.
MIXERS = {'aft_local_char': 'local', 'aft_simple_char': 'simple', 'transformer_char': 'attention'}
CONFIG = Path(__file__).parents[1] / 'configs' / 'small' / 'recall.yaml'
# What a row says of its run besides the mixer: the keys of the experiment.
VARIED = {
    **{'dim': 'model.dim', 'pairs': 'data.pairs', 'context': 'data.context', 'vocab_size': 'data.vocab_size'},
    **{'max_updates': 'schedule.max_updates', 'lr': 'optim.lr', 'seed': 'run.seed'},
}
# Keys of the sections below that change the speed only.
FREE = ('data.eval_batch_size',)
SECTIONS = ('model', 'data', 'optim', 'ema', 'schedule')
# Defaults of the trainer that every run has, as far as CONFIG leaves them open.
DEFAULTS = {
    **{'data.power': 0.01, 'data.test_size': 3000, 'data.eval_split': 'valid'},
    **{'optim.name': 'adamw', 'optim.layer_decay': None, 'optim.args': {}, 'optim.accumulate': 1},
    **{'ema.decay': None, 'ema.warmup': False, 'schedule.warmup_lr': 0.0, 'schedule.min_lr': 0.0},
    **{'run.init_from': None, 'run.amp': 'none', 'run.eval_every': 1},
}
# Keys of the model that differ from CONFIG: ABSENT where the mixer has no such key.
ABSENT = 'no such key'
OF_MIXER: dict[str, dict[str, Any]] = {
    'attention': {'model.num_heads': 1, 'model.window': ABSENT, 'model.bias_dim': ABSENT},
    'full': {'model.window': None},
    'local': {},
    'simple': {'model.window': ABSENT, 'model.bias_dim': ABSENT},
}
DATA = ('pairs', 'context', 'vocab_size')
# What tells two runs apart.
RUN = ('mixer', 'dim', *DATA, 'max_updates', 'lr', 'seed')
RESULT = ('valid_accuracy', 'test_accuracy', 'test_bits', 'updates', 'parameters')
COLUMNS = (*RUN, *RESULT, 'commit', 'processor')


def main(argv: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Write the rows and the page, and return all rows.

    Raises:
        ValueError: a run is not a complete one of train.recall or differs in what its row does not say, runs.csv has
            other columns, or the page lacks its markers.
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
    write_blocks(page, runs=format_runs(kept))
    print(f'{path} has {len(kept)} runs; {page} is written')
    return kept


def read_run(run: Path) -> dict[str, str]:
    """Return the setting and the result of a run as the cells of a row, without its origin.

    Raises:
        ValueError: the run is not a complete one of train.recall, or a key that its row does not say has another value.
    """
    result = read_result(run, RESULT, 'train.recall')
    path = run / 'config.yaml'
    config = flatten(read_config(path))
    missing = [key for key in ('model.name', *VARIED.values()) if config.get(key) is None]
    if missing:
        raise ValueError(f'expected the config of a run of train.recall, got {path} without {missing[0]}')
    mixer = config.get('model.mixer') or MIXERS.get(config['model.name'], config['model.name'])
    check_mixer(mixer, path)
    check_shared(config, mixer, path)
    found = {
        'mixer': mixer,
        **{name: config[key] for name, key in VARIED.items()},
        **{name: result[name] for name in RESULT},
    }
    return {name: f'{value:g}' if isinstance(value, float) else str(value) for name, value in found.items()}


def read_config(path: Path) -> Mapping[str, Any]:
    """Read an experiment.

    Raises:
        ValueError: the file is missing or has no sections.
    """
    config = yaml.safe_load(path.read_text(encoding='utf-8')) if path.is_file() else None
    if not isinstance(config, dict):
        raise ValueError(f'expected the config of a run of train.recall, got no sections in {path}')
    return config


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an experiment by `section.key`."""
    sections = {name: section for name, section in config.items() if isinstance(section, dict)}
    return {f'{name}.{key}': value for name, section in sections.items() for key, value in section.items()}


def check_mixer(mixer: str, path: Path) -> None:
    """Raise a ValueError unless the table has a column for a mixer."""
    if mixer not in TITLES:
        raise ValueError(f'expected the mixer to be one of {", ".join(TITLES)}, got {mixer} in {path}; leave it out')


def check_shared(config: Mapping[str, Any], mixer: str, path: Path) -> None:
    """Raise a ValueError unless what a row does not say of its run is as in all runs."""
    wanted = {**DEFAULTS, **flatten(read_config(CONFIG)), **OF_MIXER[mixer]}
    said = {'model.name', 'model.mixer', *FREE, *VARIED.values()}
    keys = [key for key in {**wanted, **config} if key.partition('.')[0] in SECTIONS or key in DEFAULTS]
    for key in keys:
        expected, found = wanted.get(key, ABSENT), config.get(key, ABSENT)
        if key not in said and found != expected:
            raise ValueError(
                f'expected {key} to be {expected} in all runs of the table, got {found} in {path}; '
                'train it again, or leave it out'
            )


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
