"""Measure models and operations against their alternatives, and what a training run consists of.

ops         Operations and layers against attention, in groups of one shape; with --tokens operations at lengths T.
models      Image classifiers of timm at several sizes against --baseline, in torch, onnxruntime and OpenVINO.
profile     Milliseconds of each kind of layer of an image classifier, next to --baseline.
decode      A token of the pixel models of AFT Table 2 with the state of what came before, for 1 and 16 images.
text        Text encoders at lengths T (Fastformer Fig. 2); with --behaviors M the latency of a request (Table 8).
loader      Loaders of training images: images/s and CPU time, next to timm's and FFCV's own.
goals       The promises of this project, with a floor and a goal each; --goals is the same. Exits with 1 if a measured
            figure is below its floor or fails; open is what lacks its device, instructions or package.
table       AFT Table 2, 4, 7 or 8: the paper's speed and memory next to those of this machine.
memory      Memory of dense features at image sizes, with fits to the number of pixels.

Times are medians, ratios are taken within a round, where the alternatives run one after the other in one process, and
come with their quartiles: above 1 is faster than the baseline. That of attention is F.scaled_dot_product_attention;
"the paper's baseline" forms the (T, T) weights, as all attention did in 2021. A row that fails says why, and the others
go on. A machine that other processes use is refused, before and after. `SECTION --help` lists the options.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.arguments import DTYPES, CommandParser, parse_size

# For each section its module, and its options with their defaults.
SECTIONS = {
    'ops': ('ops', 'groups batch-size compile tokens training most-seconds png rounds=15 dtype=float32'),
    'models': (
        'models',
        'models baseline=deit_small_patch16_224 runtimes batch-size=4 sizes training rounds=5 dtype=float32 compile',
    ),
    'profile': ('profile', 'models baseline=deit_tiny_patch16_224 batch-size=1 sizes rounds=15'),
    'decode': ('decode', 'rounds=5'),
    'text': ('text', 'models tokens total-tokens most-seconds png behaviors rounds dtype=float32'),
    'loader': ('loader', 'data batch-size=64 img-size=224 workers rounds=5'),
    'goals': ('goals', 'rows rounds=15'),
    'table': ('tables', 'number batch-size img-size depth rounds=3 dtype=float32'),
    'memory': ('scaling', 'models sizes batch-size=1 training dtype=float32 png'),
}
# For an option of a section the others that go only with it, and those that go only without it.
SWITCHES = {
    'ops': ('tokens', ('training', 'most_seconds', 'png'), ('groups', 'batch_size', 'compile')),
    'text': ('behaviors', (), ('tokens', 'total_tokens', 'most_seconds', 'png')),
}
GROUPS = ('full', 'conv', 'causal', 'layers', 'causal_layers', 'onehot')
# Every option of the sections, and how it is read.
OPTIONS: dict[str, dict[str, Any]] = {
    'data': dict(nargs='+', metavar='DATA', help='data sets'),
    'number': dict(type=int, choices=(2, 4, 7, 8), help='number of the table'),
    'groups': dict(nargs='+', choices=GROUPS, help='groups of rows'),
    'tokens': dict(type=int, nargs='*', metavar='T', help='lengths; without a number 128 to 65536'),
    'behaviors': dict(type=int, nargs='*', metavar='M', help='of a user; without a number 50 to 1000'),
    'models': dict(nargs='+', metavar='NAME', help='models to measure'),
    'baseline': dict(metavar='NAME', help='the model that the others are compared with'),
    'runtimes': dict(nargs='+', choices=('torch', 'onnxruntime', 'openvino'), help='what models run in'),
    'depth': dict(type=int, metavar='N', help='blocks of every model'),
    'batch-size': dict(type=int, metavar='B', help='images or sequences of a batch'),
    'img-size': dict(type=int, metavar='PX', help='side of the images'),
    'sizes': dict(type=parse_size, nargs='+', metavar='SIZE', help='a side in pixels, or HEIGHTxWIDTH'),
    'total-tokens': dict(type=int, metavar='N', help='tokens of a batch'),
    'workers': dict(type=int, help='loading processes'),
    'rows': dict(type=int, nargs='+', metavar='N', help='rows of the table of goals'),
    'training': dict(action='store_true', help='forward and backward'),
    'compile': dict(action='store_true', help='every row under torch.compile too'),
    'most-seconds': dict(type=float, metavar='S', help='a call may take'),
    'rounds': dict(type=int, help='each times every row once'),
    'dtype': dict(choices=DTYPES, help='of q, k and v of operations, of autocast of all else'),
    'png': dict(type=Path, metavar='FILE', help='draw the curves (needs matplotlib)'),
}
# Words for the defaults that a section chooses itself: of an option, or of a section and its option.
CHOICES = {
    'groups': 'all',
    'models': 'those of the docs',
    'text models': 'all encoders',
    'runtimes': 'torch',
    'depth': 'as printed',
    'ops batch-size': 'that of the group',
    'table batch-size': '32 images, 1 sequence',
    'img-size': 'that of the table',
    'sizes': 'those of the docs',
    'total-tokens': '65536',
    'workers': 'one per core',
    'rows': '1 to 21',
    'ops most-seconds': '5',
    'text most-seconds': '30',
    'text rounds': '3, with --behaviors 100',
    'threads': "torch's own choice",
    'goals threads': 'at most 2',
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `section` is the chosen key of SECTIONS."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if '--goals' in argv:
        argv = ['goals', *(word for word in argv if word != '--goals')]
    parser = CommandParser(__doc__)
    sections = parser.add_subparsers(dest='section', required=True, metavar='SECTION', parser_class=CommandParser)
    for name, (_, options) in SECTIONS.items():
        section = sections.add_parser(name, description=f'The section {name} of the following.\n\n{__doc__}')
        add = section.add_argument
        for option, _, default in (word.partition('=') for word in options.split()):
            given = OPTIONS[option] | ({'default': default} if default else {})
            if shown := default or _choice(name, option):
                given['help'] += f' (default: {shown})'
            add(option if option in ('data', 'number') else f'--{option}', **given)
        if name not in ('decode', 'goals', 'loader'):
            add('--device', default='cpu', help='where to measure; auto is CUDA where there is one (default: cpu)')
        add('--threads', type=int, help=f'of torch on the CPU (default: {_choice(name, "threads")})')
        add('--allow-load', action='store_true', help='report although other processes use the machine')
        add('--json', type=Path, metavar='FILE', help='also write the figures here')
    args = parser.parse_args(argv)
    switch, only_with, only_without = SWITCHES.get(args.section, ('section', (), ()))
    word, others = ('with', only_with) if getattr(args, switch) is None else ('without', only_without)
    if wrong := [name for name in others if getattr(args, name) not in (None, False)]:
        parser.error(f'--{wrong[0].replace("_", "-")} of {args.section} goes only {word} --{switch}')
    return args


def _choice(section: str, option: str) -> str | None:
    """Return the words for the default that a section chooses, or None."""
    return CHOICES.get(f'{section} {option}', CHOICES.get(option))


# Before the imports that take seconds: --help and a mistyped option are answered at once.
if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.commandline import run_command
from aft_vision.evaluate import resolve_device
from tools.benchmark import goals
from tools.benchmark.printer import Report, format_rows
from tools.machine import LoadMeter, check_load, count_cores, describe_backends, describe_machine, refuse_load


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the figures of a section, draw them and write them as JSON if wanted.

    Returns:
        `machine` and `backends` (each a line for a device), `settings`, `load` (the share of the cores that other
        processes used meanwhile, or None), `rows`, and `fits` where there are some.

    Raises:
        ValueError: a data set, a model, the device or another option is not valid.
        OSError: other processes load the machine, before or meanwhile.
        SystemExit: a goal is below its floor, or could not be measured.
    """
    args = parse_args(argv)
    settings = {name: value for name, value in vars(args).items() if value is not None}
    threads = torch.get_num_threads()
    try:
        found, report = _measure(args)
    finally:
        # A caller from Python goes on with the threads of before.
        torch.set_num_threads(threads)
    fits = [fit for fit in report.fits or () if fit['exponent'] is not None]
    print(report.head, format_rows(report.rows), *(['', format_rows(fits)] if fits else []), sep='\n')
    if args.section != 'memory' and found['load'] is not None:
        print(f'other processes used {found["load"]:.1%} of the cores')
    if getattr(args, 'png', None) is not None and report.draw is not None:
        report.draw(args.png)
    result = {**found, 'settings': settings, 'rows': report.rows, **({'fits': report.fits} if report.fits else {})}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2, default=str) + '\n')
    if args.section == 'goals' and any(row['verdict'] in ('below', 'failed') for row in report.rows):
        raise SystemExit(1)
    return result


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Report]:
    """Print what a section is measured on, and measure it on an idle machine, unless it is only memory.

    Returns:
        `machine`, `backends` and `load`; and the report.
    """
    if args.threads is not None and args.threads < 1:
        raise ValueError(f'expected --threads to be at least 1, got {args.threads}')
    device, precision = resolve_device(getattr(args, 'device', 'cpu')), getattr(args, 'dtype', 'float32')
    places = [device]
    if args.section == 'goals':
        places, precision = goals.devices(args.rows), 'float32, or bfloat16 where the row says so'
        args.threads = args.threads or min(2, count_cores())
    must_be_idle = args.section != 'memory' and not args.allow_load
    if must_be_idle:
        check_load()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    machine = '\n'.join(describe_machine(place, precision) for place in places)
    backends = '\n'.join(map(describe_backends, places))
    print(f'{machine}\n{backends}')
    meter = LoadMeter()
    report = import_module(f'tools.benchmark.{SECTIONS[args.section][0]}').run(args, device)
    load = meter.load()
    if must_be_idle:
        refuse_load(load)
    return {'machine': machine, 'backends': backends, 'load': load}, report


if __name__ == '__main__':
    run_command(main)
