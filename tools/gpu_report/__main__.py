"""Measure all that is open on a GPU, in pieces, and write a report as Markdown and JSON.

python -m tools.gpu_report --out build/gpu --data IMAGENETTE.tar
python -m tools.gpu_report --out build/gpu --pieces a b.speed

a  every kernel against float64: model, odd and long shapes, one sequence, all types, values and gradients; the same
   bits again, from a CUDA graph, and under torch.compile (tools.verify_gpu --thorough)
b  rows 17 and 18 of the goals; FlexAttention and, where it is installed, flash-linear-attention
c  whole models against DeiT, as CUDA graphs and compiled too: images/s for 1, 64 and 256 images of 224, 384 and 512 px;
   training
d  AFT-conv and DeiT trained on --data, a folder or tar file with train/CLASS and val/CLASS, for --epochs
e  AFT Tables 7, 2 and 4: speed and memory

A piece is a process with a time limit, so that none stops another; those of `a` run side by side, the others one by
one. OUT receives report.md and report.json, rewritten after each piece; NAME.json of each piece with its measurements
(verification and training keep a part of them if they are stopped, goals the lines that they printed); NAME.txt and
NAME.err, what it printed. What is done is skipped when the command runs again, and a training that was stopped goes on,
unless the sources, the machine or its command have changed. What cannot run here, as without a package, is open, and
says why.

--dry-run makes all of it tiny, on a CPU, with the kernels in Triton's interpreter.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from aft_vision_cli.commandline import EXIT_CODE, CommandParser, run_command
from tools.arguments import parse_positive


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('--out', type=Path, default=Path('build/gpu'), help='folder of the report (default: build/gpu)')
    add('--pieces', nargs='+', metavar='PIECE', help='groups, or names that --list shows (default: all)')
    add('--data', metavar='IMAGES', help='to train on, such as a tar file of Imagenette (default: no training)')
    add('--epochs', type=parse_positive, metavar='N', help='of a training (default: 50, in a dry run 1)')
    add('--limit', type=float, default=480.0, metavar='S', help='seconds of a piece (default: 480)')
    add(
        '--minutes', type=float, default=float('inf'), metavar='M', help='of all; then the rest is open (default: none)'
    )
    add('--jobs', type=int, metavar='N', help='pieces of `a` at a time (default: one per core, at most 16)')
    add('--again', action='store_true', help='run what is done too')
    add('--dry-run', action='store_true', help='tiny, on a CPU')
    add('--list', action='store_true', help='print the commands, and run nothing')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import contextlib
import csv
import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from aft_vision.cores import count_cores
from aft_vision.files import replacing, write_json
from tools.gpu_report.pieces import make_pieces
from tools.machine import describe_backends, describe_machine, read_commit
from tools.processes import Commands, interrupted_by_sigterm

PACKAGES = ('triton', 'fla', 'omegaconf')
# The measurements depend on these.
SOURCES = [f'{folder}/**/*.{kind}' for folder in ('aft_vision', 'tools', 'train') for kind in ('py', 'cpp', 'h')]
SOURCES.append('configs/**/*.yaml')
# They end with 1 when all was measured, and a kernel or a measurement is not as it should be.
VERDICTS = ('tools.verify_gpu', 'tools.benchmark')


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen pieces, and print a line for each.

    Raises:
        ValueError: there is no GPU, or no such piece.
        SystemExit: a piece is not done, or found what is not as it should be; the code is 1.
    """
    args = parse_args(argv)
    commands = make_pieces(args)
    chosen = choose([*commands], args.pieces)
    if args.list:
        print(*(f'{name:24} {" ".join(commands[name])}' for name in chosen), sep='\n')
        return
    if not args.dry_run and not torch.cuda.is_available():
        raise ValueError('nothing was measured: there is no GPU that torch can use; --dry-run needs none')
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args, commands)
    with interrupted_by_sigterm():
        run_pieces(report, chosen, args.jobs or min(count_cores(), 16))
    if not any(name.startswith('d.') for name in commands):
        print('d: not run; --data gives images to train on')
    if any(report.content['pieces'][name]['code'] != 0 for name in chosen):
        raise SystemExit(1)


def run_pieces(report: 'Report', names: Sequence[str], jobs: int) -> None:
    """Run pieces: those of `a` side by side, the others one by one."""
    # Pieces that failed or were stopped come after those never tried, whose turn would otherwise never come.
    ordered = sorted(names, key=lambda name: report.read(name) != {})
    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(report.add, (name for name in ordered if name.startswith('a.'))))
        except KeyboardInterrupt:
            # Only this thread is interrupted; the others wait for their pieces.
            pool.shutdown(wait=False, cancel_futures=True)
            report.running.end()
            raise
    for name in (name for name in ordered if not name.startswith('a.')):
        report.add(name)


def choose(pieces: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """Return the pieces of these names, or of groups whose names begin so.

    Raises:
        ValueError: there is no such piece.
    """
    found = {name: [piece for piece in pieces if f'{piece}.'.startswith(f'{name}.')] for name in names or ()}
    for name in (name for name, own in found.items() if not own):
        raise ValueError(f'expected a piece such as a or b.speed, got {name!r}; --list shows all, and d needs --data')
    return [piece for piece in pieces if names is None or any(piece in own for own in found.values())]


class Report:
    """The report, rewritten after each piece.

    Args:
        commands: The words after `python -m` of all pieces, by name.
    """

    def __init__(self, args: argparse.Namespace, commands: dict[str, list[str]]) -> None:
        self.args, self.commands, self.end = args, commands, time.monotonic() + 60 * args.minutes
        self.running = Commands()
        device, sources, self._lock = 'cpu' if args.dry_run else 'cuda', hashlib.sha256(), threading.Lock()
        for path in sorted(path for pattern in SOURCES for path in Path().glob(pattern)):
            sources.update(str(path).encode() + path.read_bytes())
        self.key = {'machine': describe_machine(device, 'bfloat16'), 'sources': sources.hexdigest()[:12]}
        self.content: dict[str, Any] = {
            **self.key,
            'backends': describe_backends(device),
            'commit': read_commit(),
            'packages': {name: importlib.util.find_spec(name) is not None for name in PACKAGES},
            'pieces': {name: entry for name in commands if (entry := self.read(name))},
        }

    def read(self, name: str) -> dict[str, Any]:
        """Return what a piece has left on this machine with these sources, or nothing."""
        path = self.args.out / f'{name}.json'
        entry = read_json(path) or {}
        return entry if entry.get('key') == self.key else {}

    def add(self, name: str) -> None:
        """Run a piece unless it is done, and write the report."""
        entry, words = self.read(name), self.commands[name]
        if self.args.again or entry.get('status') != 'done' or entry['words'] != words:
            entry = {'key': self.key, 'words': words, **self.run(name, words)}
            write_json(self.args.out / f'{name}.json', entry)
        with self._lock:
            known = self.content['pieces'] | {name: entry}
            self.content['pieces'] = {each: known[each] for each in self.commands if each in known}
            write_json(self.args.out / 'report.json', self.content)
            with replacing(self.args.out / 'report.md') as file:
                file.write_text(format_report(self.content))
            print(f'{name:24} {entry["seconds"]:6.1f} s  {entry["status"]}  {entry["reason"]}'.rstrip(), flush=True)

    def run(self, name: str, words: list[str]) -> dict[str, Any]:
        """Run a piece within its limit, and return what came of it."""
        limit = min(self.args.limit, self.end - time.monotonic())
        if limit <= 0:
            return {'status': 'open', 'reason': 'no time was left', 'code': None, 'seconds': 0.0}
        measurements, printed, errors = (self.args.out / f'{name}.{kind}' for kind in ('metrics', 'txt', 'err'))
        measurements.unlink(missing_ok=True)
        # Models on a CPU are not for the interpreter.
        interprets = self.args.dry_run and name.startswith('a.')
        more = {'TRITON_INTERPRET': '1', 'TRITON_CACHE_DIR': str(self.args.out / 'triton')} if interprets else {}
        if self.args.dry_run:
            more['CUDA_VISIBLE_DEVICES'] = ''
        # A training goes on only with one of the same sources, machine and command.
        number = hashlib.sha256(json.dumps([self.key, words]).encode()).hexdigest()[:8]
        run_dir = self.args.out / 'runs' / f'{name}-{number}' if words[0].startswith('train.') else None
        place = ['--json', str(measurements)]
        if run_dir is not None:
            place = [f'run.dir={run_dir}', 'run.overwrite=true' if self.args.again else 'run.resume=auto']
        start = time.monotonic()
        with printed.open('w') as out, errors.open('w') as err:
            command = [sys.executable, '-m', *words, *place]
            code = self.running.run_within(limit, command, stdout=out, stderr=err, env=os.environ | more)
        found = read_json(measurements) if run_dir is None else read_epochs(run_dir)
        # A traceback ends with 1 as well, but leaves its measurements incomplete.
        is_whole = found is not None and found.get('complete', True)
        is_done = is_whole and (code == 0 or (code == 1 and words[0] in VERDICTS))
        status = 'done' if is_done else 'open' if code == EXIT_CODE else 'failed' if found is None else 'in part'
        last = errors.read_text(errors='replace').strip().rpartition('\n')[2]
        reason = f'stopped after {limit:.0f} s' if code is None else f'exit status {code}: {last}'
        if is_done:
            reason = 'not all as it should be' if code else ''
        text = printed.read_text(errors='replace')
        if not is_done:
            # A benchmark shows each goal there as it is measured.
            text += errors.read_text(errors='replace')
        result = {'status': status, 'reason': reason, 'code': code, 'seconds': time.monotonic() - start}
        return {**result, 'printed': text, 'metrics': found}


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if it is missing or was cut short."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return json.loads(path.read_text())
    return None


def read_epochs(folder: Path) -> dict[str, Any] | None:
    """Return the epochs of a training; None if there are none."""
    with contextlib.suppress(FileNotFoundError), (folder / 'summary.csv').open(newline='') as file:
        return {'rows': list(csv.DictReader(file))}
    return None


def format_report(content: dict[str, Any]) -> str:
    """Return the report as Markdown: what ran, and what each piece printed."""
    absent = [name for name, there in content['packages'].items() if not there]
    lines = ['# GPU report', '', *(f'* {content[key]}' for key in ('machine', 'backends'))]
    lines += [f'* commit {content["commit"]}, sources {content["sources"]}']
    lines += [
        f'* not installed: {", ".join(absent) or "nothing that is used"}',
        '',
        '| piece | | s | |',
        '|---|---|---|---|',
    ]
    for name, entry in content['pieces'].items():
        lines.append(f'| {name} | {entry["status"]} | {entry["seconds"]:.0f} | {entry["reason"].replace("|", "/")} |')
    for name, entry in content['pieces'].items():
        if entry.get('printed'):
            lines += ['', f'## {name}', '', '```sh', f'python -m {" ".join(entry["words"])}', '```']
            lines += ['', '```text', entry['printed'].rstrip(), '```']
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    run_command(main)
