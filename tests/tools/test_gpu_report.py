"""The report of a GPU: all of it in a dry run, and what a piece that fails, hangs or is missing something leaves."""

import importlib
import json
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import interpret_triton, link_photographs

from aft_vision.models import create_decoder
from aft_vision_cli.commandline import run_command
from tools.benchmark import compare, table
from tools.gpu_report import __main__ as gpu_report
from tools.gpu_report import pieces
from tools.processes import Commands
from train.config import load_config

PROBE = """
import json, os, signal, subprocess, sys, time
kind, _, path = sys.argv[1:]
print('printed', kind)
if kind == 'missing':
    print('error: needs a package', file=sys.stderr)
    sys.exit(2)
if kind != 'crash':
    json.dump({'rows': [kind]}, open(path, 'w'))
if kind == 'hang':
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    open('child', 'w').write(str(child.pid))
    time.sleep(60)
if kind == 'crash':
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(kind == 'below')
"""


def command(module: str) -> Any:
    """The module of a command."""
    found = importlib.import_module(module)
    return importlib.import_module(f'{module}.__main__') if hasattr(found, '__path__') else found


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each piece in this process, where everything is imported."""

    def run(_: Commands, seconds: float, words: Sequence[str], stdout: Any, stderr: Any, env: dict[str, str]) -> int:
        assert words[:2] == [sys.executable, '-m']
        with monkeypatch.context() as patch, redirect_stdout(stdout):
            if 'TRITON_INTERPRET' in env:
                patch.setenv('TRITON_CACHE_DIR', env['TRITON_CACHE_DIR'])
                interpret_triton(patch)
            try:
                command(words[2]).main(words[3:])
            except SystemExit as stopped:
                return int(stopped.code or 0)
        return 0

    monkeypatch.setattr(Commands, 'run_within', run)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few photographs, short sequences, and no meter of memory, which takes a quarter of a second a call."""
    monkeypatch.setattr(compare, 'peak_memory', lambda call, device: 2**20)
    monkeypatch.setattr(table, 'create_decoder', lambda **kwargs: create_decoder(**{**kwargs, 'context': 24}))
    photographs = link_photographs(tmp_path / 'photographs', 2, 1)
    recipe = pieces.TINY_RECIPE.replace('data.batch_size=400', f'data.batch_size=20 data.dir={photographs}')
    monkeypatch.setattr(pieces, 'TINY_RECIPE', recipe)


# The other pieces of a are of other operators.
@pytest.mark.parametrize('group', ['a.full', 'b', 'c', 'd', 'e'])
@pytest.mark.usefixtures('within', 'small')
def test_a_dry_run_measures_each_piece_once(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip('triton', minversion='3.6')
    arguments = ['--dry-run', '--out', str(tmp_path), '--pieces', group, '--jobs', '1']
    gpu_report.main(arguments)
    report = json.loads((tmp_path / 'report.json').read_text())
    commands = gpu_report.make_pieces(gpu_report.parse_args(arguments))
    assert list(report['pieces']) == [name for name in commands if name.startswith(group)]
    for name, piece in report['pieces'].items():
        assert (piece['status'], piece['code']) == ('done', 0)
        assert piece['metrics']['rows']
        assert [row for row in piece['metrics']['rows'] if row.get('failure')] == []
        assert f'## {name}\n\n```sh\npython -m {" ".join(commands[name])}\n' in (tmp_path / 'report.md').read_text()
        assert piece['printed'].strip() in (tmp_path / 'report.md').read_text()
    monkeypatch.setattr(Commands, 'run_within', None)
    gpu_report.main(arguments)
    assert json.loads((tmp_path / 'report.json').read_text()) == report


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that end in different ways, in a folder of their own; those that are run, by name."""
    for module in ('probe', 'other'):
        (tmp_path / f'{module}.py').write_text(PROBE)
    monkeypatch.setattr(gpu_report, 'VERDICTS', ('probe',))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_report, 'describe_backends', lambda device: 'none')
    kinds = ['crash', 'hang', 'below', 'missing', 'fine']
    names = {f'{"a" if kind == "hang" else "b"}.{kind}': ['probe', kind] for kind in kinds}
    names['b.part'] = ['other', 'below']
    monkeypatch.setattr(gpu_report, 'make_pieces', lambda args: names)
    ran: list[str] = []
    original = Commands.run_within
    monkeypatch.setattr(Commands, 'run_within', lambda *x, **y: (ran.append(x[2][3]), original(*x, **y))[1])
    return ran


def run(*arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stopped:
        gpu_report.main(['--dry-run', '--out', 'out', '--limit', '4', *arguments])
    assert stopped.value.code == 1
    return json.loads(Path('out/report.json').read_text())['pieces']


def test_a_piece_that_fails_stops_no_other_and_runs_again(probes: list[str]):
    found = run()
    states = {name: (piece['status'], piece['code'], piece['reason']) for name, piece in found.items()}
    assert states == {
        'a.hang': ('in part', None, 'stopped after 4 s'),
        'b.crash': ('failed', -11, 'exit status -11: '),
        'b.below': ('done', 1, 'not all as it should be'),
        'b.missing': ('open', 2, 'exit status 2: error: needs a package'),
        'b.fine': ('done', 0, ''),
        'b.part': ('in part', 1, 'exit status 1: '),
    }
    assert [found[name]['metrics'] for name in ('a.hang', 'b.crash')] == [{'rows': ['hang']}, None]
    # What a piece has started ends with it.
    assert not Path('/proc', Path('child').read_text(), 'cwd').exists()
    assert sorted(probes) == ['below', 'below', 'crash', 'fine', 'hang', 'missing']
    probes.clear()
    assert run('--pieces', 'b')['b.below'] == found['b.below']
    assert sorted(probes) == ['below', 'crash', 'missing']


def test_sigterm_ends_pieces_that_run_side_by_side(probes: list[str]):
    def stop() -> None:
        end = time.monotonic() + 20
        while not Path('child').exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main(['--dry-run', '--out', 'out', '--limit', '30', '--pieces', 'a'])
    thread.join()
    assert time.monotonic() - begun < 15
    assert not Path('/proc', Path('child').read_text(), 'cwd').exists()


def test_what_is_done_runs_again_on_another_machine_or_if_it_is_wanted(
    probes: list[str], monkeypatch: pytest.MonkeyPatch
):
    for arguments in ([], ['--again'], []):
        run('--pieces', 'b.below', *arguments)
    assert probes == ['below'] * 2
    monkeypatch.setattr(gpu_report, 'describe_machine', lambda *_: 'another GPU')
    run('--pieces', 'b.below')
    Path('aft_vision').mkdir()
    Path('aft_vision/kernels.py').write_text('changed = True')
    run('--pieces', 'b.below')
    assert probes == ['below'] * 4


def test_what_no_time_is_left_for_is_open_and_what_was_done_before_is_kept(probes: list[str]):
    run('--pieces', 'b.below')
    found = run('--minutes', '0', '--pieces', 'b.fine')
    assert {name: (piece['status'], piece['reason']) for name, piece in found.items()} == {
        'b.below': ('done', 'not all as it should be'),
        'b.fine': ('open', 'no time was left'),
    }
    assert probes == ['below']


@pytest.mark.parametrize('dry_run', [True, False])
def test_every_command_takes_its_options(dry_run: bool, tmp_path: Path):
    args = Namespace(dry_run=dry_run, epochs=50, out=tmp_path, data='images.tar')
    commands = pieces.make_pieces(args)
    assert [*dict.fromkeys(name[0] for name in commands)] == ['a', 'b', 'c', 'd', 'e']
    for words in (words for words in commands.values() if not words[0].startswith('train.')):
        parsed = command(words[0]).parse_args([*words[1:], '--json', 'figures.json'])
        assert parsed.json == Path('figures.json')


@pytest.mark.parametrize(
    ('arguments', 'words'), [([], 'there is no GPU'), (['--pieces', 'z'], 'a piece such as a or b')]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_without_a_gpu_or_a_piece_it_says_so(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        run_command(gpu_report.main, ['--out', str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(('dry_run', 'epochs', 'expected'), [(True, None, 1), (True, 2, 2), (False, None, 50)])
def test_the_trainings_are_experiments(dry_run: bool, epochs: int | None, expected: int, tmp_path: Path):
    args = Namespace(dry_run=dry_run, epochs=epochs, out=tmp_path, data='images')
    trained = {name: words for name, words in pieces.make_pieces(args).items() if name.startswith('d.')}
    assert len(trained) == 2
    for name, (_, _, *words) in trained.items():
        place = words.index('--config')
        found = load_config(words[place + 1], [*words[:place], *words[place + 2 :]])
        assert (found.model['name'], found.schedule.epochs) == (name[2:], expected)
