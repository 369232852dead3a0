"""What metrics are called of answers at several temperatures."""

import pytest

from lrlhf.statistics.repeated_samples import plain_name, temperature_name, temperature_prefix


@pytest.mark.parametrize(
    ("temperature", "name"),
    [(0.0, "t0"), (1, "t1"), (0.70, "t0.7"), (1e-5, "t1e-05"), (1e6, "t1e+06")],
)
def test_a_temperature_is_named_in_short_and_its_name_is_known_again(
    temperature: float, name: str
) -> None:
    assert temperature_name(temperature) == name
    assert temperature_prefix(temperature, main=0.5) == f"{name}/"
    assert plain_name(f"{name}/score") == "score"


def test_the_main_temperature_and_an_unknown_one_are_not_named() -> None:
    assert temperature_prefix(0.7, main=0.7) == ""
    assert temperature_prefix(None, main=0.7) == ""
    assert temperature_prefix(None, main=None) == ""
    assert temperature_prefix(0.0, main=None) == "t0/"


def test_of_a_name_without_a_temperature_nothing_is_taken() -> None:
    for name in ("score", "truncated", "rewards/t0.7/x", "tail/score"):
        assert plain_name(name) == name
