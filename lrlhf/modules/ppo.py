"""Proximal policy optimization: an actor and a critic, each with its own optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Unpack

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from lrlhf.models import CausalLM
from lrlhf.modules.base import SteppedOptimizer
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.metrics.rollout_metrics import measure_critic
from lrlhf.modules.policy.critic import CriticStep, JointStep
from lrlhf.modules.policy.guard import passes_guard
from lrlhf.modules.policy.update import minibatches_of
from lrlhf.modules.policy_module import OptimizerStepTaker, PolicyModule, PolicyOptions
from lrlhf.modules.settings import Critic
from lrlhf.rewards import Rewards
from lrlhf.run import waits_for_every_parameter
from lrlhf.types import PromptBatch, StoredRollout


class PPO(PolicyModule):
    """Trains a policy and a critic with the clipped surrogate objective.

    Every response token has its own value and advantage. The critic is a network of its own
    (``critic.model``), or one head on the policy's backbone. Actor and critic have an optimizer
    each: their gradients, clipping, schedules and steps do not touch one another. One training step
    is one iteration, as in `RLOO`, with four minibatches unless ``update`` says otherwise.

    Args:
        critic: The value function; None for an algorithm that needs none.

    Reference:
        Schulman et al. 2017, eq. 7 and 9, https://arxiv.org/abs/1707.06347; for language models
        Ouyang et al. 2022, §3.5, https://arxiv.org/abs/2203.02155
    """

    default_algorithm: ClassVar[str] = "ppo"
    default_minibatches: ClassVar[int] = 4

    def __init__(
        self,
        policy: str | CausalLM | PreTrainedModel | PeftModel,
        rewards: Rewards | None = None,
        *,
        critic: Critic | None = Critic(),  # noqa: B008  frozen
        **options: Unpack[PolicyOptions],
    ) -> None:
        self.critic_options = critic  # the base loads it
        super().__init__(policy, rewards, **options)
        self.critic = self.values and self.values.network
        self.value_head = self.values.head if self.values and not self.critic else None
        self.critic_step = self.joint_step = None
        if self.values is not None:
            self.critic_step = CriticStep(self.values, self.loaded, self.settings)
        if self.critic_step is not None and self.value_head is not None:
            self.joint_step = JointStep(self.policy_step, self.critic_step)

    def training_step(self, batch: PromptBatch | StoredRollout, batch_idx: int) -> None:
        it = self.begin(batch)
        experience = self.sampler.sample(batch, it)  # y ~ π(· | x), and their scores
        self.running_scores.update(experience.scores, it.ranks)
        with it.phase("logprob"):  # log π_old(y), log π_ref(y), V(x, y), then the advantages
            experience = self.prepare(experience, it)
        it.show_rollout(experience)
        if passes_guard(experience, it, self.tokenizer):
            with it.phase("update"):
                experience = experience.to("cpu") if self.settings.update.offload else experience
                models = list(self.trainable_models().values())
                for part, text in minibatches_of(
                    experience, batch.pretraining, self.settings, models, it
                ):
                    if self.joint_step is not None and not it.freezes(self.policy_step.optimizer):
                        self.joint_step(part, text, it)  # one pass over the backbone
                        continue
                    self.policy_step(part, text, it)
                    if self.critic_step is not None:
                        self.critic_step(part, None, it)  # the texts are the policy's
        if self.values is not None:
            measure_critic(experience, it.metrics)
            it.metrics.add("value/lr", self.optimizer_of(1).param_groups[0]["lr"], 1.0)
        self.finish(experience, it)

    def stepped_optimizers(self) -> list[SteppedOptimizer]:
        critic = [] if self.critic_step is None else [self.critic_step.optimizer]
        return [*super().stepped_optimizers(), *critic]

    def optimizer_steps(self) -> dict[str, OptimizerStepTaker]:
        return super().optimizer_steps() | {
            step.stage: step for step in (self.critic_step, self.joint_step) if step is not None
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        learning = steps - self.settings.update.freeze_steps
        built = [self.optimizer_config.build(self.policy.named_parameters(), learning)]
        if self.values is not None:
            built.append(self.values.optimizer(steps))
        return [optimizer.optimizer for optimizer in built], [each.scheduler for each in built]

    def trainable_models(self) -> dict[str, nn.Module]:
        critic = {} if self.values is None else {"critic": self.values.model}
        return {**super().trainable_models(), **critic}

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy as ``transformers`` loads it, and a critic of its own in ``critic``."""
        super().export_pretrained(folder)
        if self.critic is not None:
            self.critic.save_pretrained(folder and folder / "critic", self.tokenizer)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.values is not None and waits_for_every_parameter(self.trainer):
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
