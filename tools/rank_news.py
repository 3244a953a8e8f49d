"""Rank news for a user by what they clicked, with a trained recommender.

python -m tools.rank_news --model runs/fastformer/mind_recommendation/seed_0/best --news MIND/news.tsv \
    --history N34700 N10465 N3137 --top 10
python -m tools.rank_news --model FOLDER --news MIND --history N34700 --candidates N1 N2 N3
python -m tools.rank_news --model FOLDER --news ml-100k --history 50 181 172 --top 10

--news is a news.tsv of MIND or a folder with one, or a folder of MovieLens-100k, whose films have the numbers of
u.item. --history lists the clicked news, the oldest first. All other news are ranked, or only --candidates. Each line
of the result has a score, the name of a news item, and its text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import add_device, parse_positive
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('--model', type=Path, required=True, help='a folder with a saved recommender and its tokenizer')
    add('--news', type=Path, required=True, help="MIND's news.tsv, or a folder of MIND or MovieLens-100k")
    add('--history', nargs='*', default=[], metavar='NAME', help='clicked news, the oldest first')
    add('--candidates', nargs='+', metavar='NAME', help='news to rank (default: all other news)')
    add('--top', type=parse_positive, default=10, help='lines to print (default: 10)')
    add_device(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

from aft_vision.devices import use_device
from aft_vision.fastformer.data.mind import News, read_mind_news
from aft_vision.fastformer.data.movielens import read_films
from aft_vision.fastformer.ranking import NewsRanker


def main(argv: Sequence[str] | None = None) -> list[tuple[float, str]]:
    """Print the best candidates.

    Returns:
        Their scores and names, the best first.

    Raises:
        ValueError: the model, the file or a name is not valid.
    """
    args = parse_args(argv)
    ranker = NewsRanker.load(args.model, use_device(args.device))
    has_news = args.news.is_file() or (args.news / 'news.tsv').is_file()
    news = read_mind_news(args.news, ranker.model.config.text_columns) if has_news else read_films(args.news)
    history = rows_of(news, args.history, args.news)
    candidates = rows_of(news, args.candidates or [name for name in news.ids if name not in args.history], args.news)
    scores = ranker.score([news.texts[row] for row in history], [news.texts[row] for row in candidates])
    best = [(float(scores[i]), candidates[i]) for i in (-scores).argsort(kind='stable')[: args.top]]
    if not history:
        print('nothing was clicked, so all scores are equal')
    for row in history:
        print(f' clicked  {news.ids[row]}  {news.texts[row]}')
    for score, row in best:
        print(f'{score:8.3f}  {news.ids[row]}  {news.texts[row]}')
    return [(score, news.ids[row]) for score, row in best]


def rows_of(news: News, names: Sequence[str], source: Path) -> list[int]:
    """Return the rows of news by name.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = [name for name in names if name not in news.rows]
    if unknown:
        raise ValueError(f'expected names of the {len(news)} news in {source}, got {", ".join(unknown):.80}')
    return [news.rows[name] for name in names]


if __name__ == '__main__':
    run_command(main)
