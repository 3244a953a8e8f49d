"""The command that goes on with a run."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from train.signals import resume_command


@pytest.fixture
def started(monkeypatch):
    """A function that pretends that this process was started as a module, or as a script, perhaps by torchrun."""

    def start(module: str | None, **environment: str) -> None:
        for name in ('TORCHELASTIC_RUN_ID', 'GROUP_WORLD_SIZE', 'LOCAL_WORLD_SIZE'):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        spec = None if module is None else SimpleNamespace(name=module)
        monkeypatch.setattr(sys.modules['__main__'], '__spec__', spec)
        monkeypatch.setattr(sys, 'argv', ['my train.py'])

    return start


TORCHRUN = dict(TORCHELASTIC_RUN_ID='a', LOCAL_WORLD_SIZE='4')


@pytest.mark.parametrize(
    ('module', 'environment', 'command'),
    [
        ('train.imagenet', {}, 'python -m train.imagenet'),
        ('train.fastformer.__main__', {}, 'python -m train.fastformer'),
        (None, {}, "python 'my train.py'"),
        ('train.char', TORCHRUN | {'GROUP_WORLD_SIZE': '1'}, 'torchrun --nproc-per-node 4 -m train.char'),
        ('train.char', TORCHRUN | {'GROUP_WORLD_SIZE': '2'}, 'torchrun --nnodes 2 --nproc-per-node 4 -m train.char'),
        (None, TORCHRUN | {'GROUP_WORLD_SIZE': '1'}, "torchrun --nproc-per-node 4 'my train.py'"),
    ],
)
def test_the_command_is_that_of_the_start(started, module, environment, command):
    started(module, **environment)
    found = resume_command(Path('my runs/first/config.yaml'))
    assert found == f"{command} --config 'my runs/first/config.yaml' run.resume=auto"


@pytest.mark.parametrize(
    ('environment', 'command'),
    [({}, 'aft-vision train'), (TORCHRUN, 'torchrun --nproc-per-node 4 --no-python aft-vision train')],
)
def test_a_run_of_the_console_command_goes_on_by_that_command(started, monkeypatch, environment, command):
    started('train.imagenet', **environment, **({'GROUP_WORLD_SIZE': '1'} if environment else {}))
    monkeypatch.setattr(sys.modules['__main__'], 'PROGRAM', 'aft-vision train', raising=False)
    assert resume_command(Path('runs/a/config.yaml')) == f'{command} --config runs/a/config.yaml run.resume=auto'
