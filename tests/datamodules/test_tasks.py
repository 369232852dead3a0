import pytest
import reasoning_gym

from lrlhf.datamodules import ReasoningGym

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_a_task_gives_rows_that_its_own_scorer_accepts() -> None:
    rows = list(ReasoningGym("chain_sum", size=5, seed=3, options=SUMS).rows())
    scorer = reasoning_gym.create_dataset("chain_sum", size=5, seed=3, **SUMS)
    assert len(rows) == 5
    for row in rows:
        assert isinstance(row, dict)
        left, sign, right = row["metadata"]["expression"].split()
        total = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert scorer.score_answer(str(total), row) == 1.0
        assert row["prompt"] == row["question"]
        assert row["task"] == "chain_sum"


def test_an_unknown_task_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="no task 'chainsum'; did you mean 'chain_sum'"):
        list(ReasoningGym("chainsum").rows())


def test_an_option_that_a_task_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"'chain_sum' refuses .*'digits': 3"):
        list(ReasoningGym("chain_sum", options={"digits": 3}).rows())
