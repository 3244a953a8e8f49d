"""The figures of rankings against one impression at a time: scikit-learn, and the definition of MRR in a loop."""

import numpy as np
import pytest
from sklearn import config_context
from sklearn.metrics import ndcg_score, roc_auc_score

from aft_vision.fastformer.metrics import click_loss, rank_candidates, ranking_metrics


def make_impressions(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Impressions of 0 to 30 candidates with scores of which many are equal; some have one label alone."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 31, count)
    scores = draw.normal(0, 3, sizes.sum())
    coarse = np.repeat(draw.random(count) < 0.6, sizes)
    scores[coarse] = np.round(scores[coarse] / 2)
    rate = np.repeat(draw.choice([0.0, 0.1, 0.2, 0.4, 0.5, 1.0], count), sizes)
    return scores, (draw.random(len(scores)) < rate).astype(int), sizes


def mrr(labels: np.ndarray, scores: np.ndarray) -> float:
    """The mean of 1 / rank over all that was clicked, the ranks of a stable sort."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return sum(labels[i] / rank for rank, i in enumerate(order, 1)) / sum(labels)


def test_the_figures_equal_those_of_one_impression_at_a_time():
    scores, labels, sizes = make_impressions(600)
    expected: dict[str, list[float]] = {'auc': [], 'mrr': [], 'ndcg5': [], 'ndcg10': []}
    tied = 0
    for y, s in zip(*(np.split(x, np.cumsum(sizes)[:-1]) for x in (labels, scores)), strict=True):
        if len(set(y)) < 2:
            continue
        tied += len(set(s)) < len(s)
        with config_context(assume_finite=True, skip_parameter_validation=True):
            expected['auc'].append(roc_auc_score(y, s))
        expected['mrr'].append(mrr(y, s))
        # scikit-learn shares the gain among equal scores, so it is given what the stable order makes of them.
        ordered = np.empty(len(s))
        ordered[np.argsort(-s, kind='stable')] = -np.arange(len(s))
        with config_context(assume_finite=True, skip_parameter_validation=True):
            for cutoff in (5, 10):
                expected[f'ndcg{cutoff}'].append(ndcg_score([y], [ordered], k=cutoff))
    assert len(expected['auc']) > 200
    assert tied > 100
    found = ranking_metrics(scores, labels, sizes)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, rel=1e-12)


def test_mrr_is_the_mean_over_all_clicks_not_the_first_alone():
    assert ranking_metrics([3.0, 2, 1, 0], [1, 0, 0, 1], [4])['mrr'] == (1 + 1 / 4) / 2


def test_the_figures_of_a_small_impression_are_those_by_hand():
    found = ranking_metrics([0.1, 0.9, 0.5], [0, 0, 1], [3])
    assert found == pytest.approx({'auc': 0.5, 'mrr': 0.5, 'ndcg5': 1 / np.log2(3), 'ndcg10': 1 / np.log2(3)})


def test_the_loss_of_a_click_is_cross_entropy_among_it_and_what_was_not_clicked():
    scores, labels, sizes = make_impressions(60, seed=2)
    scores[:5] += 800
    expected = []
    for y, s in zip(*(np.split(x, np.cumsum(sizes)[:-1]) for x in (labels, scores)), strict=True):
        for score in s[y == 1] if not y.all() else []:
            row = np.concatenate([[score], s[y == 0]])
            expected.append(np.log(np.exp(row - row.max()).sum()) + row.max() - score)
    assert len(expected) > 50
    assert click_loss(scores, labels, sizes) == pytest.approx(np.mean(expected), rel=1e-12)
    with pytest.raises(ValueError, match='expected an impression with a clicked and another candidate'):
        click_loss([1.0, 2.0], [1, 1], [2])


def test_equal_scores_rank_in_their_order():
    assert rank_candidates([1, 2, 2, 0, 5, 5], [4, 0, 2]).tolist() == [3, 1, 2, 4, 1, 2]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (([1.0, 2.0], [1, 0], [3]), r'shape \(3,\), the sum of sizes, got \(2,\) and \(2,\)'),
        (([1.0, 2.0], [1, 0, 0], [2]), r'got \(2,\) and \(3,\)'),
        (([1.0, float('nan')], [1, 0], [2]), 'numbers, got NaN at 1'),
        (([1.0, 2.0], [1, 1], [2]), 'expected an impression with a clicked and another candidate, got none'),
        (([], [], []), 'got none'),
    ],
)
def test_what_cannot_be_scored_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ranking_metrics(*arguments)
