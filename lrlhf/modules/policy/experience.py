"""From scored responses and the models' outputs to what an update trains on.

The formulas are in `lrlhf.functional`; here they are put into order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.advantages import has_baseline
from lrlhf.functional.algorithm import Algorithm, EstimatorInputs, PolicyLoss, Whiten, identity
from lrlhf.functional.importance import IMPORTANCE_MODES, importance_weights, rejection_mask
from lrlhf.functional.kl import MAX_LOG_RATIO, kl_estimate
from lrlhf.functional.masking import last_tokens, masked_sum
from lrlhf.functional.policy import high_entropy_mask, token_covariance
from lrlhf.functional.turns import observation_numbers
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.settings import PolicySettings, check_turn_rewards
from lrlhf.modules.settings import AUTOMATIC, Advantage, ImportanceSampling
from lrlhf.rollout import Collected
from lrlhf.run import Collectives
from lrlhf.types import Experience, Rollout

ScaleRewards: TypeAlias = Literal["none", "std", "mean_std"]


class ScoreStatistics(NamedTuple):
    """Mean and standard deviation that scores, and values of them, are measured against."""

    mean: float
    std: float

    def scaled(self, scores: Float[Tensor, " B"], mode: ScaleRewards) -> Float[Tensor, " B"]:
        """Divide by the standard deviation, and with ``mean_std`` subtract the mean before."""
        if mode == "none":
            return scores
        centre = self.mean if mode == "mean_std" else 0.0
        return (scores - centre) / self.std

    def scaled_parts(self, parts: Float[Tensor, "B T"], mode: ScaleRewards) -> Float[Tensor, "B T"]:
        """Divide what is only a part of a score; the mean goes off the rest of it."""
        return parts if mode == "none" else parts / self.std

    def of_scaled(self, mode: ScaleRewards) -> ScoreStatistics:
        """Return the statistics of the scores after `scaled`."""
        if mode == "none":
            return self
        centre = 0.0 if mode == "mean_std" else self.mean
        return ScoreStatistics(centre / self.std, 1.0)


UNSCALED = ScoreStatistics(mean=0.0, std=1.0)


class RunningScores:
    """Running mean and standard deviation of the scores of all ranks and iterations.

    A batch is counted before it is scaled, so the first one is scaled by its own deviation.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0
        """Sum of the squared distances from the mean."""

    @property
    def std(self) -> float:
        """Standard deviation (Bessel-corrected); 1 before two scores are known."""
        if self.count < 2 or self.squares <= 0:
            return 1.0
        return float((self.squares / (self.count - 1)) ** 0.5)

    def update(self, scores: Float[Tensor, " B"], collectives: Collectives) -> ScoreStatistics:
        """Count the finite scores of all ranks; returns the statistics with them.

        Reference:
            Chan, Golub, LeVeque 1979, eq. 2.1 (combining the moments of two samples)
        """
        finite = scores[scores.isfinite()].double()
        total = collectives.sum(torch.stack([finite.sum(), torch.ones_like(finite).sum()]))
        count = float(total[1])
        if count == 0:
            return self.statistics
        mean = float(total[0]) / count
        squares = float(collectives.sum((finite - mean).square().sum()))
        distance = mean - self.mean
        combined = self.count + count
        self.squares += squares + distance**2 * self.count * count / combined
        self.mean += distance * count / combined
        self.count = combined
        return self.statistics

    @property
    def statistics(self) -> ScoreStatistics:
        """Mean and standard deviation so far."""
        return ScoreStatistics(self.mean, self.std)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


@torch.no_grad()
def with_advantages(
    experience: Experience, statistics: ScoreStatistics, settings: PolicySettings, it: Iteration
) -> Experience:
    """Compute advantages, importance weights, and which tokens are trained on.

    Args:
        experience: Responses with their scores, log-probabilities and values before the update.
        statistics: Of the scores so far, these included.
        settings: Of the run.
        it: The iteration; its ranks whiten together, its metrics are told what was clipped.
    """
    if experience.old_logprobs is not None:
        experience = start_from(experience, experience.old_logprobs, settings, it)
    if settings.advantage.scale_rewards != "none":
        it.metrics.add("rollout/running_std", statistics.std, 1.0)
    kl_estimator = settings.reference.kl_estimator or "k1"
    experience = compute_advantages(
        experience,
        algorithm=settings.algorithm,
        settings=settings.advantage,
        reward_kl_estimator=kl_estimator if settings.kl_in_reward else None,
        kl_coef=it.kl_coef,
        num_generations=settings.num_generations,
        whiten=it.ranks.whiten,
        sum_over_ranks=it.ranks.sum,
        statistics=statistics,
        columns=experience.columns,
        metrics=it.metrics,
        teacher_term=experience.teacher_advantages,
    )
    experience = replace(experience, teacher_advantages=None)
    if settings.sampling.starts_hot and experience.kept_mass is not None:
        experience = _with_temperature_weights(experience, it.metrics)
    fraction = settings.update.high_entropy_fraction
    if fraction < 1:
        assert experience.entropy is not None
        chosen = high_entropy_mask(experience.entropy, experience.loss_mask, fraction=fraction)
        experience = replace(experience, selected=chosen)
    if settings.algorithm.loss.choose is not None:
        experience = mark_covariant(experience, settings.algorithm.loss, it)
    return experience


def start_from(
    rows: Experience, logprobs: Tensor, settings: PolicySettings, it: Iteration
) -> Experience:
    """Set the old log-probabilities (the proximal policy's), and with them the importance weights.

    Args:
        rows: Of a rollout.
        logprobs: `[B, T]`.
        settings: Of the run.
        it: The iteration.
    """
    rows = replace(rows, old_logprobs=logprobs)
    if rows.old_source == "recorded":  # of the very engine: there is no mismatch
        return rows
    return with_importance_weights(
        rows, logprobs, settings.importance_sampling, exact=it.exact, step=it.step
    )


def mark_covariant(experience: Experience, loss: PolicyLoss, it: Iteration) -> Experience:
    """Let a loss choose tokens of all ranks by their covariance, see `token_covariance`.

    The log-probabilities are those before the update, so that no split of it changes the choice.
    """
    before = experience.old_logprobs
    before = experience.engine_logprobs if before is None else before
    mask = experience.loss_mask if experience.selected is None else experience.selected
    own = torch.stack([before[mask], experience.advantages[mask]]).float().cpu()
    ranks = it.ranks.gather(own)
    # another choice in each iteration, and under each seed of the run
    seed = (it.module.seed or 0) * 2**32 + it.step
    chosen = loss.choose_tokens(token_covariance(*torch.cat(ranks, dim=1)), seed=seed)
    start = sum(each.shape[1] for each in ranks[: it.ranks.rank])
    marked = torch.zeros_like(mask)
    marked[mask] = chosen[start : start + own.shape[1]].to(mask.device)
    return replace(experience, covariant=marked)


def _with_temperature_weights(experience: Experience, metrics: MetricSums) -> Experience:
    """Make up for first tokens that were drawn at another temperature.

        A_it ← A_it Π_s π(y_is) / q(y_is)

    A response as a whole comes from another distribution q than the policy's, so all of its tokens
    get the weight of the response: the gradient is that of responses of the policy. Policy losses
    are proportional to positive factors of the advantage.
    """
    assert experience.kept_mass is not None
    log_weights = masked_sum(experience.kept_mass.log(), experience.response_mask, 1)
    weights = log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    metrics.add_values("importance/first_token", weights.double())
    return replace(experience, advantages=experience.advantages * weights[:, None])


def as_experience(
    rollout: Rollout,
    *,
    scores: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    padding_rows: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> Experience:
    """Start an experience from a rollout: no advantages yet, only ``padding_rows`` masked."""
    everything = torch.ones_like(rollout.truncated)
    return Experience(
        **{field.name: getattr(rollout, field.name) for field in fields(rollout)},
        scores=scores.float(),
        columns=columns,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        advantages=torch.zeros_like(rollout.sampling_logprobs),
        loss_mask=rollout.response_mask,
        counted=everything if padding_rows is None else everything & ~padding_rows,
    )


def compute_advantages(  # noqa: PLR0913  the order of what happens to a score
    experience: Experience,
    *,
    algorithm: Algorithm,
    settings: Advantage,
    reward_kl_estimator: str | None,
    kl_coef: float,
    num_generations: int,
    whiten: Whiten,
    sum_over_ranks: Callable[[Tensor], Tensor] = identity,
    statistics: ScoreStatistics = UNSCALED,
    columns: Mapping[str, Tensor] | None = None,
    metrics: MetricSums | None = None,
    teacher_term: Tensor | None = None,
) -> Experience:
    """Turn the scores of a rollout into advantages per token.

    The order is TRL's: clip the scores, subtract the KL penalty and take the baseline (the
    estimator does both), whiten; then bound the result. Scores are scaled before all that, and
    rewards of turns with them; clipping a score leaves the rewards of turns as they are, and the
    last token takes the difference.

    Args:
        experience: Rows of complete groups, ``old_logprobs`` set where the KL is in the reward,
            ``values`` where there is a critic; rows that are not ``counted`` stay out.
            ``advantages`` and ``loss_mask`` are not read.
        algorithm: Its estimator, and what that wants whitened.
        settings: Scaling, clipping, and what becomes of rewards of turns and of truncated
            responses.
        reward_kl_estimator: That of the KL penalty in the reward (k1, k2, k3); None: it has none.
        kl_coef: Strength of the penalty.
        num_generations: Responses per prompt.
        whiten: Whitens over all ranks.
        sum_over_ranks: Adds up a tensor over all ranks.
        statistics: What scores, and those of ``algorithm.extra_samples``, are scaled by.
        columns: ``[B]`` each, further ones for the estimator.
        metrics: Told the share of scores and advantages that were clipped.
        teacher_term: `[B, T]`, what a teacher adds to the advantages of all responses that are
            trained on, before they are bounded; None: there is none.

    Returns:
        The experience with ``advantages`` (0 outside the response), ``loss_mask``, ``counted``,
        and with a critic ``returns``: advantages plus values, before any whitening.

    Raises:
        ValueError: The estimator returned no advantage per token, or the loss has no place for the
            rewards of turns.
    """
    mask, truncated = experience.response_mask, experience.truncated
    excluded = ~experience.counted
    if settings.truncated == "exclude":
        excluded = excluded | truncated
    # extra samples are measured like the scores, and missed like them
    columns, missing = dict(columns or {}), experience.scores.isnan()
    for name in algorithm.extra_samples:
        scaled = statistics.scaled(columns[name], settings.scale_rewards)
        columns[name] = _clipped_scores(scaled, settings.reward_clip_range, None)
        missing = missing | columns[name].isnan()
    if settings.unscorable == "exclude":
        excluded = excluded | missing
    left_out = excluded | truncated if settings.truncated == "trl" else excluded
    loss_mask = mask & ~left_out[:, None]
    scores = statistics.scaled(experience.scores, settings.scale_rewards)
    scores = _clipped_scores(scores, settings.reward_clip_range, metrics)
    scores = scores.masked_fill(missing, torch.nan)
    estimator = algorithm.estimator
    inputs = EstimatorInputs(
        scores=scores,
        kl=_kl_of_tokens(experience, reward_kl_estimator) * loss_mask,
        response_mask=mask,
        num_generations=num_generations,
        kl_coef=kl_coef,
        baseline_mask=~excluded,
        values=experience.values,
        rows=columns,
        tokens=_token_columns(experience),
        sum_over_ranks=sum_over_ranks,
        turn_rewards=_credited_turns(experience, algorithm, settings, statistics),
        observations=_observations(experience) if estimator.uses_observations else None,
        bootstrap_mask=truncated if settings.truncated == "bootstrap" else None,
    )
    advantages = estimator(inputs, (metrics or MetricSums()).add_of_algorithm)
    if advantages.shape != mask.shape:
        raise ValueError(
            f"the estimator of algorithm {algorithm.name!r} returned a tensor of shape "
            f"{tuple(advantages.shape)}, expected one advantage per token, {tuple(mask.shape)}: "
            "lrlhf.functional.spread_over_tokens makes it from one per response"
        )
    of_values = advantages if estimator.of_values is estimator else estimator.of_values(inputs)
    returns = _targets(experience, of_values, bootstraps=settings.truncated == "bootstrap")
    scores = scores.masked_fill(excluded, torch.nan)
    scorable = ~scores.isnan()
    if estimator.groups:
        # a row without a sibling has nothing to be compared with: it is no observation either
        scorable = has_baseline(scores, num_generations=num_generations)
    observed = mask & scorable[:, None]
    advantages = estimator.normalized(advantages, observed, whiten)
    if teacher_term is not None:
        advantages, observed = advantages + teacher_term * loss_mask, observed | loss_mask
    return replace(
        experience,
        advantages=_clipped_advantages(advantages, observed, settings.clip, metrics),
        returns=returns,
        loss_mask=loss_mask,
        counted=~excluded,
    )


def _targets(experience: Experience, advantages: Tensor, *, bootstraps: bool) -> Tensor | None:
    """`[B, T]`: what the critic learns to predict; None: there is no critic.

    A row that is bootstrapped from the value of its last token has no target there: the value would
    be its own target, move by the last reward with every update, and never arrive.
    """
    mask, values = experience.response_mask, experience.values
    if values is None:
        return None
    returns = torch.where(mask, advantages + values, 0.0)
    if bootstraps:
        returns = torch.where(last_tokens(mask) & experience.truncated[:, None], values, returns)
    return returns


def before_update(experience: Experience) -> Tensor:
    """`[B, T]`: log-probabilities of the policy itself, whichever generated the responses."""
    policy = experience.policy_logprobs
    policy = experience.old_logprobs if policy is None else policy
    assert policy is not None
    return policy


def _kl_of_tokens(experience: Experience, estimator: str | None) -> Tensor:
    """`[B, T]`: KL to the reference that is subtracted from the reward; 0 where there is none."""
    if estimator is None or experience.ref_logprobs is None:
        return torch.zeros_like(experience.sampling_logprobs)
    return kl_estimate(before_update(experience), experience.ref_logprobs, estimator=estimator)


def score_columns(collected: Collected) -> dict[str, Tensor]:
    """`[B]` by name: the ``columns`` of an `Experience`."""
    rewards = collected.rewards
    columns = {
        f"reward/{name}": column
        for name, column in zip(rewards.names, rewards.per_function.T, strict=True)
    }
    if rewards.weights is not None:
        weights = zip(rewards.names, rewards.weights.T, strict=True)
        columns |= {f"weight/{name}": column for name, column in weights}
    return {**columns, **collected.extra_values}


def trained_scores(collected: Collected, settings: Advantage, *, single: bool = False) -> Tensor:
    """`[B, K]`: what teaches something where it differs; NaN where a response is left out.

    Args:
        collected: Responses and their rewards.
        settings: What is clipped, and who is left out.
        single: Take every reward that counts by itself; else their sum, and K is 1.
    """
    rewards = collected.rewards
    scores = _clipped_scores(rewards.scores, settings.reward_clip_range, None)
    if settings.truncated == "exclude":
        scores = scores.masked_fill(collected.rollout.truncated.to(scores.device), torch.nan)
    if not single or rewards.weights is None:
        return scores[:, None]
    idle = rewards.weights.nan_to_num(nan=0.0) == 0
    return rewards.per_function.masked_fill(idle | scores.isnan()[:, None], torch.nan)


def _clipped_scores(
    scores: Tensor, bounds: tuple[float, float] | None, metrics: MetricSums | None
) -> Tensor:
    if bounds is None:
        return scores
    if metrics is not None:
        outside = (scores < bounds[0]) | (scores > bounds[1])
        metrics.add("rollout/reward_clip_fraction", outside.sum(), scores.isfinite().sum())
    return scores.clamp(*bounds)


def _clipped_advantages(
    advantages: Tensor, observed: Tensor, bound: float | None, metrics: MetricSums | None
) -> Tensor:
    if bound is None:
        return advantages
    if metrics is not None:
        outside = (advantages.abs() > bound) & observed
        metrics.add("rollout/advantage_clip_fraction", outside.sum(), observed.sum())
    return advantages.clamp(-bound, bound)


def _credited_turns(
    experience: Experience, algorithm: Algorithm, settings: Advantage, statistics: ScoreStatistics
) -> Tensor | None:
    """`[B, T]` in the unit of the scaled scores; None: all of a score is the response's."""
    if experience.turn_rewards is None or settings.credit == "response":
        return None
    check_turn_rewards(algorithm)
    return statistics.scaled_parts(experience.turn_rewards, settings.scale_rewards)


SHOWN_OBSERVATIONS = (
    "the estimator compares turns by the tokens read before them, and these rows show images or "
    "sounds, whose tokens are all alike: take another algorithm (rloo_turn)"
)


def _observations(experience: Experience) -> Tensor:
    """`[B, K]`: see `observation_numbers`.

    Raises:
        ValueError: Rows show pictures, which equal tokens do not tell apart.
    """
    if experience.media is not None and any(experience.media):
        raise ValueError(SHOWN_OBSERVATIONS)
    if experience.forks is not None and bool((experience.forks != 0).any()):
        raise ValueError(
            "the estimator compares turns by the tokens read before them, and these rows hold "
            "rewritten histories, in which earlier answers are read again: set episodes.history: "
            "tokens, or take another algorithm (rloo_turn)"
        )
    return observation_numbers(
        experience.input_ids, experience.attention_mask, experience.response_mask
    )


def _token_columns(experience: Experience) -> dict[str, Tensor]:
    columns = {
        "sampling_logprobs": experience.sampling_logprobs,
        "old_logprobs": experience.old_logprobs,
        "ref_logprobs": experience.ref_logprobs,
    }
    return {name: column for name, column in columns.items() if column is not None}


def off_policy_rows(rollout: Rollout, *, exact: bool, step: int) -> Tensor:
    """`[B]`: the responses that another distribution than the policy's may have generated.

    Args:
        rollout: As the engine returned it.
        exact: Whether the engine's log-probabilities are the policy's own.
        step: Training iterations behind the policy.
    """
    if not exact:
        return torch.ones_like(rollout.truncated)
    if rollout.weight_version is None:
        return torch.zeros_like(rollout.truncated)
    return rollout.weight_version < step


def with_importance_weights(
    experience: Experience,
    logprobs: Tensor,
    settings: ImportanceSampling | None,
    *,
    exact: bool,
    step: int,
) -> Experience:
    """Give an experience its importance weights, as far as it needs or asks for them.

    Args:
        experience: Generated by an engine.
        logprobs: `[B, T]` of the policy that the update starts from.
        settings: What becomes of the ratios, of all responses; None: `AUTOMATIC`, and only of the
            responses that another distribution may have generated.
        exact: Whether the engine's log-probabilities are the policy's own.
        step: Training iterations behind the policy.
    """
    rows = off_policy_rows(experience, exact=exact, step=step)
    if settings is not None:
        rows = torch.ones_like(rows)
    settings = settings or AUTOMATIC
    if not rows.any() or (settings.weights == "none" and not settings.rejection):
        return experience
    probabilities = (logprobs, experience.engine_logprobs, experience.response_mask)
    weights = torch.ones_like(logprobs)
    if settings.weights != "none":
        low, high = settings.bounds
        weights = importance_weights(*probabilities, mode=settings.weights, low=low, high=high)
    for criterion, (low, high) in settings.rejection.items():
        weights = weights * rejection_mask(*probabilities, criterion=criterion, low=low, high=high)
    return replace(experience, importance_weights=torch.where(rows[:, None], weights, 1.0))


def measure_importance(
    micro: Experience, metrics: MetricSums, settings: ImportanceSampling
) -> None:
    """Mean weight, and the share that a bound has cut, of tokens or of whole responses."""
    weights = micro.importance_weights
    if weights is None:
        return
    mode, mask = IMPORTANCE_MODES.get(settings.weights), micro.loss_mask
    by_token = any(criterion.startswith("token") for criterion in settings.rejection)
    if (mode is None or mode.level == "sequence") and not by_token:
        mask = mask & (mask.cumsum(dim=1) == 1)  # one token stands for its response
    cut = weights == 0
    if mode is not None and mode.truncates:
        cut = cut | (weights >= settings.bounds[1])
    metrics.add("importance/weight_mean", masked_sum(weights, mask), mask.sum())
    metrics.add("importance/cut_fraction", (cut & mask).sum(), mask.sum())
