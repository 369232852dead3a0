import math
import re
from typing import Any

import pytest

from lrlhf.rewards import (
    Completion,
    ExactMatch,
    RegexFormat,
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
