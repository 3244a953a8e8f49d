"""Measure models and operations against their alternatives, and what a training run consists of.

ops         Operations and layers against attention, in groups of one shape; with --tokens operations at lengths T.
models      Image classifiers of timm at several sizes against --baseline, in torch, onnxruntime and OpenVINO.
decode      A token of the pixel models of AFT Table 2 with the state of what came before, for 1 and 16 images.
text        Text encoders at lengths T (Fastformer Fig. 2); with --behaviors M the latency of a request (Table 8).
loader      Loaders of training images: images/s and CPU time, next to timm's and FFCV's own.
goals       The promises of this project, with a floor and a goal each; --goals is the same. Exits with 1 if a measured
            measurement is below its floor or fails; open is what lacks its device, instructions or package.
table       AFT Table 2, 4, 7 or 8: the paper's speed and memory next to this machine's.

Times are medians, ratios are taken within a round, where the alternatives run one after the other in one process, and
come with their quartiles: above 1 is faster than the baseline. That of attention is F.scaled_dot_product_attention;
"the paper's baseline" forms the (T, T) weights, as all attention did in 2021. A row that fails says why, and the others
go on. A machine that other processes use is refused, before and after. `SECTION --help` lists the options.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.arguments import DTYPES, parse_count, parse_positive, parse_size
from train.command_line import CommandParser, run_command

SMALL = 'deit_small_patch16_224'
PEERS = 'cpubone_b0_bfrobust poolformer_s12 convnext_tiny mambaout_tiny xcit_small_12_p16_224'
OURS = 'aft_conv_small aft_conv_small_k11_h16 aft_full_small'
ENCODERS = 'transformer fastformer longformer bigbird linformer linear_transformer poolingformer'
GROUPS = 'full conv causal layers causal_layers onehot'
# Every option of the sections, and how it is read.
OPTIONS: dict[str, dict[str, Any]] = {
    'data': dict(nargs='+', metavar='DATA', help='data sets'),
    'number': dict(type=int, choices=(2, 4, 7, 8), help='number of the table'),
    'groups': dict(nargs='+', choices=GROUPS.split(), help='groups of rows'),
    'tokens': dict(type=parse_positive, nargs='*', metavar='T', help='lengths; without a number 128 to 65536'),
    'behaviors': dict(type=parse_positive, nargs='*', metavar='M', help='of a user; without a number 50 to 1000'),
    'models': dict(nargs='+', metavar='NAME', help='models to measure'),
    'baseline': dict(metavar='NAME', help='the model that the others are compared with'),
    'runtimes': dict(nargs='+', choices=('torch', 'onnxruntime', 'openvino'), help='what models run in'),
    'depth': dict(type=parse_positive, metavar='N', help='blocks of every model'),
    'batch_size': dict(type=parse_positive, metavar='B', help='images or sequences of a batch'),
    'img_size': dict(type=parse_positive, metavar='PX', help='side of the images'),
    'sizes': dict(type=parse_size, nargs='+', metavar='SIZE', help='a side in pixels, or HEIGHTxWIDTH'),
    'total_tokens': dict(type=parse_positive, metavar='N', help='tokens of a batch'),
    'workers': dict(type=parse_count, help='loading processes'),
    'rows': dict(type=int, nargs='+', metavar='N', help='rows of the table of goals'),
    'training': dict(action='store_true', help='forward and backward'),
    'compile': dict(action='store_true', help='every row under torch.compile too'),
    'graph': dict(action='store_true', help='every row as a CUDA graph too (with --device cuda)'),
    'most_seconds': dict(type=float, metavar='S', help='a call may take'),
    'rounds': dict(type=parse_positive, help='each times every row once'),
    'dtype': dict(choices=DTYPES, help='of q, k and v of operations, of autocast of all else'),
    'device': dict(help='where to measure; auto is CUDA where there is one'),
    'threads': dict(type=parse_positive, help='of torch on the CPU'),
    'allow_load': dict(action='store_true', help='report although other processes use the machine'),
    'json': dict(type=Path, metavar='FILE', help='also write the measurements here'),
}
# The options of each section with their defaults: values, the words of a list, and in parentheses what is chosen later.
COMMON = dict(threads="(torch's own choice)", allow_load=False, json=None)
DEVICE_OPTIONS = dict(dtype='float32', device='cpu', **COMMON)
SECTIONS: dict[str, dict[str, Any]] = {
    'ops': dict(groups=GROUPS, batch_size='(that of the group)', compile=False, graph=False)
    | dict(tokens=None, training=False, most_seconds=5.0, rounds=15, **DEVICE_OPTIONS),
    'models': dict(models=f'{OURS} {PEERS}', baseline=SMALL, runtimes='torch', batch_size=4)
    | dict(sizes='224 384 512 1024', training=False, compile=False, graph=False, rounds=5, **DEVICE_OPTIONS),
    'decode': dict(rounds=5, **COMMON),
    'text': dict(models=ENCODERS, behaviors=None, rounds='(3, with --behaviors 100)')
    | dict(tokens=None, total_tokens=65536, most_seconds=30.0, **DEVICE_OPTIONS),
    'loader': dict(data=None, batch_size=64, img_size=224, workers='(one per core)', rounds=5, **COMMON),
    'goals': dict(rows='(1 to 21)', rounds=15, **COMMON) | dict(threads='(at most 2)'),
    'table': dict(number=None, batch_size='(32 images, 1 sequence)', img_size='(that of the table)')
    | dict(depth='(as printed)', rounds=3, **DEVICE_OPTIONS),
}
# For an option of a section the others that go only with it, and those that go only without it.
EXCLUSIVE_OPTIONS = {
    'ops': ('tokens', ('training', 'most_seconds'), ('groups', 'batch_size', 'compile', 'graph')),
    'text': ('behaviors', (), ('tokens', 'total_tokens', 'most_seconds')),
}
# Options of the section models that other runtimes do not have.
TORCH_OPTIONS = ('dtype', 'training', 'compile', 'graph', 'device')


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `section` is the chosen key of SECTIONS."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if '--goals' in argv:
        argv = ['goals', *(word for word in argv if word != '--goals')]
    parser = CommandParser(__doc__)
    sections = parser.add_subparsers(dest='section', required=True, metavar='SECTION', parser_class=CommandParser)
    for name, options in SECTIONS.items():
        section = sections.add_parser(name, description=f'The section {name} of the following.\n\n{__doc__}')
        for option, default in options.items():
            given = dict(OPTIONS[option])
            if default:
                given['help'] += f' (default: {str(default).strip("()")})'
            if default and not str(default).startswith('('):
                read = given.get('type', str)
                given['default'] = [read(word) for word in default.split()] if 'nargs' in given else default
            section.add_argument(option if option in ('data', 'number') else f'--{option.replace("_", "-")}', **given)
    args = parser.parse_args(argv)
    switch, only_with, only_without = EXCLUSIVE_OPTIONS.get(args.section, ('section', (), ()))
    word, others = ('with', only_with) if getattr(args, switch) is None else ('without', only_without)
    default_of = sections.choices[args.section].get_default
    if wrong := [name for name in others if getattr(args, name) != default_of(name)]:
        parser.error(f'--{wrong[0].replace("_", "-")} of {args.section} goes only {word} --{switch}')
    only_torch = () if 'torch' in getattr(args, 'runtimes', ['torch']) else TORCH_OPTIONS
    if wrong := [name for name in only_torch if getattr(args, name) != default_of(name)]:
        parser.error(f'--{wrong[0]} of {args.section} goes only with torch among --runtimes')
    return args


if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.cores import LoadMeter, count_cores
from aft_vision.devices import resolve_device
from aft_vision.files import write_json
from aft_vision.ops.common.choice import choices_path, describe_choices
from tools.benchmark.printer import format_rows
from tools.machine import check_load, describe_backends, describe_machine, refuse_load


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the measurements of a section, and write them as JSON if wanted.

    Returns:
        `machine` and `backends` (each a line for a device), `settings` (without the file to write), `load` (the share
        of the cores that other processes used meanwhile, or None), `rows`, and `fits` where there are some.

    Raises:
        ValueError: a data set, a model, the device or another option is not valid.
        OSError: other processes load the machine, before or meanwhile.
        SystemExit: a goal is below its floor, or could not be measured.
    """
    args = parse_args(argv)
    threads, is_goals = torch.get_num_threads(), args.section == 'goals'
    if not args.allow_load:
        check_load()
    try:
        torch.set_num_threads(args.threads or (min(2, count_cores()) if is_goals else threads))
        device = resolve_device(getattr(args, 'device', 'cpu'))
        precision = 'float32, or bfloat16 where the row says so' if is_goals else getattr(args, 'dtype', 'float32')
        section = import_module(f'tools.benchmark.{args.section}')
        # Each goal has its own device.
        devices = section.devices(section.choose(args.rows)) if is_goals else [device]
        machine = '\n'.join(describe_machine(each, precision) for each in devices)
        backends = '\n'.join(map(describe_backends, devices))
        print(f'{machine}\n{backends}')
        meter = LoadMeter()
        report = section.run(args, device)
        load = meter.load()
    finally:
        # A caller from Python goes on with the threads of before.
        torch.set_num_threads(threads)
    if not args.allow_load:
        refuse_load(load)
    # Through too few sizes there is no line.
    fits = [fit for fit in report.fits if fit['exponent'] is not None]
    print(report.head, format_rows(report.rows), *(['', format_rows(fits)] if fits else []), sep='\n')
    if choices := describe_choices():
        print('', f'choices measured on this machine, in {choices_path()}', *choices, '', sep='\n')
    if load is not None:
        print(f'other processes used {load:.1%} of the cores')
    settings = {name: value for name, value in vars(args).items() if value is not None and name != 'json'}
    result: dict[str, Any] = {'machine': machine, 'backends': backends, 'load': load, 'settings': settings}
    result |= {'rows': report.rows, **({'fits': report.fits} if report.fits else {})}
    if args.json is not None:
        write_json(args.json, result)
    if is_goals and any(row['verdict'] in ('below', 'failed') for row in report.rows):
        raise SystemExit(1)
    return result


if __name__ == '__main__':
    run_command(main)
