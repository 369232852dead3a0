"""Episodes that fail where nothing but a teacher says what is good."""

import logging

import pytest

from lrlhf.rewards import RewardError
from lrlhf.rewards.rewards import NoRewards


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


def score(rewards: NoRewards, failed: int, count: int, **options: bool) -> None:
    rewards.score(["p"] * count, failed=dict.fromkeys(range(failed), "it is down"), **options)


def test_single_accidents_in_small_batches_do_not_stop_the_run() -> None:
    rewards = NoRewards()
    for _ in range(100):
        score(rewards, 1, 4)
    alone = NoRewards()
    for _ in range(50):
        score(alone, 0, 1)
        score(alone, 1, 1)


def test_a_batch_whose_episodes_all_failed_stops_the_run() -> None:
    rewards = NoRewards()
    for _ in range(100):
        score(rewards, 0, 4)
    with pytest.raises(RewardError, match=r"4 of the last 4 episodes failed.*it is down"):
        score(rewards, 4, 4)


def test_more_than_half_of_the_last_responses_stop_the_run_as_soon_as_20_are_known() -> None:
    rewards = NoRewards()
    for _ in range(9):
        score(rewards, 2, 2)
    with pytest.raises(RewardError, match="20 of the last 20 episodes failed"):
        score(rewards, 2, 2)
    # of the last 100 only: after 200 good ones 17 batches of 3 failed ones are 51
    later = NoRewards()
    score(later, 0, 200)
    for _ in range(16):
        score(later, 3, 3)
    with pytest.raises(RewardError, match="51 of the last 100 episodes failed"):
        score(later, 3, 3)
    # and of a larger batch all are counted
    with pytest.raises(RewardError, match="101 of the last 200 episodes failed"):
        score(NoRewards(), 101, 200)


def test_a_few_responses_alone_do_not_count() -> None:
    rewards = NoRewards()
    for _ in range(20):
        score(rewards, 10, 10, limited=False)
    score(rewards, 3, 4)
    for _ in range(6):
        score(rewards, 0, 3)
    score(rewards, 3, 3)
