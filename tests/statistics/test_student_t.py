"""Student's t distribution against tables and closed forms."""

import math

import pytest

from lrlhf.statistics.intervals import t_quantile, t_test_power, two_sided_p


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # Fisher and Yates, Statistical Tables, table III: P = 0.05
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(0.95, degrees) == pytest.approx(quantile, abs=6e-4)


def test_one_and_two_degrees_have_closed_forms() -> None:
    # Cauchy: P(|T| > t) = 1 - 2/π atan t; two degrees: 1 - t / √(2 + t²)
    for t in (0.1, 1.0, 7.5):
        assert two_sided_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-12)
        assert two_sided_p(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)


def test_many_degrees_are_the_normal_distribution() -> None:
    assert t_quantile(0.95, 1e7) == pytest.approx(1.959963984540054, abs=1e-6)
    assert two_sided_p(1.0, 1e7) == pytest.approx(math.erfc(1 / math.sqrt(2)), abs=1e-6)


def test_degrees_between_whole_numbers_lie_between_their_quantiles() -> None:
    assert t_quantile(0.95, 3) < t_quantile(0.95, 2.5) < t_quantile(0.95, 2)


@pytest.mark.parametrize(
    ("effect", "degrees", "expected"),
    # scipy 1.17.1, with t = stats.t.ppf(0.975, ν): nct.sf(t, ν, δ) + nct.cdf(-t, ν, δ)
    [(2.8, 4, 0.5635660449), (2.8, 30, 0.7732048539), (1.0, 10, 0.1481576285)],
)
def test_power_is_that_of_the_noncentral_distribution(
    effect: float, degrees: int, expected: float
) -> None:
    assert t_test_power(effect, degrees, 0.95) == pytest.approx(expected, abs=1e-8)


def test_power_without_an_effect_is_the_level() -> None:
    for degrees in (1, 2.5, 40, 1e5):
        assert t_test_power(0.0, degrees, 0.95) == pytest.approx(0.05, abs=1e-6)
