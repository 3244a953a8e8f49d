import math

import pytest

from tools.paired import mcnemar, paired_t


def answers(both: int, first: int, second: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Images that both, only the first, only the second and neither of two models answered right."""
    return (
        [True] * (both + first) + [False] * (second + neither),
        [True] * both + [False] * first + [True] * second + [False] * neither,
    )


def test_mcnemar_counts_only_the_images_on_which_the_models_differ():
    assert mcnemar(*answers(50, 9, 1, 40)) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(*answers(0, 1, 9, 0)) == pytest.approx(2 * (1 + 10) / 2**10)
    assert mcnemar(*answers(7, 3, 3, 0)) == mcnemar(*answers(5, 0, 0, 5)) == 1.0


def test_mcnemar_takes_thousands_of_images():
    # Exact, by integers: the binomial coefficients exceed the range of floats.
    expected = 2 * sum(math.comb(2900, i) for i in range(1401)) / 2**2900
    assert mcnemar(*answers(500, 1400, 1500, 500)) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match='longer'):
        mcnemar([True], [True, False])


def test_the_t_test_has_the_closed_forms_of_one_and_two_degrees_of_freedom():
    # Mean 3, standard error 1: t = 3.
    assert paired_t([2.0, 4.0]) == pytest.approx(1 - 2 / math.pi * math.atan(3))
    assert paired_t([1.0, 1.0, 4.0]) == pytest.approx(1 - 2 / math.sqrt(2**2 + 2))


def test_without_a_deviation_there_is_no_t_test():
    assert math.isnan(paired_t([]))
    assert math.isnan(paired_t([1.0]))
    assert math.isnan(paired_t([0.5, 0.5]))
