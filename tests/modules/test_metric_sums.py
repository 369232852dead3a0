"""Means, maxima and deviations, weighted by what was counted."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lrlhf.functional import POLICY_LOSSES
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_mismatch, measure_update
from lrlhf.run import Collectives
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


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_percentiles_are_those_of_numpy_up_to_the_bins(count: int) -> None:
    log_ratios = 0.3 * torch.randn(count, dtype=torch.float64)
    metrics = MetricSums()
    metrics.add_quantiles("ratio", log_ratios)
    values = metrics.reduce(one_process(), CPU)
    assert set(values) == {"ratio_p01", "ratio_p50", "ratio_p99"}
    for suffix, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        expected = np.quantile(np.exp(log_ratios.numpy()), share)
        # a bin is 0.001 wide in the logarithm, so its middle is at most 0.0005 away
        assert values[f"ratio_{suffix}"] == pytest.approx(expected, rel=5.1e-4)


def test_percentiles_of_parts_and_ranks_are_those_of_the_whole() -> None:
    log_ratios = 0.3 * torch.randn(300)
    whole = MetricSums()
    whole.add_quantiles("ratio", log_ratios)
    first, second = MetricSums(), MetricSums()
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

    first.reduce(Recording(one_process().trainer), CPU)
    values = second.reduce(Second(one_process().trainer), CPU)
    assert values == whole.reduce(one_process(), CPU)


def test_equal_values_have_their_own_percentiles_and_numbers_out_of_range_do_no_harm() -> None:
    metrics = MetricSums()
    metrics.add_quantiles("same", torch.zeros(5))
    metrics.add_quantiles("wild", torch.tensor([-torch.inf, 0.0, torch.inf, torch.nan]))
    metrics.add_quantiles("nothing", torch.zeros(0))
    values = metrics.reduce(one_process(), CPU)
    assert [values[f"same_{suffix}"] for suffix in ("p01", "p50", "p99")] == [1.0, 1.0, 1.0]
    # three values at e^-20, 1 and e^20: positions 0.02, 1 and 1.98 between them
    assert values["wild_p01"] == pytest.approx(0.02, rel=1e-6)
    assert values["wild_p50"] == 1.0
    assert values["wild_p99"] == pytest.approx(0.98 * math.exp(20), rel=1e-6)
    assert not any(name.startswith("nothing") for name in values)


def test_a_token_that_the_engine_could_not_have_cut_is_no_mismatch() -> None:
    experience = random_experience()
    trainer = -torch.rand(experience.input_ids.shape) * experience.response_mask
    kept = torch.full_like(trainer, 0.5)
    # the engine's probabilities: 1.1 times those of the trainer, then doubled by the cut
    drawn = (trainer + math.log(1.1) - math.log(0.5)) * experience.response_mask
    engine = replace(experience, sampling_logprobs=drawn, kept_mass=kept)
    metrics = MetricSums()
    measure_mismatch(trainer, engine, metrics)
    values = metrics.reduce(one_process(), CPU)
    assert values["mismatch/mean"] == pytest.approx(math.log(1.1), rel=1e-4)
    assert values["mismatch/max"] == pytest.approx(math.log(1.1), rel=1e-4)
    # k3 with d = log 1.1: 1 / 1.1 - 1 + log 1.1
    assert values["mismatch/kl"] == pytest.approx(1 / 1.1 - 1 + math.log(1.1), rel=1e-3)
    for name in ("p01", "p50", "p99"):
        assert values[f"mismatch/ratio_{name}"] == pytest.approx(1 / 1.1, rel=5.1e-4)


def test_a_number_is_taken_down_as_it_is_now() -> None:
    metrics = MetricSums()
    total, largest = torch.tensor(3.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    metrics.add("a", total, 1.0)
    metrics.maximum("b", largest)
    total.fill_(100.0)
    largest.fill_(100.0)
    assert metrics.reduce(one_process(), CPU) == {"a": 3.0, "b": 2.0}


def test_a_maximum_that_is_no_number_shows() -> None:
    metrics = MetricSums()
    for value in (1.0, torch.tensor(torch.nan), 2.0):
        metrics.maximum("a", value)
    assert math.isnan(metrics.reduce(one_process(), CPU)["a"])


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
        metrics.reduce(one_process(), CPU)
