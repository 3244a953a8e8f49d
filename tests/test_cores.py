"""The cores that are free, and torch's threads on them."""

import os

import pytest
import torch
from helpers import BusyMachine, threads

from aft_vision import cores
from aft_vision.cores import LoadMeter, count_cores, limit_threads
from aft_vision.devices import use_device
from train.distributed import join_world


def test_the_load_is_that_of_others_alone(monkeypatch):
    system = BusyMachine(monkeypatch)
    meter = LoadMeter()
    system.clock, system.busy, system.own = 10.0, 13.0, 9.0
    assert meter.load() == pytest.approx((13 - 9) / (10 * 2))
    system.busy, system.own = 8.0, 9.0
    assert meter.load() == 0.0


def test_threads_stay_as_they_are_where_the_load_is_unknown(monkeypatch):
    # As on macOS, which has neither.
    monkeypatch.delattr(os, 'sched_getaffinity', raising=False)
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(cores, '_used_by_others', lambda: 0.0)
    with threads(2):
        limit_threads()
        assert torch.get_num_threads() == min(2, os.cpu_count() or 1)


@pytest.mark.skipif(not os.path.exists('/proc/stat'), reason='needs Linux')
def test_the_own_work_is_known():
    before = cores._sample()
    while cores._sample().own < before.own + 0.1:
        torch.randn(300, 300) @ torch.randn(300, 300)
    after = cores._sample()
    assert after.clock > before.clock
    # The counters of a core advance by hundredths of a second, not together with those of a process.
    assert after.busy - before.busy > 0.05


def test_the_load_is_measured_for_a_moment(monkeypatch):
    system = BusyMachine(monkeypatch)
    system.others = 1.6
    assert cores._used_by_others.__wrapped__() == pytest.approx(1.6)
    assert system.clock < 1
    monkeypatch.setattr(cores, '_sample', lambda: None)
    assert cores._used_by_others.__wrapped__() == 0


@pytest.fixture
def eight(monkeypatch):
    """A machine of eight cores, of which others use 5.4, and as many threads of torch."""
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(cores, '_cores', lambda: {*range(8)})
    monkeypatch.setattr(cores, '_used_by_others', lambda: 5.4)
    monkeypatch.setattr(cores, 'QUOTA', cores.Path('missing'))
    with threads(8):
        yield


@pytest.mark.parametrize(('used', 'left'), [(0.4, 8), (0.6, 7), (5.4, 3), (8.0, 1)])
def test_threads_are_for_the_cores_that_others_leave_free(eight, monkeypatch, capsys, used, left):
    monkeypatch.setattr(cores, '_used_by_others', lambda: used)
    assert use_device('cpu') == torch.device('cpu')
    assert torch.get_num_threads() == left
    said = f'note: other processes use {used} of 8 cores; {left} of 8 threads are used, OMP_NUM_THREADS=8 takes all\n'
    assert capsys.readouterr().err == (said if left < 8 else '')


@pytest.mark.parametrize(('chosen', 'evaluates', 'left'), [(None, False, 8), (None, True, 3), (7, True, 7)])
def test_the_threads_of_a_training_do_not_depend_on_the_load(eight, capsys, chosen, evaluates, left):
    with join_world('cpu', chosen, 1, evaluates):
        assert torch.get_num_threads() == left
    said = capsys.readouterr().err
    assert ('other processes use 5.4 of 8 cores' in said) == (chosen is None)
    assert ('run.cpu_threads=3 may be faster' in said) == (left == 8)


def test_threads_that_the_user_chose_stay(eight, monkeypatch, capsys):
    monkeypatch.setenv('OMP_NUM_THREADS', '8')
    limit_threads()
    assert torch.get_num_threads() == 8
    assert not capsys.readouterr().err


@pytest.mark.parametrize(('limit', 'count'), [('max 100000', 8), ('250000 100000', 3), ('1600000 100000', 8)])
def test_a_container_has_the_cores_of_its_limit(eight, monkeypatch, tmp_path, limit, count):
    (tmp_path / 'cpu.max').write_text(f'{limit}\n')
    monkeypatch.setattr(cores, 'QUOTA', tmp_path / 'cpu.max')
    assert count_cores() == count
    limit_threads(by_load=False)
    assert torch.get_num_threads() == count
