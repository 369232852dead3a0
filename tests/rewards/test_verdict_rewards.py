"""Verdicts on pairs: their forms, read strictly, and what they are worth to a judge in training."""

from typing import Any

import pytest

from lrlhf.rewards import (
    ExactMatch,
    NumericAnswer,
    RewardError,
    RewardResult,
    Rewards,
    VerdictCorrect,
    VerdictFormat,
)
from lrlhf.rewards.judge.verdicts import FORMS, SWAPPED, verdict_form
from lrlhf.statistics.intervals import Outcomes

ANSWER = "<answer>Image 1 is better</answer>"
MALFORMED_ANSWERS = [
    "",
    "Image 1 is better",
    "<answer>Image 1 is better",
    "Image 1 is better</answer>",
    "<answer></answer>",
    "<answer>A</answer>",
    "<answer>1</answer>",
    "<answer>image 1 is better</answer>",
    "<answer>Image 1 is better.</answer>",
    "<answer>Image 3 is better</answer>",
    "<answer>Image 1 is worse</answer>",
    "<answer>Picture 1 is better</answer>",
    "<answer>Image 1 is better than Image 2</answer>",
    "<answer>Image 1 is better or Image 2 is better</answer>",
    f"{ANSWER}{ANSWER}",
    f"{ANSWER} I am sure.",
    f"I think that {ANSWER}",
    f"<think>The first.{ANSWER}",
    f"{ANSWER}<think>or not?</think>",
    f"<think>x</think>{ANSWER}<think>y</think>",
    "<answer>Both are equally good, Image 1 is better</answer>",
]


def scored(function: Any, texts: list[str], **columns: list[Any]) -> RewardResult:
    rows = [{name: values[row] for name, values in columns.items()} for row in range(len(texts))]
    rewards = Rewards([function], max_unscorable_fraction=1.0)
    prompts = [f"{row}?" for row in range(len(texts))]
    return rewards.score(prompts, texts, [[0]] * len(texts), rows)


def observe(
    function: VerdictCorrect, text: str, *, cut: bool = False, row: int = 0, **columns: Any
) -> Any:
    return function.observed(text, columns, truncated=cut, row=row)


def values(result: RewardResult) -> list[float | None]:
    return [None if value != value else value for value in result.scores.tolist()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shown", ["Response", "Image", "Video"])
@pytest.mark.parametrize("reasoning", ["", "Image 1 (9/10)\nVideo 2 (3/10)"])
def test_what_is_written_is_read_again(form: Any, shown: Any, reasoning: str) -> None:
    one = verdict_form(form)
    for verdict in ("A", "B", "tie"):
        reply = one.write(verdict, shown, reasoning)  # type: ignore[arg-type]
        assert one.read(reply) == verdict
        assert one.reasoning(reply) == ("" if form == "direct" else reasoning)
    assert {one.read(one.write(SWAPPED[gold], shown, "")) for gold in ("A", "B")} == {"A", "B"}


def test_verdicts_in_tags_are_read_strictly() -> None:
    read = verdict_form("answer").read
    assert read(f"<think>\n1: 9, 2: 3\n</think>\n{ANSWER}") == "A"
    assert read(" <answer> Video 2 is better </answer>\n") == "B"
    assert read("<answer>Both are equally good</answer>") == "tie"
    assert {text: read(text) for text in MALFORMED_ANSWERS} == dict.fromkeys(MALFORMED_ANSWERS)


def test_a_verdict_that_is_to_stand_alone_stands_alone() -> None:
    read = verdict_form("direct").read
    texts = ["Verdict: A", "\n**Verdict: A**\n", "<think>x\ny</think>\n\nVerdict: A"]
    assert [read(text) for text in texts] == ["A"] * 3
    assert [read(text) for text in ("I think.\nVerdict: A", "Verdict: A\nSure.")] == [None] * 2


def test_right_verdicts_count_and_malformed_ones_are_wrong() -> None:
    texts = ["Good.\nVerdict: A", "Verdict: B", "Verdict: tie", "A", "Verdict: A"]
    result = scored(VerdictCorrect(), texts, gold=["A", "A", "tie", "A", None])
    assert values(result) == [1.0, 0.0, 1.0, 0.0, None]
    assert result.extras["verdict"] == ["A", "B", "tie", None, "A"]
    assert result.extras["correct"] == [True, False, True, False, None]
    assert result.extras["reasoning"] == ["Good.", "", "", "", ""]
    result = scored("verdict_format", texts)
    assert values(result) == [1.0, 1.0, 1.0, 0.0, 1.0]
    other = scored(VerdictCorrect("answer", gold_column="right"), [ANSWER, *texts[:1]], right="AA")
    assert values(other) == [1.0, 0.0]


def test_reasoning_may_have_to_stand_before_the_verdict() -> None:
    texts = [
        ANSWER,
        f"<think> </think>{ANSWER}",
        f"<think>9, 6</think>{ANSWER}",
        "<think>9</think>",
    ]
    assert values(scored(VerdictFormat("answer"), texts)) == [1.0, 1.0, 1.0, 0.0]
    assert values(scored(VerdictFormat("answer", reasoning=True), texts)) == [0.0, 0.0, 1.0, 0.0]


def test_a_verdict_that_was_cut_off_is_none() -> None:
    texts = ["Good.\nVerdict: A", "Verdict: A"]
    told: dict[str, list[Any]] = {"gold": ["A", "A"], "truncated": [True, False]}
    result = scored(VerdictCorrect(), texts, **told)
    assert values(result) == [0.0, 1.0]
    assert result.extras["verdict"] == [None, "A"]
    assert values(scored(VerdictFormat(), texts, **told)) == [0.0, 1.0]
    function = VerdictCorrect()
    observed = [observe(function, text, cut=text != "Verdict: A", gold="A") for text in texts]
    shares = function.shares(observed)
    assert shares["accuracy"].outcomes == [False, True]
    assert shares["malformed"].outcomes == [True, False]


def test_without_pairs_each_row_is_independent_of_the_others() -> None:
    function = VerdictCorrect()
    observed = [observe(function, "Verdict: A", row=row, gold="A") for row in (4, 4, 7)]
    observed.append(observe(function, "Verdict: A", row=7, gold="A", pair=7))
    clusters = function.shares(observed)["accuracy"].clusters
    assert clusters[0] == clusters[1]
    assert len({*clusters}) == 3


@pytest.mark.parametrize("gold", ["a", "C", "", 1, ["A"]])
def test_a_right_verdict_that_is_none_stops_the_run(gold: Any) -> None:
    with pytest.raises(RewardError, match=r"'gold' holds .*it must be A, B, tie, or null"):
        scored(VerdictCorrect(), ["Verdict: A"], gold=[gold])


def test_an_evaluation_tells_how_a_judge_goes_wrong() -> None:
    function = VerdictCorrect("direct")
    said = [
        # of each pair its right verdict as given, and what is said in either order
        ("p0", "A", "A", "B"),  # right both times
        ("p1", "B", "A", "A"),  # the first one, wherever it stands: wrong, then right
        ("p2", "A", "A", "?"),  # right, then malformed
        ("p3", "tie", "tie", "tie"),
    ]
    observed = []
    for pair, gold, given, exchanged in said:
        for text, turned in ((given, False), (exchanged, True)):
            right = SWAPPED[gold] if turned else gold  # type: ignore[index]
            columns = {"pair": pair, "exchanged": turned, "gold": right}
            observed.append(observe(function, f"Verdict: {text}", **columns))
    observed.append(observe(function, "Verdict: A", pair="p4", gold=None))
    shares = {
        name: (sum(found.outcomes), len(found.outcomes))
        for name, found in function.shares(observed).items()
    }
    assert shares == {
        "accuracy": (6, 8),
        "malformed": (1, 9),
        # better one first: p0 as given, p1 exchanged, p2 as given
        "accuracy_first": (3, 3),
        "accuracy_second": (1, 3),
        # p0 and p3; p1 names another candidate, p2 has no second verdict
        "swap_consistency": (2, 4),
    }
    assert set(shares) == set(function.share_names)
    assert function.shares(observed[::-1])["swap_consistency"].outcomes.count(True) == 2
    assert function.shares([]) == {}
    alone = function.shares([observe(function, "Verdict: A", gold="A", pair="p")])
    assert alone == {
        "accuracy": Outcomes([True], ["p"]),
        "accuracy_first": Outcomes([True], ["p"]),
        "malformed": Outcomes([False], ["p"]),
    }


def test_an_answer_in_a_thought_is_none_and_neither_is_a_verdict_in_an_open_one() -> None:
    open_thought = "<think>\nThe first is longer. A guess would be 42\nVerdict: B"
    for form in ("line", "direct", "answer"):
        for text in (open_thought, f"<think>x</think>y\n{open_thought}", f"{ANSWER}<think>"):
            assert FORMS[form].read(text) is None
    assert FORMS["line"].read(f"{open_thought}</think>\nVerdict: A") == "A"
    number, match = NumericAnswer(), ExactMatch()
    boxed = NumericAnswer(which="boxed")
    pattern = NumericAnswer(which=r"be (\d+)")
    assert number.answer_of(open_thought) is None
    assert boxed.answer_of("<think>\\boxed{42}") is None
    assert pattern.answer_of(open_thought) is None
    assert pattern.answer_of(f"{open_thought}</think>") == "42"  # it may look at thoughts
    assert number.answer_of("The guess 41 </think>none") == "none"
    assert number.answer_of("<think>41</think>It is 42.") == "42"
    assert number.answer_of("It is 42.<think>or 43") == "42"
    assert match(completions=["<think>no</think> Yes.", "<think>yes"], answer=["yes"] * 2) == [
        1.0,
        0.0,
    ]
