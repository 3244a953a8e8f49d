"""Exact tests of two models that answered the same images, or were trained from the same seeds."""

import math
from collections.abc import Sequence


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Return the two-sided p-value of McNemar's exact test of two models on the same images.

    Args:
        first, second: For each image, whether the model is right.

    Raises:
        ValueError: the numbers of images differ.
    """
    if len(first) != len(second):
        raise ValueError(f'expected answers to the same images, got {len(first)} and {len(second)}')
    pairs = list(zip(first, second, strict=True))
    only_first, only_second = (sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
    count, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, i) for i in range(fewer + 1))
    # Integers: the binomial coefficients of thousands of images exceed the range of floats.
    return min(1.0, 2 * tail / 2**count)


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that paired differences have the mean 0.

    Returns:
        NaN for fewer than two differences, and for equal ones, which have no deviation to compare with.
    """
    n = len(differences)
    mean = math.fsum(differences) / n if n else math.nan
    square = math.fsum((x - mean) ** 2 for x in differences)
    if n < 2 or square == 0:
        return math.nan
    freedom = n - 1
    # The distribution for whole degrees of freedom is a finite sum: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    angle = math.atan(abs(mean) * math.sqrt(n * freedom / square) / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for i in range(2 + odd, freedom, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if not odd:
        return 1 - math.sin(angle) * total
    return 1 - 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0))
