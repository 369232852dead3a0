"""The settings of a policy's run, complete: every default filled in, and all of them compatible."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lrlhf.environments.settings import Episodes
from lrlhf.functional.algorithm import Algorithm
from lrlhf.modules.policy.batch_plan import largest_divisor
from lrlhf.modules.policy.importance_sampling import AUTOMATIC, ImportanceSampling
from lrlhf.modules.policy.teacher_checks import TOKEN_LOSSES
from lrlhf.modules.settings import (
    Advantage,
    DynamicSampling,
    Evaluation,
    Reference,
    Teacher,
    Update,
)
from lrlhf.rollout import Sampling
from lrlhf.run import Collectives


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What the parts of an iteration are configured by; made by `complete_settings`."""

    algorithm: Algorithm
    """With every override of a single part in place."""
    num_generations: int
    sampling: Sampling
    eval_sampling: Sampling
    evaluation: Evaluation
    reference: Reference
    advantage: Advantage
    update: Update
    default_minibatches: int
    """Optimizer steps per epoch over a rollout where ``update`` names no number."""
    importance_sampling: ImportanceSampling | None
    dynamic_sampling: DynamicSampling | None
    max_staleness: int
    allow_truncated_sampling: bool
    episodes: Episodes | None
    teacher: Teacher | None

    @property
    def kl_coef(self) -> float:
        """The configured strength of the KL penalty."""
        assert self.reference.kl_coef is not None, "complete_settings fills it in"
        return self.reference.kl_coef

    def response_tokens(self, *, training: bool) -> tuple[int, str]:
        """Return how many tokens may follow a prompt, and the option that says so."""
        episodes = self.episodes
        if episodes is not None:
            # an episode ends where the context is full; only the first of its turns needs room
            return episodes.max_turn_tokens or 0, "episodes.max_turn_tokens"
        if training:
            return self.sampling.max_new_tokens, "sampling.max_new_tokens"
        return self.eval_sampling.max_new_tokens, "eval_sampling.max_new_tokens"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is part of the reward, not of the loss."""
        return self.algorithm.kl_in == "reward"

    def minibatch_rows(self, rows: int, ranks: Collectives) -> int:
        """How many of a rank's rows one optimizer step takes."""
        if self.update.minibatch_size is not None:
            return self.update.minibatch_size // ranks.world_size
        steps = self.update.num_minibatches or largest_divisor(rows, self.default_minibatches)
        return rows // steps

    @property
    def importance(self) -> ImportanceSampling:
        """What becomes of the ratios between engine and trainer where they are weighed."""
        return self.importance_sampling or AUTOMATIC


def check_settings(settings: PolicySettings) -> None:
    """Refuse settings that do not fit together.

    Raises:
        ValueError: Two of them; says what would.
    """
    _check_groups(settings)
    _check_sampling(settings)
    _check_levels(settings)
    _check_penalty(settings)
    _check_truncation(settings)
    _check_scaling(settings)


def _check_groups(settings: PolicySettings) -> None:
    size, estimator = settings.num_generations, settings.algorithm.estimator
    if size < 1:
        raise ValueError(f"num_generations is {size}; it must be 1 or more")
    if size < 2 and (estimator.groups or settings.dynamic_sampling is not None):
        who = f"algorithm {_estimator_name(settings)!r}" if estimator.groups else "dynamic_sampling"
        raise ValueError(
            f"{who} compares the responses to one prompt, but num_generations is {size}; the "
            "nearest value is 2"
        )


def _check_sampling(settings: PolicySettings) -> None:
    if settings.sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature is 0: all responses to a prompt would be the same; train with a "
            "temperature above 0 (eval_sampling may be 0)"
        )
    if settings.sampling.truncates and not settings.allow_truncated_sampling:
        raise ValueError(
            "sampling.top_p, top_k, min_p or min_new_tokens cuts tokens off, so responses would "
            "not come from the policy that is trained; set them to 1.0, 0, 0.0 and 0, or accept "
            "the bias with allow_truncated_sampling: true"
        )
    tried = settings.evaluation.temperatures or (settings.eval_sampling.temperature,)
    if settings.evaluation.num_samples > 1 and max(tried) == 0:
        raise ValueError(
            f"evaluation.num_samples is {settings.evaluation.num_samples}, but responses at "
            "temperature 0 are all the same: set evaluation.temperatures or "
            "eval_sampling.temperature above 0"
        )
    if settings.sampling.starts_hot and settings.sampling.truncates:
        raise ValueError(
            "sampling.first_temperature is made up for by weights, which top_p, top_k, min_p and "
            "min_new_tokens would make nothing of: set them to 1.0, 0, 0.0 and 0, and limit the "
            "first token with first_top_k"
        )
    if settings.sampling.penalizes:
        raise ValueError(
            "sampling.repetition_penalty, presence_penalty or frequency_penalty makes responses "
            "come from another distribution than the policy's, whose probabilities have no "
            "penalty: set them to 1.0, 0.0 and 0.0 (eval_sampling may have them), and let the "
            "reward `repetition_penalty` punish repetition"
        )
    if settings.sampling.structured is not None:
        raise ValueError(
            "sampling.structured rules tokens out that the policy would take, so responses would "
            "not come from the policy that is trained: leave it out (eval_sampling may have it), "
            "and let the reward `regex_format` teach the format"
        )
    for name, options in settings.algorithm.beside.items():
        try:
            replace(settings.sampling, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"algorithm {settings.algorithm.name!r} samples {name!r} beside the responses "
                f"with options {dict(options)} that Sampling does not take: {error}"
            ) from error
    _check_staleness(settings)


def _check_staleness(settings: PolicySettings) -> None:
    """Refuse to generate ahead what depends on the weights or the scores of its iteration."""
    if settings.max_staleness < 0:
        raise ValueError(f"max_staleness is {settings.max_staleness}; it must be 0 or more")
    if settings.max_staleness and settings.algorithm.beside:
        raise ValueError(
            "max_staleness above 0 generates responses ahead, and algorithm "
            f"{settings.algorithm.name!r} samples {', '.join(settings.algorithm.beside)} beside "
            "them with the same weights: set max_staleness: 0"
        )
    if settings.max_staleness and settings.dynamic_sampling is not None:
        raise ValueError(
            "max_staleness above 0 generates responses before the present ones are scored, and "
            "dynamic_sampling decides by scores how many to generate: drop one of the two"
        )


def _check_levels(settings: PolicySettings) -> None:
    """Refuse one ratio per response for advantages that differ from token to token."""
    loss, estimator = settings.algorithm.loss, settings.algorithm.estimator
    if loss.level != "sequence":
        return
    name = _estimator_name(settings)
    if estimator.uses_values or estimator.per_turn:
        raise ValueError(
            f"update.loss {loss.name!r} takes one advantage per response, but the estimator "
            f"{name!r} gives one per {'turn' if estimator.per_turn else 'token'}; choose a token "
            f"loss ({TOKEN_LOSSES})"
        )
    penalty = settings.kl_in_reward and settings.kl_coef > 0
    if estimator.per_token and (penalty or estimator.options.get("gamma", 1.0) != 1):
        raise ValueError(
            f"update.loss {loss.name!r} takes one advantage per response, but the estimator "
            f"{name!r} with a KL penalty in the reward, or with gamma below 1, gives one per "
            f"token; choose a token loss ({TOKEN_LOSSES}), or reference.placement: loss and no "
            "gamma"
        )


def check_turn_rewards(algorithm: Algorithm) -> None:
    """Refuse one ratio per response for rewards of turns, which make the advantages differ.

    Raises:
        ValueError: The loss would average over a response what each of its turns has earned.
    """
    if algorithm.loss.level == "sequence" and algorithm.estimator.uses_turn_rewards:
        raise ValueError(
            f"update.loss {algorithm.loss.name!r} takes one advantage per response, but the "
            f"environment rewards turns, or a reward steps, and the estimator of algorithm "
            f"{algorithm.name!r} credits each of them; choose a token loss "
            f"({TOKEN_LOSSES}), or advantage.credit: response"
        )


def _check_truncation(settings: PolicySettings) -> None:
    """Refuse to continue a return without a value to continue it with."""
    if settings.advantage.truncated != "bootstrap" or settings.algorithm.estimator.uses_values:
        return
    raise ValueError(
        "advantage.truncated is bootstrap, which continues the return of a truncated response with "
        f"the value of a critic, but the estimator {_estimator_name(settings)!r} uses no values: "
        "take ppo, or advantage.truncated: train, exclude or trl"
    )


def _check_scaling(settings: PolicySettings) -> None:
    """Refuse to scale or clip a sum of rewards that is not read."""
    advantage = settings.advantage
    if not settings.algorithm.estimator.uses_rewards:
        return
    for name, given in (
        ("reward_clip_range", advantage.reward_clip_range is not None),
        ("scale_rewards", advantage.scale_rewards != "none"),
    ):
        if given:
            raise ValueError(
                f"advantage.{name} is about the sum of the rewards, but the estimator "
                f"{_estimator_name(settings)!r} normalises each reward by itself: leave it out, or "
                "take grpo"
            )


def _check_penalty(settings: PolicySettings) -> None:
    """Refuse a KL penalty that does nothing.

    The gradient of k1 in a loss is that of the log-probabilities, whose mean over a policy's own
    samples is zero wherever the reference is (Tang & Munos 2025, https://arxiv.org/abs/2506.09477).
    """
    reference = settings.reference
    if reference.sync_every is not None and settings.kl_coef == 0:
        raise ValueError("reference.sync_every is set, but kl_coef is 0: there is no reference")
    if settings.kl_coef == 0:
        return
    if settings.kl_in_reward and not settings.algorithm.estimator.uses_kl:
        raise ValueError(
            f"reference.placement is reward, but the estimator {_estimator_name(settings)!r} is "
            "not known to subtract inputs.kl, so the penalty would be lost: drop placement, or "
            "pass an Estimator with uses_kl=True"
        )
    if reference.kl_estimator == "k1" and not settings.kl_in_reward:
        raise ValueError(
            "reference.kl_estimator is k1 and the penalty is in the loss, where its gradient is "
            "zero on average: it would add noise and hold the policy nowhere. Take k3 (the default "
            "there) or k2, or move it with reference.placement: reward"
        )


def _estimator_name(settings: PolicySettings) -> str:
    return settings.advantage.estimator or settings.algorithm.name
