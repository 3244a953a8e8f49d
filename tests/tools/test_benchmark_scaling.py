"""Time and memory against the number of tokens: the fits and the limits."""

import json

import pytest
import torch

from tools.benchmark import compare, ops, scaling
from tools.benchmark.__main__ import main
from tools.benchmark.compare import PAPER_BASELINE, Candidate
from tools.benchmark.scaling import fit_exponent, measure_until, report_fits

CPU = torch.device('cpu')


@pytest.mark.parametrize('power', [0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_the_upper_half_of_the_range(power):
    tokens = [2**n for n in range(7, 17)]
    # Below the middle of the range, 2896, something else rules.
    values = [3e-5 * x**power if x > 2896 else 1.0 for x in tokens]
    assert fit_exponent(tokens, values) == pytest.approx(power)
    assert fit_exponent([128, 512, 2048], [7.0, 5.0 * 512**power, 5.0 * 2048**power]) == pytest.approx(power)
    assert fit_exponent([100, 200], [3.0, 3.0 * 2**power]) is None
    assert fit_exponent([128, 512, 2048], [0.0, 0.0, 0.0]) is None


@pytest.mark.parametrize(
    ('free', 'reason'),
    [
        (2**40, 'left out: could take 4 s of 1.5, 1.2 GiB of 512'),
        (2**31, 'left out: could take 0.004 s of 1.5, 1.2 GiB of 1'),
    ],
)
def test_a_candidate_that_stopped_or_failed_stays_out_and_says_why(monkeypatch, free, reason):
    milliseconds = 1e3 if '4 s' in reason and '0.004' not in reason else 1.0
    figures = iter(
        [
            {'a': {'milliseconds': milliseconds}, 'b': {'milliseconds': 1.0}, 'c': {'error': 'RuntimeError: no'}},
            {'b': {'milliseconds': 2.0}},
            {'b': {'milliseconds': 4.0}},
        ]
    )

    def measure(candidates, device, rounds, directions, dtype):
        found = next(figures)
        assert [each.name for each in candidates] == list(found)
        assert {each.baseline for each in candidates} == {'a'}
        sizes = {'a': 0.3 * 2**30, 'b': 0, 'c': 0}
        return [
            {'name': name, 'direction': directions[0], 'peak_bytes': sizes[name], **each}
            for name, each in found.items()
        ]

    monkeypatch.setattr(scaling, 'compare', measure)
    monkeypatch.setattr(compare, 'free_memory', lambda device: free)
    candidates = [Candidate(name, lambda training: None) for name in 'abc']
    rows = measure_until(lambda batch, tokens: candidates, (32, 8, 16), CPU, 1, most_seconds=1.5)
    found = [(row['tokens'], row['name'], row.get('error')) for row in rows]
    assert found == [
        (8, 'a', None),
        (8, 'b', None),
        (8, 'c', 'RuntimeError: no'),
        (16, 'a', reason),
        (16, 'b', None),
        (32, 'b', None),
    ]
    assert report_fits(rows, '').fits[1]['exponent'] == pytest.approx(1.0)


@pytest.mark.usefixtures('unmetered')
def test_every_operation_is_measured_and_written(tmp_path, capsys):
    path = tmp_path / 'figures' / 'scaling.json'
    main(['ops', '--tokens', '16', '32', '--training', '--rounds', '1', '--allow-load', '--json', str(path)])
    written = json.loads(path.read_text())
    names = [each.name for each in ops.token_candidates(1, 16, torch.float32, CPU)]
    assert [row['name'] for row in written['rows']] == 2 * names
    assert [fit['name'] for fit in written['fits']] == 2 * names
    assert {row['direction'] for row in written['rows']} == {'training'}
    found = {row['name']: row for row in written['rows'] if row['tokens'] == 32}
    for name, row in found.items():
        first = found['SDPA causal' if 'causal' in name else 'SDPA']
        # One round: the ratio is that of the two times.
        assert row['ratio'] == pytest.approx(first['milliseconds'] / row['milliseconds'])
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    # The upper half of two lengths is one, through which there is no line.
    assert 'fit of' not in shown


def test_the_memory_of_materialised_attention_is_quadratic_and_that_of_fused_attention_is_not():
    paper, kept = f'SDPA, {PAPER_BASELINE}', ('SDPA', 'AFT-simple causal')

    def make(*shape: int) -> list[Candidate]:
        return [each for each in ops.token_candidates(*shape, torch.float32, CPU) if each.name in (*kept, paper)]

    rows = measure_until(make, [128, 256, 512], CPU, 1, most_seconds=60.0)
    exponents = {fit['name']: fit['exponent'] for fit in report_fits(rows, '', ['peak_bytes']).fits}
    assert max(exponents[name] for name in kept) < 1.2
    assert exponents[paper] > 1.7


def test_one_size_has_no_exponent():
    with pytest.raises(ValueError, match=r'at least 2 lengths, got \[64\]'):
        main(['ops', '--tokens', '64', '64', '--allow-load'])
