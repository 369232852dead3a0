"""How experience becomes optimizer steps of a policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import (
    SequenceOutputs,
    looking_once,
    ruled_out_ids,
    sequence_logprobs,
    sequence_outputs,
)
from lrlhf.modules.batch_plan import BatchPlan
from lrlhf.modules.checks import uses_loss_scaler
from lrlhf.modules.importance import (
    ImportanceSampling,
    automatic_mode,
    measure_importance,
    off_policy_rows,
    weighted,
)
from lrlhf.modules.metric_sums import MetricSums
from lrlhf.modules.policy_objective import Denominators, denominators, policy_loss
from lrlhf.modules.rollout_metrics import measure_update
from lrlhf.modules.settings import Reference, Update
from lrlhf.rollout import (
    RolloutEngine,
    Sampling,
    micro_batch_rows,
    micro_batches,
    minibatches,
    trim,
)
from lrlhf.strategies import Collectives, Updater
from lrlhf.types import Experience, SequenceBatch


class PolicyUpdate(L.LightningModule):
    """The half of `PolicyModule` that takes gradients.

    A minibatch is cut into micro-batches whose losses add up to that of the whole: the denominators
    are those of the optimizer step over all ranks, so no cut changes the gradient. The one
    exception is the load-balancing loss of a mixture of experts, which is no sum over tokens: it is
    computed per micro-batch, and weighted by its tokens.
    """

    policy: PreTrainedModel | PeftModel
    sampling: Sampling
    reference: Reference
    update: Update
    importance_sampling: ImportanceSampling | None
    engine: RolloutEngine
    kl_coef: float
    skipped_steps: int
    _updater: Updater

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role."""
        raise NotImplementedError

    @property
    def _kl_in_reward(self) -> bool:
        raise NotImplementedError

    def _texts(
        self, pretraining: SequenceBatch | None, plan: BatchPlan
    ) -> list[SequenceBatch | None]:
        """Deal the pretraining texts to the optimizer steps of one pass."""
        coefficient = self.update.pretraining_coef
        if (pretraining is None) != (coefficient == 0):
            raise ValueError(
                f"update.pretraining_coef is {coefficient}, and the data has "
                f"{'no ' if pretraining is None else ''}pretraining texts (an option of "
                "PromptDataModule): set both, or neither"
            )
        if pretraining is None:
            return [None] * plan.steps_per_pass
        if len(pretraining) < plan.steps_per_pass:
            raise ValueError(
                f"a batch has {len(pretraining)} pretraining texts per process for "
                f"{plan.steps_per_pass} optimizer steps: raise data.pretraining_batch_size to a "
                f"multiple of {plan.steps_per_pass}"
            )
        parts = torch.arange(len(pretraining)).tensor_split(plan.steps_per_pass)
        return [trim(pretraining.select(rows)) for rows in parts]

    def _update(
        self,
        experience: Experience,
        texts: Sequence[SequenceBatch | None],
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        metrics.add("train/lr", self._optimizer(0).param_groups[0]["lr"], 1.0)
        size = self.update.minibatch_size
        local_size = None if size is None else size // collectives.world_size
        for model in self.trainable_models().values():
            model.train()
        for _ in range(self.update.num_iterations):
            parts = minibatches(experience, size=local_size)
            for part, text in zip(parts, texts, strict=True):
                # features that nothing is trained for are computed once per step, the others once
                # per micro-batch
                with looking_once():
                    self._optimizer_steps(part, text, metrics, collectives)
        schedulers = self.lr_schedulers()
        several = schedulers if isinstance(schedulers, list) else [schedulers]
        for scheduler, freeze_steps in zip(several, self._freeze_steps, strict=True):
            assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
            # a schedule begins when its model begins to learn
            if self.global_step >= freeze_steps:
                with warnings.catch_warnings():
                    # iterations in which there was nothing to learn from count too
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
                    scheduler.step()

    @property
    def _freeze_steps(self) -> list[int]:
        """Iterations at the start in which each optimizer waits."""
        return [self.update.freeze_steps]

    def _optimizer_steps(
        self,
        part: Experience,
        text: SequenceBatch | None,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        """Take the step of every optimizer on one minibatch."""
        if not self._is_frozen(0):
            self._policy_step(part, text, metrics, collectives)

    def _is_frozen(self, optimizer: int) -> bool:
        return self.global_step < self._freeze_steps[optimizer]

    def _policy_step(
        self,
        part: Experience,
        text: SequenceBatch | None,
        metrics: MetricSums,
        collectives: Collectives,
    ) -> None:
        totals = self._totals(part, collectives)
        if float(totals.tokens) == 0 and text is None:
            # a step without a gradient would still move the weights by the optimizer's momentum
            return
        self._accumulate(
            part,
            lambda micro, share: self._policy_loss(micro, totals, metrics, share=share)[0],
            collectives,
            text_loss=self._text_loss(text, metrics, collectives),
        )
        self._step(0, "policy", self.update.max_grad_norm, metrics)

    def _totals(self, part: Experience, collectives: Collectives) -> Denominators:
        return Denominators(*collectives.sum(denominators(part).to(self.device)))

    def _accumulate(
        self,
        part: Experience,
        loss_of: Callable[[Experience, float], Tensor],
        collectives: Collectives,
        *,
        text_loss: Callable[[], Tensor] | None = None,
    ) -> None:
        """Add up the gradients of a minibatch.

        Args:
            part: The minibatch, cut into micro-batches here.
            loss_of: A micro-batch's share of the step's loss, the shares adding up to it; gets the
                micro-batch on the device and its weight in metrics that are means over them.
            collectives: The ranks.
            text_loss: A further share that no response belongs to.
        """
        cuts = micro_batches(
            part,
            max_tokens=self.update.micro_batch_tokens,
            at_least=self._passes(part, collectives),
        )
        share = 1 / len(cuts) / collectives.world_size
        if text_loss is not None:
            # not as the last: ranks add up the gradients of what the last pass goes through
            self._backward(text_loss(), collectives, last=False)
        for index, micro in enumerate(cuts):
            last = index == len(cuts) - 1
            self._backward(loss_of(micro.to(self.device), share), collectives, last=last)

    def _passes(self, part: SequenceBatch, collectives: Collectives) -> int:
        """Count the forward passes that some rows take on the rank that needs most.

        Where weights are split, all ranks take part in gathering them, pass by pass.
        """
        limit = self.update.micro_batch_tokens
        if collectives.world_size == 1 or limit is None:
            return 1
        own = len(micro_batch_rows(part.lengths, max_tokens=limit))
        return int(collectives.max(torch.tensor(float(own), device=self.device)))

    def _backward(self, loss: Tensor, collectives: Collectives, *, last: bool) -> None:
        # ranks' gradients are averaged, while the denominators already span all ranks
        self._updater.backward(loss * collectives.world_size, last=last)

    def _optimizer(self, index: int) -> LightningOptimizer:
        optimizers = self.optimizers()
        optimizer = optimizers[index] if isinstance(optimizers, list) else optimizers
        assert isinstance(optimizer, LightningOptimizer)
        return optimizer

    def _step(self, index: int, role: str, max_grad_norm: float, metrics: MetricSums) -> None:
        norm = self._updater.step(self._optimizer(index), max_grad_norm=max_grad_norm)
        if math.isfinite(norm):
            metrics.add(f"{role}/grad_norm", norm, 1.0)
            return
        if uses_loss_scaler(self.trainer):
            return
        self.skipped_steps += 1
        if self.skipped_steps > self.update.max_skipped_steps:
            raise ValueError(
                f"the {role} gradient was not finite, and {self.skipped_steps} optimizer steps "
                f"were skipped (update.max_skipped_steps is {self.update.max_skipped_steps}); "
                "lower the learning rate, or look at the scores and log-probabilities of the last "
                "iterations"
            )

    def _policy_loss(
        self,
        micro: Experience,
        totals: Denominators,
        metrics: MetricSums,
        *,
        share: float,
        value_head: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, SequenceOutputs]:
        out = sequence_outputs(
            self.policy,
            micro,
            temperature=self.sampling.temperature,
            chunk_size=self.update.logprob_chunk,
            entropy=self.update.entropy_coef > 0,
            value_head=value_head,
            router_loss=self.update.router_loss_coef > 0,
        )
        if micro.old_logprobs is None:
            micro = self._weighted(micro, out.logprobs.detach())
        terms = policy_loss(
            out.logprobs,
            micro,
            update=self.update,
            reference=self.reference,
            kl_coef=0.0 if self._kl_in_reward else self.kl_coef,
            totals=totals,
            max_new_tokens=self.sampling.max_new_tokens,
            entropy=out.entropy,
        )
        loss = terms.loss
        if out.router_loss is not None:
            weight = micro.loss_mask.sum() / totals.tokens.clamp(min=1)
            loss = loss + self.update.router_loss_coef * weight * out.router_loss
            metrics.add("policy/router_loss", weight * out.router_loss.detach(), share)
        metrics.add("train/loss", loss, share)
        metrics.add("policy/loss", terms.policy, share)
        if self.kl_coef > 0 and not self._kl_in_reward:
            metrics.add("kl/loss", terms.kl, share)
        measure_update(
            out.logprobs.detach(), out.entropy, micro, metrics, loss=self.update.function
        )
        measure_importance(micro, metrics, self._importance)
        return loss, out

    def _weighted(self, experience: Experience, logprobs: Tensor) -> Experience:
        """Give what the engine drew its importance weights, as far as it needs or asks for them."""
        rows = off_policy_rows(experience, exact=self.engine.exact, step=self.global_step)
        if self.importance_sampling is not None:
            rows = torch.ones_like(rows)
        return weighted(experience, logprobs, self._importance, rows=rows)

    @property
    def _importance(self) -> ImportanceSampling:
        return self.importance_sampling or automatic_mode(self.update.function)

    def _text_loss(
        self, text: SequenceBatch | None, metrics: MetricSums, collectives: Collectives
    ) -> Callable[[], Tensor] | None:
        """Return the loss of the pretraining texts, to be computed in its turn."""
        if text is None:
            return None
        texts = text.to(self.device)
        # what stands for an image is given, not said
        ruled_out = torch.tensor(ruled_out_ids(self.policy.config), device=self.device)
        said = ~torch.isin(texts.input_ids, ruled_out)
        texts = replace(texts, response_mask=texts.response_mask & said)

        def compute() -> Tensor:
            tokens = collectives.sum(texts.response_mask.sum().float()).clamp(min=1)
            logprobs = sequence_logprobs(self.policy, texts, chunk_size=self.update.logprob_chunk)
            loss = -logprobs.sum() / tokens
            metrics.add("policy/pretraining_loss", loss, 1 / collectives.world_size)
            return self.update.pretraining_coef * loss

        return compute

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._updater.before_step(optimizer)
