"""What an iteration reports of its rollout and of its update."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lrlhf.functional.algorithm import PolicyLoss
from lrlhf.functional.kl import kl_estimate
from lrlhf.functional.masking import masked_mean, masked_sum
from lrlhf.functional.policy import clip_fractions, policy_metrics, sequence_ratio, token_ratio
from lrlhf.guard.anomalies import reference_kl
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.settings import Critic
from lrlhf.rewards import RewardResult
from lrlhf.types import Episode, Experience, Rollout


def measure_rollout(
    rollout: Rollout,
    result: RewardResult,
    metrics: MetricSums,
    *,
    num_generations: int,
    informative: Tensor,
) -> None:
    """Scores, lengths, truncation, and groups that teach nothing.

    Args:
        rollout: Responses, rows of one prompt consecutive.
        result: What the rewards said of them.
        metrics: Are told.
        num_generations: Responses per prompt.
        informative: `[P]`, see `informative_groups`.
    """
    scores = result.scores.double()
    groups = scores.view(-1, num_generations)
    metrics.add_values("rollout/score", scores)
    if num_generations > 1:
        for group in groups:
            scorable = group[group.isfinite()]
            if len(scorable) > 1:
                metrics.add("rollout/score_std", scorable.std(), 1.0)
    metrics.add_moments("rollout/score_std_all", scores[scores.isfinite()])
    metrics.add_values("rollout/zero_variance_groups", (~informative).double())
    metrics.add_values("rollout/unscorable_fraction", scores.isnan().double())
    lengths = rollout.response_mask.sum(dim=1).double()
    metrics.add_range("rollout/response_length", lengths)
    metrics.add_values("rollout/total_length", rollout.attention_mask.sum(dim=1).double())
    metrics.add_range("rollout/terminated_length", lengths[~rollout.truncated])
    metrics.add_values("rollout/truncated_fraction", rollout.truncated.double())
    if rollout.episodes is not None:
        measure_episodes(rollout.episodes, metrics)
        forks = torch.zeros_like(rollout.input_ids) if rollout.forks is None else rollout.forks
        metrics.add_values("episode/forks", (forks != 0).sum(dim=1).double())
    for column, name in enumerate(result.names):
        values = result.per_function[:, column].double()
        finite = values[values.isfinite()]
        metrics.add_values(f"rewards/{name}/mean", values)
        metrics.add_moments(f"rewards/{name}/std", finite)
    for name, value in result.metrics.items():
        metrics.add(f"rewards/{name}", value, 1.0)
    if rollout.kept_mass is not None:
        mask = rollout.response_mask
        metrics.add("rollout/kept_mass", masked_sum(rollout.kept_mass, mask), mask.sum())


def measure_episodes(episodes: Sequence[Episode], metrics: MetricSums) -> None:
    """Turns, and how episodes ended."""
    metrics.add_values(
        "episode/turns", torch.tensor([float(episode.turns) for episode in episodes])
    )
    for reason in ("stop", "done", "length", "max_turns", "failed"):
        ended = torch.tensor([float(each.finish_reason == reason) for each in episodes])
        metrics.add_values(f"episode/{reason}_fraction", ended)


def measure_kl(experience: Experience, metrics: MetricSums) -> None:
    """Distance to the reference per token and per response, in nats; see `reference_kl`."""
    kl = reference_kl(experience)
    if kl is None:
        return
    total = kl.sum()
    metrics.add("kl/reference", total, experience.response_mask.sum())
    metrics.add("kl/sequence", total, float(len(experience)))


def measure_mismatch(logprobs: Tensor, experience: Experience, metrics: MetricSums) -> None:
    """Distance between the trainer's log-probabilities of a rollout and the engine's.

    Tokens that top_p, top_k or min_p cut off are no difference.
    """
    mask = experience.response_mask
    engine = experience.engine_logprobs
    log_ratio = torch.where(mask, logprobs - engine, 0.0)
    metrics.add("mismatch/mean", log_ratio.abs().sum(), mask.sum())
    metrics.maximum("mismatch/max", log_ratio.abs().max())
    kl = kl_estimate(engine, logprobs, estimator="k3")
    metrics.add("mismatch/kl", masked_sum(kl, mask), mask.sum())
    metrics.add_quantiles("mismatch/ratio", torch.where(mask, log_ratio, torch.nan))


def measure_update(
    logprobs: Tensor,
    entropy: Tensor | None,
    micro: Experience,
    metrics: MetricSums,
    *,
    loss: PolicyLoss,
) -> None:
    """How far one micro-batch has moved from the policy that sampled it.

    Clip fractions and the largest ratio are of what the loss clips: tokens, or whole responses. Of
    all ratios outside the range, those count as low and high that the advantage would push further
    out: clipping leaves them without a gradient, or bounds their weight (CISPO).
    """
    mask = micro.loss_mask
    tokens = mask.sum()
    old = micro.old_logprobs
    assert old is not None
    bounds = loss.clip_range
    low, high = (math.inf, math.inf) if bounds is None else bounds
    measured = policy_metrics(logprobs, old, mask, clip_low=low, clip_high=high)
    metrics.add("policy/approx_kl", measured.approx_kl * tokens, tokens)
    if loss.level == "sequence" and not loss.clips_tokens:
        normalized = loss.options.get("length_normalized", False)
        ratio, counted = (
            sequence_ratio(logprobs, old, mask, length_normalized=normalized),
            micro.counted,
        )
        advantages = masked_mean(micro.advantages, micro.response_mask, dim=1)
        clipped = ((ratio < 1 - low) | (ratio > 1 + high)) & counted
        clip_fraction, ratios = clipped.sum(), counted.sum()
        metrics.maximum("policy/ratio_max", torch.where(counted, ratio, 0.0).amax())
    else:
        ratio, counted, advantages = token_ratio(logprobs, old, mask), mask, micro.advantages
        clip_fraction, ratios = measured.clip_fraction * tokens, tokens
        metrics.maximum("policy/ratio_max", measured.ratio_max)
    if bounds is not None:
        fractions = clip_fractions(ratio, advantages, counted, clip_low=low, clip_high=high)
        metrics.add("policy/clip_fraction", clip_fraction, ratios)
        metrics.add("policy/clip_fraction_low", fractions.low * ratios, ratios)
        metrics.add("policy/clip_fraction_high", fractions.high * ratios, ratios)
    # where no entropy was computed, the mean surprise of the sampled tokens estimates it
    surprise = -micro.sampling_logprobs if entropy is None else entropy.detach()
    metrics.add("policy/entropy", masked_sum(surprise, mask), tokens)


def measure_values(
    values: Tensor, micro: Experience, metrics: MetricSums, *, critic: Critic
) -> None:
    """How far one micro-batch's values have moved from those the rollout was taken with."""
    assert micro.values is not None
    mask = micro.value_mask
    tokens = mask.sum()
    metrics.add("value/mean", masked_sum(values, mask), tokens)
    if critic.value_clip_range is not None:
        outside = (values - micro.values).abs() > critic.value_clip_range
        metrics.add("value/clip_fraction", (outside & mask).sum(), tokens)


def measure_critic(experience: Experience, metrics: MetricSums) -> None:
    """How well the critic knew the returns of a rollout before it learnt from them."""
    assert experience.values is not None
    assert experience.returns is not None
    mask = experience.value_mask
    returns = experience.returns[mask]
    metrics.add_values("value/return_mean", returns)
    metrics.add_moments("value/return_std", returns)
    metrics.add_moments("value/error_std", returns - experience.values[mask])


def explained_variance(error_std: float, return_std: float) -> float:
    """Share of the returns' variance that the values explain; below 0: worse than their mean."""
    return 1.0 - (error_std / return_std) ** 2 if return_std > 0 else float("nan")


logger = logging.getLogger(__name__)

_FIRST = 2
_SHORT = 16
"""A limit of fewer tokens is meant to cut, as behind an answer that is a number."""
_ITERATIONS = 5
_RESPONSES = 64


class FirstResponses:
    """Says once if all responses of the first two iterations are cut off, or all groups equal.

    Equal groups are not worth a word where a teacher (``taught``) says something of each response.
    """

    def __init__(self, max_new_tokens: int, *, taught: bool = False) -> None:
        self._max_new_tokens = max_new_tokens
        self._iterations = 0
        self._responses = self._groups = 0
        self._all_cut_off, self._all_equal = True, not taught

    def observe(self, truncated: Tensor, informative: Tensor, *, num_generations: int) -> None:
        """Take in an iteration of this process.

        Args:
            truncated: `[B]`.
            informative: `[P]`, see `informative_groups`.
            num_generations: Responses per prompt.
        """
        self._iterations += 1
        if self._iterations > _FIRST:
            return
        self._responses += len(truncated)
        self._groups += len(informative)
        self._all_cut_off &= bool(truncated.all())
        self._all_equal &= num_generations > 1 and not bool(informative.any())
        if self._iterations < _FIRST:
            return
        if self._all_cut_off and self._max_new_tokens >= _SHORT:
            logger.warning(
                "%d of %d responses of the first %d steps were cut off at %d tokens: if they are "
                "to end by themselves, raise sampling.max_new_tokens",
                *(self._responses, self._responses, _FIRST, self._max_new_tokens),
            )
        if self._all_equal:
            logger.warning(
                "%d of %d groups of the first %d steps had equal rewards, so nothing was learnt: "
                "take a reward that tells responses apart, easier prompts, or raise "
                "sampling.temperature or num_generations",
                *(self._groups, self._groups, _FIRST),
            )


class ConstantRewards:
    """Warns of each reward function with the same value for every response from the start on.

    Such a function teaches nothing, and nothing else says so where others beside it do differ. It
    is looked at until five iterations and 64 responses of this process are over; functions of
    weight 0 are left out, and so is a response without a value.
    """

    def __init__(self) -> None:
        self._iterations = 0
        self._done = False
        self._counts: dict[str, int] = {}
        self._ranges: dict[str, tuple[float, float]] = {}

    def observe(self, result: RewardResult, *, chats: bool) -> None:
        """Take in the scores of an iteration, and warn once that is due.

        Args:
            result: Of the iteration's responses.
            chats: Whether the prompts are chats, so that responses are lists of messages.
        """
        if self._done:
            return
        self._iterations += 1
        for column, name in enumerate(result.names):
            values = result.per_function[:, column]
            counted = values.isfinite()
            if result.weights is not None:
                counted &= result.weights[:, column].nan_to_num(nan=0.0) != 0
            if not counted.any():
                continue
            low, high = self._ranges.get(name, (math.inf, -math.inf))
            values = values[counted]
            self._ranges[name] = min(low, float(values.min())), max(high, float(values.max()))
            self._counts[name] = self._counts.get(name, 0) + len(values)
        over = max(self._counts.values(), default=0) >= _RESPONSES
        if self._iterations >= _ITERATIONS and over:
            self._done = True
            self._warn(chats)

    def _warn(self, chats: bool) -> None:
        remark = (
            " The prompts are chats (messages, or as_chat), so completions are lists of messages: "
            "a function that looks for text takes lrlhf.rewards.completion_text of each."
        )
        for name, (low, high) in self._ranges.items():
            if low == high and self._counts[name] >= _RESPONSES:
                logger.warning(
                    "the reward function %r has returned %g for each of the first %d responses, "
                    "so it has taught nothing so far; `lrlhf reward RUN` shows what the rewards "
                    "say of a run's responses.%s",
                    name,
                    low,
                    self._counts[name],
                    remark if chats else "",
                )
