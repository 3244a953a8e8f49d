"""Errors of the commands: a traceback, or one line."""

import ast
import multiprocessing
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from train import command_line
from train.command_line import CommandParser, run_command

ROOT = Path(__file__).parents[1]
# Without the package, whose import takes seconds.
LOADED = f"import runpy\nrun_command = runpy.run_path({command_line.__file__!r})['run_command']\n"
COMMANDS = [
    path
    for folder in ('train', 'tools')
    for path in sorted((ROOT / folder).rglob('*.py'))
    if "__name__ == '__main__'" in path.read_text()
]


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def raising(error: BaseException):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    ('error', 'line'),
    [
        (ValueError('expected a,\n  got b'), 'expected a, got b'),
        (FileNotFoundError(2, 'No such file or directory', 'a.pth'), 'a.pth: No such file or directory'),
        (FileExistsError('expected a new folder'), 'expected a new folder'),
        (ImportError('expected onnx'), 'expected onnx'),
        (FloatingPointError('expected a finite loss'), 'expected a finite loss'),
        (OutOfMemoryError('CUDA out of memory.'), 'CUDA out of memory.'),
        (ValueError(), 'ValueError'),
        (
            ValueError(
                'Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n'
                '  File "a.py", line 1, in f\n    raise\nOSError: first\n\nThe above exception was ...:\n\n'
                'Traceback (most recent call last):\n  File "a.py", line 1\n    raise\na.b.ImageError: bad a.jpg\n'
            ),
            'bad a.jpg',
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, line, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command(raising(error), [])
    assert stop.value.code == 2
    assert capsys.readouterr() == ('', f'error: {line}\n')


@pytest.mark.parametrize('error', [AttributeError('a'), KeyError('a'), TypeError('a'), RuntimeError('a')])
def test_a_fault_of_the_program_is_raised(error):
    with pytest.raises(type(error)):
        run_command(raising(error), [])


@pytest.mark.parametrize(
    'message',
    ['DataLoader worker (pid 12) is killed by signal: Killed. ', 'DataLoader worker (pid(s) 1, 2) exited unexpectedly'],
)
def test_a_loading_process_that_the_system_ended_is_one_line(message, capsys):
    with pytest.raises(SystemExit):
        run_command(raising(RuntimeError(message)), [])
    shown = capsys.readouterr().err
    assert shown.startswith(f'error: {message.strip()}; the system ends processes for lack of memory')
    assert shown.count('\n') == 1


def test_a_loading_process_whose_socket_is_closed_has_ended(capsys):
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(SystemExit):
        run_command(lambda _: ours.recv(), [])
    assert capsys.readouterr().err.startswith('error: DataLoader worker exited (EOFError); the system ends processes')


def test_debug_shows_the_traceback_before_the_line(capsys):
    with pytest.raises(SystemExit):
        run_command(raising(ValueError('a')), ['--debug'])
    shown = capsys.readouterr().err
    assert shown.startswith('Traceback (most recent call last)')
    assert shown.endswith('\nerror: a\n')


def test_other_processes_wait_for_the_first_to_speak(monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(command_line.time, 'sleep', waited.append)
    monkeypatch.setenv('RANK', '1')
    with pytest.raises(SystemExit):
        run_command(raising(ValueError('a')), [])
    assert waited == [command_line.ERROR_DELAY]
    assert capsys.readouterr().err == 'error: process 1: a\n'


def test_the_help_is_as_written_and_has_the_debug_option(monkeypatch):
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', SimpleNamespace(name='tools.some.__main__'))
    lines = CommandParser('What it does.\n\nsome  text').format_help().splitlines()
    assert lines[0] == 'usage: python -m tools.some [-h] [--import MODULE_OR_FILE] [--debug]'
    assert lines[2:5] == ['What it does.', '', 'some  text']
    assert CommandParser(None).parse_args(['--debug']).debug


def test_paths_of_options_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    parser = CommandParser('What it does.')
    parser.add_argument('files', nargs='+')
    parser.add_argument('--out', type=Path)
    parser.add_mutually_exclusive_group().add_argument('--data')
    parser.add_argument('--prompt', type=str)
    args = parser.parse_args(['~/a', '-', '$HOME/b', '--out=~/c', '--data', '${HOME}', '--prompt', '~/ is home'])
    assert args.files == ['/home/me/a', '-', '/home/me/b']
    assert (args.out, args.data, args.prompt) == (Path('/home/me/c'), '/home/me', '~/ is home')


def test_a_wrong_option_is_one_line(capsys):
    parser = CommandParser('What it does.')
    parser.add_argument('--rounds', type=int)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(['--rounds', 'many'])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: argument --rounds: invalid int value: 'many'; --help shows the usage\n"


@pytest.mark.parametrize('typed', ['--modl x', '--modl=x', '--modl x --data d'])
def test_a_misspelt_option_names_the_nearest_one(typed, capsys):
    parser = CommandParser('Text.')
    parser.add_argument('--model', required=True)
    parser.add_argument('--data', required=True)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(typed.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith('error: there is no option --modl; did you mean --model?; ')


def test_a_misspelt_option_of_a_section_names_the_nearest_one(capsys):
    parser = CommandParser('Text.')
    sections = parser.add_subparsers(dest='section', parser_class=CommandParser)
    sections.add_parser('models', description='Text.').add_argument('--sizes')
    with pytest.raises(SystemExit):
        parser.parse_args(['models', '--szes', '3'])
    assert 'there is no option --szes; did you mean --sizes?' in capsys.readouterr().err


@pytest.mark.parametrize('path', COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_runs_with_errors_of_one_line(path):
    *_, block = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    )
    assert ast.unparse(block.body[-1]) == 'run_command(main)'


@pytest.mark.parametrize(
    'command',
    [['train.imagenet', '--config', 'none.yaml'], ['tools.report', '--checkpoint', 'none.pth', '--only', 'biases']],
    ids=lambda command: command[0],
)
def test_a_command_ends_with_one_line_and_code_2(command, monkeypatch, capfd):
    monkeypatch.setattr(sys, 'argv', command)
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(command[0], run_name='__main__')
    shown = capfd.readouterr()
    assert (stop.value.code, shown.out) == (2, '')
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith('error: expected ')


@pytest.mark.parametrize('lines', [1, 100_000])
def test_output_that_nobody_reads_ends_a_command_without_a_word(lines):
    script = (
        f'import sys\n{LOADED}'
        f'def main(argv):\n    sys.stdin.read()\n    for _ in range({lines}):\n        print("a line")\n'
        'run_command(main)\n'
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, '-c', script], cwd=ROOT, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b''
    assert process.returncode == 141


def test_the_processes_of_torchrun_say_it_once(tmp_path):
    """One line by one of them, and a code that is not 0; torchrun adds lines of its own."""
    command = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'commandline_probe']
    (tmp_path / 'commandline_probe.py').write_text(
        f'{LOADED}def main(argv):\n    raise ValueError("expected more")\nrun_command(main)\n'
    )
    environment = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': f'{ROOT}:{tmp_path}', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if 'expected more' in line] == ['error: expected more']
