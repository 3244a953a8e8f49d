"""Training of the predictor of conversions: learning, the best epoch, resuming, what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
from text_files import write_behaviors, write_mind, write_mind_behaviors, write_movielens
from text_runs import arguments as smoke_arguments
from text_runs import assert_goes_on_to_the_same_weights
from transformers import AutoModel

from aft_vision.fastformer import FastformerForConversion
from aft_vision.fastformer.data.behaviors import BehaviorTable
from train.fastformer.__main__ import main
from train.fastformer.conversion import ConversionRun, read_splits
from train.fastformer.tasks import load_text_config

SMOKE = Path(__file__).parents[2] / 'configs' / 'smoke' / 'conversion.yaml'


@pytest.fixture(scope='module')
def requests(tmp_path_factory) -> Path:
    return write_behaviors(tmp_path_factory.mktemp('requests') / 'b.jsonl', rows=200)


arguments = partial(smoke_arguments, 'conversion')
SHORT = ('schedule.max_updates=15', 'run.keep=2')


@pytest.fixture(scope='module')
def trained(requests, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp('run')
    return folder, main(arguments(requests, folder, *SHORT))


def test_a_run_leaves_the_epoch_with_the_best_auc(trained):
    folder, summary = trained
    written = json.loads((folder / 'result.json').read_text())
    assert written == {**summary, 'model': written['model']}
    for result in written['runs']:
        assert result['requests'] == {'train': 160, 'validation': 20, 'test': 20}
        assert 0 < result['positive']['test'] < 1
        best = max(result['epochs'], key=lambda epoch: epoch['auc'])
        assert (result['best_epoch'], result['validation_log_loss']) == (best['epoch'], best['log_loss'])
        assert all(epoch['log_loss'] == pytest.approx(epoch['loss'], abs=1e-5) for epoch in result['epochs'])


def test_a_saved_model_tests_as_it_did(trained, requests, capsys):
    folder, summary = trained
    main(['--eval', *arguments(requests, folder)])
    printed = capsys.readouterr().out.splitlines()
    for seed, result in enumerate(summary['runs']):
        auc, loss = (result[f'test_{name}'] for name in ('auc', 'log_loss'))
        assert f'seed_{seed}/best, test: auc {100 * auc:.2f} %, log_loss {loss:.4f} nats' in printed[seed]
    model = AutoModel.from_pretrained(folder / 'seed_0' / 'best')
    assert isinstance(model, FastformerForConversion)
    assert sorted(model.config.behavior_types) == ['ad', 'page', 'search']


def test_an_interrupted_run_goes_on_to_the_same_weights(trained, requests, tmp_path, monkeypatch):
    common = arguments(requests, tmp_path, *SHORT, 'run.save_updates=4', 'run.seeds=[1]')
    assert_goes_on_to_the_same_weights(monkeypatch, 13, common, tmp_path, trained[0])


def test_it_learns_that_users_act_on_ads_of_what_they_did(tmp_path):
    requests = write_behaviors(tmp_path / 'b.jsonl', rows=1000, most=4, topics=4)
    more = ['run.seeds=[0]', 'data.batch_size=32', 'schedule.epochs=8', 'optim.lr=1e-3', 'model.hidden_dropout_prob=0']
    more += ['model.hidden_size=64', 'model.num_attention_heads=4']
    # Of 12 starts, the slowest has 0.91 after six epochs, and 0.95 after all.
    assert main(arguments(requests, tmp_path / 'run', *more))['test_auc']['mean'] > 0.9


def make_run(kind: str, path: Path, *overrides: str) -> ConversionRun:
    config = load_text_config(SMOKE, [f'data.kind={kind}', f'data.path={path}', *overrides])
    return ConversionRun.read(config, path)


def test_each_kind_of_data_is_divided_as_it_must_be(tmp_path, requests):
    films = make_run('movielens', write_movielens(tmp_path / 'films', users=60)).splits
    assert len(films['validation']) == len(films['test']) == round(sum(map(len, films.values())) / 10)
    news = make_run('mind', write_mind_behaviors(write_mind(tmp_path / 'news'))).splits
    assert len(news['train']) > 8 * len(news['test'])
    users = [set(part['user']) for part in make_run('json', requests, 'data.division=user').splits.values()]
    assert not users[0] & users[1]
    assert not users[0] & users[2]
    last, at_random = (make_run('json', requests, *more) for more in (['data.division=last'], []))
    assert last.table.texts == at_random.table.texts
    assert last.splits['test']['ad'] != at_random.splits['test']['ad']


def test_files_of_their_own_are_whole_parts(tmp_path, requests):
    tested = write_behaviors(tmp_path / 'test.jsonl', rows=50, seed=5)
    run = make_run('json', requests, f'data.test_path={tested}', 'data.valid_share=0.25')
    assert run.counts() == {'train': 150, 'validation': 50, 'test': 50}
    run = make_run('json', requests, f'data.test_path={tested}', f'data.valid_path={tested}')
    assert run.counts() == {'train': 200, 'validation': 50, 'test': 50}
    # The vocabulary is of the training texts alone.
    assert len(run.texts()) < len(run.table.texts)


def test_a_test_file_of_one_label_is_an_error(tmp_path, requests):
    path = tmp_path / 'test.jsonl'
    path.write_text('{"label": 0, "ad": "x", "behaviors": []}\n')
    config = load_text_config(SMOKE, [f'data.path={requests}', f'data.test_path={path}'])
    with pytest.raises(ValueError, match="both labels in the split 'test', got 0 of 1"):
        read_splits(config.data, BehaviorTable())


def test_a_model_for_other_behaviours_is_an_error(trained, requests, tmp_path):
    source = trained[0] / 'seed_0' / 'best'
    run = make_run('movielens', write_movielens(tmp_path, users=60))
    with pytest.raises(ValueError, match=r'expected a model of 10 behaviours of the types rated .* with 10 of '):
        run.load_model(source)
    run = make_run('json', requests, 'data.max_behaviors=11')
    with pytest.raises(ValueError, match='expected a model of 11 behaviours'):
        run.load_model(source)
