"""The settings of a policy's run, complete: every default filled in, and all of them compatible."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from lrlhf.environments.settings import Episodes, resolve
from lrlhf.functional.algorithm import LOG_METRIC, Algorithm, Estimator, PolicyLoss
from lrlhf.functional.algorithms import (
    ALGORITHMS,
    ALIASES,
    ESTIMATORS,
    distillation,
    pass_at_k,
    resolve_algorithm,
    resolve_estimator,
    resolve_policy_loss,
)
from lrlhf.functional.algorithms.ppo import PPO_CLIP
from lrlhf.functional.names import unknown_name
from lrlhf.modules.policy.iteration import largest_divisor
from lrlhf.modules.policy.privileged import names_in, read_context
from lrlhf.modules.settings import (
    AUTOMATIC,
    Advantage,
    DynamicSampling,
    Evaluation,
    ImportanceSampling,
    Reference,
    Teacher,
    Update,
)
from lrlhf.rollout import Sampling
from lrlhf.run import Collectives

TOKEN_LOSSES = "token_clip, dapo, cispo, reinforce"


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The options of a policy's run, complete and compatible with one another.

    `complete` makes them of what a module's constructor takes, whose names they have.

    Raises:
        ValueError: Two options do not fit together; says what would.
    """

    algorithm: Algorithm
    """With every override of a single part in place."""
    num_generations: int
    sampling: Sampling
    eval_sampling: Sampling
    evaluation: Evaluation
    reference: Reference
    advantage: Advantage
    update: Update
    default_minibatches: int = 1
    """Optimizer steps per epoch over a rollout where ``update`` names no number."""
    importance_sampling: ImportanceSampling | None
    dynamic_sampling: DynamicSampling | None
    max_staleness: int
    allow_truncated_sampling: bool
    episodes: Episodes | None
    teacher: Teacher | None = None
    scored: bool = True
    """Whether there are rewards."""

    @classmethod
    def complete(
        cls,
        *,
        default_algorithm: str,
        algorithm: str | Algorithm | None,
        eval_sampling: Sampling | None,
        reference: Reference,
        **options: Any,
    ) -> Self:
        """Fill in what a constructor was not given.

        Args:
            default_algorithm: Of the module, where nothing names another.
            algorithm: See `PolicyModule`, as the others.
            eval_sampling: None: greedy, or as in training where several responses are to differ.
            reference: Its strength and placement may be the algorithm's.
            options: The other fields.
        """
        if algorithm is None and not options.get("scored", True):
            algorithm = distillation.ALGORITHM
        chosen = assemble_algorithm(
            algorithm,
            default=default_algorithm,
            advantage=options["advantage"],
            update=options["update"],
        )
        if reference.placement is not None:
            chosen = replace(chosen, kl_in=reference.placement)
        if reference.kl_coef is None:
            reference = replace(reference, kl_coef=chosen.kl_coef)
        if eval_sampling is None:
            eval_sampling = _default_eval_sampling(options["sampling"], options["evaluation"])
        return cls(algorithm=chosen, eval_sampling=eval_sampling, reference=reference, **options)

    @property
    def keeps_mask(self) -> bool:
        """Whether probabilities are renormalised over the ids that truncated sampling left."""
        return self.sampling.truncates and not self.allow_truncated_sampling

    def __post_init__(self) -> None:
        _check_teacher(self)
        _check_groups(self)
        _check_sampling(self)
        _check_levels(self)
        _check_penalty(self)
        _check_truncation(self)
        _check_scaling(self)
        if self.episodes is not None:
            resolve(self.episodes)

    @property
    def kl_coef(self) -> float:
        """The configured strength of the KL penalty."""
        assert self.reference.kl_coef is not None, "`complete` fills it in"
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
        """Return how many of a rank's rows one optimizer step takes."""
        if self.update.minibatch_size is not None:
            return self.update.minibatch_size // ranks.world_size
        steps = self.update.num_minibatches or largest_divisor(rows, self.default_minibatches)
        return rows // steps

    @property
    def importance(self) -> ImportanceSampling:
        """How ratios between engine and trainer become weights, where they do."""
        return self.importance_sampling or AUTOMATIC


def _check_teacher(settings: PolicySettings) -> None:
    """Refuse to learn from nothing, and a teacher that cannot say what it is asked."""
    teacher, algorithm, scored = settings.teacher, settings.algorithm, settings.scored
    if teacher is None and not scored:
        raise ValueError(
            "rewards is missing: name reward functions, or a teacher to learn from (teacher.model)"
        )
    estimator = algorithm.estimator
    alone = estimator.function is distillation.no_advantages
    if teacher is None and alone:
        raise ValueError(
            f"algorithm {algorithm.name!r} makes nothing of rewards, and there is no teacher to "
            "learn from: set teacher.model, or take another algorithm"
        )
    if teacher is None:
        return
    sampling, filtered = settings.sampling, settings.dynamic_sampling is not None
    if alone and teacher.placement == "loss" and sampling.starts_hot:
        raise ValueError(
            "sampling.first_temperature is made up for by weights of advantages, and with "
            "teacher.placement loss there are none without rewards: leave it out, or set "
            "placement: reward"
        )
    if not scored and (filtered or estimator.groups or estimator.uses_values):
        option = "dynamic_sampling" if filtered else f"algorithm {algorithm.name!r}"
        raise ValueError(
            f"{option} learns from scores, and there are no rewards beside the teacher: drop it "
            "(update.loss chooses a loss), or name reward functions"
        )
    if teacher.placement == "reward" and algorithm.loss.level == "sequence":
        raise ValueError(
            f"update.loss {algorithm.loss.name!r} takes one advantage per response, but "
            "teacher.placement reward gives one per token; choose a token loss "
            f"({TOKEN_LOSSES}), or teacher.placement: loss"
        )
    if teacher.context is not None:
        _check_names(settings, names_in(read_context(teacher.context)))
    if teacher.server is not None and sampling.temperature != 1:
        raise ValueError(
            "teacher.server gives log-probabilities at temperature 1, and sampling.temperature is "
            f"{sampling.temperature:g}: set it to 1, or load the teacher with teacher.model"
        )


def _check_names(settings: PolicySettings, names: frozenset[str]) -> None:
    """Refuse a context of a teacher that reads what there never is."""
    if "feedback" in names and settings.episodes is None:
        raise ValueError(
            "teacher.context reads feedback, what the environment of episodes says, and there are "
            "no episodes: set episodes, or read a column or an extra of another name"
        )
    lacks = "" if settings.num_generations > 1 else "num_generations above 1"
    lacks = lacks if settings.scored else "rewards"
    if "correct_response" in names and lacks:
        raise ValueError(
            "teacher.context reads correct_response, another response to the prompt with a high "
            f"score, and there is never one: set {lacks}, or leave it out"
        )
    plays = settings.episodes
    rewritten = plays is not None and (plays.history != "tokens" or plays.agent is not None)
    if rewritten:
        raise ValueError(
            "teacher.context changes the prompt of a response, and episodes.agent or history: "
            "template writes another one for each turn: leave them out, or drop context"
        )


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
    k = estimator.options.get("k")
    if estimator.function is pass_at_k.pass_at_k and not (type(k) is int and 1 <= k < size):
        raise ValueError(
            f"advantage.options k is {k!r}; it must be a whole number from 1 to below "
            f"num_generations, {size}: of all responses there is one best, so that none would learn"
        )


def _check_sampling(settings: PolicySettings) -> None:
    if settings.sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature is 0: all responses to a prompt would be the same; train with a "
            "temperature above 0 (eval_sampling may be 0)"
        )
    if settings.keeps_mask and settings.teacher is not None:
        raise ValueError(
            "sampling.top_p, top_k, min_p or min_new_tokens cuts tokens off, and the policy's "
            "probabilities over the rest do not compare with the teacher's, which are over all: "
            "set them to 1.0, 0, 0.0 and 0, or accept the bias with allow_truncated_sampling: true"
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
    for name, options in settings.algorithm.extra_samples.items():
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
    if settings.max_staleness and settings.algorithm.extra_samples:
        extra = ", ".join(settings.algorithm.extra_samples)
        raise ValueError(
            "max_staleness above 0 generates responses ahead, and algorithm "
            f"{settings.algorithm.name!r} samples {extra} beside them with the same weights: set "
            "max_staleness: 0"
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
    for name, is_set in (
        ("reward_clip_range", advantage.reward_clip_range is not None),
        ("scale_rewards", advantage.scale_rewards != "none"),
    ):
        if is_set:
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
    if reference.kl_estimator == "unbiased" and settings.kl_in_reward:
        raise ValueError(
            "reference.kl_estimator is unbiased, which weighs a gradient, and the penalty is in "
            "the reward, which has none: take k1 there, or reference.placement: loss"
        )
    if reference.kl_estimator == "k1" and not settings.kl_in_reward:
        raise ValueError(
            "reference.kl_estimator is k1 and the penalty is in the loss, where its gradient is "
            "zero on average: it would add noise and hold the policy nowhere. Take k3 (the default "
            "there) or k2, or move it with reference.placement: reward"
        )


def _estimator_name(settings: PolicySettings) -> str:
    return settings.advantage.estimator or settings.algorithm.name


def greedy_like(sampling: Sampling) -> Sampling:
    """Return greedy sampling with the lengths and stop strings of another."""
    return Sampling(
        temperature=0.0,
        max_new_tokens=sampling.max_new_tokens,
        stop=sampling.stop,
        stop_in_text=sampling.stop_in_text,
    )


def _default_eval_sampling(sampling: Sampling, evaluation: Evaluation) -> Sampling:
    """Return greedy sampling, or that of training where several responses are to differ."""
    greedy = greedy_like(sampling)
    if evaluation.num_samples == 1 or evaluation.temperatures:
        return greedy
    return replace(greedy, temperature=sampling.temperature)


def assemble_algorithm(
    algorithm: str | Algorithm | None, *, default: str, advantage: Advantage, update: Update
) -> Algorithm:
    """Return an algorithm with the parts in place that are overridden one by one.

    Args:
        algorithm: A value, a name or an import path; None: the one that ``advantage.estimator``
            names, or ``default``.
        default: A name.
        advantage: Its estimator, options and normalisation, where they are set.
        update: Its loss, options and aggregation, where they are set.

    Raises:
        ValueError: A name or option is unknown, or an option is not of this kind of loss.
    """
    named = advantage.estimator
    if algorithm is None and named in {*ALGORITHMS, *ALIASES}:
        algorithm = named
    estimator = None if named is None else resolve_estimator(named)
    if algorithm is None and named is not None and estimator is not None:
        # PPO's loss takes advantages whether or not the tokens of a response differ
        algorithm = Algorithm(name=named, estimator=estimator, loss=PPO_CLIP, kl_in="reward")
    base = resolve_algorithm(algorithm or default)
    estimator = estimator or base.estimator
    estimator = _with_estimator_options(estimator, named or base.name, advantage)
    own = update.loss in (None, base.loss.name)
    loss = base.loss if own or update.loss is None else resolve_policy_loss(update.loss)
    loss = _with_loss_options(loss, update)
    kl_in = base.kl_in if estimator.uses_kl else "loss"
    # extra samples are taken for the advantages
    extra = resolve_algorithm(named).extra_samples if named in ESTIMATORS else base.extra_samples
    return replace(base, estimator=estimator, loss=loss, kl_in=kl_in, extra_samples=extra)


def _with_estimator_options(estimator: Estimator, name: str, advantage: Advantage) -> Estimator:
    _check_options(f"advantage.options (estimator {name})", [estimator.function], advantage.options)
    options = {**estimator.options, **advantage.options}
    if "lam" in advantage.options and options.get("length_alpha") is not None:
        raise ValueError(
            f"advantage.options of {name} have lam, and length_alpha in its place: set "
            "length_alpha: null, or leave lam out"
        )
    level = estimator.normalize
    if advantage.normalize is not None:
        default: Literal["token", "sequence"] = "token" if estimator.per_turn else "sequence"
        level = (default if level == "none" else level) if advantage.normalize else "none"
    return estimator._replace(options=options, normalize=level)


def _with_loss_options(loss: PolicyLoss, update: Update) -> PolicyLoss:
    functions = [loss.function, *([loss.choose] if loss.choose else [])]
    _check_options(f"update.options (loss {loss.name})", functions, update.options)
    for name, is_set in (
        ("aggregate", update.aggregate is not None),
        ("high_entropy_fraction", update.high_entropy_fraction < 1),
    ):
        if is_set and loss.level == "sequence":
            raise ValueError(
                f"update.{name} is about tokens, but update.loss {loss.name!r} has one value per "
                f"response; leave it out, or choose a token loss ({TOKEN_LOSSES}, …)"
            )
    loss = loss._replace(
        options={**loss.options, **update.options}, aggregate=update.aggregate or loss.aggregate
    )
    if update.options:
        _try_options(loss)
    return loss


def _try_options(loss: PolicyLoss) -> None:
    """Have a loss refuse values out of their range before a rollout is paid for."""
    tokens, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    further = {}
    if loss.choose is not None:
        further["covariant"] = loss.choose_tokens(tokens[0], seed=0)[None]
    advantages = tokens[0] if loss.level == "sequence" else tokens
    loss.function(tokens, tokens, advantages, mask, **loss.function_options, **further)


def _check_options(
    where: str, functions: Sequence[Callable[..., Any]], options: Mapping[str, Any]
) -> None:
    """Refuse options that none of the functions has, before a rollout was paid for."""
    parameters = [
        parameter
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
    ]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    keywords = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    known = [name for name in keywords if name not in (LOG_METRIC, "covariant")]
    for name in options:
        if name not in known:
            raise unknown_name(f"option in {where}", name, known)
