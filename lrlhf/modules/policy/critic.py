"""The value function of PPO: a network of its own or a head, its unit, its loss and its step."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.functional.algorithm import Algorithm
from lrlhf.guard.anomalies import StepWatch
from lrlhf.models import (
    ValueHead,
    ValueModel,
    ValueNetwork,
    new_value_head,
    plain_model,
    sequence_values,
)
from lrlhf.modules.base import SteppedOptimizer
from lrlhf.modules.metrics.rollout_metrics import measure_values
from lrlhf.modules.optimizers import OptimizerAndScheduler
from lrlhf.modules.policy.experience import ScoreStatistics
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.objective import Denominators, PolicyStep, step_of, value_loss
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.policy.update import OptimizerStep
from lrlhf.modules.settings import Critic
from lrlhf.run.quiet_output import quiet
from lrlhf.types import Experience, SequenceBatch

_LR = 1e-5
"""Of a critic's body, and of a head that was trained before."""
_HEAD_LR = 0.5
"""Of a new head, times its inputs: about how far a step moves a value, in score deviations."""


class ValueFunction(NamedTuple):
    """What tells the value of each state."""

    settings: Critic
    network: ValueNetwork | None
    """Of its own; None: the head reads the policy's backbone."""
    head: ValueHead

    @property
    def model(self) -> nn.Module:
        """What its optimizer trains."""
        return self.head if self.network is None else self.network

    def follow(self, statistics: ScoreStatistics, *, step: int) -> None:
        """Scale and shift a new head's outputs to the deviation and mean of the scores so far."""
        if self.head.is_new and step >= self.settings.freeze_steps:
            self.head.measure_in(statistics.std, statistics.mean)

    def optimizer(self, total_steps: float) -> OptimizerAndScheduler:
        """Build its optimizer: a new head is further from what it should be than a body.

        Args:
            total_steps: Iterations of the run.
        """
        settings = self.settings.optimizer
        learning = total_steps - self.settings.freeze_steps
        named = list(self.model.named_parameters())
        head_lr = _HEAD_LR / self.head.output.in_features
        if settings.lr is not None or not self.head.is_new:
            return settings.filled(lr=_LR).build(named, learning)
        if self.network is None:
            return settings.filled(lr=head_lr).build(named, learning)
        return settings.filled(lr=_LR).build(named, learning, lrs={"head.": head_lr})


def check_critic(algorithm: Algorithm, critic: Critic | None) -> None:
    """Refuse a critic that nothing reads, and an algorithm that misses one.

    Args:
        algorithm: Of the run.
        critic: None: there is none.

    Raises:
        ValueError: One of the two.
    """
    if algorithm.estimator.uses_values == (critic is not None):
        return
    raise ValueError(
        f"algorithm {algorithm.name!r} needs a critic, and critic is null: use "
        "lrlhf.modules.PPO with its critic"
        if critic is None
        else f"algorithm {algorithm.name!r} uses no values: set critic: null, or take ppo"
    )


@quiet()
def load_value_function(
    critic: Critic,
    policy: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
) -> ValueFunction:
    """Load or make a critic.

    Raises:
        ValueError: It shares weights with the policy, or does not know all of its tokens.
    """
    model = critic.model
    if model is None:
        return ValueFunction(critic, None, new_value_head(policy, critic.head))
    if isinstance(model, str):
        model = ValueModel(source=model, head=critic.head)
    network = model.load() if isinstance(model, ValueModel) else model
    if {id(weight) for weight in network.parameters()} & {
        id(weight) for weight in policy.parameters()
    }:
        raise ValueError(
            "critic.model shares weights with the policy, so two optimizers would move them; "
            "leave it out for a head on the policy's backbone, or pass a copy"
        )
    _check_vocabulary(network, tokenizer)
    return ValueFunction(critic, network, network.head)


def _check_vocabulary(network: ValueNetwork, tokenizer: PreTrainedTokenizerBase) -> None:
    """The critic reads the policy's token ids."""
    largest = max(tokenizer.get_vocab().values())
    known = len(plain_model(network.backbone).get_input_embeddings().weight)  # type: ignore[arg-type]
    if known <= largest:
        raise ValueError(
            f"critic.model knows {known} tokens, but the policy's "
            f"tokenizer has ids up to {largest}: a critic reads the policy's own ids, so it "
            "must come from a model with the same tokenizer"
        )


class CriticStep:
    """The critic's optimizer step on a minibatch.

    Args:
        critic: What is trained; its optimizer is the module's second.
        policy: Its backbone is read by a head.
        settings: Of the run.
    """

    stage = "value"
    """What dumps call it."""

    def __init__(
        self, critic: ValueFunction, policy: LoadedPolicy, settings: PolicySettings
    ) -> None:
        self._critic, self._policy = critic, policy.model
        own = critic.settings
        self.optimizer = SteppedOptimizer(1, "value", own.max_grad_norm, own.freeze_steps)
        model = policy.model if critic.network is None else critic.network.backbone
        self._optimizer_step = step_of([model], policy.tokenizer, settings)

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration
    ) -> StepWatch | None:
        """Take the step, see `PolicyStep`; texts belong to that one."""
        del text
        totals = Denominators.of(part, it)
        if it.freezes(self.optimizer) or float(totals.valued) == 0:
            return None
        step = self._optimizer_step(part, it, [self.optimizer], stage=self.stage)
        for micro in step:
            step.backward(self.loss(self._values(micro), micro, step, totals, it))
        return step.watch

    def _values(self, micro: Experience) -> Tensor:
        """`[B, T]`; a head reads a backbone that gets no gradient from it."""
        if self._critic.network is not None:
            values: Tensor = self._critic.network(micro)
            return values
        head = self._critic.head
        return sequence_values(self._policy, head, micro, train_backbone=False, replay=True)

    def read_backbone(self, hidden: Tensor) -> Tensor:
        """Compute values whose loss reaches the backbone with its own weight, 0 by default."""
        fixed = hidden.detach()
        coefficient = self._critic.settings.backbone_coef
        if coefficient > 0:
            fixed = fixed + coefficient * (hidden - fixed)
        values: Tensor = self._critic.head(fixed)
        return values

    def loss(
        self,
        values: Tensor,
        micro: Experience,
        step: OptimizerStep[Experience],
        totals: Denominators,
        it: Iteration,
    ) -> Tensor:
        """Compute a micro-batch's share of the value loss, see `PolicyStep.loss`."""
        step.watch.outputs["the values"] = values.detach()
        critic, clip = self._critic.settings, self._critic.settings.value_clip_range
        if clip is not None:
            critic = replace(critic, value_clip_range=clip * it.value_unit)
        loss = value_loss(values, micro, critic=critic, totals=totals)
        it.metrics.add("value/loss", loss, step.share)
        measure_values(values.detach(), micro, it.metrics, critic=critic)
        return loss


class JointStep:
    """The steps of policy and head from one pass over the backbone that they share.

    Args:
        policy: The policy's step, whose loss and optimizer are used.
        critic: The critic's.
    """

    stage = "joint"
    """What dumps call it."""

    def __init__(self, policy: PolicyStep, critic: CriticStep) -> None:
        self._policy, self._critic = policy, critic

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration
    ) -> StepWatch | None:
        """Take the steps, see `PolicyStep`."""
        policy, critic = self._policy, self._critic
        totals = Denominators.of(part, it)
        if float(totals.tokens) == 0 and text is None:
            return None
        frozen = it.freezes(critic.optimizer) or float(totals.valued) == 0
        step = policy.optimizer_step(
            part,
            it,
            [policy.optimizer] if frozen else [policy.optimizer, critic.optimizer],
            stage=self.stage,
            text=text,
            text_loss=policy.text_loss(text, it),
        )
        for micro in step:
            loss, out = policy.loss(micro, step, totals, it, value_head=critic.read_backbone)
            assert out.values is not None
            value = critic.loss(out.values, micro, step, totals, it)
            step.backward(loss if frozen else loss + value)
        return step.watch
