"""Training of recommenders: what is learned, measured, written, resumed and refused."""

import re
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from text_files import read_predictions, write_mind, write_mind_behaviors, write_movielens
from text_runs import arguments as smoke_arguments
from text_runs import assert_goes_on_to_the_same_weights
from transformers import BertConfig, BertModel, XLNetConfig, XLNetModel

from aft_vision.fastformer import FastformerForNewsRecommendation
from aft_vision.fastformer.metrics import ranking_metrics
from aft_vision.fastformer.tokenize import train_tokenizer
from train.fastformer import __main__ as fastformer
from train.fastformer.recommendation import ClickOrder, RecommendationRun, RecommendationTrainer
from train.fastformer.tasks import load_text_config

SMOKE = Path(__file__).parents[2] / 'configs' / 'smoke' / 'recommendation.yaml'
METRICS = ('auc', 'mrr', 'ndcg5', 'ndcg10')
# Enough for the topics to be learned: 200 impressions, three passes.
LEARNING = ('model.hidden_size=32', 'model.hidden_dropout_prob=0', 'optim.lr=1e-2', 'schedule.epochs=3')


@pytest.fixture(scope='module')
def mind(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('mind')
    write_mind(folder)
    return write_mind_behaviors(folder, rows=250)


arguments = partial(smoke_arguments, 'recommendation')


def make_run(mind: Path, folder: Path, *overrides: str) -> RecommendationRun:
    return RecommendationRun.read(load_text_config(SMOKE, [f'data.path={mind}', *overrides]), folder)


@pytest.fixture(scope='module')
def trained(mind, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp('run')
    return folder, fastformer.main(arguments(mind, folder, *LEARNING))


def test_a_recommender_learns_what_its_users_like(trained):
    _, summary = trained
    assert summary['test_auc']['mean'] > 0.8
    for result in summary['runs']:
        assert result['impressions'] == {'train': 200, 'validation': 25, 'test': 25}
        assert all(f'{part}_{name}' in result for part in ('test', 'validation') for name in METRICS)
        best = max(result['epochs'], key=lambda epoch: epoch['auc'])
        assert result['best_epoch'] == best['epoch']


def test_the_ranks_of_the_best_model_are_written(trained, mind):
    folder, summary = trained
    behaviors = make_run(mind, folder).splits['test']
    for seed, result in enumerate(summary['runs']):
        ids, scores, _ = read_predictions(folder / f'seed_{seed}' / 'prediction_test.zip')
        assert ids == behaviors.impression_ids
        again = ranking_metrics(scores, behaviors.labels, behaviors.candidates.sizes)
        # All but AUC depend on the ranks alone.
        assert all(again[name] == pytest.approx(result[f'test_{name}']) for name in METRICS[1:])


def test_an_ensemble_ranks_by_the_mean_scores(trained, mind, capsys):
    folder, summary = trained
    more = [*LEARNING, 'data.ensemble=true', 'data.eval_split=validation']
    fastformer.main(['--eval', *arguments(mind, folder, *more)])
    printed = capsys.readouterr().out.splitlines()
    for seed, result in enumerate(summary['runs']):
        assert f'seed_{seed}/best, validation: auc {100 * result["validation_auc"]:.2f} %' in printed[seed]
    run = make_run(mind, folder, *more)
    sources = [folder / f'seed_{seed}' / 'best' for seed in (0, 1)]
    scores = [run.load_trainer(source).scores(run.splits['validation']) for source in sources]
    behaviors = run.splits['validation']
    expected = ranking_metrics((scores[0] + scores[1]) / 2, behaviors.labels, behaviors.candidates.sizes)
    assert printed[2].startswith(f'ensemble of 2, validation: auc {100 * expected["auc"]:.2f} %, mrr')
    assert len(read_predictions(folder / 'prediction_validation.zip')[0]) == 25


def test_processes_share_the_impressions(trained, mind):
    folder, _ = trained
    run = make_run(mind, folder)
    whole = run.load_trainer(folder / 'seed_0' / 'best')
    behaviors = run.splits['test']
    parts = []
    for index in range(3):
        # One of three processes; what it adds to the others' is taken down instead.
        accelerator = SimpleNamespace(
            unwrap_model=lambda model, **_: model, reduce=lambda part, _: part, autocast=nullcontext
        )
        args = SimpleNamespace(process_index=index, world_size=3, per_device_eval_batch_size=16, device='cpu')
        process = SimpleNamespace(
            args=args, accelerator=accelerator, model=whole.model, data_collator=whole.data_collator
        )
        parts.append(RecommendationTrainer.scores(process, behaviors))
    assert all((np.stack(parts) != 0).sum(0) <= 1)
    np.testing.assert_allclose(sum(parts), whole.scores(behaviors), rtol=1e-5)


def test_an_interrupted_run_goes_on_to_the_same_weights(mind, tmp_path, monkeypatch):
    folders = tmp_path / 'whole', tmp_path / 'cut'
    common = ['run.seeds=[1]', 'schedule.max_updates=7', 'run.save_updates=5', 'run.keep=2', 'data.max_impressions=64']
    whole, cut = (arguments(mind, folder, *common) for folder in folders)
    fastformer.main(whole)
    assert_goes_on_to_the_same_weights(monkeypatch, 6, cut, folders[1], folders[0])


def test_the_order_of_clicks_depends_on_the_seed_and_the_epoch_alone():
    order = ClickOrder(50, seed=3)
    first = list(order)
    order.set_epoch(2)
    third, again = list(order), ClickOrder(50, seed=3)
    again.set_epoch(2)
    assert list(again) == third
    # The numbers of the third epoch are behind those of two others.
    assert sorted(third) == list(range(100, 150))
    assert sorted(first) == list(range(50))
    assert [number % 50 for number in third] != first
    # Nor are those of the next seed the same an epoch earlier.
    earlier = ClickOrder(50, seed=4)
    earlier.set_epoch(1)
    assert [number - 50 for number in earlier] != [number - 100 for number in third]
    assert list(ClickOrder(50, seed=4)) != first


@pytest.mark.parametrize(('amp', 'expected'), [('none', False), ('bfloat16', True)])
def test_evaluation_has_the_number_format_of_training(mind, tmp_path, monkeypatch, amp, expected):
    run = make_run(mind, tmp_path, f'run.amp={amp}', 'run.device=cpu')
    tokenizer = run.make_tokenizer()
    model = run.new_model(tokenizer)
    found, encode = [], model.encode_news
    monkeypatch.setattr(
        model, 'encode_news', lambda **texts: found.append(torch.is_autocast_enabled('cpu')) or encode(**texts)
    )
    scores = run.make_trainer(model, tokenizer, run.arguments(tmp_path, 0)).scores(run.splits['test'])
    assert set(found) == {expected}
    assert scores.dtype == np.float32


def test_the_ranks_of_a_model_from_elsewhere_are_written_to_the_folder_of_the_run(trained, mind, tmp_path):
    best = shutil.copytree(trained[0] / 'seed_0' / 'best', tmp_path / 'models' / 'a')
    fastformer.main(['--eval', *arguments(mind, tmp_path / 'run', f'run.init_from={best}', 'model.hidden_size=32')])
    assert not (tmp_path / 'models' / 'prediction_test.zip').exists()
    assert len(read_predictions(tmp_path / 'run' / 'prediction_test.zip')[0]) == 25


def test_impressions_without_labels_are_ranked_but_not_measured(mind, tmp_path, capsys):
    test = write_mind_behaviors(tmp_path / 'test', rows=9, labelled=False)
    write_mind(test)
    more = ['run.seeds=[0]', 'schedule.max_updates=2', f'data.test_path={test}', 'data.valid_share=0.2']
    summary = fastformer.main(arguments(mind, tmp_path / 'run', *more))
    assert 'test_auc' not in summary
    assert summary['runs'][0]['impressions'] == {'train': 200, 'validation': 50, 'test': 9}
    assert len(read_predictions(tmp_path / 'run' / 'seed_0' / 'prediction_test.zip')[0]) == 9
    capsys.readouterr()
    fastformer.main(['--eval', *arguments(mind, tmp_path / 'run', *more)])
    assert 'ranked, without labels to measure' in capsys.readouterr().out


@pytest.mark.parametrize(('part', 'labels'), [('valid', None), ('valid', '0'), ('test', '1'), ('train', None)])
def test_a_part_that_cannot_be_measured_is_an_error_before_the_run_begins(mind, tmp_path, part, labels):
    other = write_mind_behaviors(tmp_path / 'other', rows=40, labelled=labels is not None)
    write_mind(other)
    rows = other / 'behaviors.tsv'
    rows.write_text(re.sub(r'(N\d+)-[01]', rf'\1-{labels}', rows.read_text()))
    more = [f'data.{"path" if part == "train" else part + "_path"}={other}']
    name = {'valid': 'validation'}.get(part, part)
    with pytest.raises(ValueError, match=f"the split '{name}': expected (impressions with labels|an impression with)"):
        fastformer.main(arguments(mind, tmp_path / 'run', *more))
    assert not (tmp_path / 'run').exists()


def test_the_model_remembers_the_columns_of_its_texts(mind, tmp_path):
    run = make_run(mind, tmp_path, 'data.text_columns=[title,category]')
    model = run.make_model(run.tokenizer, seed=0)
    assert model.config.text_columns == ['title', 'category']
    model.save_pretrained(tmp_path / 'saved')
    run.tokenizer.save_pretrained(tmp_path / 'saved')
    again = make_run(mind, tmp_path, f'run.init_from={tmp_path / "saved"}')
    assert again.make_model(run.tokenizer, seed=0).config.text_columns == ['title']


def test_a_language_model_without_a_limit_of_positions_takes_texts_of_any_length(mind, tmp_path):
    tokenizer = train_tokenizer(make_run(mind, tmp_path).texts())
    config = XLNetConfig(vocab_size=len(tokenizer), d_model=8, n_layer=1, n_head=2, d_inner=8)
    XLNetModel(config).save_pretrained(tmp_path / 'xlnet')
    tokenizer.save_pretrained(tmp_path / 'xlnet')
    run = make_run(mind, tmp_path, f'model.text_model={tmp_path / "xlnet"}', 'data.max_length=9999')
    assert run.new_model(run.make_tokenizer()).text_encoder.model.config.d_model == 8


def test_films_are_recommended_too(tmp_path):
    films = write_movielens(tmp_path / 'films')
    more = ['data.kind=movielens', 'data.shown=9', 'data.max_impressions=20', 'run.seeds=[0]', 'schedule.epochs=1']
    summary = fastformer.main(arguments(films, tmp_path / 'run', *more))
    assert summary['runs'][0]['impressions'] == {'train': 20, 'validation': 12, 'test': 12}
    assert 0 <= summary['test_mrr']['mean'] <= 1


def test_a_language_model_is_fine_tuned_with_its_own_tokenizer(mind, tmp_path):
    source, run = tmp_path / 'bert', make_run(mind, tmp_path)
    tokenizer = train_tokenizer(run.texts())
    small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    torch.manual_seed(5)
    # More rows than words, as published models have them.
    BertModel(BertConfig(vocab_size=len(tokenizer) + 3, **small)).save_pretrained(source)
    tokenizer.save_pretrained(source)
    run = make_run(mind, tmp_path, f'model.text_model={source}')
    assert run.arguments(tmp_path, 0).ddp_find_unused_parameters
    used = run.make_tokenizer()
    assert (used.get_vocab(), used.model_max_length) == (tokenizer.get_vocab(), 12)
    expected = load_file(source / 'model.safetensors')
    found = run.make_model(used, seed=0).text_encoder.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    more = [f'model.text_model={source}', 'schedule.max_updates=1', 'run.seeds=[0]']
    fastformer.main(arguments(mind, tmp_path / 'run', *more))
    best = FastformerForNewsRecommendation.from_pretrained(tmp_path / 'run' / 'seed_0' / 'best')
    assert best.config.text_config.hidden_size == 8
    assert best.config.vocab_size == len(best.get_input_embeddings().weight) == len(tokenizer) + 3
    with pytest.raises(ValueError, match=r'expected data\.max_length of at most 512, as .*bert takes, got 513'):
        make_run(mind, tmp_path, f'model.text_model={source}', 'data.max_length=513').new_model(used)
    # Training goes on from there, and the language model that it began with may stay in the experiment.
    again = make_run(mind, tmp_path, f'model.text_model={source}', f'run.init_from={tmp_path}/run/seed_0/best')
    weights = again.make_model(again.make_tokenizer(), seed=0).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in best.state_dict().items())


def test_the_vocabulary_is_that_of_the_training_impressions(mind, tmp_path):
    run = make_run(mind, tmp_path, 'data.max_impressions=1')
    train = run.splits['train']
    named = np.unique(np.concatenate([train.histories.values, train.candidates.values]))
    assert run.texts() == [run.news.texts[row] for row in named]
    assert len(run.texts()) < len(run.news)


def test_a_model_of_another_kind_or_history_is_an_error(trained, mind, tmp_path):
    folder, _ = trained
    with pytest.raises(ValueError, match=r'expected a model of 5 clicks \(data.max_behaviors\), got .* with 6'):
        make_run(mind, tmp_path, 'data.max_behaviors=5').load_model(folder / 'seed_0' / 'best')
    BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match=r'expected a recommender, got .* with a BertModel'):
        make_run(mind, tmp_path).load_model(tmp_path)


def test_a_model_without_the_language_model_that_is_stated_is_an_error(trained, mind, tmp_path):
    best = trained[0] / 'seed_0' / 'best'
    run = make_run(mind, tmp_path, *LEARNING, f'run.init_from={best}', 'model.text_model=bert')
    with pytest.raises(ValueError, match=r"expected a language model for the texts in run\.init_from .*, got 'bert'"):
        run.make_model(run.make_tokenizer(), 0)


def test_parts_of_their_own_are_used_whole(mind, tmp_path):
    other = write_mind_behaviors(tmp_path / 'dev', rows=7, seed=3)
    write_mind(other, rows=66)
    run = make_run(mind, tmp_path, f'data.valid_path={other}', f'data.test_path={other}')
    assert run.counts() == {'train': 250, 'validation': 7, 'test': 7}
    assert len(run.news) == 66
