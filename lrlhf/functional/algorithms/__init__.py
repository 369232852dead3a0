"""Policy-gradient algorithms by name, one file each."""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm, Estimator, PolicyLoss
from lrlhf.functional.algorithms import (
    bnpo,
    cispo,
    clip_cov,
    cpgd,
    dapo,
    distillation,
    dppo,
    dr_grpo,
    gdpo,
    gigpo,
    gmpo,
    gpg,
    grpo,
    gspo,
    kl_cov,
    luspo,
    mt_grpo,
    opo,
    pass_at_k,
    ppo,
    reinforce,
    reinforce_baseline,
    reinforce_plus_plus,
    remax,
    rloo,
    rloo_openrlhf,
    rloo_turn,
    sapo,
    vapo,
    vespo,
)
from lrlhf.functional.names import import_value

ALGORITHMS: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM
    for module in (
        rloo,
        rloo_openrlhf,
        rloo_turn,
        ppo,
        vapo,
        grpo,
        mt_grpo,
        gigpo,
        gdpo,
        dr_grpo,
        bnpo,
        dapo,
        gspo,
        luspo,
        gmpo,
        cispo,
        sapo,
        vespo,
        dppo,
        clip_cov,
        kl_cov,
        cpgd,
        pass_at_k,
        opo,
        gpg,
        reinforce,
        reinforce_baseline,
        reinforce_plus_plus,
        remax,
        distillation,
    )
}

ESTIMATORS: dict[str, Estimator] = {
    **{name: algorithm.estimator for name, algorithm in ALGORITHMS.items()},
    "gae": ppo.ALGORITHM.estimator,
    "group_norm": grpo.ALGORITHM.estimator,
}
"""Advantages under the names that `Advantage.estimator` knows."""

ALIASES = {"gae": "ppo", "group_norm": "grpo"}
"""Algorithms that an estimator is better known by."""

POLICY_LOSSES: dict[str, PolicyLoss] = {
    ppo.TOKEN_CLIP.name: ppo.TOKEN_CLIP,
    **{
        loss.name: loss
        for loss in (algorithm.loss for algorithm in ALGORITHMS.values())
        if loss.name != ppo.TOKEN_CLIP.name
    },
}
"""Losses under the names that `Update.loss` knows."""


def resolve_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Return an algorithm: as it is, by its name, or imported by its dotted path.

    Raises:
        ValueError: Unknown name, or a path that leads to no `Algorithm`.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    name = ALIASES.get(algorithm, algorithm)
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    value = import_value("algorithm", name, ALGORITHMS)
    if not isinstance(value, Algorithm):
        raise ValueError(
            f"algorithm {name!r} is a {type(value).__name__}, not a "
            "lrlhf.functional.Algorithm; give the path of the value itself, such as "
            "my_package.ALGORITHM (a function of advantages alone is advantage.estimator, one of "
            "losses update.loss)"
        )
    return value


def resolve_estimator(name: str) -> Estimator:
    """Return advantages by name, or imported by their dotted path.

    Args:
        name: A key of `ESTIMATORS`, or the path of an `Estimator` or of a function like its
            ``function``. Nothing is known of a bare function: its advantages are not whitened, and
            it may ignore ``inputs.kl``, so the KL penalty goes into the loss.

    Raises:
        ValueError: Unknown name, or a path that leads to neither.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    value = import_value("estimator", name, ESTIMATORS)
    if isinstance(value, Estimator):
        return value
    if callable(value):
        return Estimator(value, uses_kl=False)
    raise ValueError(f"estimator {name!r} is a {type(value).__name__}, not a function")


def resolve_policy_loss(name: str) -> PolicyLoss:
    """Return a policy loss by name, or imported by its dotted path.

    Args:
        name: A key of `POLICY_LOSSES`, or the path of a `PolicyLoss` or of a function like the
            losses per token, which is then averaged over tokens.

    Raises:
        ValueError: Unknown name, or a path that leads to neither.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    value = import_value("policy loss", name, POLICY_LOSSES)
    if isinstance(value, PolicyLoss):
        return value
    if callable(value):
        return PolicyLoss(name, value)
    raise ValueError(f"policy loss {name!r} is a {type(value).__name__}, not a function")
