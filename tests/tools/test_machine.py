"""Names of machines, and whether others use them."""

import pytest
from helpers import BusyMachine

from aft_vision.ops.common import choice
from tools import machine
from tools.machine import LoadMeter, check_load, describe_backends, refuse_load


def test_a_machine_that_others_use_is_refused(monkeypatch):
    system = BusyMachine(monkeypatch)
    check_load()
    system.others = 0.2
    check_load()
    system.others = 1.0
    with pytest.raises(OSError, match=r'at most 10% of the available cores, got 50%; wait, or give --allow-load'):
        check_load()


def test_where_the_system_tells_nothing_the_mean_of_a_minute_decides(monkeypatch):
    monkeypatch.setattr('aft_vision.cores._sample', lambda: None)
    monkeypatch.setattr('os.cpu_count', lambda: 16)
    monkeypatch.setattr('os.getloadavg', lambda: (1.0, 0.0, 0.0))
    assert LoadMeter().load() is None
    refuse_load(None)
    check_load()
    monkeypatch.setattr('os.getloadavg', lambda: (4.0, 0.0, 0.0))
    with pytest.raises(OSError, match='got 25%'):
        check_load()


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
