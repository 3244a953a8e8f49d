"""Data of the recommendation task: impressions for training, validation and test."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from aft_vision.data.ranges import within
from aft_vision.fastformer.data.impressions import Behaviors, split_impressions
from aft_vision.fastformer.data.mind import News, read_mind_behaviors, read_mind_news
from aft_vision.fastformer.data.movielens import read_movielens
from train.fastformer.schema import OWN_PATHS, TextData


@dataclass(frozen=True)
class RecommendationData(TextData):
    """Impressions of news, or of films; what `TextData` has, and these. An example of training is a click.

    Attributes:
        kind: `mind` (news.tsv and behaviors.tsv), or `movielens` (MovieLens-100k: the next film of a user).
        path: The folder of the training impressions, or of MovieLens.
        valid_path, test_path: For `mind`: folders of these splits; None draws them from training. The test split
            may have no labels, as in MIND: it is then ranked without metrics.
        drop_missing: For `mind`: leave out clicks and candidates that are not in the news, as in an excerpt.
        text_columns: For `mind`: columns of the news to read: `title`, `abstract`, `category`, `subcategory`.
        negatives: K, unclicked candidates per click in a training sample.
        shown: For `movielens`: candidates of an impression besides the watched film.
        max_impressions: Number of training impressions to draw by `split_seed`; None for all.
        test_share, valid_share: Shares of the impressions of `mind`, for splits that have no folder.
        tokenizer: Ignored with `model.text_model`, which has its own.
        max_behaviors: Number of last clicks of a user to use.
        eval_batch_size: News, or users, per batch of the evaluation; None means as many as clicks in training.
        ensemble: With --eval, also rank by the mean scores of all seeds.
    """

    kinds_of_key = {  # noqa: RUF012
        **dict.fromkeys(
            ('valid_path', 'test_path', 'drop_missing', 'text_columns', 'test_share', 'valid_share'), ('mind',)
        ),
        'shown': ('movielens',),
    }

    kind: Literal['mind', 'movielens'] = 'mind'
    max_length: int = within('[1, inf)', 48, 'tokens')
    valid_path: str | None = None
    test_path: str | None = None
    drop_missing: bool = False
    text_columns: list[str] = field(default_factory=lambda: ['title'])
    negatives: int = within('[1, inf)', 4)
    shown: int = within('[1, inf)', 99)
    max_impressions: int | None = within('[1, inf)', None, 'impressions')
    max_behaviors: int = within('[1, inf)', 50, 'clicks')
    ensemble: bool = False


def read_splits(data: RecommendationData) -> tuple[News, dict[str, Behaviors]]:
    """Read all news, and the impressions for `train`, `validation` and `test`.

    Raises:
        ValueError: a file is missing, damaged or of another layout.
    """
    if data.kind == 'movielens':
        news, splits = read_movielens(data.path, data.max_behaviors, data.shown, data.split_seed)
    else:
        news, splits = _read_mind(data)
    train = splits['train']
    if data.max_impressions is not None and data.max_impressions < len(train):
        chosen = np.random.default_rng(data.split_seed).choice(len(train), data.max_impressions, replace=False)
        splits['train'] = train.select(np.sort(chosen))
    return news, splits


def _read_mind(data: RecommendationData) -> tuple[News, dict[str, Behaviors]]:
    given = {'train': data.path, **data.own_paths()}
    news = read_mind_news(list(given.values()), data.text_columns)
    splits = {
        split: read_mind_behaviors(folder, news.rows, data.max_behaviors, data.drop_missing)
        for split, folder in given.items()
    }
    shares = data.drawn_shares(given)
    if len(shares) > 1:
        drawn = split_impressions(splits['train'], [*shares.values()], data.split_seed)
        splits |= zip(shares, drawn, strict=True)
    return news, {split: splits[split] for split in ('train', *OWN_PATHS)}
