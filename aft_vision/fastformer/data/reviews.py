"""Reviews with their ratings: Amazon, the IMDB of JMARS with ten classes, and aclImdb."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset

from aft_vision.fastformer.data.files import Record, missing_columns, read_json
from aft_vision.fastformer.data.table import collect, name_columns

AMAZON_RATINGS = tuple('12345')
IMDB_RATINGS = tuple(map(str, range(1, 11)))
SENTIMENTS = ('neg', 'pos')
# No review of aclImdb is rated 5 or 6.
ACL_RATINGS = (*'1234', *'78', '9', '10')
ACL_NAME = re.compile(r'(\d+)_(\d+)\.txt')
NOT_JMARS = 'aclImdb is the binary IMDB, not IMDB-10; read_acl_imdb reads it'


def read_amazon(path: str | Path, **options: Any) -> Dataset:
    """Read Amazon's reviews, five classes: `reviews_Electronics_5.json.gz` and its like, or the files of 2023.

    Args:
        path: JSON lines with `reviewText` and `overall` (2014, 2018), or `text` and `rating` (2023).
        options: `sample`, `seed` and `drop_incomplete`, as `table.collect` takes them; the paper's 50,000 reviews are
            `sample=50_000`.

    Raises:
        ValueError: the file is damaged or of another layout; names line and column.
    """
    first, records = _peek(path)
    for text, rating in (('reviewText', 'overall'), ('text', 'rating')):
        if rating in first.values:
            return collect(records, [text], rating, AMAZON_RATINGS, **options)
    raise missing_columns(first.location, ['reviewText or text', 'overall or rating'], list(first.values))


def read_jmars(
    path: str | Path, text: str | Sequence[str] = 'review', label: str = 'rating', **options: Any
) -> Dataset:
    """Read the IMDB of JMARS, ten classes: `data.json`, one JSON list of reviews with `rating`, `title`, `review`.

    Args:
        text: The key of the review, or several whose texts are joined by a space.
        label: The key of its rating, 1 to 10.
        options: As `read_amazon` takes them.

    Raises:
        ValueError: the file is damaged or of another layout, or it is aclImdb, which has two classes.
    """
    if Path(path).is_dir():
        raise ValueError(f'expected the data.json of JMARS, got the folder {path}; {NOT_JMARS}')
    (first, records), columns = _peek(path), name_columns(text)
    if not {*columns, label} <= first.values.keys():
        raise ValueError(f'{missing_columns(first.location, [*columns, label], list(first.values))}; {NOT_JMARS}')
    dataset = collect(records, columns, label, IMDB_RATINGS, **options)
    ratings = {IMDB_RATINGS[number] for number in dataset.unique('label')}
    # A small part of JMARS may have none of them by chance.
    if len(dataset) >= 100 and ratings <= set(ACL_RATINGS):
        raise ValueError(f'expected reviews of every rating from 1 to 10 in {path}, got none of 5 and 6; {NOT_JMARS}')
    return dataset


def read_acl_imdb(folder: str | Path, split: str = 'train', label: str = 'sentiment', **options: Any) -> Dataset:
    """Read aclImdb as published: a folder with `train/neg/0_3.txt` and so on, where 3 is the rating.

    Args:
        split: `train` or `test`.
        label: `sentiment`: neg and pos. `rating`: 1 to 4 and 7 to 10.
        options: As `read_amazon` takes them.

    Raises:
        ValueError: a folder or its files are missing, or a file is named otherwise or damaged.
    """
    if label not in ('sentiment', 'rating'):
        raise ValueError(f'expected the label sentiment or rating, got {label!r}')
    records = chain.from_iterable(_read_folder(Path(folder) / split / sentiment) for sentiment in SENTIMENTS)
    return collect(records, ['text'], label, SENTIMENTS if label == 'sentiment' else ACL_RATINGS, **options)


def _peek(path: str | Path) -> tuple[Record, Iterator[Record]]:
    """Return the first record of a JSON file, and an iterator over all."""
    records = read_json(path)
    first = next(records, None)
    if first is None:
        raise ValueError(f'expected reviews in {path}, got an empty file')
    return first, chain([first], records)


def _read_folder(folder: Path) -> Iterator[Record]:
    """Stream the reviews of a folder, which is named after their sentiment."""
    paths = list(folder.glob('*.txt'))
    if not paths:
        raise ValueError(f'expected reviews in {folder}, such as 0_3.txt, got none')
    astray = [path for path in paths if ACL_NAME.fullmatch(path.name) is None]
    if astray:
        raise ValueError(f'expected names like NUMBER_RATING.txt, got {min(astray)}')
    for path in sorted(paths, key=lambda path: int(path.stem.partition('_')[0])):
        try:
            content = path.read_text(encoding='utf-8-sig')
        except UnicodeDecodeError as error:
            raise ValueError(
                f'{path}, byte {error.start + 1}: expected UTF-8, got {error.object[error.start]:#x}'
            ) from error
        yield Record(str(path), {'text': content, 'sentiment': folder.name, 'rating': path.stem.partition('_')[2]})
