import math
import re
from typing import Any

import pytest

from lrlhf.rewards import (
    Completion,
    ExactMatch,
    LengthPenalty,
    OverlongPenalty,
    RegexFormat,
    RepetitionPenalty,
    RewardError,
    RewardFunction,
    Rewards,
    completion_text,
)
from lrlhf.rewards.functions import one_by_one


def value(function: RewardFunction, completion: Completion, **columns: Any) -> float | None:
    """Score one response through the runner."""
    rewards = Rewards([function], max_unscorable_fraction=1.0)
    score = float(rewards.score(["p"], [completion], [[1]], [columns]).scores[0])
    return None if math.isnan(score) else score


def test_the_text_of_a_completion_is_what_the_assistant_said() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    called = {"role": "assistant", "content": None}
    assert completion_text([said, {"role": "tool", "content": "x"}, called]) == "a\n"


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        ({}, "  paris.\n", "Paris", 1.0),
        ({}, "New\n York", "new york", 1.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "a", None, None),
        ({"normalize": False}, "paris", "Paris", 0.0),
        ({"extract": r"<a>(.*?)</a>"}, "so <a>Rome</a> no <a>Paris</a>!", "Paris", 1.0),
        ({"extract": r"<a>(.*?)</a>"}, "Paris", "Paris", 0.0),
    ],
)
def test_exact_match(
    options: dict[str, Any], completion: Completion, answer: Any, expected: float | None
) -> None:
    assert value(ExactMatch(**options), completion, answer=answer) == expected


def test_exact_match_reads_the_column_that_it_is_told() -> None:
    function = ExactMatch(answer_column="target")
    assert value(function, "a", answer="b", target="a") == 1.0
    with pytest.raises(RewardError, match=r"no column 'target'; did you mean 'targets'.*column"):
        value(function, "a", targets="a")


@pytest.mark.parametrize(
    ("options", "completion", "expected"),
    [
        ({"pattern": "<t>.*</t>"}, " <t>a\nb</t>\n", 1.0),
        ({"pattern": "<t>.*</t>"}, "x <t>a</t>", 0.0),
        ({"pattern": "<t>.*</t>", "full_match": False}, "x <t>a</t> y", 1.0),
        ({"pattern": "<t>.*</t>", "prefix": "<t>"}, "a</t>", 1.0),
    ],
)
def test_regex_format(options: dict[str, Any], completion: Completion, expected: float) -> None:
    assert value(RegexFormat(**options), completion) == expected


def test_a_text_that_can_be_matched_in_too_many_ways_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(one_by_one, "_TIMEOUT_S", 0.2)
    endless, texts = r"(x|xx)+$", ["x" * 60 + "!", "no"]
    for function in (RegexFormat(endless, full_match=False), ExactMatch(extract=endless)):
        rows = [{"answer": "1"}] * 2
        result = Rewards([function]).score(["p"] * 2, texts, [[1]] * 2, rows)
        assert result.scores.tolist() == [0.0, 0.0]
        assert re.search(r"1 of 2 responses could not be scored .*response 0", result.failures[0])


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"x_{i}=(\d+)", "x_qqqqq=7"),
        (r"\\mathrm{e}", r"\mathrq"),
        (r"Answer: {d}", "Answer: 5"),
        (r"[{e}]{2,}", "{e"),
    ],
)
def test_a_pattern_means_what_it_means_to_python(pattern: str, text: str) -> None:
    (found,) = RegexFormat(pattern, full_match=False)(completions=[text])
    assert found == float(re.search(pattern, text) is not None)


# ---------------------------------------------------------------------- lengths


def penalty(function: RewardFunction, text: str, tokens: int) -> float:
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
    assert penalty(LengthPenalty(**options), "ab cd efg", tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("length", "expected"),
    # 100 tokens at most, the last 20 cost: 0 up to 80, then 1/20 each, doubled by the factor
    [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0)],
)
def test_overlong_penalty_grows_over_the_buffer(length: int, expected: float) -> None:
    function = OverlongPenalty(max_new_tokens=100, buffer=20, factor=2.0)
    assert penalty(function, "", length) == pytest.approx(expected)


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
    assert penalty(RepetitionPenalty(**options), text, 4) == pytest.approx(expected)


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
