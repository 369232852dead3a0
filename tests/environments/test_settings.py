"""The options of episodes."""

import sys
from typing import Any

import pytest

from lrlhf.environments import Episodes
from lrlhf.environments.settings import resolve


def solve() -> float:
    return 1.0


@pytest.mark.parametrize(
    "beside", [{"environment": dict}, {"options": {"a": 1}}, {"tools": [len]}], ids=str
)
def test_an_agent_stands_alone(beside: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="an agent beside environment, options or tools"):
        Episodes(agent=solve, **beside)


def test_something_must_be_played_with() -> None:
    with pytest.raises(ValueError, match="neither an environment nor tools nor an agent"):
        Episodes()


def test_an_agent_is_a_function_or_its_path() -> None:
    assert resolve(Episodes(agent=solve)).agent is solve
    assert resolve(Episodes(agent="os.path.join")).agent is sys.modules["os"].path.join
    with pytest.raises(ValueError, match=r"agent 'os\.nothing' cannot be imported"):
        resolve(Episodes(agent="os.nothing"))
