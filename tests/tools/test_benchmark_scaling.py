"""Time and memory against the number of tokens: the fits, the limits, the picture."""

import json

import pytest
import torch

from aft_vision.visualize import new_figure
from tools.benchmark import scaling
from tools.benchmark.__main__ import main
from tools.benchmark.curves import draw_curves, fit_exponent, fit_scaling, format_scaling
from tools.benchmark.scaling import Limit, Spent, measure_scaling

CPU = torch.device('cpu')


@pytest.mark.parametrize('power', [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_upper_half_of_the_range(power):
    tokens = [2**n for n in range(7, 17)]
    # Below the middle of the range, 2896, something else rules.
    values = [3e-5 * x**power if x > 2896 else 1.0 for x in tokens]
    assert fit_exponent(tokens, values) == pytest.approx(power)
    assert fit_exponent([128, 512, 2048], [7.0, 5.0 * 512**power, 5.0 * 2048**power]) == pytest.approx(power)
    assert fit_exponent([100, 200], [3.0, 3.0 * 2**power]) is None
    assert fit_exponent([100], [3.0]) is None
    assert fit_exponent([128, 512, 2048], [0.0, 0.0, 0.0]) is None


def test_an_operation_stops_where_it_could_take_more_than_the_limits():
    spent = Spent(seconds=1.0, bytes=2**30)
    assert spent.reason(4, Limit(4.0, 2**32)) is None
    assert spent.reason(4, Limit(3.9, 2**32)) == 'a call could take 4 s, the limit is 3.9 s'
    assert spent.reason(4, Limit(4.0, 2**31)) == 'a call could take 4 GiB, the limit is 2 GiB'


def test_an_operation_that_stopped_stays_out_and_has_a_line(monkeypatch):
    names = ['SDPA', 'AFT-simple causal']
    monkeypatch.setattr(scaling, 'OPERATIONS', {name: scaling.OPERATIONS[name] for name in names})
    monkeypatch.setattr(scaling, 'BASELINES', {})
    times = iter([{'SDPA': 1e3, 'AFT-simple causal': 1.0}, {'AFT-simple causal': 2.0}, {'AFT-simple causal': 4.0}])

    def time_calls(calls, device, rounds, progress, baselines):
        found = next(times)
        assert list(calls) == list(found)
        assert baselines == dict.fromkeys(names, 'SDPA')
        return {
            name: {'milliseconds': ms, 'peak_bytes': 0, 'ratio': 1.0, 'ratio_quartiles': (1, 1)}
            for name, ms in found.items()
        }

    monkeypatch.setattr(scaling, 'time_calls', time_calls)
    rows, stops = measure_scaling([32, 8, 16], Limit(1.5, 1e9), CPU, 'float32', 1)
    assert [(row['tokens'], row['operation']) for row in rows] == [
        (8, names[0]),
        (8, names[1]),
        (16, names[1]),
        (32, names[1]),
    ]
    assert {row['baseline'] for row in rows} == {'SDPA'}
    reason = 'a call could take 4 s, the limit is 1.5 s'
    assert stops == [{'operation': 'SDPA', 'before': 16, 'reason': reason}]
    text = format_scaling(rows, fit_scaling(rows), stops)
    assert f'SDPA stopped before T = 16: {reason}' in text
    assert '1.00' in text


def test_causal_operations_are_compared_with_causal_attention():
    assert set(scaling.BASELINES) == {
        name for name in scaling.OPERATIONS if name.startswith('AFT') and 'causal' in name
    }
    rows, _ = measure_scaling([8, 16], Limit(60.0, 2**30), CPU, 'float32', 1)
    found = {row['operation']: row for row in rows if row['tokens'] == 16}
    for name, row in found.items():
        assert row['baseline'] == ('SDPA causal' if name in scaling.BASELINES else 'SDPA')
        # One round: the ratio is that of the two times.
        assert row['ratio'] == pytest.approx(found[row['baseline']]['milliseconds'] / row['milliseconds'])


@pytest.mark.parametrize(('training', 'gib'), [(False, 32), (True, 64)])
def test_the_first_length_is_not_tried_where_its_matrices_could_not_fit(monkeypatch, training: bool, gib: int):
    tried = []

    def call(name, tokens, *args):
        tried.append(name)
        return lambda: torch.zeros(1)

    monkeypatch.setattr(scaling, '_call', call)
    # 8 matrices of 4 GiB each at 32768 tokens, and one in AFT-full; twice as many in training.
    for limit, left_out in ((gib, []), (gib - 1, [scaling.WRITTEN_OUT]), (0.1, [scaling.WRITTEN_OUT, 'AFT-full'])):
        tried.clear()
        shapes = [2**15, 2**15 + 1]
        _, stops = measure_scaling(shapes, Limit(60.0, limit * 2**30), CPU, 'float32', 1, training)
        assert [stop['operation'] for stop in stops if stop['before'] == 2**15] == left_out
        assert set(tried) == set(scaling.OPERATIONS) - set(left_out)
    assert f'a call could take {gib} GiB, the limit is 0.1 GiB' in {stop['reason'] for stop in stops}


def test_every_operation_is_measured_drawn_and_written(tmp_path, capsys):
    files = ['--png', str(tmp_path / 'scaling.png'), '--json', str(tmp_path / 'scaling.json')]
    result = main(['--scaling', '16', '32', '64', '--rounds', '1', '--allow-load', *files])
    written = json.loads((tmp_path / 'scaling.json').read_text())
    assert (tmp_path / 'scaling.png').stat().st_size > 10_000
    assert [fit['operation'] for fit in written['fits']] == list(scaling.OPERATIONS)
    assert written['stops'] == result['stops'] == []
    assert len(written['rows']) == 3 * len(scaling.OPERATIONS)
    shown = capsys.readouterr().out
    for name in scaling.OPERATIONS:
        assert name in shown


def test_a_curve_that_lies_on_another_is_seen():
    rows = [
        {'operation': name, 'tokens': tokens, 'milliseconds': 1.0, 'peak_bytes': tokens * 2**20}
        for name in ('SDPA', 'SDPA causal')
        for tokens in (8, 16, 32)
    ]
    axes = new_figure(4, 4).subplots()
    draw_curves(axes, rows, fit_scaling(rows), 'peak_bytes', 'peak')
    first, second = axes.get_lines()
    assert list(first.get_ydata()) == list(second.get_ydata()) == [8, 16, 32]
    assert first.get_linestyle() != second.get_linestyle()
    assert second.get_label() == 'SDPA causal: exponent 1.00'


def test_training_takes_more_memory(monkeypatch):
    names = ['SDPA', 'AFT-full', 'AFT-simple causal']
    monkeypatch.setattr(scaling, 'OPERATIONS', {name: scaling.OPERATIONS[name] for name in names})
    found = [
        measure_scaling([16, 24], Limit(60.0, 2**30), CPU, 'float32', 1, training)[0] for training in (False, True)
    ]
    for forward, both in zip(*found, strict=True):
        assert both['peak_bytes'] > forward['peak_bytes']


def test_the_memory_of_materialised_attention_is_quadratic_and_that_of_fused_attention_is_not(monkeypatch):
    chosen = {name: make for name, make in scaling.OPERATIONS.items() if not name.startswith(('AFT-full', 'AFT-local'))}
    monkeypatch.setattr(scaling, 'OPERATIONS', chosen)
    rows, stops = measure_scaling([128, 256, 512], Limit(60.0, 2**30), CPU, 'float32', 1)
    fits = {fit['operation']: fit['peak_bytes'] for fit in fit_scaling(rows)}
    written_out = next(name for name in fits if 'math' in name)
    assert fits[written_out] > 1.7
    assert fits['SDPA'] < 1.2
    assert fits['AFT-simple causal'] < 1.2
    assert stops == []


def test_one_length_has_no_curve():
    with pytest.raises(ValueError, match=r'at least 2 lengths from 1 token, got \[64, 64\]'):
        measure_scaling([64, 64], Limit(1.0, 1.0), CPU, 'float32', 1)
