"""Answers of the commands before they do anything."""

import dataclasses
import importlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from train.convert_schema import ConvertConfig
from train.fastformer.tasks import TASKS
from train.key_list import list_keys
from train.model_section import decoder_schema, model_schema
from train.schema import Config
from train.sequence_schema import CharConfig, RecallConfig

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__main__')
    for folder in ('train', 'tools')
    for path in (ROOT / folder).rglob('*.py')
    if "if __name__ == '__main__'" in path.read_text()
)
# Imports that take seconds.
HEAVY = ('torch', 'timm', 'transformers', 'numpy', 'matplotlib', 'omegaconf')
REPORT_IMPORTS = f"""
import atexit, runpy, sys
atexit.register(lambda: print('LOADED', *[name for name in {HEAVY} if name in sys.modules]))
sys.argv = ['command', *sys.argv[2:]]
runpy.run_module(sys.orig_argv[3], run_name='__main__', alter_sys=True)
"""


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    return subprocess.run(
        [sys.executable, '-c', REPORT_IMPORTS, command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope='module')
def answers() -> dict[str, subprocess.CompletedProcess[str]]:
    """The answer of each command to --help."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMANDS, pool.map(lambda command: run(command, '--help'), COMMANDS), strict=True))


@pytest.mark.parametrize('command', COMMANDS)
def test_help_needs_no_import_that_takes_seconds_and_shows_what_is_typed(answers, command):
    answer = answers[command]
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == 'LOADED'
    assert f'usage: python -m {command} ' in answer.stdout


@pytest.mark.parametrize('command', ['imagenet', 'convert', 'char', 'pixel', 'recall', 'fastformer.__main__'])
def test_a_trainer_without_arguments_names_an_experiment_to_try(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f'train.{command}').main([])
    assert stopped.value.code == 2
    named = capsys.readouterr().err.partition('--config ')[2].split(';')[0].strip()
    assert (ROOT / 'configs' / f'{named}.yaml').is_file()


def test_every_key_has_a_default_and_a_meaning(capsys):
    from train.imagenet import main

    assert main(['--keys']) is None
    printed = capsys.readouterr().out
    keys = list_keys(Config)
    assert {'data.batch_size', 'optim.lr', 'run.seed'} <= {key.name for key in keys}
    assert [key.name for key in keys if not key.meaning or f'{key.name}={key.default}' not in printed] == []


@pytest.mark.parametrize(
    ('schema', 'arguments'),
    [
        (Config, model_schema()),
        (ConvertConfig, model_schema()),
        (CharConfig, decoder_schema()),
        (RecallConfig, decoder_schema()),
        *((task.schema, task.schema.model_schema()) for task in TASKS.values()),
    ],
)
def test_every_key_that_an_experiment_may_have_is_listed_in_the_words_of_yaml(schema, arguments):
    listed = {key.name: key for key in list_keys(schema, arguments)}
    sections = {field.name: field.type for field in dataclasses.fields(schema) if dataclasses.is_dataclass(field.type)}
    for section, kind in {**sections, 'model': arguments}.items():
        assert {f'{section}.{field.name}' for field in dataclasses.fields(kind)} <= listed.keys()
    assert [name for name, key in listed.items() if not key.meaning] == []
    assert not any('None' in key.meaning.split() for key in listed.values())


def test_the_keys_of_a_model_are_described_with_their_ranges():
    rate = next(key for key in list_keys(Config, model_schema()) if key.name == 'model.drop_path_rate')
    assert rate[2:] == ('in [0, 1)', 'Stochastic depth rate.')
    size = next(key for key in list_keys(Config, model_schema()) if key.name == 'model.kernel_size')
    assert size.limits == 'at least 1'
    assert size.meaning.startswith('s of AFT-conv, in tokens')
    gate = next(key for key in list_keys(CharConfig, decoder_schema()) if key.name == 'model.query_gate')
    assert (gate.limits, gate.meaning[:5]) == ('', 'false')


def test_an_interrupt_ends_in_a_line(monkeypatch, capsys):
    from train.command_line import run_command

    def main(argv: object) -> None:
        signal.default_int_handler(signal.SIGINT, None)

    with pytest.raises(SystemExit) as stopped:
        run_command(main, [])
    assert stopped.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err.count('\n') == 1
