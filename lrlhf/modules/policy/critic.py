"""The value function of PPO: a network of its own or a head, its unit, its loss and its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.guard.step_watch import StepWatch
from lrlhf.models import (
    ValueHead,
    ValueModel,
    ValueNetwork,
    new_value_head,
    plain_model,
    sequence_values,
)
from lrlhf.modules.metrics.rollout_metrics import measure_values
from lrlhf.modules.optimizers import OptimizerAndScheduler
from lrlhf.modules.policy.gradient_step import GradientStep, PolicyStep
from lrlhf.modules.policy.iteration import Iteration, UpdateContext
from lrlhf.modules.policy.objective import Denominators, value_loss
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.row_step import Stepped
from lrlhf.modules.policy.running_moments import ScoreMoments
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

    def follow(self, moments: ScoreMoments, *, step: int) -> None:
        """Have a new head that learns judge in units of the scores so far."""
        if self.head.is_new and step >= self.settings.freeze_steps:
            self.head.measure_in(moments.deviation, moments.mean)

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


class _ValueObjective:
    """The value loss on the micro-batches of one optimizer step."""

    def __init__(self, critic: ValueFunction, policy: PreTrainedModel | PeftModel) -> None:
        self._critic = critic
        self._policy = policy

    def values(self, micro: Experience) -> Tensor:
        """`[B, T]`; a head reads a backbone that gets no gradient from it."""
        if self._critic.network is not None:
            values: Tensor = self._critic.network(micro)
            return values
        return sequence_values(self._policy, self._critic.head, micro, train_backbone=False)

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
        share: float,
        watch: StepWatch,
        *,
        totals: Denominators,
        it: Iteration,
        deviation: float,
    ) -> Tensor:
        watch.outputs["the values"] = values.detach()
        critic, clip = self._critic.settings, self._critic.settings.value_clip_range
        if clip is not None:
            critic = replace(critic, value_clip_range=clip * deviation)
        loss = value_loss(values, micro, critic=critic, totals=totals)
        it.metrics.add("value/loss", loss, share)
        measure_values(values.detach(), micro, it.metrics, critic=critic)
        return loss


class CriticStep:
    """Takes the critic's optimizer step on a minibatch.

    Args:
        critic: What is trained; its optimizer is the module's second.
        policy: Its backbone is read by a head.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """

    stage = "value"

    def __init__(
        self,
        critic: ValueFunction,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
    ) -> None:
        self.objective = _ValueObjective(critic, policy)
        own = critic.settings
        self.stepped = Stepped(1, "value", own.max_grad_norm, own.freeze_steps)
        self.models = [policy if critic.network is None else critic.network.backbone]
        self._gradient = GradientStep(self.stage, self.models, tokenizer, settings)

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        totals = self._gradient.denominators(part, it)
        if self.stepped.waits(it) or float(totals.valued) == 0:
            return None

        def loss_of(micro: Experience, share: float, watch: StepWatch) -> Tensor:
            return self.objective.loss(
                self.objective.values(micro),
                micro,
                share,
                watch,
                totals=totals,
                it=it,
                deviation=context.value_unit,
            )

        # texts belong to the policy's step
        return self._gradient.take(
            part, None, it, context, loss_of=loss_of, optimizers=[self.stepped]
        )


class JointStep:
    """Takes the steps of policy and head from one pass over the backbone that they share.

    Args:
        policy: The policy's step, whose loss and optimizer are used.
        critic: The critic's.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """

    stage = "joint"

    def __init__(
        self,
        policy: PolicyStep,
        critic: CriticStep,
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
    ) -> None:
        self._policy, self._critic = policy, critic
        # the backbone, and a teacher whose divergence is in the loss
        self._gradient = GradientStep(self.stage, policy.models, tokenizer, settings)

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        totals = self._gradient.denominators(part, it)
        if float(totals.tokens) == 0 and text is None:
            return None
        waits = self._critic.stepped.waits(it) or float(totals.valued) == 0

        def loss_of(micro: Experience, share: float, watch: StepWatch) -> Tensor:
            loss, out = self._policy.objective.loss(
                micro,
                share,
                watch,
                totals=totals,
                it=it,
                context=context,
                value_head=self._critic.objective.read_backbone,
            )
            assert out.values is not None
            value = self._critic.objective.loss(
                out.values,
                micro,
                share,
                watch,
                totals=totals,
                it=it,
                deviation=context.value_unit,
            )
            return loss if waits else loss + value

        stepped: Sequence[Stepped] = [self._policy.stepped]
        return self._gradient.take(
            part,
            text,
            it,
            context,
            loss_of=loss_of,
            optimizers=[*stepped, *([] if waits else [self._critic.stepped])],
            text_loss=self._policy.objective.text_loss(text, it),
        )
