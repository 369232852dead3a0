"""One optimizer step of a policy on a minibatch of its experience."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.guard.bundle import StepBundle
from lrlhf.guard.step_watch import StepWatch
from lrlhf.modules.policy.iteration import Iteration, UpdateContext
from lrlhf.modules.policy.objective import Denominators, PolicyObjective, denominators
from lrlhf.modules.policy.policy_guard import describe_rows, place_in
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.row_step import RowStep, Stepped
from lrlhf.modules.policy.teaching import Teaching
from lrlhf.types import Experience, SequenceBatch


class OptimizerStep(Protocol):
    """Takes one optimizer step on a minibatch, of one optimizer or of several together."""

    stage: str
    """What dumps call it."""

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        """Take the step.

        Args:
            part: The minibatch of this rank.
            text: Pretraining texts that belong to it.
            it: The iteration.
            context: Of the iteration's update.

        Returns:
            What was seen of it; None: there was nothing to learn from.
        """
        ...


class GradientStep:
    """Takes optimizer steps on the minibatches of an experience.

    Args:
        stage: What dumps call the step.
        models: What the rows go through.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
    """

    def __init__(
        self,
        stage: str,
        models: Sequence[PreTrainedModel | PeftModel],
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
    ) -> None:
        self.stage = stage
        self._tokenizer = tokenizer
        self._rows = RowStep[Experience](
            models,
            max_tokens=settings.update.micro_batch_tokens,
            # experts are balanced over the tokens of whole rows
            shared=settings.update.router_loss_coef == 0,
            place_of=lambda micro, watch: place_in(micro, watch, tokenizer),
        )

    @staticmethod
    def denominators(part: Experience, it: Iteration) -> Denominators:
        """Count what the sums of an optimizer step are divided by, over all ranks."""
        return Denominators(*it.ranks.sum(denominators(part).to(it.device)))

    def take(
        self,
        part: Experience,
        text: SequenceBatch | None,
        it: Iteration,
        context: UpdateContext,
        *,
        loss_of: Callable[[Experience, float, StepWatch], Tensor],
        optimizers: Sequence[Stepped],
        text_loss: Callable[[], Tensor] | None = None,
    ) -> StepWatch:
        """Take the step, unless the guard objects; see `RowStep.take`.

        Args:
            part: The minibatch.
            text: Only kept for a dump.
            it: The iteration.
            context: Only kept for a dump.
            loss_of: A micro-batch's share of the step's loss.
            optimizers: That step, in this order.
            text_loss: A further share that no response belongs to.
        """

        def bundle(seeds: tuple[int, ...], watch: StepWatch) -> StepBundle:
            batches = {"part": part, "text": text}
            return StepBundle(
                stage=self.stage,
                batches={name: one for name, one in batches.items() if one is not None},
                seeds=[seeds],
                context=context._asdict(),
                records=describe_rows(part, self._tokenizer, watch.log_ratios),
            )

        return self._rows.take(
            part,
            it,
            loss_of=loss_of,
            optimizers=optimizers,
            bundle=bundle,
            text_loss=text_loss,
            replayed=context.stored,
        )


class PolicyStep:
    """Takes the policy's optimizer step on a minibatch.

    Args:
        policy: The model; its optimizer is the module's first.
        tokenizer: Writes the rows of a dump.
        settings: Of the run.
        teaching: The teacher; None: there is none.
    """

    stage = "policy"

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: PolicySettings,
        teaching: Teaching | None = None,
    ) -> None:
        self.objective = PolicyObjective(policy, settings, teaching)
        update = settings.update
        self.models = [policy]
        if teaching is not None and teaching.model is not None and teaching.in_loss:
            self.models.append(teaching.model.model)
        self.stepped = Stepped(0, "policy", update.max_grad_norm, update.freeze_steps)
        self._gradient = GradientStep(self.stage, self.models, tokenizer, settings)

    def __call__(
        self, part: Experience, text: SequenceBatch | None, it: Iteration, context: UpdateContext
    ) -> StepWatch | None:
        totals = self._gradient.denominators(part, it)
        # a step without a gradient would still move the weights by the optimizer's momentum
        if self.stepped.waits(it) or (float(totals.tokens) == 0 and text is None):
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
