"""Runs of associative recall whose results are known, kept and shown."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from tools import recall
from train.config import load_config, save_config
from train.sequence_schema import RecallConfig

ROOT = Path(__file__).parents[2]
PAGE = 'words\n<!-- runs: of make results -->\n<!-- end -->\n'
ORIGIN = ['--commit', 'abc', '--processor', 'That']
MIXERS = {
    'attention': ['model.name=transformer_char', 'model.num_heads=1'],
    'full': ['model.mixer=full', 'model.window=null'],
    'local': [],
    'simple': ['model.name=aft_simple_char'],
}


@pytest.fixture
def docs(tmp_path) -> Path:
    """A folder of results pages."""
    folder = tmp_path / 'docs'
    folder.mkdir()
    (folder / 'recall.md').write_text(PAGE)
    return folder


def make_run(folder: Path, mixer: str, valid: float, test: float, *overrides: str) -> str:
    """Write the folder of a run as the trainer does: the resolved experiment and the result."""
    folder.mkdir(exist_ok=True)
    config = load_config(
        ROOT / 'configs' / 'small' / 'recall.yaml',
        ['schedule.max_updates=1000', *MIXERS[mixer], *overrides],
        RecallConfig,
    )
    save_config(config, folder / 'config.yaml')
    result = {'valid_accuracy': valid, 'test_accuracy': test, 'test_bits': 1.5, 'updates': 400, 'parameters': 137024}
    (folder / 'result.json').write_text(json.dumps(result))
    return str(folder)


def test_the_table_has_the_rate_with_the_best_validation_of_each_mixer(docs, tmp_path):
    runs = [
        make_run(tmp_path / 'a', 'attention', 99.5, 99.25),
        make_run(tmp_path / 'b', 'local', 25.0, 29.0, 'optim.lr=1e-2'),
        make_run(tmp_path / 'c', 'local', 26.0, 24.0),
        make_run(tmp_path / 'd', 'full', 30.0, 31.0, 'data.pairs=16', 'data.context=64'),
    ]
    recall.main([*runs, *ORIGIN, '--docs', str(docs)])
    page = (docs / 'recall.md').read_text()
    assert '| 64 | 99.2, 1.50 bits (0.003, 400) | - | 24.0, 1.50 bits (0.003, 400) | - | 25.0, 2.00 bits |\n' in page
    assert '| 16 | 64 | 128 | 64 | - | 31.0, 1.50 bits (0.003, 400) | - | - | 6.2, 4.00 bits |\n' in page
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
        run = make_run(tmp_path / 'a', 'simple', 25.0, test)
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
    assert 'RUN needs --commit and --processor, got none for --processor' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('mixer', 'override', 'message'),
    [
        ('local', 'model.window=4', r'expected model\.window to be 8 as in .*OTHER, got 4 in .*b/config\.yaml'),
        ('local', 'model.depth=4', r'model\.depth to be 2 as in .*OTHER, got 4'),
        ('simple', 'model.query_gate=false', r'model\.query_gate to be None as in .*OTHER, got False'),
        ('full', 'optim.weight_decay=0.2', r'optim\.weight_decay to be 0\.1 as in .*OTHER, got 0\.2'),
        ('full', 'run.amp=bfloat16', r'run\.amp to be none as in .*OTHER, got bfloat16'),
    ],
)
def test_a_run_of_another_experiment_is_refused_before_anything_is_written(docs, tmp_path, mixer, override, message):
    at = [*ORIGIN, '--docs', str(docs)]
    recipe, last = make_run(tmp_path / 'a', mixer, 25.0, 25.0), make_run(tmp_path / 'b', mixer, 25.0, 99.0, override)
    with pytest.raises(ValueError, match=message.replace('OTHER', r'a/config\.yaml')):
        recall.main([recipe, last, *at])
    assert [path.name for path in docs.rglob('*')] == ['recall.md']
    recall.main([recipe, *at])
    written = {path: path.read_bytes() for path in docs.rglob('*.*')}
    for other_rate in ([], ['optim.lr=1e-2']):
        make_run(tmp_path / 'b', mixer, 25.0, 99.0, override, *other_rate)
        with pytest.raises(ValueError, match=message.replace('OTHER', rf'data/recall/{mixer}\.yaml')):
            recall.main([last, *at])
    assert {path: path.read_bytes() for path in docs.rglob('*.*')} == written


def test_runs_of_a_mixer_may_differ_in_place_and_speed(docs, tmp_path):
    other = ['data.eval_batch_size=10', 'run.cpu_threads=2', 'run.overwrite=true', 'run.device=cpu']
    runs = [make_run(tmp_path / 'a', 'local', 25.0, 25.0), make_run(tmp_path / 'b', 'local', 25.0, 26.0, *other)]
    assert len(recall.main([*runs, *ORIGIN, '--docs', str(docs)])) == 1
    assert '26.0, 1.50 bits' in (docs / 'recall.md').read_text()


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ('', r'a run of train\.recall, got no sections in .*config\.yaml'),
        ('data: [', 'got no sections in'),
        ('data: 4', 'got no sections in'),
        ('data: {pairs: 4}', r'config\.yaml without model\.name'),
        ('model: {name: aft_local_char}', r'without model\.dim'),
    ],
)
def test_a_damaged_config_is_refused(docs, tmp_path, config, message):
    run = make_run(tmp_path / 'a', 'local', 25.0, 25.0)
    (tmp_path / 'a' / 'config.yaml').write_text(config)
    with pytest.raises(ValueError, match=message):
        recall.main([run, *ORIGIN, '--docs', str(docs)])
    assert (docs / 'recall.md').read_text() == PAGE


def test_the_config_of_a_run_is_kept_without_its_folder(docs, tmp_path):
    run = make_run(tmp_path / 'a', 'local', 25.0, 25.0, 'optim.weight_decay=0.2', f'run.dir={tmp_path / "a"}')
    recall.main([run, *ORIGIN, '--docs', str(docs)])
    (kept,) = (docs / 'data' / 'recall').glob('*.yaml')
    before, after = (load_config(path, [], RecallConfig) for path in (Path(run) / 'config.yaml', kept))
    assert after == dataclasses.replace(before, run=dataclasses.replace(before.run, dir=None))


def test_a_run_without_a_limit_of_updates_is_refused(docs, tmp_path):
    run = make_run(tmp_path / 'a', 'full', 25.0, 25.0, 'schedule.max_updates=null')
    with pytest.raises(ValueError, match=r'train\.recall, got .*config\.yaml without schedule\.max_updates'):
        recall.main([run, *ORIGIN, '--docs', str(docs)])
    assert (docs / 'recall.md').read_text() == PAGE


def test_an_unknown_mixer_is_refused_in_a_run_and_in_what_is_kept(docs, tmp_path):
    run, kept = make_run(tmp_path / 'a', 'local', 25.0, 25.0), docs / 'data' / 'recall' / 'runs.csv'
    recall.main([run, *ORIGIN, '--docs', str(docs)])
    kept.write_text(kept.read_text().replace('local', 'axial'))
    with pytest.raises(ValueError, match=r'one of attention, full, local, simple, got axial in .*runs\.csv'):
        recall.main(['--docs', str(docs)])
    kept.write_text('mixer,dim\nlocal,64\n')
    with pytest.raises(ValueError, match=r'expected the columns mixer, dim, pairs, .*, got mixer, dim; restore'):
        recall.main(['--docs', str(docs)])
    kept.unlink()
    config = tmp_path / 'a' / 'config.yaml'
    config.write_text(config.read_text().replace('aft_local_char', 'linear_char'))
    with pytest.raises(ValueError, match=r'got linear_char in .*config\.yaml'):
        recall.main([run, *ORIGIN, '--docs', str(docs)])


def test_the_page_has_the_table_of_the_kept_runs():
    results = ROOT / 'docs' / 'results'
    rows = recall.read_rows(results / 'data' / 'recall' / 'runs.csv')
    assert recall.format_runs(rows) in (results / 'recall.md').read_text()
