"""What a run asks of what generates its responses and of what scores them."""

from __future__ import annotations

from collections.abc import Iterable

from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.rewards import Rewards
from lrlhf.rewards.lookup import comparing
from lrlhf.rollout import RolloutEngine
from lrlhf.rollout.engines.engine import check_format

_SINGLE = "let a judge look at single ones (mode: absolute, or reference_column)"


def check_engine(engine: RolloutEngine, settings: PolicySettings) -> None:
    """Refuse an engine that cannot do what the settings ask for.

    Raises:
        ValueError: Names the setting, and an engine that can.
    """
    can = engine.capabilities
    hot = settings.sampling.starts_hot or settings.eval_sampling.starts_hot
    if hot and not can.tells_kept_mass:
        raise ValueError(
            f"sampling.first_temperature: {type(engine).__name__} draws all tokens of a response "
            "at one temperature: leave it out, or take lrlhf.rollout.TransformersEngine"
        )
    if settings.sampling.truncates and not can.tells_kept_mass:
        raise ValueError(
            f"sampling.top_p, top_k, min_p or min_new_tokens cuts tokens off, and "
            f"{type(engine).__name__} does not tell how much probability that was, so its "
            "log-probabilities do not compare with the policy's: set them to 1.0, 0, 0.0 and "
            "0, or take lrlhf.rollout.TransformersEngine (eval_sampling may cut)"
        )
    check_format(engine, settings.eval_sampling, option="eval_sampling")
    if settings.max_staleness > 0 and not can.concurrent:
        raise ValueError(
            f"max_staleness is {settings.max_staleness}, but model.engine is "
            f"{type(engine).__name__}, which computes in the training process: set "
            "max_staleness: 0, or take lrlhf.rollout.VLLMServerEngine"
        )
    if settings.max_staleness > 1 and not can.updates_in_flight:
        raise ValueError(
            f"max_staleness is {settings.max_staleness}, but {type(engine).__name__} takes no new "
            "weights while it generates: set max_staleness: 1, or take "
            "lrlhf.rollout.VLLMServerEngine"
        )


def check_generating_ahead(settings: PolicySettings, rewards: Rewards) -> None:
    """Refuse to generate ahead what could not be scored after a resume.

    Raises:
        ValueError: A reward function reads environments; names it.
    """
    if not settings.max_staleness or settings.episodes is None:
        return
    if names := rewards.asking_for("environments"):
        raise ValueError(
            f"the reward function {names[0]} reads the environments, which a resumed run has "
            "not for responses that were generated ahead: set max_staleness: 0, or give the "
            "environment get_reward() and take environment_reward"
        )


def check_compared(rewards: Rewards, num_generations: int) -> None:
    """Refuse rewards that compare the responses to a prompt where there is one of each.

    Raises:
        ValueError: There is.
    """
    names = comparing(rewards.functions)
    if names and num_generations < 2:
        raise ValueError(
            f"num_generations is {num_generations}, and the reward {names[0]!r} compares the "
            f"responses to a prompt: set it to 2 or more, or {_SINGLE}"
        )


def check_beside(rewards: Rewards, beside: Iterable[str]) -> None:
    """Refuse rewards that compare responses where the algorithm has one scored alone.

    Args:
        rewards: Of the training.
        beside: What the algorithm samples beside the others, one to a prompt.

    Raises:
        ValueError: There is such a response, and such a reward.
    """
    names = comparing(rewards.functions)
    if names and (alone := ", ".join(beside)):
        raise ValueError(
            f"the algorithm has one more response to each prompt ({alone}) scored alone, and the "
            f"reward {names[0]!r} compares responses: take rloo, or {_SINGLE}"
        )


def check_evaluation(functions: Rewards, settings: PolicySettings, *, answers_once: bool) -> None:
    """Refuse functions that compare responses where an evaluation scores one of a prompt alone.

    Those that a recipe asks about some labels only are left to the run: data may have others.

    Args:
        functions: Rewards or metrics that the evaluation asks.
        settings: Of the run.
        answers_once: Whether every prompt is answered once, whatever the settings say.

    Raises:
        ValueError: It does; says which samples would do.
    """
    names = [name for name in comparing(functions.functions) if name in functions.asked_of_all]
    if not names:
        return
    check_compared(functions, settings.num_generations)
    evaluation, size = settings.evaluation, settings.num_generations
    temperatures = evaluation.temperatures or (settings.eval_sampling.temperature,)
    several = (
        "set evaluation.num_samples to a multiple of num_generations at temperatures above 0, or "
        "trainer.limit_val_batches: 0, or "
    )
    if answers_once:
        reason, several = "a prediction has one response to a prompt", "validate, or "
    elif evaluation.num_samples % size == 1:
        reason = (
            f"evaluation.num_samples is {evaluation.num_samples}, and samples are taken in rounds "
            f"of num_generations ({size}), one of which has a single response to a prompt"
        )
    elif min(temperatures) == 0:
        reason = "one of the temperatures of evaluations is 0, where a prompt has one response"
    else:
        return
    raise ValueError(
        f"{reason}, and the reward {names[0]!r} compares the responses to a prompt: "
        f"{several}{_SINGLE}"
    )
