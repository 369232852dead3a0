"""Episodes that fail where nothing but a teacher says what is good."""

import logging

import pytest

from lrlhf.rewards import RewardError
from lrlhf.rewards.no_rewards import NoRewards


def test_failed_episodes_have_no_score_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewards = NoRewards()
    for _ in range(2):
        with caplog.at_level(logging.ERROR):
            result = rewards.score(["p"] * 10, failed={3: "the tool is down"})
        assert result.scores.isnan().nonzero().tolist() == [[3]]
        (failure,) = result.failures
        assert failure.startswith("environment: ")
        assert "the tool is down" in failure
    assert caplog.text.count("the tool is down") == 1


def test_too_many_failed_episodes_stop_the_run_but_for_a_few_responses_alone() -> None:
    failed = {3: "the tool is down", 7: "so is this one"}
    with pytest.raises(RewardError, match=r"2 of 10 episodes failed \(allowed: 10%\).*is down"):
        NoRewards().score(["p"] * 10, failed=failed)
    alone = NoRewards().score(["p"] * 10, failed=failed, limited=False)
    assert alone.scores.isnan().sum() == 2
