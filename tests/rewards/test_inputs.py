"""Rewards that see the values of other rewards."""

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lrlhf.rewards import (
    IsolatedReward,
    RegexFormat,
    RewardError,
    RewardFunction,
    RewardResult,
    Rewards,
)

Values = Mapping[str, Sequence[float | None]]


def score(asked: Rewards, count: int = 3, **columns: Sequence[Any]) -> RewardResult:
    return asked.score(
        [f"p{row}" for row in range(count)],
        [f"c{row}" for row in range(count)],
        [[row] for row in range(count)],
        [{name: values[row] for name, values in columns.items()} for row in range(count)],
    )


def row_numbers(completions: Sequence[str]) -> list[float]:
    return [float(text[1:]) for text in completions]


async def tens(completions: Sequence[str]) -> list[float]:
    await asyncio.sleep(0.05)
    return [10.0] * len(completions)


def product(rewards: dict[str, list[float]]) -> list[float]:
    return [a * b for a, b in zip(rewards["row_numbers"], rewards["tens"], strict=True)]


async def plus_product(rewards: dict[str, list[float]], bonus: Sequence[float]) -> list[float]:
    await asyncio.sleep(0)
    return [value + extra for value, extra in zip(rewards["product"], bonus, strict=True)]


def test_a_function_sees_the_values_of_those_before_it_and_the_columns() -> None:
    rewards = Rewards([row_numbers, tens, product, plus_product], weights=[0, 0, 1, 1])
    result = score(rewards, bonus=[0.5, 0.25, 0.125])
    assert result.names == ("row_numbers", "tens", "product", "plus_product")
    assert result.per_function.tolist() == [
        [0, 10, 0, 0.5], [1, 10, 10, 10.25], [2, 10, 20, 20.125]
    ]  # fmt: skip
    # only what has a weight counts
    assert result.scores.tolist() == [0.5, 20.25, 40.125]
    assert list(result.seconds) == list(result.names)


def test_inputs_choose_by_name_in_any_order() -> None:
    seen = {}

    def first(rewards: Values) -> list[float]:
        seen["first"] = dict(rewards)
        return [float(value or 0) + 1 for value in rewards["row_numbers"]]

    class Second(RewardFunction):
        def __call__(self, *, rewards: Values, **columns: Any) -> list[float]:
            seen["second"] = dict(rewards)
            return [2 * float(value or 0) for value in rewards["first"]]

    def everything(**given: Any) -> list[float]:
        seen["everything"] = given.get("rewards")
        return [0.0] * len(given["completions"])

    chosen = {"first": ["row_numbers"], "second": ["first"]}
    functions = {"second": Second(), "first": first, "all": everything, "row_numbers": row_numbers}
    result = score(Rewards(functions, inputs=chosen), count=2)
    assert result.per_function.tolist() == [[2, 1, 0, 0], [4, 2, 0, 1]]
    # who takes whatever comes is given it only where that was chosen
    assert seen == {
        "first": {"row_numbers": [0, 1]}, "second": {"first": [1, 2]}, "everything": None
    }  # fmt: skip
    score(Rewards(functions, inputs={**chosen, "all": ["second"]}), count=2)
    assert seen["everything"] == {"second": [2, 4]}


def test_a_column_of_that_name_is_for_functions_that_do_not_ask_for_it() -> None:
    def of_column(**columns: Any) -> list[float]:
        return list(columns["rewards"])

    def of_others(rewards: Values) -> Any:
        return rewards["of_column"]

    assert score(Rewards([of_column]), rewards=[7.0, 8.0, 9.0]).scores.tolist() == [7, 8, 9]
    # to whom else it would be the one or the other
    chosen = {"of_column": ["row_numbers"]}
    for asked in (
        Rewards([of_column, of_others]),
        Rewards([optional_rewards]),
        Rewards([of_column, row_numbers], inputs=chosen),
    ):
        with pytest.raises(RewardError, match=r"takes 'rewards'.* rename the column"):
            score(asked, rewards=[7.0, 8.0, 9.0])


@pytest.mark.parametrize("breaks", [True, False])
def test_values_that_are_missing_are_none(breaks: bool) -> None:
    def partly(completions: Sequence[str]) -> list[float | None]:
        if breaks:
            raise RuntimeError(f"down for {len(completions)}")
        return [1.0, None, float("inf")]

    def known(rewards: Values) -> list[float]:
        return [float(value is not None) for value in rewards["partly"]]

    result = score(Rewards([partly, known], weights=[0, 1]))
    assert result.scores.tolist() == [0.0 if breaks else 1.0, 0.0, 0.0]
    assert len(result.failures) == 1


def test_what_depends_on_a_broken_function_may_break_itself_and_both_are_told() -> None:
    def down(completions: Sequence[str]) -> list[float]:
        raise RuntimeError(f"no answer for {len(completions)}")

    def doubled(rewards: Values) -> list[float]:
        return [2 * value for value in rewards["down"]]  # type: ignore[operator]

    result = score(Rewards([row_numbers, down, doubled], optional=["down", "doubled"]))
    assert result.scores.tolist() == [0, 1, 2]
    assert [failure.partition(":")[0] for failure in result.failures] == ["down", "doubled"]


def test_labels_decide_who_is_asked_and_what_is_seen() -> None:
    seen: list[Any] = []

    def gated(rewards: Values, completions: Sequence[str]) -> list[float]:
        seen.append((list(completions), dict(rewards)))
        return [float(value if value is not None else -1) for value in rewards["row_numbers"]]

    recipe = {
        "math": {"row_numbers": 0.0, "gated": 2.0},
        "code": {"tens": 1.0, "gated": 1.0},
        "chat": {"row_numbers": 3.0},
    }
    rewards = Rewards([row_numbers, tens, gated], recipe=recipe)
    result = score(rewards, count=4, label=["math", "code", "chat", "math"])
    # math: twice its own row's number; code: 10 - 1, as its row was not asked for a number
    assert result.scores.tolist() == [0, 9, 6, 6]
    assert seen == [(["c0", "c1", "c3"], {"row_numbers": [0, None, 3], "tens": [None, 10, None]})]


def test_functions_that_wait_for_none_run_at_once_and_those_that_do_after_them() -> None:
    together = threading.Barrier(2, timeout=20)
    order: list[str] = []

    def one(completions: Sequence[str]) -> list[float]:
        together.wait()
        time.sleep(0.05)
        order.append("one")
        return [1.0] * len(completions)

    def other(completions: Sequence[str]) -> list[float]:
        together.wait()
        return [1.0] * len(completions)

    def last(rewards: Values, completions: Sequence[str]) -> list[float]:
        order.append("last")
        return [float(len(rewards))] * len(completions)

    result = score(Rewards([one, other, last]))
    assert not result.failures
    assert result.scores.tolist() == [4, 4, 4]
    assert order == ["one", "last"]


def test_what_a_late_function_logs_is_dropped_before_others_run() -> None:
    done, returned = threading.Event(), threading.Event()

    def late(completions: Sequence[str], log_metric: Any) -> list[float]:
        done.wait(20)
        log_metric("late", 1.0)
        returned.set()
        return [1.0] * len(completions)

    def after(rewards: Values, completions: Sequence[str]) -> list[float]:
        done.set()
        returned.wait(20)
        return [0.0 if rewards["late"][0] is None else 1.0] * len(completions)

    result = score(Rewards([late, after], optional=["late"], timeout=0.5))
    assert "late" not in result.metrics
    assert result.scores.tolist() == [0, 0, 0]


def test_other_processes_get_the_values_of_their_rows() -> None:
    isolated = IsolatedReward("tests.rewards.isolated_functions.doubled_values", workers=2)
    rewards = Rewards(
        {"numbers": row_numbers, "isolated": isolated}, inputs={"isolated": ["numbers"]}
    )
    try:
        assert score(rewards, count=5).per_function[:, 1].tolist() == [0, 2, 4, 6, 8]
    finally:
        rewards.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_copies_see_the_same(copied: Any) -> None:
    rewards = copied(Rewards([row_numbers, tens, product]))
    assert score(rewards).scores.tolist() == [10, 21, 32]
    assert score(rewards.with_own_failures()).scores.tolist() == [10, 21, 32]


def test_a_name_that_is_not_there_stops_the_run() -> None:
    def misspelt(rewards: Values) -> Any:
        return rewards["row_number"]

    with pytest.raises(
        RewardError,
        match=r"'misspelt': it reads the values of 'row_number'; did you mean 'row_numbers'\?,"
        r" and has those of row_numbers, tens: list that function before it",
    ):
        score(Rewards([row_numbers, tens, misspelt]))


def optional_rewards(completions: Sequence[str], rewards: Values | None = None) -> list[float]:
    return [0.0 if rewards is None else float(len(rewards))] * len(completions)


def test_an_argument_with_a_default_may_be_left_out() -> None:
    assert score(Rewards([optional_rewards])).scores.tolist() == [0, 0, 0]
    assert score(Rewards([tens, optional_rewards])).scores.tolist() == [11, 11, 11]


@pytest.mark.parametrize(
    ("functions", "inputs", "message"),
    [
        ([product], {}, "'product' takes 'rewards', the values of the functions before it, and it"),
        ([row_numbers, product], {"produkt": []}, "inputs: there is no .*mean 'product'"),
        ([row_numbers, product], {"product": ["rows"]}, r"inputs\['product'\]: there is no .*rows"),
        ([tens, product, row_numbers], {"row_numbers": ["product"]}, "has no argument 'rewards'"),
        # classes take columns only to leave them alone
        ([tens, RegexFormat(".")], {"regex_format": ["tens"]}, "has no argument 'rewards'"),
        ([tens, product], {"product": ["product"]}, "in a circle: 'product' -> 'product'; none"),
        (
            [tens, product, plus_product],
            {"product": ["plus_product"]},
            r"in a circle: '(plus_)?product' -> '(plus_)?product' -> '(plus_)?product'; none of",
        ),
    ],
)
def test_inputs_that_lead_nowhere_are_explained(
    functions: list[Any], inputs: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Rewards(functions, inputs=inputs)
    assert "\n" not in str(caught.value)
