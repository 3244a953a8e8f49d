"""Small files in the real formats for tests; the words of a text say what it is about."""

import gzip
import json
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aft_vision.fastformer.data.movielens import GENRES
from aft_vision.fastformer.data.reviews import AMAZON_RATINGS, IMDB_RATINGS

MIND_CATEGORIES = ('autos', 'finance', 'health', 'news', 'sports', 'weather')
COMMON_WORDS = ('the', 'a', 'of', 'and', 'it', 'was', 'this', 'with', 'as', 'for')
# Words of each class, by its number.
TOPIC_WORDS = tuple(tuple(f'{stem}{end}' for end in ('ton', 'ling', 'ward')) for stem in 'abcdefghij')
BEHAVIOR_TYPES = ('search', 'page', 'ad')


class TextWriter:
    """Makes texts of a class: common words, among them some that no other class has."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)

    def sentence(self, topic: int, words: int = 8) -> str:
        chosen = [*self.random.choices(COMMON_WORDS, k=words - 2), *self.random.choices(TOPIC_WORDS[topic], k=2)]
        self.random.shuffle(chosen)
        return ' '.join(chosen).capitalize() + '.'

    def text(self, topic: int, longest: int = 4) -> str:
        return ' '.join(self.sentence(topic) for _ in range(self.random.randint(1, longest)))


def write_amazon(path: str | Path, rows: int = 50, seed: int = 0, year: int = 2014) -> Path:
    """Write reviews as in reviews_Electronics_5.json.gz (2014) or Electronics.jsonl (2023), ratings in turn."""
    writer = TextWriter(seed)
    lines = []
    for number in range(rows):
        rating = number % len(AMAZON_RATINGS)
        text, title = writer.text(rating), writer.sentence(rating, 3)
        if year == 2014:
            review = dict(
                reviewerID=f'A{number:013}', asin=f'B{number:09}', reviewerName='J. "Jo" Doe', helpful=[0, 1]
            ) | dict(reviewText=text, overall=rating + 1.0, summary=title)
            review |= dict(unixReviewTime=1370131200, reviewTime='06 2, 2013')
        else:
            review = dict(rating=rating + 1.0, title=title, text=text, images=[], asin=f'B{number:09}')
            review |= dict(parent_asin=f'B{number:09}', user_id=f'U{number}', timestamp=1588687728923)
            review |= dict(helpful_vote=0, verified_purchase=True)
        lines.append(json.dumps(review) + '\n')
    return _write(path, ''.join(lines))


def write_jmars(path: str | Path, rows: int = 50, seed: int = 0) -> Path:
    """Write reviews as in data.json of JMARS, one JSON list, ratings 1 to 10 in turn."""
    writer = TextWriter(seed)
    reviews = []
    for number in range(rows):
        topic = number % len(IMDB_RATINGS)
        review = dict(rating=topic + 1, title=writer.sentence(topic, 3), movie=f'Movie {number % 7}')
        reviews.append(review | dict(review=writer.text(topic), user=f'ur{number:07}'))
    return _write(path, json.dumps(reviews, indent=1))


def write_mind(folder: str | Path, rows: int = 60, seed: int = 0) -> Path:
    """Write MIND's news.tsv, with bare quotes and empty abstracts, and a docs.tsv with the body of every other news."""
    writer = TextWriter(seed)
    news, docs = [], []
    for number in range(rows):
        topic = number % len(MIND_CATEGORIES)
        title = writer.sentence(topic) + (' "Live' if number % 5 == 0 else '')
        abstract = '' if number % 4 == 0 else writer.text(topic)
        entities = '[{"Label": "X", "Type": "G", "WikidataId": "Q1", "Confidence": 1.0}]'
        row = [f'N{number + 1}', MIND_CATEGORIES[topic], f'{MIND_CATEGORIES[topic]}misc', title, abstract]
        news.append('\t'.join([*row, f'https://assets.msn.com/labs/mind/{number}.html', entities, '[]']))
        if number % 2 == 0:
            docs.append('\t'.join([*row, 'Body: ' + writer.text(topic, 8)]))
    _write(Path(folder) / 'docs.tsv', '\n'.join(docs) + '\n')
    return _write(Path(folder) / 'news.tsv', '\n'.join(news) + '\n').parent


def write_mind_behaviors(
    folder: str | Path, rows: int = 80, seed: int = 0, labelled: bool = True, news: int = 60
) -> Path:
    """Write MIND's behaviors.tsv for the news of `write_mind(rows=news)`: users click what is of the topic of before.

    Every eighth user has no history. Without labels, it is as in the test split.
    """
    draw, topics = random.Random(seed), len(MIND_CATEGORIES)
    lines = []
    for number in range(rows):
        topic = draw.randrange(topics)
        liked, others = list(range(topic, news, topics)), [i for i in range(news) if i % topics != topic]
        history = [] if number % 8 == 0 else draw.choices(liked, k=draw.randint(1, 7))
        clicked = draw.sample(liked, draw.randint(1, 2))
        shown = clicked + draw.sample(others, draw.randint(2, 9))
        draw.shuffle(shown)
        candidates = [f'N{i + 1}-{int(i in clicked)}' if labelled else f'N{i + 1}' for i in shown]
        names = ' '.join(f'N{i + 1}' for i in history)
        time = f'11/{draw.randint(9, 15)}/2019 {draw.randint(1, 12)}:36:57 {draw.choice(("AM", "PM"))}'
        lines.append('\t'.join([str(number + 1), f'U{draw.randrange(99)}', time, names, ' '.join(candidates)]))
    return _write(Path(folder) / 'behaviors.tsv', '\n'.join(lines) + '\n').parent


def write_movielens(folder: str | Path, users: int = 12, films: int = 40, seed: int = 0, original: bool = True) -> Path:
    """Write MovieLens-100k's u.data and u.item, or RecBole's .inter and .item: a user watches films of one genre."""
    draw, judge = random.Random(seed), random.Random(seed + 1)
    genres = GENRES[1:5]
    ratings, items = [], []
    for number in range(films):
        genre, title = genres[number % len(genres)], f'Film {number}, Thé'
        if original:
            flags = ['1' if name == genre else '0' for name in GENRES]
            items.append(
                '|'.join([str(number + 1), f'{title} (1995)', '01-Jan-1995', '', 'http://us.imdb.com/', *flags])
            )
        else:
            items.append('\t'.join([str(number + 1), title, '1995', genre]))
    for user in range(users):
        liked = [number for number in range(films) if number % len(genres) == user % len(genres)]
        for second, film in enumerate(draw.sample(liked, draw.randint(4, 8))):
            ratings.append(
                '\t'.join([str(user + 1), str(film + 1), str(judge.randint(1, 5)), str(881250949 + second // 2)])
            )
    draw.shuffle(ratings)
    headers = {'item': 'item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq'}
    headers['inter'] = 'user_id:token\titem_id:token\trating:float\ttimestamp:float'
    for name, kind, lines in (('u.item', 'item', items), ('u.data', 'inter', ratings)):
        content = '\n'.join(lines if original else [headers[kind], *lines]) + '\n'
        path = Path(folder) / (name if original else f'ml-100k.{kind}')
        _write(path, content, 'latin-1' if original else 'utf-8')
    return Path(folder)


def write_behaviors(
    path: str | Path, rows: int = 200, seed: int = 0, most: int = 8, topics: int = len(TOPIC_WORDS)
) -> Path:
    """Write requests as JSON lines; the label is 1 where the user has done something with the topic of the ad.

    Args:
        most: Behaviours of a request, of which some have none.
        topics: Topics of all requests, of which each has at most three.
    """
    writer, draw = TextWriter(seed), random.Random(seed + 1)
    lines = []
    for number in range(rows):
        chosen = draw.sample(range(topics), 3)
        done = draw.choices(chosen[:2], k=draw.randint(0, most))
        ad = draw.choice(done) if done and number % 2 else chosen[2]
        behaviors = [{'type': draw.choice(BEHAVIOR_TYPES), 'text': writer.sentence(topic, 4)} for topic in done]
        request = {'label': int(ad in done), 'ad': writer.sentence(ad, 4), 'behaviors': behaviors}
        lines.append(json.dumps({**request, 'user': f'U{number // 2}'}) + '\n')
    return _write(path, ''.join(lines))


def write_glove(path: str | Path, words: Sequence[str], dim: int = 50, seed: int = 0) -> Path:
    """Write a GloVe text file with random vectors of the words."""
    vectors = np.random.default_rng(seed).normal(0, 0.4, (len(words), dim))
    lines = (' '.join([word, *(f'{x:.5f}' for x in vector)]) for word, vector in zip(words, vectors, strict=True))
    return _write(path, '\n'.join(lines) + '\n')


def read_predictions(path: str | Path) -> tuple[list[str], np.ndarray, list[int]]:
    """Impressions, 1 / rank of all candidates, and how many each has, read as the scorer of MIND's leaderboard does."""
    path = Path(path)
    text = zipfile.ZipFile(path).read('prediction.txt').decode() if path.suffix == '.zip' else path.read_text()
    lines = [line.split() for line in text.splitlines()]
    ranks = [json.loads(ranks) for _, ranks in lines]
    assert all(sorted(row) == list(range(1, len(row) + 1)) for row in ranks)
    return [name for name, _ in lines], 1 / np.concatenate(ranks), [len(row) for row in ranks]


def _write(path: str | Path, content: str, encoding: str = 'utf-8') -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    return path
