from fractions import Fraction
from typing import Any

import pytest

from lrlhf.rewards import NumericAnswer, Rewards
from lrlhf.rewards.functions import numeric_answer
from lrlhf.rewards.functions.numeric_answer import numbers_in, only_number
from lrlhf.rewards.functions.one_by_one import OneByOne
from tests.rewards.test_text_rewards import value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 apples and 12.5 pears.", [7, Fraction(25, 2)]),
        ("1,234,567.5 but 1,2345", [Fraction(2469135, 2), 1, 2345]),
        ("$1,000 or €5 or -$3 or $-4", [1000, 5, -3, -4]),
        ("5 - 3 = 2", [5, 3, 2]),
        ("minus −3", [-3]),
        ("3/4 and -1 / 2", [Fraction(3, 4), Fraction(-1, 2)]),
        (r"\frac{1}{2}, -\dfrac{3}{4}", [Fraction(1, 2), Fraction(-3, 4)]),
        ("1e3 and 2.5E-1", [1000, Fraction(1, 4)]),
        ("1e99999999", []),
        ("5/0", [None]),
        ("Q1 x2 v3.0", []),
        ("9" * 5000, [None]),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, expected: list[Fraction | None]) -> None:
    assert numbers_in(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("$72$", 72), ("12 apples", 12), ("30 square metres", 30), ("x^2", None)]
)
def test_a_text_that_is_one_number_is_told_from_others(text: str, expected: int | None) -> None:
    assert only_number(text) == expected


@pytest.mark.parametrize(
    ("which", "text", "answer", "expected"),
    [
        ("last", "First 5, then 72.", "#### 72", 1.0),
        ("last", "72, no, 5", "#### 72", 0.0),
        ("last", "It is #### 72 after 3 days", "72", 1.0),
        ("last", "72 #### none", "72", 0.0),
        ("last", "It costs 18 dollars", "Janet has 9 * 2 = $<<9*2=18>>18\n#### 18", 1.0),
        ("last", "= -3", -3, 1.0),
        ("last", "0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("last", "50", "50%", 1.0),
        ("last", "7", None, None),
        ("last", "5 or 9/0", "5", 0.0),
        ("first", " 8\n9 - 4 = 5", "8", 1.0),
        ("boxed", r"5 \boxed{8} 9", "8", 1.0),
        ("boxed", r"\boxed{x = 8}", "8", 1.0),
        ("boxed", r"\boxed{7}, no, \boxed{\boxed{8}}", "8", 1.0),
        ("first", "<think>9?</think> 8", "8", 1.0),
        (r"Answer:(.*)", "4 Answer: it is 8, really", "8", 1.0),
        (r"<\d+>", "7 <8> 9", "8", 1.0),
    ],
)
def test_numeric_answers(which: str, text: Any, answer: Any, expected: float | None) -> None:
    function = NumericAnswer(which=which, use_math_verify=False)
    assert value(function, text, answer=answer) == expected


@pytest.mark.parametrize(
    ("tolerance", "text", "answer", "expected"),
    [
        (0.001, "0.3333", "1/3", 1.0),
        (0.0, "8", "8", 1.0),
        (0.01, "1009", "1000", 1.0),  # 1 % of 1000 is 10
        (0.01, "1011", "1000", 0.0),
        (0.0, "2.0000001", "2", 0.0),
    ],
)
def test_the_tolerance_is_relative_above_one(
    tolerance: float, text: str, answer: str, expected: float
) -> None:
    assert value(NumericAnswer(tolerance=tolerance), text, answer=answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{2\sqrt{2}}", 1.0),
        (r"\boxed{9^{9^{9^9}}}", 0.0),
        (r"\boxed{9**999999999}", 0.0),
        (r"\boxed{1000000!}", 0.0),
    ],
)
def test_expressions_are_compared_by_value(text: str, expected: float) -> None:
    assert value(NumericAnswer(which="boxed"), text, answer=r"\sqrt{8}") == expected


ENDLESS = r"\boxed{\binom{999999}{333333}}"


def test_a_response_that_keeps_math_verify_busy_is_given_up_and_stops_nothing() -> None:
    # one of three, as in a small batch, which a resumed run draws again
    texts = [r"\boxed{\sqrt{8}}", ENDLESS, r"\boxed{2\sqrt{2}}"]
    rewards = Rewards([NumericAnswer(which="boxed", timeout=2.0)])
    result = rewards.score(["p"] * 3, texts, [[1]] * 3, [{"answer": r"\sqrt{8}"}] * 3)
    assert result.scores.tolist() == [1.0, 0.0, 1.0]
    (failure,) = result.failures
    assert "1 of 3 responses could not be scored" in failure
    assert failure.endswith("response 1: no result after 2 s")


def test_a_right_answer_that_keeps_math_verify_busy_gives_no_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    score = OneByOne.score

    def counted(self: OneByOne, timeout: float, **texts: str) -> float | None:
        asked.append(texts["answer"])
        return score(self, timeout, **texts)

    monkeypatch.setattr(OneByOne, "score", counted)
    function = NumericAnswer(which="boxed", timeout=1.0)
    assert [value(function, r"\boxed{\pi}", answer=ENDLESS) for _ in range(3)] == [None] * 3
    assert asked == [r"\pi", asked[1]]  # it is tried once, beside the response and alone


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("last", "5\nso it is $2\\sqrt{2}$"),
        ("first", "it is $2\\sqrt{2}$\n5"),
        ("Answer: (.*)", "5\nAnswer: 2\\sqrt{2}"),
    ],
)
def test_expressions_are_found_where_numbers_would_be(which: str, text: str) -> None:
    assert value(NumericAnswer(which=which), text, answer=r"\sqrt{8}") == 1.0


def test_math_verify_can_be_asked_about_numbers_too() -> None:
    text = r"\boxed{\sqrt{4}}"
    for use, expected in (("auto", 0.0), (True, 1.0)):
        function = NumericAnswer(which="boxed", use_math_verify=use)
        assert value(function, text, answer="2") == expected


def test_a_missing_math_verify_is_no_matter_unless_it_is_demanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numeric_answer, "_has_math_verify", lambda: False)
    assert value(NumericAnswer(), "3", answer="3") == 1.0
    assert value(NumericAnswer(), "x", answer="x^2") is None
    with pytest.raises(ImportError, match=r"pip install 'lrlhf\[math\]'"):
        value(NumericAnswer(use_math_verify=True), "3", answer="3")
