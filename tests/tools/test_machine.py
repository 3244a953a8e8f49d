"""Names of machines, and whether others use them."""

import os

import pytest
import torch

from aft_vision.ops.common import choice
from tools import machine
from tools.machine import LoadMeter, check_load, describe_backends, refuse_load


class System:
    """A system of two cores whose clock, cores and processes are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = self.busy = self.own = 0.0
        monkeypatch.setattr(machine, '_sample', lambda: machine._Sample(self.clock, self.busy, self.own))
        monkeypatch.setattr(machine, '_cores', lambda: {0, 1})
        monkeypatch.setattr(machine.time, 'sleep', self.sleep)
        self.others = 0.0

    def sleep(self, seconds: float) -> None:
        """Others work meanwhile, on so many cores."""
        self.clock += seconds
        self.busy += self.others * seconds


@pytest.fixture
def system(monkeypatch):
    return System(monkeypatch)


def test_the_load_is_that_of_others_alone(system):
    meter = LoadMeter()
    system.clock, system.busy, system.own = 10.0, 13.0, 9.0
    assert meter.load() == pytest.approx((13 - 9) / (10 * 2))
    system.busy, system.own = 8.0, 9.0
    assert meter.load() == 0.0


def test_a_machine_that_others_use_is_refused(system):
    check_load()
    system.others = 0.2
    check_load()
    system.others = 1.0
    with pytest.raises(OSError, match=r'at most 10% of the available cores, got 50%; wait, or give --allow-load'):
        check_load()


def test_where_the_system_tells_nothing_the_mean_of_a_minute_decides(monkeypatch):
    monkeypatch.setattr(machine, '_sample', lambda: None)
    monkeypatch.setattr('os.cpu_count', lambda: 16)
    monkeypatch.setattr('os.getloadavg', lambda: (1.0, 0.0, 0.0))
    assert LoadMeter().load() is None
    refuse_load(None)
    check_load()
    monkeypatch.setattr('os.getloadavg', lambda: (4.0, 0.0, 0.0))
    with pytest.raises(OSError, match='got 25%'):
        check_load()


@pytest.mark.skipif(not os.path.exists('/proc/stat'), reason='needs Linux')
def test_the_own_work_is_known():
    before = machine._sample()
    while machine._sample().own < before.own + 0.1:
        torch.randn(300, 300) @ torch.randn(300, 300)
    after = machine._sample()
    assert after.clock > before.clock
    # The counters of a core advance by hundredths of a second, not together with those of a process.
    assert after.busy - before.busy > 0.05


def test_the_backends_are_named():
    shown = describe_backends('cpu')
    for word in ('oneDNN', 'compiled kernel', 'Triton', 'eager, cpp'):
        assert word in shown


@pytest.mark.parametrize(
    ('fields', 'expected'),
    [
        ({'model name': 'AMD EPYC', 'cpu family': '26', 'model': '2'}, 'AMD EPYC (family 26, model 2)'),
        ({'model name': 'Neoverse-N1'}, 'Neoverse-N1'),
    ],
)
def test_a_processor_is_named_with_its_generation(monkeypatch, fields, expected):
    monkeypatch.setattr(choice, 'cpu_info', lambda *names: next((fields[x] for x in names if x in fields), ''))
    assert machine.describe_machine('cpu').startswith(f'{expected}; ')
