"""Text encoders: against the number of tokens, and the latency of predicting conversions."""

import json

import pytest
import torch

from tools.benchmark import text
from tools.benchmark.__main__ import ENCODERS, main
from tools.benchmark.compare import PAPER_BASELINE
from tools.benchmark.text import BASELINE, KEPT, TRAINING, WHOLE

CPU = torch.device('cpu')
MATERIALISED = f'{BASELINE}, {PAPER_BASELINE}'
NAMES = [BASELINE, MATERIALISED, 'fastformer']
ALL = [BASELINE, MATERIALISED, *ENCODERS.split()[1:]]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The smallest encoders and requests."""
    for name, value in (('DIM', 16), ('HEADS', 2), ('ADS', 2), ('TEXT_TOKENS', 4)):
        monkeypatch.setattr(text, name, value)


@pytest.mark.usefixtures('unmetered')
def test_every_encoder_is_measured_at_lengths_and_written(tmp_path, capsys):
    file = ['--json', str(tmp_path / 'figures.json')]
    main(['text', '--tokens', '32', '16', '--total-tokens', '32', '--rounds', '1', '--allow-load', *file])
    written, names = json.loads((tmp_path / 'figures.json').read_text()), ALL
    assert sorted(ENCODERS.split()) == sorted(text.fastformer.ENCODERS)
    for direction in ('forward', 'training'):
        fits = [fit['name'] for fit in written['fits'] if fit['direction'] == direction]
        assert fits == 2 * names
        rows = [row for row in written['rows'] if row['direction'] == direction]
        assert [(row['tokens'], row['batch_size'], row['name']) for row in rows] == [
            (tokens, batch, name) for tokens, batch in ((16, 2), (32, 1)) for name in names
        ]
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


@pytest.mark.usefixtures('unmetered')
def test_an_encoder_is_measured_in_all_forms_of_a_request(tmp_path, capsys):
    options = ['--rounds', '2', '--allow-load', '--json', str(tmp_path / 'figures.json')]
    main(['text', '--behaviors', '9', '5', '--models', 'fastformer', *options])
    rows = json.loads((tmp_path / 'figures.json').read_text())['rows']
    found = [(row['behaviors'], row['what'], row['name']) for row in rows]
    assert found == [(length, words, name) for length in (5, 9) for words in (WHOLE, KEPT, TRAINING) for name in NAMES]
    for row in rows:
        assert 0 < row['milliseconds'] <= row['p99_milliseconds']
        low, high = row['ratio_quartiles']
        assert low <= row['ratio'] <= high
        if row['name'] == BASELINE:
            assert row['ratio'] == row['peak_ratio'] == 1
    assert WHOLE in capsys.readouterr().out


def test_training_has_a_tenth_of_the_rounds(monkeypatch):
    rounds = []
    monkeypatch.setattr(text, 'compare', lambda candidates, device, count, **options: rounds.append(count) or [])
    for given in ([], ['--rounds', '25'], ['--rounds', '3']):
        main(['text', '--behaviors', '5', '--models', 'fastformer', '--allow-load', *given])
    assert rounds == [100, 100, 10, 25, 25, 2, 3, 3, 1]


def test_no_request_but_that_of_materialised_attention_takes_memory_with_the_square_of_the_behaviours():
    options = ['--rounds', '1', '--models', 'fastformer', '--allow-load']
    rows = main(['text', '--behaviors', '128', '512', *options])['rows']

    def peaks(form: str, behaviors: int) -> dict[str, int]:
        kept = [row for row in rows if (row['what'], row['behaviors']) == (form, behaviors)]
        return {row['name']: row['peak_bytes'] for row in kept}

    for name in NAMES:
        # Four times as many behaviours: the weights are sixteen times as many.
        assert (peaks(KEPT, 512)[name] / peaks(KEPT, 128)[name] > 8) == (name == MATERIALISED)
        assert peaks(TRAINING, 512)[name] > 1.5 * peaks(WHOLE, 512)[name]


def test_the_two_forms_are_the_same_request(monkeypatch):
    def texts(model):
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(1, text.VOCAB, (7, 4), generator=draw)
        return model.text_encoder(ids, torch.ones_like(ids))

    made = []
    create = text.fastformer.FastformerForConversion
    monkeypatch.setattr(
        text.fastformer, 'FastformerForConversion', lambda config: made.append(create(config)) or made[0]
    )
    with torch.no_grad():
        whole = text.make_request('fastformer', 5, WHOLE, CPU, False).forward()
        # In place of the random vectors those of the texts.
        monkeypatch.setattr(text, 'draw', lambda *shape: texts(made[0]))
        kept = text.make_request('fastformer', 5, KEPT, CPU, False).forward()
    assert whole.shape == (1, 2)
    torch.testing.assert_close(kept, whole)


def test_an_encoder_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"expected names among .*, got \['performer'\]"):
        main(['text', '--models', 'performer', '--allow-load'])
