"""News of MIND with their topics."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from aft_vision.fastformer.data.files import Record, read_delimited
from aft_vision.fastformer.data.table import collect, mark_nan

NEWS_COLUMNS = 'news_id category subcategory title abstract url title_entities abstract_entities'.split()
DOCS_COLUMNS = ('news_id', 'category', 'subcategory', 'title', 'abstract', 'body')
TEXT_COLUMNS = ('title', 'abstract', 'body')


def read_mind_topic(
    news: str | Path | Sequence[str | Path],
    docs: str | Path | None = None,
    text: Sequence[str] | None = None,
    **options: Any,
) -> Dataset:
    """Read the news of MIND with their categories.

    Args:
        news: A `news.tsv` as published (8 columns, no header), a folder with one, a folder of such folders (train,
            dev and test), or several of these; a news that is in several counts once.
        docs: A `docs.tsv` with bodies, which MIND itself lacks: news_id, category, subcategory, title, abstract, body.
        text: Columns to join: `title`, `abstract`, `body`; None: the body where there is one, else title and abstract.
        options: `sample`, `seed` and `drop_incomplete`, as `table.collect` takes them.

    Raises:
        ValueError: a file is damaged or of another layout, which names line and column, or `body` is asked for
            without `docs`.
    """
    if text is not None and (not set(text) <= set(TEXT_COLUMNS) or ('body' in text and docs is None)):
        raise ValueError(f'expected columns of {", ".join(TEXT_COLUMNS)}, and docs for a body, got {", ".join(text)}')
    bodies: dict[str, str] = {}
    if docs is not None:
        rows = read_delimited(docs, '\t', DOCS_COLUMNS, quoted=False)
        bodies = {row.values['news_id']: row.values['body'] for row in rows}
    rows = mark_nan(read_news_rows(news), 'category')
    return collect(_choose_text(rows, bodies, text), ['text'], 'category', **options)


def read_news_rows(news: str | Path | Sequence[str | Path]) -> Iterator[Record]:
    """Stream the rows of `news.tsv` files of MIND by `NEWS_COLUMNS`; a news that is there again counts once.

    Args:
        news: The files, folders with one, or a folder of such folders, in their order.
    """
    seen: set[str] = set()
    paths = map(Path, [news] if isinstance(news, (str, Path)) else news)
    for path in [file for each in paths for file in _news_files(each)]:
        for record in read_delimited(path, '\t', NEWS_COLUMNS, quoted=False):
            if record.values['news_id'] not in seen:
                seen.add(record.values['news_id'])
                yield record


def _news_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    own = path / 'news.tsv'
    return [own] if own.exists() else sorted(path.glob('*/news.tsv')) or [own]


def _choose_text(records: Iterable[Record], bodies: dict[str, str], text: Sequence[str] | None) -> Iterator[Record]:
    for location, values in records:
        body = bodies.get(values['news_id'], '')
        columns = text or (('body',) if body else ('title', 'abstract'))
        parts = [body if column == 'body' else values[column] for column in columns]
        yield Record(location, {'text': ' '.join(filter(None, parts)), 'category': values['category']})
