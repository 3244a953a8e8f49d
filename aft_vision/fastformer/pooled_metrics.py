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
        ValueError: shapes that do not fit, a logit that is not finite, or labels that are not both 0 and 1.
    """
    z, y = np.asarray(logits, np.float64), np.asarray(labels)
    if z.ndim != 1 or z.shape != y.shape:
        raise ValueError(f'expected logits and labels of one shape (n,), got {z.shape} and {y.shape}')
    if not np.isfinite(z).all():
        raise ValueError(f'expected finite logits, got {np.count_nonzero(~np.isfinite(z))} that are not')
    if set(np.unique(y)) != {0, 1}:
        raise ValueError(f'expected labels 0 and 1, both, got {np.unique(y)}')
    return {'auc': float(roc_auc_score(y, z)), 'log_loss': float(np.mean(np.logaddexp(0.0, z) - y * z))}
