"""A reward that says the same of every response is named, once."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO
from lrlhf.modules.metrics.constant_rewards import ConstantRewards
from lrlhf.rewards import RewardResult, Rewards
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import fit


def _result(weights: Sequence[float] = (1.0, 1.0, 0.0), *, count: int = 16) -> RewardResult:
    """Of three functions: always 0, different for each response, and always 2."""
    values = torch.zeros(count, 3)
    values[:, 1] = torch.arange(count)
    values[:, 2] = 2.0
    return RewardResult(
        scores=values[:, 1],
        per_function=values,
        names=("polite", "length", "logged"),
        metrics={},
        extras={},
        failures=[],
        weights=torch.tensor([list(weights)]).expand(count, 3),
    )


def test_a_function_of_one_value_is_named_once_and_those_of_no_weight_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = ConstantRewards()
    with caplog.at_level(logging.WARNING, "lrlhf"):
        for _ in range(4):
            watch.observe(_result(), chats=False)
        assert caplog.messages == []  # 64 responses, of four iterations
        for _ in range(5):
            watch.observe(_result(), chats=False)
    (message,) = caplog.messages
    assert "'polite' has returned 0 for each of the first 80 responses" in message
    assert "`lrlhf reward RUN`" in message
    assert "messages" not in message


def test_a_few_responses_do_not_tell_and_missing_values_do_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = ConstantRewards()
    result = _result(count=8)
    result.per_function[0, 0] = math.nan
    with caplog.at_level(logging.WARNING, "lrlhf"):
        for _ in range(8):
            watch.observe(result, chats=False)
    assert caplog.messages == []  # 7 values in each of 8 iterations: 56


def test_a_function_that_varied_once_is_not_constant_and_chats_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    varied, watch = _result(), ConstantRewards()
    varied.per_function[0, 0] = 1.0
    with caplog.at_level(logging.WARNING, "lrlhf"):
        for result in (varied, *[_result()] * 5):
            watch.observe(result, chats=True)
        assert caplog.messages == []
        watch = ConstantRewards()
        for _ in range(8):
            watch.observe(_result(), chats=True)
    (message,) = caplog.messages
    assert "completion_text" in message


def says_thanks(completions: Sequence[Any]) -> list[float]:
    return [float("thanks" in completion) for completion in completions]


def test_a_run_on_chats_is_told_that_completions_are_messages(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = RLOO(
        model_folder,
        Rewards([says_thanks]),
        num_generations=4,
        sampling=Sampling(max_new_tokens=2),
        seed=1,
    )
    rows = [{"prompt": f"say {number}"} for number in range(8)]
    data = PromptDataModule(train=rows, batch_size=4, as_chat=True)
    with caplog.at_level(logging.WARNING, "lrlhf.modules.metrics.constant_rewards"):
        fit(module, Path("unused"), tmp_path, steps=5, data=data)
    (message,) = [one for one in caplog.messages if "says_thanks" in one]
    assert "returned 0 for each of the first 80 responses" in message
    assert "completions are lists of messages" in message
    assert "lrlhf.rewards.completion_text" in message
