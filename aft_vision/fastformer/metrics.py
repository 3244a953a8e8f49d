"""Ranking metrics within impressions: AUC, MRR and nDCG as in MIND's scorer, vectorised.

Every metric is computed per impression and then averaged. Impressions with only clicked or only unclicked candidates
are skipped, because they have no AUC. Candidates with equal scores count half in AUC. Elsewhere they rank in their
order in the file; in the published scorer their order depends on its sort.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

CUTOFFS = (5, 10)
# Keys of `ranking_metrics`.
RANKING_METRICS = ('auc', 'mrr', *(f'ndcg{cutoff}' for cutoff in CUTOFFS))


class _Impressions(NamedTuple):
    """Scores and labels (n,) of all candidates, the impression (n,) that each is of, and their counts (I,)."""

    scores: np.ndarray
    labels: np.ndarray
    group: np.ndarray
    sizes: np.ndarray

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return sums (I,) of values (n,) over each impression."""
        return np.bincount(self.group, values, len(self.sizes))


def ranking_metrics(scores: ArrayLike, labels: ArrayLike, sizes: ArrayLike) -> dict[str, float]:
    """Compute group AUC, MRR, nDCG@5 and nDCG@10, in [0, 1].

    MRR is the mean of 1 / rank over all clicked candidates, not only of the first. nDCG has gains 2^label - 1 and
    discounts log2(1 + rank).

    Args:
        scores: (n,), of the candidates of all impressions, one impression after another; the larger, the earlier.
        labels: (n,), 1 where a candidate was clicked, else 0.
        sizes: (I,), how many candidates each impression has; they sum to n.

    Raises:
        ValueError: shapes that do not fit, a score that is NaN, or no impression with both labels.
    """
    data = _check(scores, labels, sizes)
    clicked = data.sum(data.labels)
    ranks, gains = rank_candidates(data.scores, data.sizes), np.exp2(data.labels) - 1
    # The sum of the ranks of clicks, where ties have their mean rank, gives AUC.
    total = data.sum(_ranks(data, method='average') * data.labels)
    mixed = (clicked > 0) & (clicked < data.sizes)
    if not mixed.any():
        raise ValueError('expected an impression with a clicked and another candidate, got none')
    with np.errstate(invalid='ignore', divide='ignore'):
        # Impressions that are not mixed are 0 / 0, and left out.
        metrics = {
            'auc': (total - clicked * (clicked + 1) / 2) / (clicked * (data.sizes - clicked)),
            'mrr': data.sum(data.labels / ranks) / clicked,
        }
        for cutoff in CUTOFFS:
            best = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(cutoff) + 2))])
            gained = data.sum(np.where(ranks <= cutoff, gains / np.log2(ranks + 1), 0.0))
            metrics[f'ndcg{cutoff}'] = gained / best[np.minimum(clicked, cutoff).astype(np.int64)]
    return {name: float(values[mixed].mean()) for name, values in metrics.items()}


def click_loss(scores: ArrayLike, labels: ArrayLike, sizes: ArrayLike) -> float:
    """Compute the mean cross-entropy of each click among itself and the unclicked candidates of its impression.

    Takes the arguments of `ranking_metrics`. Clicks without other candidates are skipped.

    Raises:
        ValueError: as `ranking_metrics`.
    """
    data = _check(scores, labels, sizes)
    others = np.where(data.labels == 0, data.scores, -np.inf)
    highest = np.full(len(data.sizes), -np.inf)
    np.maximum.at(highest, data.group, others)
    clicked = (data.labels == 1) & np.isfinite(highest)[data.group]
    if not clicked.any():
        raise ValueError('expected an impression with a clicked and another candidate, got none')
    highest = np.where(np.isfinite(highest), highest, 0.0)
    rest = np.log(np.maximum(data.sum(np.exp(others - highest[data.group])), 1.0)) + highest
    return float(np.logaddexp(0.0, rest[data.group] - data.scores)[clicked].mean())


def rank_candidates(scores: ArrayLike, sizes: ArrayLike) -> np.ndarray:
    """Return ranks (n,) from 1 within each impression, by descending score; ties keep their order."""
    data = _check(scores, np.zeros(np.shape(scores)), sizes)
    return _ranks(data, method='first', ascending=False).astype(np.int64)


def _ranks(data: _Impressions, **options: Any) -> np.ndarray:
    return pd.Series(data.scores).groupby(data.group).rank(**options).to_numpy()


def _check(scores: ArrayLike, labels: ArrayLike, sizes: ArrayLike) -> _Impressions:
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    sizes = np.asarray(sizes, dtype=np.int64)
    if not scores.shape == labels.shape == (sizes.sum(),):
        raise ValueError(
            f'expected scores and labels of shape ({sizes.sum()},), the sum of sizes, got {scores.shape} and '
            f'{labels.shape}'
        )
    if np.isnan(scores).any():
        raise ValueError(f'expected scores that are numbers, got NaN at {int(np.flatnonzero(np.isnan(scores))[0])}')
    return _Impressions(scores, labels, np.repeat(np.arange(len(sizes)), sizes), sizes)
