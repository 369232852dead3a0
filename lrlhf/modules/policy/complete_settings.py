"""Fill in what a run was not told, from its algorithm and its module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from lrlhf.environments.settings import Episodes, resolve
from lrlhf.functional.algorithm import Algorithm, Estimator, PolicyLoss
from lrlhf.functional.algorithms import (
    ALGORITHMS,
    ALIASES,
    ESTIMATORS,
    distillation,
    resolve_algorithm,
    resolve_estimator,
    resolve_policy_loss,
)
from lrlhf.functional.algorithms.ppo import PPO_CLIP
from lrlhf.functional.names import unknown_name
from lrlhf.modules.policy.importance_sampling import ImportanceSampling
from lrlhf.modules.policy.policy_settings import PolicySettings, check_settings
from lrlhf.modules.policy.teacher_checks import TOKEN_LOSSES, check_teacher
from lrlhf.modules.settings import (
    Advantage,
    DynamicSampling,
    Evaluation,
    Reference,
    Teacher,
    Update,
)
from lrlhf.rollout import Sampling


def complete_settings(  # noqa: PLR0913  what the constructors take
    *,
    default_algorithm: str,
    default_minibatches: int = 1,
    algorithm: str | Algorithm | None,
    num_generations: int,
    sampling: Sampling,
    eval_sampling: Sampling | None,
    evaluation: Evaluation,
    reference: Reference,
    advantage: Advantage,
    update: Update,
    importance_sampling: ImportanceSampling | None,
    dynamic_sampling: DynamicSampling | None,
    max_staleness: int,
    allow_truncated_sampling: bool,
    episodes: Episodes | None,
    teacher: Teacher | None = None,
    scored: bool = True,
) -> PolicySettings:
    """Fill in what a constructor was not given, and refuse what does not fit together.

    Args:
        default_algorithm: Of the module, where nothing names another.
        default_minibatches: Of the module.
        algorithm: See `RLOO`.
        num_generations: See `RLOO`.
        sampling: See `RLOO`.
        eval_sampling: See `RLOO`.
        evaluation: See `RLOO`.
        reference: See `RLOO`.
        advantage: See `RLOO`.
        update: See `RLOO`.
        importance_sampling: See `RLOO`.
        dynamic_sampling: See `RLOO`.
        max_staleness: See `RLOO`.
        allow_truncated_sampling: See `RLOO`.
        episodes: See `RLOO`.
        teacher: See `RLOO`.
        scored: Whether there are rewards.

    Raises:
        ValueError: Two options do not fit together; says what would.
    """
    if algorithm is None and not scored:
        algorithm = distillation.ALGORITHM
    chosen = assemble_algorithm(
        algorithm, default=default_algorithm, advantage=advantage, update=update
    )
    if reference.placement is not None:
        chosen = replace(chosen, kl_in=reference.placement)
    if reference.kl_coef is None:
        reference = replace(reference, kl_coef=chosen.kl_coef)
    settings = PolicySettings(
        algorithm=chosen,
        num_generations=num_generations,
        sampling=sampling,
        eval_sampling=eval_sampling or _default_eval_sampling(sampling, evaluation),
        evaluation=evaluation,
        reference=reference,
        advantage=advantage,
        update=update,
        default_minibatches=default_minibatches,
        importance_sampling=importance_sampling,
        dynamic_sampling=dynamic_sampling,
        max_staleness=max_staleness,
        allow_truncated_sampling=allow_truncated_sampling,
        episodes=episodes,
        teacher=teacher,
    )
    check_teacher(teacher, chosen, sampling, scored=scored, different=dynamic_sampling is not None)
    check_settings(settings)
    if episodes is not None:
        resolve(episodes)
    return settings


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
    # what is sampled beside the responses is sampled for the advantages
    beside = resolve_algorithm(named).beside if named in ESTIMATORS else base.beside
    return replace(base, estimator=estimator, loss=loss, kl_in=kl_in, beside=beside)


def _with_estimator_options(estimator: Estimator, name: str, advantage: Advantage) -> Estimator:
    _check_options(f"advantage.options (estimator {name})", estimator.function, advantage.options)
    level = estimator.normalize
    if advantage.normalize is not None:
        default: Literal["token", "sequence"] = "token" if estimator.per_turn else "sequence"
        level = (default if level == "none" else level) if advantage.normalize else "none"
    return estimator._replace(options={**estimator.options, **advantage.options}, normalize=level)


def _with_loss_options(loss: PolicyLoss, update: Update) -> PolicyLoss:
    _check_options(f"update.options (loss {loss.name})", loss.function, update.options)
    for name, given in (
        ("aggregate", update.aggregate is not None),
        ("high_entropy_fraction", update.high_entropy_fraction < 1),
    ):
        if given and loss.level == "sequence":
            raise ValueError(
                f"update.{name} is about tokens, but update.loss {loss.name!r} has one value per "
                f"response; leave it out, or choose a token loss ({TOKEN_LOSSES}, …)"
            )
    return loss._replace(
        options={**loss.options, **update.options}, aggregate=update.aggregate or loss.aggregate
    )


def _check_options(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that the function does not have, before a rollout was paid for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise unknown_name(f"option in {where}", name, known)
