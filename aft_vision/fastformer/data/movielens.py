"""MovieLens-100k as impressions: the next film of a user, given the films before it.

A film is a news item whose text is title, year and genres. A rated film counts as watched, whatever the rating.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aft_vision.fastformer.data.files import Record, read_delimited
from aft_vision.fastformer.data.impressions import Behaviors, Ragged
from aft_vision.fastformer.data.mind import News

GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    'Mystery Romance Sci-Fi Thriller War Western'
).split()
RATING_COLUMNS = ('user_id', 'item_id', 'rating', 'timestamp')
ITEM_COLUMNS = ('item_id', 'title', 'release_date', 'video_release_date', 'url', *GENRES)
# Columns of RecBole's films that make their texts.
ATOMIC_TEXTS = ('movie_title', 'release_year', 'class')
# Splits that are read for training and for measuring.
SPLITS = ('train', 'validation', 'test')
STARS = ('1', '2', '3', '4', '5')


class Rating(NamedTuple):
    """A user's rating of a film; `film` is its row in the films, `seconds` the time since 1970."""

    user: str
    film: int
    stars: int
    seconds: float


def read_movielens(
    folder: str | Path,
    max_behaviors: int = 50,
    negatives: int = 99,
    seed: int = 0,
) -> tuple[News, dict[str, Behaviors]]:
    """Read the films, and every film watched by a user as an impression after the films before it.

    The last film of each user is for `test`, the second last for `validation`, and the others, except the first, which
    has no history, for `train`. The other candidates of an impression are films that the user had not watched by then,
    drawn without replacement; the watched film is at a random position among them.

    Args:
        folder: With `u.data` and `u.item` as GroupLens published them, or `ml-100k.inter` and `ml-100k.item`, the same
            with headers, as RecBole has them.
        max_behaviors: Number of last films of a history. Films of the same second keep their order in the file.
        negatives: Candidates besides the watched film, or fewer if a user has watched nearly everything.
        seed: Seed of the draws.

    Raises:
        ValueError: a file is damaged or of another layout, or a film is unknown; names line and column.
    """
    news = read_films(folder)
    ratings = load_ratings(folder, news)
    # Users stay in the order of the file, as do the films of one second by a stable sort.
    watched: dict[str, list[int]] = {rating.user: [] for rating in ratings}
    for user, film, _, _ in sorted(ratings, key=itemgetter(3)):
        watched[user].append(film)
    return news, _make_impressions(watched, len(news), max_behaviors, negatives, np.random.default_rng(seed))


def load_ratings(folder: str | Path, films: News) -> list[Rating]:
    """Read the ratings in the order of the file.

    Args:
        folder: As `read_movielens` takes it.

    Raises:
        ValueError: there is no such file, or it is damaged, a film is unknown, the stars are not 1 to 5 or a time is no
            number; names line and column.
    """
    if _is_original(folder):
        records = read_delimited(Path(folder) / 'u.data', '\t', RATING_COLUMNS, quoted=False)
    else:
        path = Path(folder) / 'ml-100k.inter'
        records = read_delimited(path, '\t', quoted=False, needed=RATING_COLUMNS, typed=True)
    return [_as_rating(record, films.rows) for record in records]


def _as_rating(record: Record, rows: Mapping[str, int]) -> Rating:
    user, item, stars, time = (record.values[column] for column in RATING_COLUMNS)
    if item not in rows:
        raise ValueError(f"{record.location}, column 'item_id': expected one of {len(rows)} films, got {item!r}")
    if stars not in STARS:
        raise ValueError(f"{record.location}, column 'rating': expected {', '.join(STARS)}, got {stars!r}")
    try:
        seconds = float(time)
        if not math.isfinite(seconds):
            raise ValueError(f'got {seconds}')
    except ValueError as error:
        raise ValueError(f"{record.location}, column 'timestamp': expected seconds: {error}") from error
    return Rating(user, rows[item], int(stars), seconds)


def read_films(folder: str | Path) -> News:
    """Read only the films, with title, year and genres as their texts.

    Raises:
        ValueError: as `read_movielens`.
    """
    if _is_original(folder):
        records = read_delimited(Path(folder) / 'u.item', '|', ITEM_COLUMNS, quoted=False, encoding='latin-1')
        text = _published_text
    else:
        needed = ('item_id', *ATOMIC_TEXTS)
        records = read_delimited(Path(folder) / 'ml-100k.item', '\t', quoted=False, needed=needed, typed=True)
        text = _atomic_text
    films = {record.values['item_id']: text(record) for record in records}
    return News(list(films), list(films.values()))


def _is_original(folder: str | Path) -> bool:
    for name in ('u.item', 'ml-100k.item'):
        if (Path(folder) / name).is_file():
            return name == 'u.item'
    raise ValueError(f'expected u.data and u.item, or ml-100k.inter and ml-100k.item, in {folder}, got neither')


def _published_text(record: Record) -> str:
    values = record.values
    return ' '.join([values['title'], *(genre for genre in GENRES if values[genre] == '1')])


def _atomic_text(record: Record) -> str:
    return ' '.join(filter(None, (record.values[column] for column in ATOMIC_TEXTS)))


def _make_impressions(
    watched: dict[str, list[int]], films: int, max_behaviors: int, negatives: int, draw: np.random.Generator
) -> dict[str, Behaviors]:
    splits: dict[str, list[tuple[str, Sequence[int], np.ndarray, int]]] = {split: [] for split in SPLITS}
    for user, order in watched.items():
        unseen = np.ones(films, dtype=bool)
        unseen[order[:1]] = False
        for step in range(1, len(order)):
            # Films watched later may be shown: leaving them out would reveal the tested films.
            unseen[order[step]] = False
            others = np.flatnonzero(unseen)
            left = len(order) - 1 - step
            split = SPLITS[2 - left] if left < 2 else 'train'
            shown = draw.choice(others, min(negatives, len(others)), replace=False)
            at = int(draw.integers(len(shown) + 1))
            candidates = np.insert(shown, at, order[step])
            splits[split].append((f'{user}-{step}', order[max(0, step - max_behaviors) : step], candidates, at))
    return {split: _as_impressions(rows) for split, rows in splits.items()}


def _as_impressions(rows: Sequence[tuple[str, Sequence[int], np.ndarray, int]]) -> Behaviors:
    candidates = Ragged.from_rows([shown for _, _, shown, _ in rows])
    labels = np.zeros(len(candidates.values), dtype=np.int8)
    labels[candidates.starts[:-1] + np.array([at for _, _, _, at in rows], dtype=np.int64)] = 1
    return Behaviors([name for name, _, _, _ in rows], Ragged.from_rows([h for _, h, _, _ in rows]), candidates, labels)
