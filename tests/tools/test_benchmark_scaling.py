"""Time and memory against the number of tokens or pixels: the fits, the limits, the pictures."""

import json

import pytest
import timm
import torch

from aft_vision.visualize import new_figure
from tools.benchmark import compare, models, ops, printer, scaling
from tools.benchmark.__main__ import main
from tools.benchmark.compare import PAPER_BASELINE, Candidate
from tools.benchmark.printer import plot_curves
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
    assert report_fits(rows, 'tokens', '').fits[1]['exponent'] == pytest.approx(1.0)


@pytest.mark.usefixtures('unmetered')
def test_every_operation_is_measured_drawn_and_written(tmp_path, capsys):
    png, path = tmp_path / 'pictures' / 'scaling.png', tmp_path / 'figures' / 'scaling.json'
    files = ['--png', str(png), '--json', str(path)]
    main(['ops', '--tokens', '16', '32', '--training', '--rounds', '1', '--allow-load', *files])
    written = json.loads(path.read_text())
    assert png.stat().st_size > 10_000
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
    exponents = {fit['name']: fit['exponent'] for fit in report_fits(rows, 'tokens', '', ['peak_bytes']).fits}
    assert max(exponents[name] for name in kept) < 1.2
    assert exponents[paper] > 1.7


def test_a_curve_that_lies_on_another_is_seen(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(printer, 'new_figure', lambda *size: figures.append(new_figure(*size)) or figures[0])
    rows = [
        {'direction': 'forward', 'name': name, 'tokens': tokens, 'peak_bytes': tokens * 2**20}
        for name in ('SDPA', 'SDPA causal')
        for tokens in (8, 16, 32)
    ]
    plot_curves(report_fits(rows, 'tokens', 'head', ['peak_bytes']), tmp_path / 'curves.png')
    first, second = figures[0].axes[0].get_lines()
    assert list(first.get_ydata()) == list(second.get_ydata()) == [8, 16, 32]
    assert first.get_linestyle() != second.get_linestyle()
    assert second.get_label() == 'SDPA causal: exponent 1.00'


def test_one_size_has_no_curve():
    with pytest.raises(ValueError, match=r'at least 2 lengths, got \[64\]'):
        main(['ops', '--tokens', '64', '64', '--allow-load'])
    with pytest.raises(ValueError, match='at least 2 image sizes of different area'):
        main(['memory', '--sizes', '64x32', '32x64'])


@pytest.fixture
def shallow(monkeypatch):
    """Feature extractors of two blocks."""
    kwargs = dict(features_only=True, out_indices=[0, 1], dynamic_img_size=True, dynamic_img_pad=True)
    monkeypatch.setattr(models, 'create', lambda name, *args: timm.create_model(name, **kwargs))


@pytest.mark.usefixtures('shallow')
def test_memory_of_aft_conv_is_linear_in_pixels_and_materialised_attention_is_not(monkeypatch, tmp_path, capsys):
    # Memory does not depend on what others do.
    monkeypatch.setattr('tools.machine.LoadMeter.load', lambda meter: 0.54)
    names = ['deit_tiny_patch16_224', 'aft_conv_tiny']
    options = ['--models', *names, '--sizes', '384', '224', '256x384', '320', '--png', str(tmp_path / 'memory.png')]
    result = main(['memory', *options])
    fused, materialised, conv = result['fits']
    assert [fit['name'] for fit in (fused, conv)] == names
    assert materialised['name'] == f'{names[0]}, {PAPER_BASELINE}'
    assert 0.85 < conv['exponent'] <= 1.05
    assert 0.9 < fused['exponent'] <= 1.05
    assert materialised['exponent'] > 1.4
    # The input of a block, the queries, keys and values, and the result: 5 maps at least, of 192 channels in float32.
    assert conv['bytes_per_pixel'] > 5 * 192 * 4 / 16**2
    largest = [row['peak_bytes'] for row in result['rows'] if row['pixels'] == 384 * 384]
    assert largest[1] > 2 * 3 * 577**2 * 4 > largest[0]
    assert (tmp_path / 'memory.png').stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert all(text in shown for text in ('threads; float32; torch', '256x384', 'exponent', 'bytes/pixel'))


@pytest.mark.usefixtures('shallow')
def test_training_keeps_the_attention_weights_that_are_materialised():
    options = ['--models', 'deit_tiny_patch16_224', '--sizes', '64', '128x64', '--batch-size', '2', '--training']
    rows = main(['memory', *options])['rows']
    forward, training = ([row for row in rows if row['direction'] == each] for each in ('forward', 'training'))
    assert [row['pixels'] for row in training] == [2 * 64 * 64] * 2 + [2 * 128 * 64] * 2
    for less, more in zip(forward, training, strict=True):
        assert less['peak_bytes'] < more['saved_bytes'] < more['peak_bytes']
    more = training[3]['saved_bytes'] - training[2]['saved_bytes']
    # In 2 blocks of 3 heads, of 2 images with 32 patches and a class token; fused attention keeps a number per row.
    assert more == pytest.approx(2 * 2 * 3 * (33**2 - 33) * 4, rel=0.01)


def test_slopes_are_those_of_lines():
    kinds = {'line': lambda x: 40 * x + 1000, 'power': lambda x: 3 * x**1.5, 'flat': lambda x: 20 * x}
    rows = [
        dict(name=name, pixels=x, direction='forward', peak_bytes=value(x))
        for name, value in kinds.items()
        for x in (10_000, 40_000, 90_000)
    ]
    line, power, flat = report_fits(rows, 'pixels', '', ['peak_bytes']).fits
    assert line['bytes_per_pixel'] == pytest.approx(40)
    assert line['exponent'] == pytest.approx(1.0, abs=0.01)
    assert power['exponent'] == pytest.approx(1.5)
    assert flat['bytes_per_pixel'] == pytest.approx(20)


def test_a_feature_extractor_takes_any_size():
    for name in ('aft_full_tiny', 'deit_tiny_patch16_224', 'resnet18'):
        maps = models.create(name, (64, 43), dense=True)(torch.zeros(1, 3, 64, 43))
        assert maps[-1].shape[-2:] == ((2, 2) if name == 'resnet18' else (4, 3))
