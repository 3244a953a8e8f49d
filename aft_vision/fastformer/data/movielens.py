"""MovieLens-100k as impressions: the next film of a user, given the films before it.

A film is a news item whose text is title, year and genres. A rated film counts as watched, whatever the rating.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from aft_vision.fastformer.data.files import Record, each_once, read_delimited
from aft_vision.fastformer.data.impressions import Behaviors, Ragged
from aft_vision.fastformer.data.mind import News

GENRES = (
    *('unknown', 'Action', 'Adventure', 'Animation', "Children's", 'Comedy', 'Crime', 'Documentary', 'Drama'),
    *('Fantasy', 'Film-Noir', 'Horror', 'Musical', 'Mystery', 'Romance', 'Sci-Fi', 'Thriller', 'War', 'Western'),
)
RATING_COLUMNS = ('user_id', 'item_id', 'rating', 'timestamp')
ITEM_COLUMNS = ('item_id', 'title', 'release_date', 'video_release_date', 'url', *GENRES)
# Columns of RecBole's films that make their texts.
ATOMIC_TEXTS = ('movie_title', 'release_year', 'class')
# Splits that are read for training and for measuring.
SPLITS = ('train', 'validation', 'test')


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
    watched = _read_watched(open_ratings(folder), news.rows)
    return news, _make_impressions(watched, len(news), max_behaviors, negatives, np.random.default_rng(seed))


def open_ratings(folder: str | Path) -> Iterator[Record]:
    """Stream the ratings, with the columns RATING_COLUMNS at least.

    Args:
        folder: As `read_movielens` takes it.

    Raises:
        ValueError: there is no such file, or it is damaged; names line and column.
    """
    if _is_original(folder):
        return read_delimited(Path(folder) / 'u.data', '\t', RATING_COLUMNS, quoted=False)
    return read_delimited(Path(folder) / 'ml-100k.inter', '\t', quoted=False, needed=RATING_COLUMNS, typed=True)


def read_rating(record: Record, rows: Mapping[str, int]) -> tuple[str, int, float]:
    """Return the user, the row of the film and the seconds of a record of `open_ratings`.

    Args:
        rows: `News.rows` of the films.

    Raises:
        ValueError: a film is unknown or a time no number; names line and column.
    """
    user, item = record.values['user_id'], record.values['item_id']
    if item not in rows:
        raise ValueError(f"{record.place}, column 'item_id': expected one of {len(rows)} films, got {item!r}")
    try:
        seconds = float(record.values['timestamp'])
        if not math.isfinite(seconds):
            raise ValueError(f'got {seconds}')
    except ValueError as error:
        raise ValueError(f"{record.place}, column 'timestamp': expected seconds: {error}") from error
    return user, rows[item], seconds


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
    found = {record.values['item_id']: text(record) for record in each_once(records, 'item_id')}
    return News(list(found), list(found.values()))


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


def _read_watched(records: Iterator[Record], rows: dict[str, int]) -> dict[str, list[int]]:
    """Return the films of each user in the order of time."""
    watched: dict[str, list[tuple[float, int]]] = {}
    for record in records:
        user, film, time = read_rating(record, rows)
        watched.setdefault(user, []).append((time, film))
    return {user: [film for _, film in sorted(films, key=lambda pair: pair[0])] for user, films in watched.items()}


def _make_impressions(
    watched: dict[str, list[int]], films: int, max_behaviors: int, negatives: int, draw: np.random.Generator
) -> dict[str, Behaviors]:
    splits: dict[str, list[tuple[str, Sequence[int], np.ndarray, int]]] = {split: [] for split in SPLITS}
    for user, order in watched.items():
        unseen = np.ones(films, dtype=bool)
        unseen[order[:1]] = False
        for place in range(1, len(order)):
            # Films watched later may be shown: leaving them out would reveal the tested films.
            unseen[order[place]] = False
            others = np.flatnonzero(unseen)
            left = len(order) - 1 - place
            split = SPLITS[2 - left] if left < 2 else 'train'
            shown = draw.choice(others, min(negatives, len(others)), replace=False)
            at = int(draw.integers(len(shown) + 1))
            candidates = np.insert(shown, at, order[place])
            splits[split].append((f'{user}-{place}', order[max(0, place - max_behaviors) : place], candidates, at))
    return {split: _as_impressions(rows) for split, rows in splits.items()}


def _as_impressions(rows: Sequence[tuple[str, Sequence[int], np.ndarray, int]]) -> Behaviors:
    candidates = Ragged.from_rows([shown for _, _, shown, _ in rows])
    labels = np.zeros(len(candidates.values), dtype=np.int8)
    labels[candidates.starts[:-1] + np.array([at for _, _, _, at in rows], dtype=np.int64)] = 1
    return Behaviors([name for name, _, _, _ in rows], Ragged.from_rows([h for _, h, _, _ in rows]), candidates, labels)
