"""Ranking news for a person from the command line."""

import shutil
from pathlib import Path

import pytest
import torch
from text_files import write_mind, write_movielens

from aft_vision.fastformer import (
    FastformerConfig,
    FastformerForNewsRecommendation,
    FastformerForSequenceClassification,
    FastformerNewsConfig,
)
from aft_vision.fastformer.data.mind import read_mind_news
from aft_vision.fastformer.ranking import NewsRanker
from aft_vision.fastformer.tokenize import train_tokenizer
from tools import rank_news


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('model')
    texts = read_mind_news(write_mind(folder, rows=30)).texts
    tokenizer = train_tokenizer(texts, max_length=12)
    torch.manual_seed(0)
    small = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, max_behaviors=3, initializer_range=0.3)
    config = FastformerNewsConfig(vocab_size=len(tokenizer), max_position_embeddings=12, **small)
    FastformerForNewsRecommendation(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments(saved: Path, *more: str) -> list[str]:
    return ['--model', str(saved), '--news', str(saved), '--device', 'cpu', *more]


def test_all_other_news_are_ranked_by_their_scores(saved, capsys):
    best = rank_news.main(arguments(saved, '--history', 'N3', 'N9', '--top', '5'))
    news = read_mind_news(saved)
    ranker = NewsRanker.load(saved)
    others = [name for name in news.ids if name not in ('N3', 'N9')]
    scores = ranker.score([news.texts[2], news.texts[8]], [news.texts[news.rows[name]] for name in others])
    expected = sorted(zip(-scores, range(len(others)), strict=True))[:5]
    assert [name for _, name in best] == [others[i] for _, i in expected]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ['N3', 'N9', *(name for _, name in best)]
    assert lines[2].endswith(news.texts[news.rows[best[0][1]]])


def test_the_order_of_the_history_and_its_last_clicks_count(saved):
    ranker, texts = NewsRanker.load(saved), read_mind_news(saved).texts
    whole, last, other = (ranker.score(texts[a:b], texts[10:]) for a, b in ((0, 6), (3, 6), (0, 3)))
    assert whole.tolist() == last.tolist()
    assert abs(whole - other).max() > 1e-4


def test_a_tokenizer_without_a_limit_cuts_off_what_the_model_cannot_take(saved, monkeypatch, capfd):
    ranker, texts = NewsRanker.load(saved), read_mind_news(saved).texts
    capfd.readouterr()
    long = [' '.join(texts[:4]), *texts[10:]]
    expected = ranker.score(texts[:2], long)
    monkeypatch.setattr(ranker.tokenizer, 'model_max_length', int(1e30))
    assert ranker.max_length == 12
    assert ranker.score(texts[:2], long).tolist() == expected.tolist()
    monkeypatch.setattr(ranker.model.config, 'text_config', ranker.model.config)
    assert ranker.max_length is None
    assert ranker.score(texts[:2], texts[2:4]).shape == (2,)
    assert ranker.score([], []).shape == (0,)
    # No progress bar for the texts of one user.
    assert capfd.readouterr().err == ''


def test_candidates_alone_are_ranked(saved):
    best = rank_news.main(arguments(saved, '--history', 'N3', '--candidates', 'N5', 'N6'))
    assert sorted(name for _, name in best) == ['N5', 'N6']


def test_without_a_history_all_scores_are_the_same(saved, capsys):
    assert {score for score, _ in rank_news.main(arguments(saved))} == {0.0}
    assert 'nothing was clicked' in capsys.readouterr().out


def test_films_are_ranked_too(saved, tmp_path):
    command = ['--model', str(saved), '--news', str(write_movielens(tmp_path)), '--history', '3', '--top', '4']
    assert len(rank_news.main([*command, '--device', 'cpu'])) == 4


def test_the_columns_are_those_of_training(saved, tmp_path, capsys):
    model = shutil.copytree(saved, tmp_path / 'model')
    config = FastformerNewsConfig.from_pretrained(model)
    assert config.text_columns == ['title']
    config.text_columns = ['category', 'title']
    config.save_pretrained(model)
    news = read_mind_news(saved, ['category', 'title'])
    rank_news.main(arguments(model, '--news', str(saved), '--history', 'N3'))
    assert capsys.readouterr().out.splitlines()[0].endswith(news.texts[news.rows['N3']])


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--history', 'N3', 'N99'], 'expected names of the 30 news in .*, got N99'),
        (['--candidates', 'N98'], 'got N98'),
    ],
)
def test_a_wrong_argument_is_named(saved, more, message):
    with pytest.raises(ValueError, match=message):
        rank_news.main(arguments(saved, *more))


def test_what_is_no_recommender_is_named(saved, tmp_path):
    with pytest.raises(ValueError, match='expected a folder with a saved model, got'):
        rank_news.main(['--model', str(tmp_path), '--news', str(saved)])


def test_a_model_of_another_task_is_refused_before_anything_is_printed(saved, tmp_path, capfd):
    config = FastformerConfig(vocab_size=9, hidden_size=4, num_attention_heads=2)
    FastformerForSequenceClassification(config).save_pretrained(tmp_path)
    capfd.readouterr()
    with pytest.raises(ValueError, match=r'expected a recommender, got .* with a FastformerForSequenceClassification'):
        rank_news.main(['--model', str(tmp_path), '--news', str(saved)])
    assert capfd.readouterr() == ('', '')
