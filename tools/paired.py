"""Exact tests of two models that answered the same images, or were trained from the same seeds."""

import math
from collections.abc import Sequence


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Return the two-sided p-value of McNemar's exact test of two models on the same images.

    Args:
        first, second: For each image, whether the model is right.
    """
    from scipy.stats import binomtest

    pairs = list(zip(first, second, strict=True))
    only_first, only_second = (sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    count = only_first + only_second
    return float(binomtest(only_first, count).pvalue) if count else 1.0


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that paired differences have the mean 0.

    Returns:
        NaN for fewer than two differences, and for equal ones, which have no deviation to compare with.
    """
    from scipy.stats import ttest_1samp

    if len(set(differences)) < 2:
        return math.nan
    return float(ttest_1samp(differences, 0).pvalue)
