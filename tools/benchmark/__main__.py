"""Measure models and operations against their alternatives, and what a training run consists of.

python -m tools.benchmark ops [--groups full conv causal layers causal_layers onehot] [--batch-size B] [--compile]
python -m tools.benchmark ops --tokens [T ...] [--training] [--png FILE]
python -m tools.benchmark models [--models NAME ...] [--sizes 224 384 ...] [--runtimes torch onnxruntime openvino]
python -m tools.benchmark decode [--compile]
python -m tools.benchmark text --tokens [T ...] [--total-tokens N] [--models NAME ...] [--png FILE]
python -m tools.benchmark text --behaviors [M ...] [--models NAME ...]
python -m tools.benchmark loader IMAGENET IMAGENET_FFCV [--augment deit] [--workers 8]
python -m tools.benchmark goals [--rows 4 5 14]
python -m tools.benchmark table {2,4,7,8} [--batch-size B] [--depth N]
python -m tools.benchmark memory [--models NAME ...] [--sizes 224 512x683 ...] [--training] [--png FILE]

ops         Operations and layers against attention, forward and in training, in groups of one shape. onehot is
            ops.aft_onehot (AFT Eq. 10) against the convolution with the same kernel, and AFT-simple, the bound. With
            --tokens, operations at lengths T, with exponents fitted over the upper half of the range; an operation
            stops before a length at which a call could exceed the limits.
models      Image classifiers of timm at several sizes, fused, against --baseline, in torch or exported to onnxruntime
            and OpenVINO.
decode      One token of the pixel models of AFT Table 2 with the state of what came before, for 1 and 16 images.
text        Text encoders. With --tokens (Fastformer Fig. 2) the classifier of MIND, as many texts as make up the tokens
            of a batch; figures are of one text. With --behaviors (Fastformer Table 8) the predictor of conversions:
            median and 99th percentile of the latency, one user with M behaviours and 20 ads a call.
loader      Images/s of data sets (a folder, a tar file, a folder of FFCV files): of uint8 batches as they are read, and
            of normalised batches on the device. Ratios are to the first.
goals       The promises of this project, with a floor and a goal each; exits with 1 if a measured figure is below its
            floor or fails. Figures without their device, instructions or package are open.
table       A table of the AFT paper: the printed figures, then those of this machine. 2 and 4 are training iterations,
            7 and 8 inference, of models with random weights.
memory      Memory of dense features (`features_only`) at image sizes, with fits to the number of pixels.

Times are medians; ratios are taken within a round, where the
alternatives run one after the other in one process, and come with their quartiles over the rounds: above 1 is faster
than the baseline. The baseline of every ratio of attention is F.scaled_dot_product_attention; rows of "the paper's
baseline" form the (T, T) weights, as all attention did in 2021. --compile adds every row under torch.compile, compared
with the compiled baseline; compiling is no part of the times. A row that fails says why, and the others go on. A
machine that other processes use is refused, before and after. `--goals` is another name of `goals`.
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
SECTIONS: dict[str, tuple[str, str]] = {
    'ops': ('ops', 'groups tokens batch-size training most-seconds=5 most-gib rounds=15 dtype=float32 compile png'),
    'models': (
        'models',
        'models baseline=deit_small_patch16_224 runtimes batch-size=4 sizes training most-gib rounds=5 dtype=float32 '
        'compile',
    ),
    'decode': ('decode', 'rounds=5 compile'),
    'text': (
        'text',
        'tokens behaviors models depth total-tokens=65536 most-seconds=30 most-gib rounds dtype=float32 png',
    ),
    'loader': ('loader', 'data batch-size=64 img-size=224 rounds=5 workers augment=crop'),
    'goals': ('goals', 'rounds=15 rows'),
    'table': ('tables', 'number batch-size img-size depth most-gib rounds=3 dtype=float32 compile'),
    'memory': ('pixels', 'models sizes batch-size=1 training dtype=float32 png'),
}
GROUPS = ('full', 'conv', 'causal', 'layers', 'causal_layers', 'onehot')
POSITIONAL = ('data', 'number')
_FLAG: dict[str, Any] = dict(action='store_true')
# Every option of the sections, and how it is read.
OPTIONS: dict[str, dict[str, Any]] = {
    'data': dict(nargs='+', metavar='DATA', help='data sets'),
    'number': dict(type=int, choices=(2, 4, 7, 8), help='of the table'),
    'groups': dict(nargs='+', choices=GROUPS, help='(default: all)'),
    'tokens': dict(type=int, nargs='*', metavar='T', help='lengths; without a number 128 to 65536'),
    'behaviors': dict(type=int, nargs='*', metavar='M', help='of a user; without a number 50 to 1000'),
    'models': dict(nargs='+', metavar='NAME', help='models of timm, or text encoders (default: those of the docs)'),
    'baseline': dict(metavar='NAME', help='the model that the others are compared with (default: %(default)s)'),
    'runtimes': dict(nargs='+', choices=('torch', 'onnxruntime', 'openvino'), help='(default: torch)'),
    'depth': dict(type=int, metavar='N', help='blocks of every model (default: as printed)'),
    'batch-size': dict(type=int, metavar='B', help='(default: %(default)s; None is that of the group or table)'),
    'img-size': dict(type=int, metavar='PX', help='(default: %(default)s; None is that of the table)'),
    'sizes': dict(type=parse_size, nargs='+', metavar='SIZE', help='a side in pixels, or HEIGHTxWIDTH'),
    'total-tokens': dict(type=int, metavar='N', help='tokens of a batch (default: %(default)s)'),
    'augment': dict(choices=('crop', 'deit'), help='(default: crop, and flip)'),
    'workers': dict(type=int, help='loading processes (default: one per core)'),
    'rows': dict(type=int, nargs='+', metavar='N', help='(default: all but 22 and 23)'),
    'training': dict(_FLAG, help='forward and backward'),
    'compile': dict(_FLAG, help='every row under torch.compile too'),
    'most-seconds': dict(type=float, metavar='S', help='a call may take, of --tokens (default: %(default)s)'),
    'most-gib': dict(type=float, metavar='GIB', help='a call may take (default: half of the free memory)'),
    'rounds': dict(type=int, help='(default: %(default)s; None is 3 for --tokens, 100 for --behaviors)'),
    'dtype': dict(choices=DTYPES, help='q, k and v of operations, autocast of all else (default: float32)'),
    'png': dict(type=Path, metavar='FILE', help='draw the curves (needs matplotlib)'),
}


class SectionParser(CommandParser):
    """The parser of a section."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(description)
        self.prog = prog


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `section` is the chosen key of SECTIONS."""
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = ['goals' if word == '--goals' else word for word in argv]
    parser = CommandParser(__doc__)
    sections = parser.add_subparsers(dest='section', required=True, metavar='SECTION', parser_class=SectionParser)
    for name, (_, options) in SECTIONS.items():
        section = sections.add_parser(name, description=f'The section {name} of the following.\n\n{__doc__}')
        for option, _, default in (word.partition('=') for word in options.split()):
            flag = option if option in POSITIONAL else f'--{option}'
            given: dict[str, Any] = {'default': default} if default else {}
            section.add_argument(flag, **OPTIONS[option], **given)
        add = section.add_argument
        if name != 'goals':
            add('--device', default='cpu', help='where to measure; auto is CUDA where there is one (default: cpu)')
        add('--threads', type=int, help="of torch on the CPU (default: 2 for goals, else torch's own choice)")
        add('--allow-load', action='store_true', help='report although other processes use the machine')
        add('--json', type=Path, metavar='FILE', help='also write the figures here')
    return parser.parse_args(argv)


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
    print(report.head, format_rows(report.rows), sep='\n')
    if report.fits:
        print('', format_rows(report.fits), sep='\n')
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
    is_goals = args.section == 'goals'
    device = torch.device('cpu') if is_goals else resolve_device(args.device)
    if args.threads is not None and args.threads < 1:
        raise ValueError(f'expected --threads to be at least 1, got {args.threads}')
    must_be_idle = args.section != 'memory' and not args.allow_load
    if must_be_idle:
        check_load()
    if is_goals or args.threads is not None:
        torch.set_num_threads(args.threads or min(2, count_cores()))
    places = goals.devices(args.rows) if is_goals else [device]
    machine = '\n'.join(describe_machine(place, _precision(args)) for place in places)
    backends = '\n'.join(map(describe_backends, places))
    print(f'{machine}\n{backends}')
    meter = LoadMeter()
    report = import_module(f'tools.benchmark.{SECTIONS[args.section][0]}').run(args, device)
    load = meter.load()
    if must_be_idle:
        refuse_load(load)
    return {'machine': machine, 'backends': backends, 'load': load}, report


def _precision(args: argparse.Namespace) -> str:
    if args.section == 'goals':
        return 'float32, or bfloat16 where the row says so'
    dtype = getattr(args, 'dtype', 'float32')
    lowered = 'q, k and v, or autocast of layers, in' if args.section == 'ops' else 'autocast to'
    return dtype if dtype == 'float32' else f'{lowered} {dtype}'


if __name__ == '__main__':
    run_command(main)
