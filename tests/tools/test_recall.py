"""Runs of associative recall whose results are known, kept and shown."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from tools import recall

PAGE = 'words\n<!-- runs: of make results -->\n<!-- end -->\n'
ORIGIN = ['--commit', 'abc', '--processor', 'That']


@pytest.fixture
def docs(tmp_path) -> Path:
    """A folder of results pages."""
    folder = tmp_path / 'docs'
    folder.mkdir()
    (folder / 'recall.md').write_text(PAGE)
    return folder


def make_run(folder: Path, model: dict, valid: float, test: float, lr: float = 3e-3, pairs: int = 4) -> str:
    config = {
        'model': {'dim': 64, **model},
        'data': {'pairs': pairs, 'context': 4 * pairs, 'vocab_size': 256},
        'optim': {'lr': lr},
        'schedule': {'max_updates': 1000},
        'run': {'seed': 0},
    }
    result = {'valid_accuracy': valid, 'test_accuracy': test, 'test_bits': 1.5, 'updates': 400, 'parameters': 137024}
    folder.mkdir(exist_ok=True)
    (folder / 'config.yaml').write_text(yaml.safe_dump(config))
    (folder / 'result.json').write_text(json.dumps(result))
    return str(folder)


def test_the_table_has_the_rate_with_the_best_validation_of_each_mixer(docs, tmp_path):
    local, attention = {'name': 'aft_local_char'}, {'name': 'transformer_char'}
    runs = [
        make_run(tmp_path / 'a', attention, 99.5, 99.25),
        make_run(tmp_path / 'b', local, 25.0, 29.0, lr=1e-2),
        make_run(tmp_path / 'c', local, 26.0, 24.0),
        make_run(tmp_path / 'd', {**local, 'mixer': 'full'}, 30.0, 31.0, pairs=16),
    ]
    recall.main([*runs, *ORIGIN, '--docs', str(docs)])
    page = (docs / 'recall.md').read_text()
    assert '| 64 | 99.2, 1.50 bits (0.003, 400) | - | 24.0, 1.50 bits (0.003, 400) | - | 25.0, 2.00 bits |\n' in page
    assert '| 16 | 64 | 256 | 64 | - | 31.0, 1.50 bits (0.003, 400) | - | - | 6.2, 4.00 bits |\n' in page
    assert page.index('| 4 | 16 |') < page.index('| 16 | 64 |')
    assert 'That, commit abc' in page
    with (docs / 'data' / 'recall' / 'runs.csv').open() as file:
        kept = list(csv.DictReader(file))
    assert [(row['mixer'], row['pairs'], row['lr'], row['test_accuracy']) for row in kept] == [
        ('attention', '4', '0.003', '99.25'),
        ('local', '4', '0.003', '24'),
        ('local', '4', '0.01', '29'),
        ('full', '16', '0.003', '31'),
    ]


def test_a_run_replaces_itself_and_the_page_is_written_again_without_runs(docs, tmp_path):
    at = ['--docs', str(docs)]
    for test in (24.0, 99.0):
        run = make_run(tmp_path / 'a', {'name': 'aft_simple_char'}, 25.0, test)
        assert len(recall.main([run, *ORIGIN, *at])) == 1
    written = (docs / 'recall.md').read_text()
    assert '99.0, 1.50 bits (0.003, 400)' in written
    (docs / 'recall.md').write_text(PAGE)
    assert len(recall.main(at)) == 1
    assert (docs / 'recall.md').read_text() == written


def test_a_run_is_complete_and_has_an_origin(docs, tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    with pytest.raises(ValueError, match=r'run without result\.json'):
        recall.main([str(tmp_path / 'run'), *ORIGIN, '--docs', str(docs)])
    with pytest.raises(SystemExit):
        recall.main([str(tmp_path / 'run'), '--commit', 'abc', '--docs', str(docs)])
    assert 'a RUN needs --commit and --processor' in capsys.readouterr().err
