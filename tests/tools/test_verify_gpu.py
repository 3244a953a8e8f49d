"""The verification of the kernels on a GPU: the tests that it runs, and what it says without one."""

import pytest
import torch

from aft_vision.commandline import run_command
from tools import verify_gpu


def stop(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_command(verify_gpu.main, arguments)
    return int(stopped.value.code)


@pytest.mark.parametrize(('arguments', 'marks'), [((), 'gpu and not slow'), (('--thorough', '-n', '8'), 'gpu')])
def test_it_runs_the_tests_that_need_a_gpu(arguments, marks, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(pytest, 'main', lambda words: calls.append(words) or 1)
    assert stop(*arguments) == 1
    assert calls == [['-m', marks, *arguments[1:], str(verify_gpu.TESTS)]]


@pytest.mark.parametrize(('there', 'words'), [(False, 'there is no GPU'), (True, 'expected a checkout')])
def test_without_a_gpu_or_tests_it_says_so(there, words, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: there)
    monkeypatch.setattr(verify_gpu, 'TESTS', tmp_path / 'tests')
    assert stop() == 2
    assert words in capsys.readouterr().err
