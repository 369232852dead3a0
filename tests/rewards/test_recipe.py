from collections.abc import Sequence
from typing import Any

import pytest

from lrlhf.rewards import RewardError, RewardResult, Rewards

RECIPE = {"math": {"right": 1.0, "short": 0.5}, "chat": {"kind": 2.0}}


class Recorder:
    def __init__(self, value: float) -> None:
        self.value = value
        self.seen: list[list[str]] = []

    def __call__(self, completions: Sequence[str], log_extra: Any) -> list[float]:
        self.seen.append(list(completions))
        log_extra(f"is {self.value}", list(completions))
        return [self.value] * len(completions)


def score(rewards: Rewards, labels: Sequence[object], column: str = "label") -> RewardResult:
    texts = [f"c{row}" for row in range(len(labels))]
    return rewards.score(texts, texts, [[1]] * len(labels), [{column: label} for label in labels])


def functions() -> dict[str, Any]:
    return {"right": Recorder(1.0), "short": Recorder(3.0), "kind": Recorder(5.0)}


def test_each_response_is_scored_by_the_recipe_of_its_label() -> None:
    asked = functions()
    result = score(Rewards(asked, recipe=RECIPE), ["math", "chat", "math"])
    # math: 1·1 + 0.5·3; chat: 2·5
    assert result.scores.tolist() == [2.5, 10.0, 2.5]
    assert result.per_function.isnan().tolist() == [
        [False, False, True], [True, True, False], [False, False, True]
    ]  # fmt: skip
    assert asked["right"].seen == [["c0", "c2"]]
    assert asked["kind"].seen == [["c1"]]
    assert result.extras["is 1.0"] == ["c0", None, "c2"]
    assert result.metrics["kind/unscored_fraction"] == 0.0


def test_what_a_function_sees_and_says_belongs_to_its_rows() -> None:
    def right(completions: Sequence[str], answer: Sequence[str], log_extra: Any) -> list[Any]:
        log_extra("answer", answer)
        return [1.0, "no number"][: len(completions)]

    def kind(completions: Sequence[str], answer: Sequence[str], log_extra: Any) -> list[float]:
        log_extra("answer", answer)
        return [2.0] * len(completions)

    recipe = {"math": {"right": 1.0}, "chat": {"kind": 1.0}}
    rewards = Rewards({"right": right, "kind": kind}, recipe=recipe, max_unscorable_fraction=1.0)
    texts = ["c0", "c1", "c2"]
    rows = zip(["chat", "math", "math"], "xyz", strict=True)
    columns = [{"label": label, "answer": answer} for label, answer in rows]
    result = rewards.score(texts, texts, [[1]] * 3, columns)
    assert result.extras == {"answer": [None, "y", "z"], "kind/answer": ["x", None, None]}
    assert result.metrics["right/unscored_fraction"] == 0.5
    (failure,) = result.failures
    assert "position 2" in failure


def test_weights_may_be_named_and_0_only_logs() -> None:
    weights = {"kind": 2.0, "broken": 0.0, "right": 1.0}
    rewards = Rewards(
        {"right": Recorder(1.0), "broken": lambda completions: ["?"] * len(completions)}
        | {"kind": Recorder(5.0)},
        weights=weights,
    )
    assert score(rewards, ["any"]).scores.tolist() == [1.0 + 2.0 * 5.0]
    del weights["broken"]
    with pytest.raises(ValueError, match="weights lacks 'short'"):
        Rewards(functions(), weights=weights)


def test_a_label_may_be_a_number() -> None:
    rewards = Rewards(functions(), recipe={"1": RECIPE["math"], "2": RECIPE["chat"]})
    assert score(rewards, [2, 1]).scores.tolist() == [10.0, 2.5]


def test_weights_and_a_recipe_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        Rewards(functions(), weights=[1.0] * 3, recipe=RECIPE)


def test_an_unknown_label_is_named_with_its_row_and_the_nearest_one() -> None:
    with pytest.raises(RewardError, match=r"response 1 has the label 'maths'.*mean 'math'"):
        score(Rewards(functions(), recipe=RECIPE), ["chat", "maths"])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({}, "recipe is empty"),
        ({"math": {"rigth": 1.0}}, r"recipe\['math'\].*'rigth'; did you mean 'right'"),
        ({"math": {"right": 1.0, "short": 1.0}}, "no label uses 'kind'"),
    ],
)
def test_wrong_recipes_are_explained(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rewards(functions(), recipe=recipe)
