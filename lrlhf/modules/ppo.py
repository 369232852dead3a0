"""Proximal policy optimization: an actor and a critic, each with its own optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import (
    CausalLM,
    ValueHead,
    ValueModel,
    ValueNetwork,
    new_value_head,
    plain_model,
    sequence_values,
)
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_critic, measure_values
from lrlhf.modules.optimizers import OptimizerAndScheduler
from lrlhf.modules.policy.objective import Denominators, value_loss
from lrlhf.modules.policy.policy_experience import OldOutputs
from lrlhf.modules.policy.policy_module import PolicyModule
from lrlhf.modules.policy.policy_update import TakesStep, Turn
from lrlhf.modules.settings import Critic
from lrlhf.rewards import Rewards
from lrlhf.run import Collectives, waits_for_every_parameter
from lrlhf.types import Experience, Rollout, SequenceBatch

_LR = 1e-5
"""Of a critic's body, and of a head that was trained before."""
_HEAD_LR = 0.5
"""Of a new head, times its inputs: about how far a step moves a value, in score deviations."""


class PPO(PolicyModule):
    """Trains a policy and a critic with the clipped surrogate objective.

    Every response token has its own value and advantage. The critic is a network of its own
    (``critic.model``), or one head on the policy's backbone. Actor and critic have an optimizer
    each: their gradients, clipping, schedules and steps do not touch one another.

    Args:
        policy: As for `PolicyModule`.
        rewards: As for `PolicyModule`.
        critic: The value function; None for an estimator that needs none.
        options: The other arguments of `PolicyModule`.

    Reference:
        Schulman et al. 2017, eq. 7 and 9, https://arxiv.org/abs/1707.06347; for language models
        Ouyang et al. 2022, §3.5, https://arxiv.org/abs/2203.02155
    """

    default_estimator = "gae"
    default_minibatches = 4

    def __init__(
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        rewards: Rewards,
        *,
        critic: Critic | None = Critic(),  # noqa: B008  frozen
        **options: Any,
    ) -> None:
        super().__init__(policy, rewards, **options)
        self.critic_settings = critic
        self.critic, self.value_head = self._value_function(critic)

    def _check_critic(self) -> None:
        """Leave it to `_value_function`."""

    def _value_function(
        self, critic: Critic | None
    ) -> tuple[ValueNetwork | None, ValueHead | None]:
        estimator = self.advantage.estimator
        if self.advantage.function.uses_values != (critic is not None):
            raise ValueError(
                f"advantage.estimator {estimator!r} needs a critic, and critic is null"
                if critic is None
                else f"advantage.estimator {estimator!r} uses no values: set critic: null, or "
                "take gae"
            )
        if critic is None:
            return None, None
        model = critic.model
        if model is None:
            return None, new_value_head(self.policy, critic.head)
        if isinstance(model, str):
            model = ValueModel(source=model, head=critic.head)
        network = model.load() if isinstance(model, ValueModel) else model
        if {id(weight) for weight in network.parameters()} & {
            id(weight) for weight in self.policy.parameters()
        }:
            raise ValueError(
                "critic.model shares weights with the policy, so two optimizers would move them; "
                "leave it out for a head on the policy's backbone, or pass a copy"
            )
        self._check_vocabulary(network)
        return network, None

    @property
    def _backbones(self) -> list[PreTrainedModel | PeftModel]:
        critic = self.critic
        return [*super()._backbones, *([] if critic is None else [critic.backbone])]

    def _check_vocabulary(self, network: ValueNetwork) -> None:
        """The critic reads the policy's token ids."""
        largest = max(self.tokenizer.get_vocab().values())
        known = len(plain_model(network.backbone).get_input_embeddings().weight)  # type: ignore[arg-type]
        if known <= largest:
            raise ValueError(
                f"critic.model knows {known} tokens, but the policy's "
                f"tokenizer has ids up to {largest}: a critic reads the policy's own ids, so it "
                "must come from a model with the same tokenizer"
            )

    def trainable_models(self) -> dict[str, nn.Module]:
        models = super().trainable_models()
        critic = self.critic if self.critic is not None else self.value_head
        return models if critic is None else {**models, "critic": critic}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy as ``transformers`` loads it, and a critic of its own in ``critic``."""
        super().export_pretrained(folder)
        if self.critic is not None:
            self.critic.save_pretrained(folder and folder / "critic", self.tokenizer)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.critic_settings and waits_for_every_parameter(self.trainer):
            raise ValueError(
                "actor and critic are trained by backward passes of their own, and this strategy "
                "waits for the gradients of all parameters in each: use trainer.strategy: "
                "ddp_find_unused_parameters_true"
            )
        if stage == "fit" and self.value_head is not None and uses_loss_scaler(self.trainer):
            raise ValueError(
                "trainer.precision 16-mixed scales the losses of actor and critic together, but "
                "unscales them apart, which a head on the policy's backbone does not allow; use "
                "bf16-mixed, or give the critic a network of its own (critic.model)"
            )

    def _optimizers(self, total_steps: float) -> list[OptimizerAndScheduler]:
        built = super()._optimizers(total_steps)
        settings = self.critic_settings
        if settings is None:
            return built
        learning = total_steps - settings.freeze_steps
        named = list(self.trainable_models()["critic"].named_parameters())
        head_lr = _HEAD_LR / self._head.output.in_features
        if settings.optimizer.lr is not None or not self._head.is_new:
            critic = settings.optimizer.filled(lr=_LR).build(named, learning)
        elif self.critic is None:
            critic = settings.optimizer.filled(lr=head_lr).build(named, learning)
        else:
            config = settings.optimizer.filled(lr=_LR)
            critic = config.build(named, learning, lrs={"head.": head_lr})
        return [*built, critic]

    @property
    def _head(self) -> ValueHead:
        head = self.value_head if self.critic is None else self.critic.head
        assert head is not None
        return head

    # ------------------------------------------------------------------ one iteration

    def _log_iteration(
        self, experience: Experience, metrics: MetricSums, collectives: Collectives
    ) -> None:
        if experience.values is not None:
            measure_critic(experience, metrics)
            metrics.add("value/lr", self._optimizer(1).param_groups[0]["lr"], 1.0)
        super()._log_iteration(experience, metrics, collectives)

    def _see_scores(self, scores: Tensor, collectives: Collectives) -> None:
        """Let the critic know mean and deviation of the scores before it judges their states."""
        if self.critic_settings is None:
            super()._see_scores(scores, collectives)
            return
        self.moments.update(scores, collectives)
        if self._head.is_new and not self._is_frozen(1):
            self._head.measure_in(*self._unit)

    @property
    def _unit(self) -> tuple[float, float]:
        """Deviation and mean of the scores so far, as they enter the advantages."""
        moments, mode = self.moments, self.advantage.scale_rewards
        centre = 0.0 if mode == "mean_std" else moments.mean
        return (moments.deviation, centre) if mode == "none" else (1.0, centre / moments.deviation)

    def _old_outputs(self, rollout: Rollout, *, logprobs: bool, entropy: bool) -> OldOutputs:
        if self.value_head is not None:
            # one pass over the shared backbone gives both
            return self._policy_outputs(rollout, entropy=entropy, value_head=self.value_head)
        outputs = super()._old_outputs(rollout, logprobs=logprobs, entropy=entropy)
        if self.critic is None:
            return outputs
        critic = self.critic.eval()
        values = self._in_parts(rollout, critic.backbone, lambda part: [critic(part)])[0]
        return outputs._replace(values=values)

    def _optimizer_steps(
        self,
        part: Experience,
        text: SequenceBatch | None,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        if self.value_head is not None and not self._is_frozen(0):
            self._joint_step(part, text, metrics, collectives)
            return
        super()._optimizer_steps(part, text, metrics, collectives)
        if self.critic_settings is not None and not self._is_frozen(1):
            self._critic_step(part, metrics, collectives)

    @property
    def _freeze_steps(self) -> list[int]:
        critic = self.critic_settings
        return [*super()._freeze_steps, *([critic.freeze_steps] if critic else [])]

    def _critic_step(self, part: Experience, metrics: MetricSums, collectives: Collectives) -> None:
        assert self.critic_settings is not None
        totals = self._totals(part, collectives)
        if float(totals.valued) == 0:
            return

        def loss_of(micro: Experience, share: float) -> Tensor:
            return self._value_loss(self._values(micro), micro, totals, metrics, share=share)

        inputs = self._begin_step("value", part, None)
        self._accumulate(part, loss_of, collectives, metrics)
        self._finish_step([self._critic_turn], inputs, part, metrics, collectives)

    @property
    def _critic_turn(self) -> Turn:
        assert self.critic_settings is not None
        return Turn(1, "value", self.critic_settings.max_grad_norm)

    @property
    def _steps(self) -> dict[str, TakesStep]:
        def critic(
            part: Experience, _: SequenceBatch | None, metrics: MetricSums, ranks: Collectives
        ) -> None:
            self._critic_step(part, metrics, ranks)

        return {**super()._steps, "value": critic, "joint": self._joint_step}

    def _values(self, micro: Experience) -> Tensor:
        if self.critic is not None:
            values: Tensor = self.critic(micro)
            return values
        assert self.value_head is not None
        return sequence_values(self.policy, self.value_head, micro, train_backbone=False)

    def _value_loss(
        self,
        values: Tensor,
        micro: Experience,
        totals: Denominators,
        metrics: MetricSums,
        *,
        share: float,
    ) -> Tensor:
        assert self.critic_settings is not None
        self._watch.outputs["the values"] = values.detach()
        critic, deviations = self.critic_settings, self.critic_settings.value_clip_range
        if deviations is not None:
            critic = replace(critic, value_clip_range=deviations * self._unit[0])
        loss = value_loss(values, micro, critic=critic, totals=totals)
        metrics.add("value/loss", loss, share)
        measure_values(values.detach(), micro, metrics, critic=critic)
        return loss

    def _joint_step(
        self,
        part: Experience,
        text: SequenceBatch | None,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        """Train policy and head from one pass over the backbone that they share."""
        assert self.critic_settings is not None
        totals = self._totals(part, collectives)
        if float(totals.tokens) == 0 and text is None:
            return
        frozen = self._is_frozen(1) or float(totals.valued) == 0

        def loss_of(micro: Experience, share: float) -> Tensor:
            loss, out = self._policy_loss(
                micro, totals, metrics, share=share, value_head=self._read_backbone
            )
            assert out.values is not None
            value = self._value_loss(out.values, micro, totals, metrics, share=share)
            return loss if frozen else loss + value

        inputs = self._begin_step("joint", part, text)
        text_loss = self._text_loss(text, metrics, collectives)
        self._accumulate(part, loss_of, collectives, metrics, text_loss=text_loss)
        turns = [self._policy_turn, *([] if frozen else [self._critic_turn])]
        self._finish_step(turns, inputs, part, metrics, collectives)

    def _read_backbone(self, hidden: Tensor) -> Tensor:
        """Compute values whose loss reaches the backbone with its own weight, 0 by default."""
        assert self.value_head is not None
        assert self.critic_settings is not None
        fixed = hidden.detach()
        coefficient = self.critic_settings.backbone_coef
        if coefficient > 0:
            fixed = fixed + coefficient * (hidden - fixed)
        values: Tensor = self.value_head(fixed)
        return values
