import numpy as np
import pytest
from sklearn.metrics import log_loss

from aft_vision.fastformer.pooled_metrics import POOLED_METRICS, pooled_metrics


def test_auc_is_the_share_of_pairs_in_order_with_ties_by_half():
    draw = np.random.default_rng(0)
    for _ in range(50):
        logits, labels = draw.integers(-3, 4, 30).astype(float), draw.integers(0, 2, 30)
        labels[:2] = 0, 1
        clicked, others = logits[labels == 1][:, None], logits[labels == 0][None]
        expected = ((clicked > others) + 0.5 * (clicked == others)).mean()
        found = pooled_metrics(logits, labels)
        assert tuple(found) == POOLED_METRICS
        assert found['auc'] == pytest.approx(expected, abs=1e-12)
        assert found['log_loss'] == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), abs=1e-12)


def test_the_loss_of_large_logits_is_finite_and_right():
    assert pooled_metrics([1000.0, -1000.0], [1, 0]) == {'auc': 1.0, 'log_loss': 0.0}
    assert pooled_metrics([1000.0, -1000.0], [0, 1]) == {'auc': 0.0, 'log_loss': 1000.0}


@pytest.mark.parametrize(
    ('logits', 'labels', 'message'),
    [
        ([0.0, 1.0], [1, 1], r'expected labels 0 and 1, both, got \[1\]'),
        ([0.0, 1.0], [0, 2], 'expected labels 0 and 1, both'),
        ([0.0, np.nan], [0, 1], 'contains NaN'),
    ],
)
def test_what_has_no_auc_is_an_error(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        pooled_metrics(logits, labels)
