"""The table of exported files in other runtimes: what is there is kept, and errors are rows."""

import csv
from pathlib import Path
from typing import Any

import pytest
from helpers import load_script

run = load_script('tests/runtimes/run.py')


@pytest.fixture
def computed(monkeypatch, tmp_path) -> list[Any]:
    """The cases that were run, of two runtimes, without environments."""
    cases: list[Any] = []

    def make_environment(folder: Path, runtime: Any) -> Path:
        if runtime.python:
            raise FileNotFoundError(runtime.python)
        folder.mkdir(parents=True)
        return folder / 'bin' / 'python'

    monkeypatch.setattr(run, 'PLACE', tmp_path)
    monkeypatch.setattr(run, 'make_environment', make_environment)
    monkeypatch.setattr(run, 'prepare', lambda *case: case)
    monkeypatch.setattr(run, 'run_case', lambda python, adapter, case: cases.append(case) or {'error': 'a cause'})
    return cases


def test_rows_that_are_there_are_kept_and_an_environment_is_deleted(computed, tmp_path):
    out = tmp_path / 'runtimes.csv'
    run.main(['opencv', '--out', str(out)])
    with out.open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(computed) == len(run.ONNX) * len(run.MODELS) * len(run.CASES)
    assert {(row['version'], row['error']) for row in rows} == {('5.0.0.93', 'a cause')}
    assert not list((tmp_path / 'environments').iterdir())
    # As after an interruption.
    run.write_rows(out, rows[:-2])
    run.main(['opencv', '--out', str(out)])
    assert len(computed) == len(rows) + 2
    run.main(['opencv', '--out', str(out), '--again'])
    assert len(computed) == 2 * len(rows) + 2
