from typing import Any

import pytest

from lrlhf.rewards import LengthPenalty, OverlongPenalty, RepetitionPenalty, RewardFunction, Rewards


def value(function: RewardFunction, text: str, tokens: int) -> float:
    result = Rewards([function]).score(["p"], [text], [list(range(tokens))], [{}])
    return float(result.scores[0])


@pytest.mark.parametrize(
    ("options", "tokens", "expected"),
    [
        ({"target": 10, "slope": 0.1}, 13, -0.3),
        ({"target": 10, "slope": 0.1, "side": "under"}, 4, -0.6),
        ({"target": 10, "slope": 0.1, "side": "both"}, 4, -0.6),
        ({"target": 10, "slope": 0.1, "max_penalty": 2.5}, 40, -2.5),
        ({"target": 1, "slope": 0.5, "unit": "words", "max_penalty": 9}, 99, -1.0),  # 3 words
        ({"target": 1, "slope": 0.5, "unit": "characters", "max_penalty": 9}, 99, -4.0),  # 9
    ],
)
def test_length_penalty(options: dict[str, Any], tokens: int, expected: float) -> None:
    assert value(LengthPenalty(**options), "ab cd efg", tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("length", "expected"),
    # 100 tokens at most, the last 20 cost: 0 up to 80, then 1/20 each, doubled by the factor
    [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0)],
)
def test_overlong_penalty_grows_over_the_buffer(length: int, expected: float) -> None:
    function = OverlongPenalty(max_new_tokens=100, buffer=20, factor=2.0)
    assert value(function, "", length) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"ngram": 1}, "a a A a", -0.75),  # 1 of 4 words is new
        ({"ngram": 2, "max_penalty": 3.0}, "a b a b a", -1.5),  # ab ba ab ba: 2 of 4
        ({}, "a b c", 0.0),  # shorter than one piece
        ({}, "a b c d a b c d", -0.2),  # abcd bcda cdab dabc abcd: 4 of 5
        ({"ngram": 1, "unit": "characters"}, "aabb", -0.5),
        ({"ngram": 1, "unit": "tokens"}, "a a a a", 0.0),  # the ids differ
    ],
)
def test_repetition_penalty(options: dict[str, Any], text: str, expected: float) -> None:
    assert value(RepetitionPenalty(**options), text, tokens=4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LengthPenalty(target=-1), "target is -1"),
        (lambda: OverlongPenalty(10, 11), "buffer is 11"),
        (lambda: RepetitionPenalty(ngram=0), "ngram is 0"),
    ],
)
def test_wrong_options_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
