"""Latency of predicting conversions: every encoder, both forms, what a request is."""

import json

import pytest
import torch

from tools.benchmark import conversion
from tools.benchmark.__main__ import main
from tools.benchmark.conversion import FORMS, Setting, create_model, make_request, measure_conversion
from tools.benchmark.fastformer import BASELINE, MATERIALISED, encoder_names

CPU = torch.device('cpu')
SMALL = Setting(ads=2, text_tokens=4, dim=16, heads=2, depth=1)
SHRINK = ['--ads', '2', '--text-tokens', '4', '--dim', '16', '--heads', '2', '--rounds', '2', '--allow-load']


def test_every_encoder_is_measured_in_both_forms_and_written(tmp_path, capsys, monkeypatch):
    # The meter takes a quarter of a second a call; a test below has the true one.
    monkeypatch.setattr(conversion, 'peak_memory', lambda call, device: 2**20)
    main(['--conversion', '9', '5', *SHRINK, '--json', str(tmp_path / 'figures.json')])
    rows = json.loads((tmp_path / 'figures.json').read_text())['rows']
    assert [(row['behaviors'], row['form'], row['encoder']) for row in rows] == [
        (length, form, name) for length in (5, 9) for form in FORMS for name in encoder_names()
    ]
    assert {(row['form'], row['rounds']) for row in rows} == {('whole', 2), ('at hand', 2), ('training', 1)}
    for row in rows:
        assert 0 < row['milliseconds'] <= row['p99_milliseconds']
        assert row['peak_ratio'] == 1
        low, high = row['ratio_quartiles']
        assert low <= row['ratio'] <= high
        if row['encoder'] == BASELINE:
            assert row['ratio'] == 1
    shown = capsys.readouterr().out
    assert all(f'{words}; 9 behaviours' in shown for words in FORMS.values())


def test_materialised_attention_alone_takes_memory_with_the_square_of_the_behaviours():
    names = [BASELINE, MATERIALISED, 'fastformer']
    rows = measure_conversion([128, 512], SMALL, CPU, 'float32', 1, models=names)
    for name in names:
        short, long = (row['peak_bytes'] for row in rows if (row['encoder'], row['form']) == (name, 'at hand'))
        # Four times as many behaviours: the weights are sixteen times as many.
        assert (long / short > 8) == (name == MATERIALISED)
    whole, learning = (
        [row['peak_bytes'] for row in rows if row['form'] == form and row['behaviors'] == 512]
        for form in ('whole', 'training')
    )
    assert all(more > 1.5 * less for less, more in zip(whole, learning, strict=True))
    assert all(row['peak_ratio'] == 1 for row in rows if row['encoder'] == BASELINE)


def test_the_two_forms_are_the_same_request(monkeypatch):
    model = create_model('fastformer', 5, SMALL)
    found = make_request(model, 5, SMALL, CPU)
    with torch.no_grad():
        whole = found['whole']()
        # In place of the random vectors those of the texts.
        monkeypatch.setattr(torch, 'randn', lambda *shape, generator: texts)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(1, conversion.VOCAB, (7, 4), generator=draw)
        texts = model.text_encoder(ids, torch.ones_like(ids))
        at_hand = make_request(model, 5, SMALL, CPU)['at hand']()
    assert whole.shape == (1, 2)
    torch.testing.assert_close(at_hand, whole)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['5', '--ads', '0'], 'expected numbers from 1, got .*ads=0'),
        (['0'], r'expected numbers from 1, got \[0\] behaviours'),
        (['5', '--models', 'performer'], r"expected names among .*, got \['performer'\]"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        main(['--conversion', *options, '--allow-load'])
