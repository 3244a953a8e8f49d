"""Public data sets in which users act upon items, as requests: MovieLens-100k and MIND."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from datasets import Dataset

from aft_vision.fastformer.data.behaviors import Behavior, BehaviorTable, Request
from aft_vision.fastformer.data.impressions import Behaviors
from aft_vision.fastformer.data.mind import News, read_mind_behaviors, read_mind_news
from aft_vision.fastformer.data.movielens import Rating, load_ratings, read_films

MIN_LIKED_STARS = 4


def read_ratings(folder: str | Path, table: BehaviorTable, max_behaviors: int | None = 50) -> Dataset:
    """Read MovieLens-100k: each rating asks whether the user likes the film, given the ratings before it.

    Title, year and genres of a film are its text, 4 and 5 stars are the label 1, and a behaviour's type is `rated 1`
    to `rated 5`. Rows are in the order of time, so that the last of them make a test split. Behaviours of a row are
    the ratings of the user in earlier seconds; films rated in the same second are not behaviours of each other.

    Args:
        folder: As `movielens.read_movielens` takes it.
        table: Table to which texts and types are added.
        max_behaviors: Number of last behaviours to keep per request; None for all.

    Raises:
        ValueError: there are no such files, or one is damaged or of another layout; names line and column.
    """
    films = read_films(folder)
    # A stable order: rows of one second stay as in the file.
    ratings = sorted(load_ratings(folder, films), key=itemgetter(3))
    return table.collect(_requests_of_ratings(ratings, films.texts), max_behaviors)


def read_mind_clicks(
    folder: str | Path, table: BehaviorTable, max_behaviors: int | None = 50, *, drop_missing: bool = False
) -> Dataset:
    """Read MIND's impressions as requests: each candidate asks whether it is clicked, given the clicks before.

    The texts are titles, and the behaviours are only clicks, so there is one type, `click`. Rows are in the order of
    time, so that the last of them make a test split, and the samples of an impression have its number.

    Args:
        folder: With `news.tsv` and `behaviors.tsv` with labels.
        table: Table to which texts and types are added.
        max_behaviors: Number of last clicks to keep per user; None for all.
        drop_missing: Leave out clicks and candidates that are not in the news, as in an excerpt of MIND.

    Raises:
        ValueError: a file is missing, damaged or of another layout, or has no labels; names line and column.
    """
    news, limit = read_mind_news(folder), sys.maxsize if max_behaviors is None else max_behaviors
    behaviors = read_mind_behaviors(folder, news.rows, limit, drop_missing)
    if behaviors.labels is None:
        raise ValueError(f'expected candidates with labels (N1-0 N2-1) in {folder}, got none')
    return table.collect(_requests_of_impressions(behaviors, behaviors.labels, news), max_behaviors)


def _requests_of_ratings(ratings: Iterable[Rating], texts: Sequence[str]) -> Iterator[Request]:
    earlier: dict[str, list[Behavior]] = defaultdict(list)
    for _, together in groupby(ratings, key=itemgetter(3)):
        same_second = list(together)
        for user, film, stars, _ in same_second:
            yield Request(int(stars >= MIN_LIKED_STARS), texts[film], list(earlier[user]), user)
        for user, film, stars, _ in same_second:
            earlier[user].append(Behavior(f'rated {stars}', texts[film]))


def _requests_of_impressions(behaviors: Behaviors, labels: np.ndarray, news: News) -> Iterator[Request]:
    # A stable order: impressions of one second stay as in the file.
    for impression, row in enumerate(np.argsort(np.asarray(behaviors.seconds), kind='stable').tolist()):
        clicks = [Behavior('click', news.texts[number]) for number in behaviors.histories[row]]
        start, end = behaviors.candidates.starts[row : row + 2]
        user = '' if behaviors.users is None else behaviors.users[row]
        for number, label in zip(behaviors.candidates[row], labels[start:end], strict=True):
            yield Request(int(label), news.texts[number], clicks, user, impression)
