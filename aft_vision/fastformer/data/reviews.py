"""Reviews with their ratings: Amazon, and the IMDB of JMARS with ten classes."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset

from aft_vision.fastformer.data.files import Record, missing_columns, read_json
from aft_vision.fastformer.data.table import collect, name_columns

AMAZON_RATINGS = tuple('12345')
IMDB_RATINGS = tuple(map(str, range(1, 11)))
# No review of aclImdb is rated 5 or 6.
ACL_RATINGS = (*'1234', *'78', '9', '10')
NOT_JMARS = 'aclImdb is the binary IMDB, not IMDB-10; data.kind=hub data.path=stanfordnlp/imdb reads it'


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


def _peek(path: str | Path) -> tuple[Record, Iterator[Record]]:
    """Return the first record of a JSON file, and an iterator over all."""
    records = read_json(path)
    first = next(records, None)
    if first is None:
        raise ValueError(f'expected reviews in {path}, got an empty file')
    return first, chain([first], records)
