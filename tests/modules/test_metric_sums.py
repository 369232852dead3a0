"""Means, maxima and deviations, weighted by what was counted."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from lrlhf.functional.losses import POLICY_LOSSES
from lrlhf.modules.metric_sums import MetricSums
from lrlhf.modules.rollout_metrics import measure_update
from lrlhf.strategies import Collectives
from tests.modules.test_policy_objective import random_experience

CPU = torch.device("cpu")


def one_process() -> Collectives:
    return Collectives(SimpleNamespace(world_size=1, global_rank=0))  # type: ignore[arg-type]


def test_a_mean_is_weighted_by_its_counts() -> None:
    metrics = MetricSums()
    metrics.add("a", 6.0, 3.0)
    metrics.add("a", torch.tensor(2.0), torch.tensor(1))
    metrics.add("nothing", 0.0, 0.0)
    # (6 + 2) / (3 + 1); a mean of nothing is left out
    assert metrics.reduce(one_process(), CPU) == {"a": 2.0}


def test_values_that_are_not_numbers_do_not_count() -> None:
    metrics = MetricSums()
    metrics.add_values("a", torch.tensor([1.0, float("nan"), 3.0]))
    assert metrics.reduce(one_process(), CPU) == {"a": 2.0}


def test_deviations_and_maxima() -> None:
    metrics = MetricSums()
    metrics.add_moments("std", torch.tensor([1.0, 4.0]))
    metrics.add_moments("std", torch.tensor([10.0]))
    metrics.maximum("max", 3.0)
    metrics.maximum("max", torch.tensor(5.0))
    values = metrics.reduce(one_process(), CPU)
    assert values["std"] == pytest.approx(statistics.stdev([1.0, 4.0, 10.0]))
    assert values["max"] == 5.0


def test_a_sequence_loss_reports_the_ratios_of_whole_responses() -> None:
    experience = random_experience()
    assert experience.old_logprobs is not None
    # 0.1 on every token: over 0.2 in sum for every response of two tokens and more, never per token
    logprobs = experience.old_logprobs + 0.1 * experience.response_mask
    lengths = experience.response_mask.sum(dim=1)
    values = {}
    for name in ("sequence_clip", "token_clip"):
        metrics = MetricSums()
        measure_update(logprobs, None, experience, metrics, loss=POLICY_LOSSES[name])
        values[name] = metrics.reduce(one_process(), CPU)
    longer = float((lengths >= 2).float().mean())
    assert values["sequence_clip"]["policy/clip_fraction"] == pytest.approx(longer)
    assert values["token_clip"]["policy/clip_fraction"] == 0.0
    expected = torch.exp(0.1 * lengths.max())
    assert values["sequence_clip"]["policy/ratio_max"] == pytest.approx(float(expected), rel=1e-5)


def test_whitening_counts_only_what_the_mask_counts() -> None:
    values = torch.tensor([1.0, 3.0, 100.0, float("nan")])
    mask = torch.tensor([True, True, False, False])
    whitened = one_process().whiten(values, mask, eps=0.0)
    # mean 2, deviation sqrt(2)
    torch.testing.assert_close(whitened[:2], torch.tensor([-1.0, 1.0]) / 2**0.5)
    assert whitened[2] == 100.0
