"""Text encoders against the number of tokens: every encoder, the limits, the figures of a text."""

import json
import sys

import pytest
import torch

from tools.benchmark import fastformer, scaling, times
from tools.benchmark.__main__ import main
from tools.benchmark.fastformer import BASELINE, MATERIALISED, Size, create_classifier, measure_fastformer
from tools.benchmark.scaling import Limit

CPU = torch.device('cpu')
SMALL = Size(dim=16, heads=2, depth=1)
NO_LIMIT = Limit(60.0, 2**32)
SHRINK = ['--total-tokens', '32', '--dim', '16', '--heads', '2', '--depth', '1', '--rounds', '1', '--allow-load']


def test_every_encoder_is_measured_drawn_and_written(tmp_path, capsys, monkeypatch):
    # The meter takes a quarter of a second a call; a test below has the true one.
    monkeypatch.setattr(times, 'peak_memory', lambda call, device: 2**20)
    files = ['--png', str(tmp_path / 'curves.png'), '--json', str(tmp_path / 'figures.json')]
    main(['--fastformer', '32', '16', *SHRINK, *files])
    written = json.loads((tmp_path / 'figures.json').read_text())
    names = fastformer.encoder_names()
    assert len(names) == 8
    for direction in ('forward', 'training'):
        fits = [fit for fit in written['fits'] if fit['direction'] == direction]
        assert [fit['operation'] for fit in fits] == names
        rows = [row for row in written['rows'] if row['direction'] == direction]
        assert [(row['tokens'], row['batch_size'], row['operation']) for row in rows] == [
            (tokens, batch, name) for tokens, batch in ((16, 2), (32, 1)) for name in names
        ]
    assert written['stops'] == []
    assert (tmp_path / 'curves.png').stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_materialised_attention_alone_is_quadratic_in_memory():
    names = [BASELINE, MATERIALISED, 'fastformer']
    found = measure_fastformer([128, 256, 512], 128, NO_LIMIT, CPU, 'float32', 1, models=names, size=SMALL)
    for direction in ('forward', 'training'):
        fits = {fit['operation']: fit['peak_bytes'] for fit in found['fits'] if fit['direction'] == direction}
        assert fits[MATERIALISED] > 1.5
        assert 0.8 < fits[BASELINE] < 1.1
        assert 0.8 < fits['fastformer'] < 1.1
    forward, training = (
        [row['peak_bytes'] for row in found['rows'] if row['direction'] == direction]
        for direction in ('forward', 'training')
    )
    assert all(learning > inference for inference, learning in zip(forward, training, strict=True))


def test_an_encoder_stops_before_a_first_batch_of_which_a_part_takes_too_much(monkeypatch):
    measured = []

    def time_calls(calls, device, rounds, progress, baselines):
        measured.append(list(calls))
        seconds = {BASELINE: 0.1, 'fastformer': 0.01}
        return {
            name: {
                'milliseconds': 1e3 * seconds[name],
                'peak_bytes': 1,
                'ratio': 1.0 if baselines[name] in calls else None,
                'ratio_quartiles': None,
            }
            for name in calls
        }

    monkeypatch.setattr(scaling, 'time_calls', time_calls)
    limit = Limit(1.0, 2**30)
    found = measure_fastformer([2, 4], 64, limit, CPU, 'float32', 1, models=['fastformer', BASELINE], size=SMALL)
    assert measured == 2 * [[BASELINE, 'fastformer'], ['fastformer'], ['fastformer']]
    assert [(row['operation'], row['tokens'], row['batch_size']) for row in found['rows']] == 2 * [
        ('fastformer', 2, 32),
        ('fastformer', 4, 16),
    ]
    assert {row['ratio'] for row in found['rows']} == {None}
    assert [(row['milliseconds'], row['batch_milliseconds']) for row in found['rows'][:2]] == [
        (10 / 32, 10),
        (10 / 16, 10),
    ]
    reason = 'a call could take 1.6 s, the limit is 1 s'
    assert [stop['reason'] for stop in found['stops']] == [reason, reason]
    text = fastformer.format_fastformer(**found)
    assert text.count(f'{BASELINE} stopped before T = 2: {reason}') == 2


def test_an_encoder_that_a_device_has_no_memory_for_stops_alone(monkeypatch):
    create = fastformer.create_classifier

    def fail(name, tokens, size):
        if (name, tokens) == (MATERIALISED, 32):
            raise torch.OutOfMemoryError
        return create(name, tokens, size)

    monkeypatch.setattr(fastformer, 'create_classifier', fail)
    monkeypatch.setattr(times, 'peak_memory', lambda call, device: 2**20)
    found = measure_fastformer([16, 32], 32, NO_LIMIT, CPU, 'float32', 1, models=[BASELINE, MATERIALISED], size=SMALL)
    assert [(stop['operation'], stop['before']) for stop in found['stops']] == 2 * [(MATERIALISED, 32)]
    assert 'no memory left' in found['stops'][0]['reason']
    assert [row['operation'] for row in found['rows'][:3]] == [BASELINE, MATERIALISED, BASELINE]


def test_the_two_transformers_are_the_same_but_for_the_form_of_their_attention():
    fused, written_out = (create_classifier(name, 8, SMALL).eval() for name in (BASELINE, MATERIALISED))
    written_out.load_state_dict(fused.state_dict())
    embeds = torch.randn(2, 8, fused.config.embedding_size, generator=torch.Generator().manual_seed(0))
    results = [model(inputs_embeds=embeds).logits for model in (fused, written_out)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert [model.config._attn_implementation for model in (fused, written_out)] == ['sdpa', 'eager']


def test_the_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'aft_vision.fastformer', None)
    monkeypatch.delattr('aft_vision.fastformer', raising=False)
    with pytest.raises(ImportError, match=r"text encoders need transformers: pip install 'aft-vision\[text\]'"):
        fastformer.encoder_names()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--total-tokens', '0'], 'at least 1 token in a batch, got 0'),
        (['--models', 'performer'], "expected names among .*, got \\['performer'\\]"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        main(['--fastformer', '16', '32', '--allow-load', *options])
