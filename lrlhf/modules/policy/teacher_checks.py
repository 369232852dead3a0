"""What a teacher goes together with."""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.algorithms import distillation
from lrlhf.modules.settings import Teacher
from lrlhf.rollout import Sampling

TOKEN_LOSSES = "token_clip, dapo, cispo, reinforce"


def check_teacher(
    teacher: Teacher | None,
    algorithm: Algorithm,
    sampling: Sampling,
    *,
    scored: bool,
    different: bool,
) -> None:
    """Refuse to learn from nothing, and a teacher that cannot say what it is asked.

    Args:
        teacher: None: there is none.
        algorithm: With every override in place.
        sampling: Of the training responses.
        scored: Whether there are rewards.
        different: Whether groups are chosen by their scores.

    Raises:
        ValueError: Says what would do.
    """
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
    if alone and teacher.placement == "loss" and sampling.starts_hot:
        raise ValueError(
            "sampling.first_temperature is made up for by weights of advantages, and with "
            "teacher.placement loss there are none without rewards: leave it out, or set "
            "placement: reward"
        )
    if not scored and (different or estimator.groups or estimator.uses_values):
        option = "dynamic_sampling" if different else f"algorithm {algorithm.name!r}"
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
    if teacher.server is not None and sampling.temperature != 1:
        raise ValueError(
            "teacher.server gives log-probabilities at temperature 1, and sampling.temperature is "
            f"{sampling.temperature:g}: set it to 1, or load the teacher with teacher.model"
        )
