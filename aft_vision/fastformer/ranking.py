"""Scores of whole files of impressions: news encoded once, then users, then products; ensembles by the mean score."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .data.impressions import Behaviors, NewsCollator, pad_rows
from .hierarchy import gather_vectors
from .newsrec import FastformerForNewsRecommendation


@torch.no_grad()
def score_behaviors(
    model: FastformerForNewsRecommendation, behaviors: Behaviors, collator: NewsCollator, batch_size: int = 256
) -> np.ndarray:
    """Score the candidates of all impressions; every news that they name is encoded once.

    Args:
        model: Is put into evaluation, and left as it was.
        batch_size: News, and users, that are encoded at once.

    Returns:
        (n,) float32, as `behaviors.candidates.values` lie.
    """
    was_training = model.training
    model.eval()
    try:
        news, places = np.unique(
            np.concatenate([behaviors.histories.values, behaviors.candidates.values]), return_inverse=True
        )
        vectors = _encode_all(model, collator, news, batch_size)
        histories, candidates = np.split(places, [len(behaviors.histories.values)])
        parts = [np.zeros(0, dtype=np.float32)]
        for first in range(0, len(behaviors), batch_size):
            last = min(first + batch_size, len(behaviors))
            starts = behaviors.histories.starts[first : last + 1]
            clicked = np.split(histories[starts[0] : starts[-1]], starts[1:-1] - starts[0])
            rows = torch.from_numpy(pad_rows(clicked, -1)).to(model.device)
            users = model.encode_users(*gather_vectors(vectors, rows))
            starts = behaviors.candidates.starts[first : last + 1]
            shown = torch.from_numpy(candidates[starts[0] : starts[-1]]).to(model.device)
            owner = torch.from_numpy(np.repeat(np.arange(last - first), np.diff(starts))).to(model.device)
            # One candidate a row: impressions of all lengths without padding.
            scores = model.score(users[owner], vectors[shown][:, None])[:, 0]
            parts.append(scores.float().cpu().numpy())
        return np.concatenate(parts)
    finally:
        model.train(was_training)


def _encode_all(
    model: FastformerForNewsRecommendation, collator: NewsCollator, news: np.ndarray, batch_size: int
) -> Tensor:
    """Vectors (U, C) of news, in batches of about the same length."""
    order = np.argsort(collator.tokens.sizes[news], kind='stable')
    parts = []
    for first in range(0, len(news), batch_size):
        batch = collator.texts(news[order[first : first + batch_size]])
        parts.append(model.encode_news(**{name: value.to(model.device) for name, value in batch.items()}))
    vectors = torch.cat(parts)
    unsorted = torch.empty_like(vectors)
    unsorted[torch.from_numpy(order).to(vectors.device)] = vectors
    return unsorted


def mean_scores(scores: Sequence[np.ndarray]) -> np.ndarray:
    """The scores of an ensemble: the mean of those of its models, all (n,).

    Raises:
        ValueError: there are none, or of different candidates.
    """
    if not scores or len({len(part) for part in scores}) > 1:
        raise ValueError(f'expected scores of the same candidates, got {[len(part) for part in scores]}')
    return np.mean(scores, axis=0, dtype=np.float64)
