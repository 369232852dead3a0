"""Groups of options that RLOO and PPO share, as their YAML spells them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lrlhf.functional.estimators import Estimator, resolve_estimator
from lrlhf.functional.losses import PolicyLoss, resolve_policy_loss
from lrlhf.functional.names import unknown_name
from lrlhf.models import CausalLM


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The frozen policy that the trained one is kept close to.

    Args:
        kl_coef: Strength of the penalty on KL(policy || reference), in reward units per nat;
            0 loads no reference.
        kl_estimator: Estimator of the penalty where it is part of the loss: k1, k2 or k3. In the
            reward it is always k1.
        placement: Where the penalty goes: "reward" or "loss". None follows the estimator: the
            RLOO and REINFORCE families in the reward, the GRPO family in the loss.
        sync_every: Mix the policy into the reference every so many iterations (TR-DPO, Gorbatovski
            et al. 2024, https://arxiv.org/abs/2404.09656, eq. 2); None: never.
        mixup: Weight of the policy in that mix; 1 replaces the reference.
        model: Another model with the policy's tokenizer; None: the policy as it starts.
    """

    kl_coef: float = 0.05
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    placement: Literal["reward", "loss"] | None = None
    sync_every: int | None = None
    mixup: float = 0.6
    model: CausalLM | None = None

    def __post_init__(self) -> None:
        if self.kl_coef < 0:
            raise ValueError(f"reference.kl_coef is {self.kl_coef}; it must be 0 or more")
        if self.sync_every is not None and self.sync_every < 1:
            raise ValueError(f"reference.sync_every is {self.sync_every}; it must be 1 or more")
        if self.sync_every is not None and self.kl_coef == 0:
            raise ValueError("reference.sync_every is set, but kl_coef is 0: there is no reference")
        if not 0 < self.mixup <= 1:
            raise ValueError(f"reference.mixup is {self.mixup}; it must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How scores become advantages.

    Args:
        estimator: A name from `lrlhf.functional.estimators.ESTIMATORS` (rloo, rloo_openrlhf, grpo,
            dr_grpo, reinforce, reinforce_baseline, reinforce_plus_plus), or the import path of a
            function of the same signature.
        options: Keyword arguments of that function.
        reward_clip_range: Lowest and highest score, applied before everything else.
        normalize: Shift and scale the advantages of all ranks to mean 0 and deviation 1. None does
            what the estimator's paper does.
        truncated: What becomes of responses that ran into the length limit. "train": nothing
            special. "exclude": they are not trained on, do not count in any mean, and do not enter
            their siblings' baseline. "trl": as TRL's mask_truncated_completions: not trained on,
            but still counted in the mean and in the baselines.
    """

    estimator: str = "rloo"
    options: dict[str, Any] = field(default_factory=dict)
    reward_clip_range: tuple[float, float] | None = None
    normalize: bool | None = None
    truncated: Literal["train", "exclude", "trl"] = "train"

    def __post_init__(self) -> None:
        _check_options("advantage", self.function.function, self.options)
        if self.reward_clip_range is not None and not (
            self.reward_clip_range[0] < self.reward_clip_range[1]
        ):
            raise ValueError(
                f"advantage.reward_clip_range is {self.reward_clip_range}; the first number must "
                "be the smaller one"
            )

    @property
    def function(self) -> Estimator:
        """The estimator that the name stands for."""
        return resolve_estimator(self.estimator)


@dataclass(frozen=True, kw_only=True)
class Update:
    """How experience becomes optimizer steps.

    Args:
        loss: A name from `lrlhf.functional.losses.POLICY_LOSSES` (sequence_clip, token_clip, gspo,
            cispo, dapo, dr_grpo, cpgd, reinforce), or the import path of a function of the same
            signature.
        options: Keyword arguments of that function, for example ``clip_high: 0.28``.
        num_iterations: Passes over each rollout.
        minibatch_size: Responses of all processes per optimizer step; None: all of a rollout.
        micro_batch_tokens: Tokens of one forward pass, padding counted; None: a minibatch at once.
            Memory, not results, depends on it.
        max_grad_norm: Clip the gradient to this norm; ``inf`` leaves it.
        entropy_coef: Weight of the entropy bonus.
        logprob_chunk: Tokens whose logits exist at the same time.
        max_skipped_steps: Stop after so many optimizer steps with a gradient that was not finite.
    """

    loss: str = "sequence_clip"
    options: dict[str, Any] = field(default_factory=dict)
    num_iterations: int = 1
    minibatch_size: int | None = None
    micro_batch_tokens: int | None = None
    max_grad_norm: float = 1.0
    entropy_coef: float = 0.0
    logprob_chunk: int = 1024
    max_skipped_steps: int = 10

    def __post_init__(self) -> None:
        _check_options("update", self.function.function, self.options)
        for name in ("num_iterations", "minibatch_size", "micro_batch_tokens", "logprob_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"update.{name} is {value}; it must be 1 or more")
        if self.max_grad_norm <= 0:
            raise ValueError(f"update.max_grad_norm is {self.max_grad_norm}; it must be above 0")

    @property
    def function(self) -> PolicyLoss:
        """The loss that the name stands for, with the options in place."""
        loss = resolve_policy_loss(self.loss)
        return loss._replace(defaults={**loss.defaults, **self.options})


def _check_options(group: str, function: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Refuse options that the function does not have, before a rollout was paid for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise unknown_name(f"option in {group}.options", name, known)
