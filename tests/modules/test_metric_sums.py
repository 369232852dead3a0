"""Means, maxima, deviations and percentiles, weighted by what was counted; running scores."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lrlhf.datamodules import PromptDataModule
from lrlhf.functional import POLICY_LOSSES
from lrlhf.modules import RLOO, Critic
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import (
    ConstantRewards,
    FirstResponses,
    explained_variance,
    measure_critic,
    measure_kl,
    measure_mismatch,
    measure_rollout,
    measure_update,
    measure_values,
)
from lrlhf.modules.policy.experience import RunningScores
from lrlhf.rewards import RewardResult, Rewards
from lrlhf.rollout import Sampling
from lrlhf.run import Collectives
from lrlhf.types import Experience, Rollout
from tests.modules.policy_runs import fit, one_process
from tests.modules.test_policy_objective import random_experience

NAN = float("nan")


def reduced(metrics: MetricSums, ranks: Collectives | None = None) -> dict[str, float]:
    return metrics.reduce(ranks or one_process(), torch.device("cpu"))


def test_means_are_weighted_by_their_counts_and_maxima_show_what_is_no_number() -> None:
    metrics = MetricSums()
    metrics.add("mean", 6.0, 3.0)
    metrics.add("mean", torch.tensor(2.0), torch.tensor(1))
    metrics.add("nothing", 0.0, 0.0)
    metrics.add_values("values", torch.tensor([1.0, NAN, 3.0]))
    metrics.add_moments("std", torch.tensor([1.0, 4.0]))
    metrics.add_moments("std", torch.tensor([10.0]))
    for value in (3.0, torch.tensor(5.0)):
        metrics.maximum("max", value)
    for value in (1.0, torch.tensor(NAN), 2.0):
        metrics.maximum("broken", value)
    values = reduced(metrics)
    # (6 + 2) / (3 + 1); a mean of nothing is left out
    assert values["mean"] == values["values"] == 2.0
    assert values["std"] == pytest.approx(statistics.stdev([1.0, 4.0, 10.0]))
    assert values["max"] == 5.0
    assert math.isnan(values["broken"])
    assert "nothing" not in values


def test_sums_and_maxima_are_those_of_all_ranks_in_float64() -> None:
    metrics = MetricSums()
    metrics.add("mean", 2.0**24 + 1, 1.0)  # which float32 rounds
    metrics.add("tensor", torch.tensor(2.0**24 + 1, dtype=torch.float64), 1.0)
    metrics.maximum("max", 3.0)
    metrics.minimum("min", 3.0)
    assert reduced(metrics)["tensor"] == 2**24 + 1

    class OfTwo(Collectives):
        """Another rank has added 3 of one more, and had 5 at the most and at the least."""

        def sum(self, value: torch.Tensor) -> torch.Tensor:
            return value + torch.tensor([3.0, 1.0])

        def max(self, value: torch.Tensor) -> torch.Tensor:
            return value.maximum(torch.tensor([5.0, -5.0], dtype=value.dtype))

    values = reduced(metrics, OfTwo(one_process().trainer))
    assert values["mean"] == (2**24 + 1 + 3) / 2
    assert (values["max"], values["min"]) == (5.0, 3.0)


def test_scores_lengths_and_returns_by_hand() -> None:
    # two prompts of two responses, the last of which nothing could score
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
    rollout = Rollout(
        input_ids=torch.zeros(4, 4, dtype=torch.long),
        attention_mask=torch.tensor(
            [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
        ).bool(),
        response_mask=mask,
        sampling_logprobs=torch.zeros(4, 4),
        group_ids=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([True, False, False, False]),
    )
    scores = torch.tensor([1.0, 3.0, 8.0, NAN])
    result = RewardResult(
        scores=scores,
        per_function=scores[:, None],
        names=("r",),
        metrics={},
        extras={},
        failures=[],
    )
    metrics = MetricSums()
    informative = torch.tensor([True, False, True, True])
    measure_rollout(rollout, result, metrics, num_generations=2, informative=informative)
    values = reduced(metrics)
    assert values["rollout/score_std"] == pytest.approx(math.sqrt(2))  # of 1 and 3 alone
    # of 1, 3 and 8: gaps -3, -1, 4
    assert values["rollout/score_std_all"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2))
    assert values["rollout/total_length"] == (4 + 3 + 3 + 2) / 4
    assert values["rollout/response_length"] == (2 + 1 + 2 + 1) / 4
    assert values["rollout/terminated_length"] == (1 + 2 + 1) / 3
    assert values["rollout/zero_variance_groups"] == 0.25

    experience = Experience(
        **{one.name: getattr(rollout, one.name) for one in fields(rollout)},
        advantages=torch.zeros(4, 4),
        loss_mask=mask,
        counted=torch.tensor([True, True, False, True]),
        scores=torch.tensor([1.0, 3.0, 8.0, 0.0]),
        values=torch.zeros(4, 4),
        returns=torch.tensor([[9, 9, 1, 2], [9, 9, 6, 9], [9, 4, 4, 9], [9, 7, 9, 9]]).float(),
    )
    # nats per token of 6 tokens, and per response
    apart = replace(experience, ref_logprobs=-0.5 * mask)
    metrics = MetricSums()
    measure_kl(apart, metrics)
    assert reduced(metrics) == pytest.approx({"kl/reference": 0.5, "kl/sequence": 0.5 * 6 / 4})

    # tokens that count have moved by -3, 1, 1 and 3
    moved = torch.tensor([[9, 9, -3, 1], [9, 9, 1, 9], [9, 9, 9, 9], [9, 3, 9, 9]]).float()
    metrics = MetricSums()
    measure_values(moved, experience, metrics, critic=Critic(value_clip_range=2.0))
    assert reduced(metrics) == {"value/mean": 0.5, "value/clip_fraction": 0.5}

    metrics = MetricSums()
    measure_critic(experience, metrics)
    values = reduced(metrics)
    # tokens of responses that count: 1, 2, 6 and 7
    assert values["value/return_mean"] == (1 + 2 + 6 + 7) / 4
    assert values["value/return_std"] == pytest.approx(statistics.stdev([1, 2, 6, 7]))


def test_variance_that_values_explain() -> None:
    # errors of deviation 1 where returns have 2: a quarter of the variance is left
    assert explained_variance(1.0, 2.0) == 0.75
    assert math.isnan(explained_variance(1.0, 0.0))


def test_a_number_is_taken_down_as_it_is_now() -> None:
    metrics = MetricSums()
    total, largest = torch.tensor([3.0, 2.0], dtype=torch.float64)
    metrics.add("a", total, 1.0)
    metrics.maximum("b", largest)
    total.fill_(100.0)
    largest.fill_(100.0)
    assert reduced(metrics) == {"a": 3.0, "b": 2.0}


def test_nothing_of_a_device_is_read_before_the_reduction() -> None:
    # on the meta device every read fails
    metrics = MetricSums()
    scores, mask = torch.empty(4, device="meta"), torch.empty(4, dtype=torch.bool, device="meta")
    metrics.add("mean", scores.sum(), mask.sum())
    metrics.add_values("values", scores)
    metrics.add_moments("std", scores)
    metrics.maximum("max", scores.amax())
    metrics.add_quantiles("ratio", scores)
    with pytest.raises(RuntimeError, match="meta"):
        reduced(metrics)


def test_clip_fractions_and_ratios_are_those_of_the_loss() -> None:
    experience = random_experience()
    assert experience.old_logprobs is not None
    # 0.1 on every token: over 0.2 in sum for every response of two tokens and more, never per token
    logprobs = experience.old_logprobs + 0.1 * experience.response_mask
    lengths = experience.response_mask.sum(dim=1)
    cpgd = POLICY_LOSSES["cpgd"]
    losses = {
        "sequence": POLICY_LOSSES["sequence_clip"],
        "token": POLICY_LOSSES["token_clip"],
        "wide": cpgd._replace(options=cpgd.options | {"clip_range": 0.2}),
        "narrow": cpgd._replace(options=cpgd.options | {"clip_range": 0.01}),
    }
    values = {}
    for name, loss in losses.items():
        metrics = MetricSums()
        measure_update(logprobs, None, experience, metrics, loss=loss)
        values[name] = reduced(metrics)
    longer = float((lengths >= 2).float().mean())
    assert values["sequence"]["policy/clip_fraction"] == pytest.approx(longer)
    fractions = [values[name]["policy/clip_fraction"] for name in ("token", "wide", "narrow")]
    assert fractions == [0.0, 0.0, 1.0]
    expected = float(torch.exp(0.1 * lengths.max()))
    assert values["sequence"]["policy/ratio_max"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipping_is_counted_where_it_takes_the_gradient(level: str) -> None:
    # four responses of one token: below the range and above it, each with an advantage of either
    # sign; clipping takes the gradient of the first and of the last
    experience = random_experience(rows=4, width=2)
    mask = experience.loss_mask
    ratios = torch.tensor([0.5, 0.5, 2.0, 2.0])[:, None]
    experience = replace(
        experience,
        old_logprobs=torch.zeros_like(experience.advantages),
        advantages=torch.tensor([-1.0, 1.0, -1.0, 2.0])[:, None] * mask,
    )
    loss = POLICY_LOSSES["sequence_clip" if level == "sequence" else "token_clip"]
    metrics = MetricSums()
    measure_update(ratios.log() * mask, None, experience, metrics, loss=loss)
    measured = reduced(metrics)
    assert measured["policy/clip_fraction"] == 1.0
    assert measured["policy/clip_fraction_low"] == 0.25
    assert measured["policy/clip_fraction_high"] == 0.25
    # of the last two alone, the second of which is held back
    metrics = MetricSums()
    counted = torch.tensor([False, False, True, True])
    part = replace(experience, counted=counted, loss_mask=mask & counted[:, None])
    measure_update(ratios.log() * mask, None, part, metrics, loss=loss)
    measured = reduced(metrics)
    assert measured["policy/clip_fraction"] == 1.0
    assert measured["policy/clip_fraction_low"] == 0.0
    assert measured["policy/clip_fraction_high"] == 0.5


def test_micro_batches_count_by_their_tokens() -> None:
    metrics = MetricSums()
    for rows, gap in ((1, 0.0), (3, 1.0)):
        micro = random_experience(rows=rows, width=2)
        old = torch.zeros_like(micro.advantages)
        loss = POLICY_LOSSES["token_clip"]
        measure_update(
            old + gap * micro.loss_mask, None, replace(micro, old_logprobs=old), metrics, loss=loss
        )
    # k3 of three of four tokens
    expected = (math.exp(1) - 1 - 1) * 3 / 4
    assert reduced(metrics)["policy/approx_kl"] == pytest.approx(expected, rel=1e-5)


def test_ranges_do_not_depend_on_how_the_values_are_split() -> None:
    values = torch.tensor([3.0, 1.0, 8.0, 2.0])
    split, whole = MetricSums(), MetricSums()
    whole.add_range("length", values)
    for part in values.split([1, 3, 0]):
        split.add_range("length", part)
    assert reduced(split) == reduced(whole)
    assert reduced(whole) == {"length": 3.5, "length_min": 1.0, "length_max": 8.0}


def test_whitening_counts_only_what_the_mask_counts() -> None:
    values = torch.tensor([1.0, 3.0, 100.0, NAN])
    whitened = one_process().whiten(values, torch.tensor([True, True, False, False]), eps=0.0)
    # mean 2, deviation sqrt(2)
    torch.testing.assert_close(whitened[:2], torch.tensor([-1.0, 1.0]) / 2**0.5)
    assert whitened[2] == 100.0


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_percentiles_are_those_of_numpy_up_to_the_bins(count: int) -> None:
    log_ratios = 0.3 * torch.randn(count, dtype=torch.float64)
    metrics = MetricSums()
    metrics.add_quantiles("ratio", log_ratios)
    values = reduced(metrics)
    assert set(values) == {"ratio_p01", "ratio_p50", "ratio_p99"}
    for suffix, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        expected = np.quantile(np.exp(log_ratios.numpy()), share)
        # a bin is 0.001 wide in the logarithm, so its middle is at most 0.0005 away
        assert values[f"ratio_{suffix}"] == pytest.approx(expected, rel=5.1e-4)


def test_percentiles_of_parts_and_ranks_are_those_of_the_whole() -> None:
    log_ratios = 0.3 * torch.randn(300)
    whole, first, second = (MetricSums() for _ in range(3))
    whole.add_quantiles("ratio", log_ratios)
    for part in log_ratios[:120].split(50):
        first.add_quantiles("ratio", part)
    second.add_quantiles("ratio", log_ratios[120:])
    sums: list[torch.Tensor] = []

    class Recording(Collectives):
        def sum(self, value: torch.Tensor) -> torch.Tensor:
            sums.append(value)
            return value

    class Second(Collectives):
        def sum(self, value: torch.Tensor) -> torch.Tensor:
            return value + sums.pop(0)

    reduced(first, Recording(one_process().trainer))
    assert reduced(second, Second(one_process().trainer)) == reduced(whole)


def test_equal_values_have_their_own_percentiles_and_numbers_out_of_range_do_no_harm() -> None:
    metrics = MetricSums()
    metrics.add_quantiles("same", torch.zeros(5))
    metrics.add_quantiles("wild", torch.tensor([-torch.inf, 0.0, torch.inf, torch.nan]))
    metrics.add_quantiles("nothing", torch.zeros(0))
    values = reduced(metrics)
    assert [values.pop(f"same_{suffix}") for suffix in ("p01", "p50", "p99")] == [1.0, 1.0, 1.0]
    # three values at e^-20, 1 and e^20: positions 0.02, 1 and 1.98 between them
    expected = {"wild_p01": 0.02, "wild_p50": 1.0, "wild_p99": 0.98 * math.exp(20)}
    assert values == pytest.approx(expected, rel=1e-6)


def test_a_token_that_the_engine_could_not_have_cut_is_no_mismatch() -> None:
    experience = random_experience()
    trainer = -torch.rand(experience.input_ids.shape) * experience.response_mask
    kept = torch.full_like(trainer, 0.5)
    # the engine's probabilities: 1.1 times those of the trainer, then doubled by the cut
    sampling = (trainer + math.log(1.1) - math.log(0.5)) * experience.response_mask
    metrics = MetricSums()
    measure_mismatch(
        trainer, replace(experience, sampling_logprobs=sampling, kept_mass=kept), metrics
    )
    values = reduced(metrics)
    assert values["mismatch/mean"] == pytest.approx(math.log(1.1), rel=1e-4)
    assert values["mismatch/max"] == pytest.approx(math.log(1.1), rel=1e-4)
    # k3 with d = log 1.1: 1 / 1.1 - 1 + log 1.1
    assert values["mismatch/kl"] == pytest.approx(1 / 1.1 - 1 + math.log(1.1), rel=1e-3)
    for name in ("p01", "p50", "p99"):
        assert values[f"mismatch/ratio_{name}"] == pytest.approx(1 / 1.1, rel=5.1e-4)


def running_scores_of(*parts: list[float]) -> RunningScores:
    scores = RunningScores()
    for part in parts:
        scores.update(torch.tensor(part, dtype=torch.float64), one_process())
    return scores


def test_running_scores_of_parts_are_those_of_the_whole() -> None:
    # mean of 1 2 4 9 -3; squared distances 2.56 0.36 1.96 40.96 31.36
    scores = running_scores_of([1.0, 2.0, NAN], [NAN], [4.0, 9.0, -3.0])
    assert scores.count == 5
    assert scores.mean == pytest.approx(2.6)
    assert scores.std == pytest.approx(math.sqrt(77.2 / 4))
    now = scores.statistics
    scaled = now.scaled(torch.tensor([2.6, NAN]), "mean_std")
    assert scaled[0] == pytest.approx(0.0, abs=1e-6)
    assert scaled[1].isnan()
    assert now.scaled(torch.tensor([1.0]), "std")[0] == pytest.approx(1 / math.sqrt(19.3))
    assert now.scaled(torch.tensor([1.0]), "none")[0] == 1.0
    # large offsets do not cost precision, and nothing is scaled before scores differ
    large = running_scores_of(*([1e8 + value] for value in range(4)))
    assert large.std == pytest.approx(math.sqrt(5 / 3), rel=1e-6)
    assert running_scores_of([5.0, 5.0]).std == 1.0


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
        watch, result = ConstantRewards(), _result()
        result.per_function[0, 0] = math.nan
        for _ in range(5):
            watch.observe(result, chats=False)
    (message,) = caplog.messages
    assert "returned 0 for each of the first 75 responses" in message


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
    with caplog.at_level(logging.WARNING, "lrlhf.modules.metrics.rollout_metrics"):
        fit(module, Path("unused"), tmp_path, steps=5, data=data)
    (message,) = [one for one in caplog.messages if "says_thanks" in one]
    assert "returned 0 for each of the first 80 responses" in message
    assert "completions are lists of messages" in message
    assert "lrlhf.rewards.completion_text" in message


@pytest.mark.parametrize(
    ("cut_off", "differs", "told"),
    [
        ([1, 1, 1, 1], [1, 0], ["8 of 8 responses of the first 2 steps were cut off at 16 tokens"]),
        ([1, 1, 0, 1], [0, 0], ["4 of 4 groups of the first 2 steps had equal rewards"]),
        ([1, 1, 0, 1], [0, 1], []),
    ],
)
def test_first_steps_from_which_nothing_can_be_learnt_are_told_once(
    caplog: pytest.LogCaptureFixture, cut_off: list[int], differs: list[int], told: list[str]
) -> None:
    watch = FirstResponses(max_new_tokens=16)
    for _ in range(4):
        watch.observe(torch.tensor(cut_off) > 0, torch.tensor(differs) > 0, num_generations=2)
    assert [message.partition(":")[0].partition(",")[0] for message in caplog.messages] == told
    taught = FirstResponses(max_new_tokens=3, taught=True)  # of equal groups, by a teacher
    for _ in range(2):
        taught.observe(torch.zeros(2) > 0, torch.zeros(1) > 0, num_generations=2)
    # of single responses there are no groups
    alone = FirstResponses(max_new_tokens=3)
    for _ in range(2):
        alone.observe(torch.zeros(2) > 0, torch.zeros(2) > 0, num_generations=1)
    # a limit of three tokens is meant to cut
    short = FirstResponses(max_new_tokens=3)
    for _ in range(2):
        short.observe(torch.ones(2) > 0, torch.ones(1) > 0, num_generations=2)
    assert len(caplog.messages) == len(told)
