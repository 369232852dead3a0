from typing import Any

import pytest

from lrlhf.rewards import ReasoningGymScore, RewardError, Rewards
from lrlhf.rewards.functions import task_score, task_scorers

SUM = {"question": "2 + 3 =", "answer": "5", "metadata": {"source_dataset": "chain_sum"}}
GCD = {"question": "gcd of 4 and 6?", "answer": "2", "metadata": {"source_dataset": "gcd"}}


def scores(function: ReasoningGymScore, *rows: tuple[str, dict[str, Any]]) -> Any:
    rewards = Rewards([function], max_unscorable_fraction=1.0)
    texts = [text for text, _ in rows]
    return rewards.score(texts, texts, [[1]] * len(rows), [row for _, row in rows])


def test_each_response_is_scored_by_its_own_task() -> None:
    result = scores(ReasoningGymScore(), (" 5\n", SUM), ("2", GCD), ("6", SUM), ("3", GCD))
    assert result.scores[:2].tolist() == [1.0, 1.0]
    assert (result.scores[2:] < 1).all()
    assert result.metrics["reasoning_gym/unreadable"] == 0.0


def test_only_full_marks_count_when_strict() -> None:
    rows = (("the answer is 5, I think", SUM), ("5", SUM))  # the first gets partial credit
    assert 0 < scores(ReasoningGymScore(), *rows).scores[0] < 1
    assert scores(ReasoningGymScore(strict=True), *rows).scores.tolist() == [0.0, 1.0]


def test_a_response_that_the_scorer_cannot_read_gets_nothing_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strict_number(answer: str | None, entry: dict[str, Any]) -> float:
        assert answer is not None
        return float(int(answer) == int(entry["answer"]))

    class InThisProcess:
        def score(self, timeout: float, **arguments: Any) -> float | None:
            assert timeout == 10.0
            lists = {name: [value] for name, value in arguments.items()}
            return task_scorers.score(**lists)[0]

    monkeypatch.setattr(task_scorers.reasoning_gym, "get_score_answer_fn", lambda _: strict_number)
    monkeypatch.setattr(task_score, "shared", lambda _: InThisProcess())
    monkeypatch.setattr(task_score, "_load", lambda: None)
    result = scores(ReasoningGymScore(), ("5", SUM), ("five", SUM), ("6", SUM), ("V", SUM))
    assert result.scores.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result.metrics["reasoning_gym/unreadable"] == 0.5
    assert result.failures == []


def test_a_response_that_keeps_the_scorer_busy_is_given_up() -> None:
    row = {"question": "make 3", "answer": "1 + 2"}
    row |= {"metadata": {"source_dataset": "countdown", "numbers": [1, 2], "target": 3}}
    result = scores(
        ReasoningGymScore(strict=True, timeout=2), ("1 + 2", row), ("9**9**9**9", row), ("2+1", row)
    )
    assert result.scores.tolist() == [1.0, 0.0, 1.0]
    assert result.metrics["reasoning_gym/unreadable"] == pytest.approx(1 / 3)
    assert "1 of 3 responses could not be scored" in result.failures[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "5", "metadata": {}}, "no column 'question'"),
        (SUM | {"metadata": {"task": "x"}}, "without 'source_dataset'"),
        (SUM | {"metadata": {"source_dataset": "chain_sums"}}, "mean 'chain_sum'"),
    ],
)
def test_rows_that_are_no_tasks_are_explained(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        scores(ReasoningGymScore(), ("5", row))
