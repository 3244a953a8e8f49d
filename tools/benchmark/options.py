"""The command line of the benchmark: its sections, and the options that each takes."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.arguments import DTYPES, CommandParser, parse_size
from tools.benchmark.paper import TABLES
from tools.benchmark.paper_sequences import SEQUENCE_TABLES


class Section(NamedTuple):
    """What is measured.

    Args:
        run: The function of `tools.benchmark.sections` that measures it.
        options: That it takes, with their defaults.
        flag: That chooses it.
        is_timed: Whether other processes disturb it.
        lowered: What --dtype other than float32 does, in words.
        precision: The precision in words, where --dtype does not say it.
        devices: The function there that lists those that it measures on; None is the one of --device.
        threads: Of torch unless --threads says it, at most one a core; None is torch's own choice.
    """

    run: str
    options: dict[str, Any]
    flag: str
    is_timed: bool = True
    lowered: str = 'autocast to'
    precision: str | None = None
    devices: str | None = None
    threads: int | None = None

    def describe_precision(self, dtype: str | None) -> str:
        """The precision in words, with that of --dtype where it is an option."""
        if self.precision is not None or dtype in (None, 'float32'):
            return self.precision or 'float32'
        return f'{self.lowered} {dtype}'


_OPERATIONS = dict(batch_size=None, rounds=15, dtype='float32', compile=False)
_SEQUENCES = dict(batch_size=1, depth=None, most_gib=None, rounds=3, dtype='float32', compile=False)
_CLASSIFIERS = dict(
    batch_size=4, models=None, sizes=None, training=False, most_gib=None, rounds=5, dtype='float32', compile=False
)
_SCALING = dict(most_seconds=5.0, most_gib=None, training=False, rounds=3, dtype='float32', png=None)
_FASTFORMER: dict[str, Any] = dict(
    models=None,
    total_tokens=2**16,
    dim=256,
    heads=16,
    depth=2,
    most_seconds=30.0,
    most_gib=None,
    rounds=3,
    dtype='float32',
    png=None,
)
_CONVERSION: dict[str, Any] = dict(
    models=None, ads=20, text_tokens=16, dim=256, heads=16, depth=1, rounds=100, dtype='float32'
)
_MEMORY = dict(batch_size=1, models=None, sizes=None, training=False, dtype='float32', png=None)
_LOADER = dict(batch_size=64, img_size=224, rounds=5, workers=os.cpu_count(), augment='crop')
SECTIONS = {
    'operations': Section('run_operations', _OPERATIONS, '--operations', lowered='q, k and v in'),
    'layers': Section('run_layers', _OPERATIONS, '--layers'),
    'classifiers': Section('run_classifiers', _CLASSIFIERS, '--classifiers'),
    'scaling': Section('run_scaling', _SCALING, '--scaling', lowered='q, k and v in'),
    'fastformer': Section('run_fastformer', _FASTFORMER, '--fastformer'),
    'conversion': Section('run_conversion', _CONVERSION, '--conversion'),
    'table': Section(
        'run_table', dict(batch_size=32, img_size=None, rounds=5, dtype='float32', compile=False), '--table'
    ),
    'sequences': Section('run_sequences', _SEQUENCES, '--table {2,4}'),
    'memory': Section('run_memory', _MEMORY, '--memory', is_timed=False),
    'onehot': Section('run_onehot', dict(rounds=15, dtype='float32'), '--onehot', lowered='q, k and v in'),
    'goals': Section(
        'run_goals',
        dict(rounds=15, rows=None),
        '--goals',
        precision='float32, or bfloat16 where the row says so',
        devices='goal_devices',
        threads=2,
    ),
    'decode': Section('run_decode', dict(rounds=5, compile=False), '--decode'),
    'loader': Section('run_loader', _LOADER, '--loader'),
}


def parse_args(argv: Sequence[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Parse the command line; `section` is the chosen key of SECTIONS, and its options have their defaults."""
    parser = CommandParser(description)
    _add_sections(parser.add_mutually_exclusive_group(required=True))
    _add_models(parser.add_argument)
    _add_data(parser.add_argument)
    _add_measuring(parser.add_argument)
    _add_output(parser.add_argument)
    args = parser.parse_args(argv)
    chosen = next(name for name in SECTIONS if getattr(args, name, None) is not None)
    args.section = 'sequences' if chosen == 'table' and args.table in SEQUENCE_TABLES else chosen
    section = SECTIONS[args.section]
    for name in {name for each in SECTIONS.values() for name in each.options}:
        if getattr(args, name) is None:
            setattr(args, name, section.options.get(name))
        elif name not in section.options:
            parser.error(f'--{name.replace("_", "-")} is no option of {section.flag}')
    return args


def _add_sections(chosen: Any) -> None:
    flag: dict[str, Any] = dict(action='store_true', default=None)
    numbers = sorted([*TABLES, *SEQUENCE_TABLES])
    chosen.add_argument('--operations', **flag, help='operations against attention')
    chosen.add_argument('--layers', **flag, help='layers against attention')
    chosen.add_argument('--classifiers', **flag, help='models of timm at several sizes')
    chosen.add_argument(
        '--scaling', type=int, nargs='*', metavar='T', help='time and memory against tokens (default: 128 to 65536)'
    )
    chosen.add_argument(
        '--fastformer', type=int, nargs='*', metavar='T', help='Fig. 2 of the Fastformer paper (default: 128 to 65536)'
    )
    chosen.add_argument(
        '--conversion',
        type=int,
        nargs='*',
        metavar='M',
        help='Table 8 of the Fastformer paper against the behaviours of a user (default: 50 to 1000)',
    )
    chosen.add_argument('--table', type=int, choices=numbers, help='a table of the AFT paper')
    chosen.add_argument('--memory', **flag, help='memory against pixels')
    chosen.add_argument('--onehot', **flag, help='the one-offset operation')
    chosen.add_argument('--goals', **flag, help='what this project promises')
    chosen.add_argument('--decode', **flag, help='one token at a time, with a state')
    chosen.add_argument('--loader', nargs='+', metavar='DATA', help='data sets; the first is compared to')


def _add_models(add: Callable[..., Any]) -> None:
    add(
        '--models',
        nargs='+',
        metavar='NAME',
        help='of --memory and --classifiers; encoders of --fastformer and --conversion',
    )
    add(
        '--depth',
        type=int,
        metavar='N',
        help='of --table 2 and 4: blocks of every model (default: as printed); layers of --fastformer (default: 2) and '
        '--conversion (1)',
    )
    add('--dim', type=int, metavar='C', help='of --fastformer and --conversion: width (default: 256)')
    add('--heads', type=int, metavar='N', help='of --fastformer and --conversion (default: 16)')


def _add_data(add: Callable[..., Any]) -> None:
    add(
        '--batch-size',
        type=int,
        help='(default: 32, 8 and 2 for the groups of --operations, 8 and 2 for --layers, 32 for --table 7 and '
        '8, 4 for --classifiers, 64 for --loader, else 1)',
    )
    add('--img-size', type=int, metavar='PX', help="(default: the table's; 224 for --loader)")
    add(
        '--sizes',
        type=parse_size,
        nargs='+',
        metavar='SIZE',
        help='of --memory and --classifiers: a side in pixels, or HEIGHTxWIDTH',
    )
    add('--ads', type=int, metavar='N', help='of --conversion: ads of a user (default: 20)')
    add('--text-tokens', type=int, metavar='N', help='of --conversion: tokens of a text (default: 16)')
    add('--total-tokens', type=int, metavar='N', help='of --fastformer: tokens of a batch (default: 65536)')
    add('--augment', choices=('crop', 'deit'), help='of --loader (default: crop, and flip)')
    add('--workers', type=int, help='of --loader: loading processes (default: one per core)')


def _add_measuring(add: Callable[..., Any]) -> None:
    flag: dict[str, Any] = dict(action='store_true', default=None)
    add(
        '--rounds',
        type=int,
        help='(default: 15 for --operations, --layers, --onehot and --goals, 3 for --scaling, --fastformer, --table 2 '
        'and 4, 100 for --conversion, else 5)',
    )
    add('--rows', type=int, nargs='+', metavar='N', help='of --goals (default: all)')
    add('--dtype', choices=DTYPES, help='q, k and v of operations, autocast of all else (default: float32)')
    add('--training', **flag, help='of --memory, --classifiers and --scaling: forward and backward')
    add('--compile', **flag, help='every row under torch.compile too')
    add(
        '--most-seconds',
        type=float,
        metavar='S',
        help='what a call may take: of --scaling (default: 5) and --fastformer (30)',
    )
    add(
        '--most-gib',
        type=float,
        metavar='GIB',
        help='of --scaling, --fastformer, --classifiers, --table 2 and 4 (default: half of what is free)',
    )


def _add_output(add: Callable[..., Any]) -> None:
    add(
        '--device',
        default='cpu',
        help='where to measure, auto is CUDA where there is one (default: cpu); --goals chooses itself',
    )
    add('--threads', type=int, help="of torch on the CPU (default: 2 for --goals, else torch's own choice)")
    add('--allow-load', action='store_true', help='report although other processes use the machine')
    add('--json', type=Path, metavar='FILE', help='also write the figures here')
    add(
        '--png',
        type=Path,
        metavar='FILE',
        help='of --memory, --scaling and --fastformer: draw the curves (needs matplotlib)',
    )
