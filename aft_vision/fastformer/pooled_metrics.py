"""Metrics of predicted actions, over all requests at once."""

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import roc_auc_score

# Keys of `pooled_metrics`.
POOLED_METRICS = ('auc', 'log_loss')


def pooled_metrics(logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Compute AUC over all requests of all users, in [0, 1], and the mean binary cross-entropy in nats.

    Args:
        logits: (n,), logits of label 1.
        labels: (n,), 0 or 1.

    Raises:
        ValueError: labels that are not both 0 and 1, or what scikit-learn refuses.
    """
    z, y = np.asarray(logits, np.float64), np.asarray(labels)
    if set(np.unique(y)) != {0, 1}:
        raise ValueError(f'expected labels 0 and 1, both, got {np.unique(y)}')
    return {'auc': float(roc_auc_score(y, z)), 'log_loss': float(np.mean(np.logaddexp(0.0, z) - y * z))}
