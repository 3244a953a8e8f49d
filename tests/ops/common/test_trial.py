"""Calls in a child process: what ends it ends nothing else, and is told by name."""

import os
import signal
import time

import pytest
import torch

from aft_vision.ops.common import trial
from aft_vision.ops.common.trial import run_trials


def fail() -> None:
    raise RuntimeError('deliberate\nwith more lines')


def test_each_call_that_fails_is_told_and_the_others_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setattr(trial, 'SECONDS', 2)
    failures = run_trials(
        {
            'fine': lambda: os.write(1, b'not shown'),
            'raises': fail,
            'crashes': lambda: signal.raise_signal(signal.SIGSEGV),
            'aborts': os.abort,
            'leaves': lambda: os._exit(3),
            'hangs': lambda: time.sleep(60),
            'fine too': lambda: torch.ones(300, 300) @ torch.ones(300, 300),
        }
    )
    assert [name for name, failure in failures.items() if not failure.lasts] == ['hangs']
    assert {name: failure.reason for name, failure in failures.items()} == {
        'raises': 'deliberate',
        'crashes': 'the process ended by SIGSEGV',
        'aborts': 'the process ended by SIGABRT',
        'leaves': 'the process ended with status 3',
        'hangs': 'no end after 2 s',
    }
    assert capfd.readouterr() == ('', '')


def test_nothing_in_this_process_changes():
    threads = torch.get_num_threads()
    seen: list[int] = []
    assert run_trials({'appends': lambda: seen.append(1), 'sets': lambda: torch.set_num_threads(threads + 1)}) == {}
    assert seen == []
    assert torch.get_num_threads() == threads


def test_what_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, 'LIMIT', 0.3)
    start = time.monotonic()
    with pytest.raises(OSError, match=r'expected trials to end in 0\.3 s'):
        run_trials({'hangs': lambda: time.sleep(60)})
    assert time.monotonic() - start < 10
