from collections.abc import Sequence

import pytest
from openai_agent import calculated, solve

from tests.environments.agents.policy import play


@pytest.mark.parametrize(
    ("turns", "told", "reward"),
    [
        (["calc: 45 + 31 * 7", "answer: 262"], ["= 262"], 1.0),
        (["answer: 263"], [], 0.0),
        (["hm", "calc: 1 ** 9", "calc: 2 - 3"], ["error", "error"], 0.0),
    ],
)
def test_the_agent_works_with_its_calculator(
    turns: Sequence[str], told: Sequence[str], reward: float
) -> None:
    script = iter(turns)
    asked, end, paid = play(solve, lambda _: next(script), question="45 + 31 * 7", answer=262)
    assert asked[0].messages[-1]["content"] == "question: 45 + 31 * 7"
    assert [one.messages[-1]["content"] for one in asked[1:]] == told
    assert (end.finish_reason, paid) == ("stop", reward)


def test_numbers_that_python_does_not_read_are_an_error() -> None:
    assert calculated("calc: 007 + 1") == "error"
