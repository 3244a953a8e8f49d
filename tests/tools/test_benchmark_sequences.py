"""The tables of pixel and character models: the paper's figures are those of the recipes, ours are measured."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from aft_vision.models import create_decoder
from tools.benchmark import sequences
from tools.benchmark.__main__ import main
from tools.benchmark.compare import PAPER_BASELINE
from tools.benchmark.memory import peak_memory
from tools.benchmark.paper_sequences import SEQUENCE_TABLES
from tools.benchmark.sequences import format_sequences, measure_sequences

CPU = torch.device('cpu')
CONFIGS = Path(__file__).parents[2] / 'configs'
OURS = [(number, row) for number, table in SEQUENCE_TABLES.items() for row in table.rows if row.config]


@pytest.mark.parametrize(('number', 'row'), OURS, ids=lambda value: getattr(value, 'config', value))
def test_a_row_has_the_figures_and_the_model_of_its_recipe(number, row):
    text = (CONFIGS / SEQUENCE_TABLES[number].folder / f'{row.config}.yaml').read_text()
    header = ' '.join(line.lstrip('# ') for line in text.splitlines() if line.startswith('#'))
    assert f'AFT Table {number}, row "{row.name}", L {row.depth}, d {row.dim}, h {row.heads}' in header
    bits = re.search(r': ([\d.]+) bits/\w+ \(test\), ([\d.]+) \(training\)', header)
    assert (float(bits[1]), float(bits[2])) == (row.test_bits, row.train_bits)
    speed = re.search(r'([\d.]+) iterations/s and ([\d.]+) GB per GPU', header)
    assert (float(speed[1]), float(speed[2])) == (row.iterations_per_second, row.memory_gb)
    assert yaml.safe_load(text)['model'] == row.model
    assert (row.model['depth'], row.model['dim']) == (row.depth, row.dim)


def test_every_row_is_compared_with_a_transformer_of_its_depth():
    for table in SEQUENCE_TABLES.values():
        for row in table.rows:
            if row.baseline is not None:
                first = table.rows[row.baseline]
                assert (first.name, first.depth, first.dim) == ('Transformer', row.depth, row.dim)
        assert create_decoder(**table.rows[-1].model, device='meta').context == table.tokens


def test_iterations_are_measured_beside_the_papers(monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda function, **kwargs: function)
    rows = measure_sequences(4, 2, 1, 2**30, CPU, 'float32', 1, compiled=True, context=24, dim=32)
    names = [row['name'] for row in rows]
    assert names[:4] == ['Transformer', f'Transformer, {PAPER_BASELINE}'] * 2
    assert [row['measured'] is None for row in rows] == [row['config'] is None for row in rows]
    deep = [row for row in rows if row['config'] in ('transformer_l24_d256', 'aft_simple_l24_d256')]
    first, written_out, simple = deep
    assert (first['measured']['ratio'], first['measured']['memory_ratio']) == (1.0, 1.0)
    assert (written_out['paper'], written_out['measured']['compiled']) == (None, None)
    assert simple['paper']['ratio'] == pytest.approx(2.61 / 1.57)
    assert simple['paper']['memory_ratio'] == pytest.approx(9.6 / 28.3)
    # One block of the whole model's width here.
    model = create_decoder('aft_simple_char', depth=1, context=24, dim=32)
    assert simple['measured']['parameters'] == sum(parameter.numel() for parameter in model.parameters())
    assert simple['measured']['compiled']['milliseconds'] > 0
    shown = format_sequences(4, rows)
    assert ' 24  256  1  1.046  1.209  2.61  1.66   9.6  0.34 |' in shown
    assert next(line for line in shown.splitlines() if line.startswith('Reformer')).endswith('-')


def test_materialised_attention_that_does_not_fit_is_left_out():
    rows = measure_sequences(2, 1, 1, 2**10, CPU, 'float32', 1, img_size=(2, 2), dim=32)
    refused = [row for row in rows if row['refused']]
    assert [row['name'] for row in refused] == [f'Transformer, {PAPER_BASELINE}'] * 2
    assert {row['measured'] for row in refused} == {None}
    assert 'left out: its weights alone take 0.0 GiB' in format_sequences(2, rows)


def test_an_iteration_changes_the_weights_and_needs_the_same_memory_each_time():
    model = create_decoder('aft_simple_char', depth=1, context=8, dim=8)
    step = sequences._Step(model, torch.zeros(1, 8, dtype=torch.int64), 'float32').make()
    before = model.head.weight.detach().clone()
    first, second = (peak_memory(step, CPU) for _ in range(2))
    assert not torch.equal(before, model.head.weight)
    # Gradients and the state of AdamW are there since the first call.
    assert 0 < first == second


def test_the_shortened_models_are_said(monkeypatch, tmp_path, capsys):
    taken = []
    monkeypatch.setattr(sequences, 'measure_sequences', lambda *args, **kwargs: taken.append(args) or [])
    main(['--table', '4', '--depth', '2', '--most-gib', '3', '--allow-load', '--json', str(tmp_path / 'table.json')])
    assert taken == [(4, 1, 2, 3 * 2**30, CPU, 'float32', 3)]
    shown = capsys.readouterr().out
    assert 'AFT Table 4: training iterations, batch of 1, every model cut to 2 blocks, T = 1024' in shown
    assert json.loads((tmp_path / 'table.json').read_text())['settings']['depth'] == 2
