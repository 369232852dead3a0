"""The optimizer step of a policy: log-probabilities, the algorithm's loss, and the terms beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.guard.step_watch import StepWatch
from lrlhf.models import SequenceOutputs, ruled_out_ids, sequence_logprobs, sequence_outputs
from lrlhf.modules.metrics.rollout_metrics import measure_mismatch, measure_update
from lrlhf.modules.policy.gradient_step import GradientStep, Stepped
from lrlhf.modules.policy.importance_sampling import measure_importance, with_importance_weights
from lrlhf.modules.policy.iteration import Iteration, UpdateContext
from lrlhf.modules.policy.objective import Denominators, policy_loss, summed_tokens
from lrlhf.modules.policy.policy_guard import show_probabilities
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.types import Experience, SequenceBatch


class PolicyObjective:
    """The loss of a policy on the micro-batches of one optimizer step.

    Args:
        policy: The model.
        settings: Algorithm, update and sampling of the run.
    """

    def __init__(self, policy: PreTrainedModel | PeftModel, settings: PolicySettings) -> None:
        self._policy = policy
        self._settings = settings

    def loss(
        self,
        micro: Experience,
        share: float,
        watch: StepWatch,
        *,
        totals: Denominators,
        it: Iteration,
        context: UpdateContext,
        value_head: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, SequenceOutputs]:
        """Compute a micro-batch's share of the step's loss, and what the model gave.

        Args:
            micro: The rows, on the device.
            share: Weight in metrics that are means over micro-batches.
            watch: Shown the probabilities.
            totals: Of the whole step over all ranks.
            it: The iteration, told the metrics.
            context: Of the iteration's update.
            value_head: Reads the last hidden states; None: there is none.
        """
        settings, update, loss = (
            self._settings,
            self._settings.update,
            self._settings.algorithm.loss,
        )
        out = sequence_outputs(
            self._policy,
            micro,
            temperature=settings.sampling.temperature,
            chunk_size=update.logprob_chunk,
            entropy=update.entropy_coef > 0,
            value_head=value_head,
            router_loss=update.router_loss_coef > 0,
        )
        now = out.logprobs.detach()
        # before anything has moved, the engine's probabilities compare with the policy's
        fresh = context.from_engine and it.optimizer_steps == 1
        unseen = fresh or micro.old_logprobs is None
        show_probabilities(watch, now, micro, loss, unseen=unseen)
        if fresh:
            measure_mismatch(now, micro, it.metrics)
        if micro.old_logprobs is None:
            micro = with_importance_weights(
                micro, now, settings.importance_sampling, exact=context.exact, step=it.step
            )
        terms = policy_loss(
            out.logprobs,
            micro,
            loss=loss,
            entropy_coef=update.entropy_coef,
            kl_estimator=settings.reference.kl_estimator or "k3",
            kl_coef=0.0 if settings.kl_in_reward else context.kl_coef,
            totals=totals,
            max_new_tokens=settings.sampling.max_new_tokens,
            entropy=out.entropy,
        )
        total = terms.loss
        if out.router_loss is not None:
            weight = micro.loss_mask.sum() / totals.tokens.clamp(min=1)
            summed = summed_tokens(loss, tokens=totals.tokens, rows=totals.rows)
            total = total + update.router_loss_coef * summed * weight * out.router_loss
            it.metrics.add("policy/router_loss", weight * out.router_loss.detach(), share)
        it.metrics.add("train/loss", total, share)
        it.metrics.add("policy/loss", terms.policy, share)
        if context.kl_coef > 0 and not settings.kl_in_reward:
            it.metrics.add("kl/loss", terms.kl, share)
        measure_update(now, out.entropy, micro, it.metrics, loss=loss)
        measure_importance(micro, it.metrics, settings.importance)
        return total, out

    def text_loss(self, text: SequenceBatch | None, it: Iteration) -> Callable[[], Tensor] | None:
        """Return the loss of the pretraining texts of a minibatch, to be computed in its turn."""
        if text is None:
            return None
        texts = text.to(it.device)
        # what stands for an image is given, not said
        ruled_out = torch.tensor(ruled_out_ids(self._policy.config), device=it.device)
        said = texts.response_mask & ~torch.isin(texts.input_ids, ruled_out)
        texts = replace(texts, response_mask=said)
        update = self._settings.update

        def compute() -> Tensor:
            own = torch.stack([said.sum(), said.any(dim=1).sum()])
            tokens, rows = it.ranks.sum(own.float()).unbind()
            logprobs = sequence_logprobs(self._policy, texts, chunk_size=update.logprob_chunk)
            loss = -logprobs.sum() / tokens.clamp(min=1)
            it.metrics.add("policy/pretraining_loss", loss, 1 / it.ranks.world_size)
            summed = summed_tokens(self._settings.algorithm.loss, tokens=tokens, rows=rows)
            return update.pretraining_coef * summed * loss

        return compute


class PolicyStep:
    """Takes the policy's optimizer step on a minibatch.

    Args:
        policy: The model; its optimizer is the module's first.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """

    stage = "policy"

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
    ) -> None:
        self.objective = PolicyObjective(policy, settings)
        self.stepped = Stepped(0, "policy", settings.update.max_grad_norm)
        self._gradient = GradientStep(self.stage, [policy], tokenizer, settings)
        self._freeze_steps = settings.update.freeze_steps

    def waits(self, it: Iteration) -> bool:
        """Whether the policy stays as it is in this iteration."""
        return it.step < self._freeze_steps

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        totals = self._gradient.denominators(part, it)
        # a step without a gradient would still move the weights by the optimizer's momentum
        if self.waits(it) or (float(totals.tokens) == 0 and text is None):
            return None

        def loss_of(micro: Experience, share: float, watch: StepWatch) -> Tensor:
            return self.objective.loss(micro, share, watch, totals=totals, it=it, context=context)[
                0
            ]

        return self._gradient.take(
            part,
            text,
            it,
            context,
            loss_of=loss_of,
            optimizers=[self.stepped],
            text_loss=self.objective.text_loss(text, it),
        )
