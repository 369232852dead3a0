"""From scored responses to what an update needs: log-probabilities, values, advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.functional.policy import high_entropy_mask
from lrlhf.guard.dump import StepInputs
from lrlhf.models import ReferencePolicy, ValueHead, looking_once, sequence_outputs
from lrlhf.models.sharding import settle
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.policy.objective import as_experience, compute_advantages
from lrlhf.modules.policy.policy_guard import ITERATION
from lrlhf.modules.policy.policy_update import PolicyUpdate
from lrlhf.modules.policy.running_moments import RunningMoments
from lrlhf.modules.settings import Advantage
from lrlhf.rollout import trim
from lrlhf.run import Collectives
from lrlhf.types import Experience, Rollout


class OldOutputs(NamedTuple):
    """What the policy, and the critic, made of a rollout before the update; each may be absent."""

    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None


class PolicyExperience(PolicyUpdate):
    """The part of `PolicyModule` that looks at a rollout before the update, without gradients."""

    frozen: ReferencePolicy | None
    advantage: Advantage
    num_generations: int
    moments: RunningMoments

    @torch.no_grad()
    def _experience(
        self,
        rollout: Rollout,
        scores: Tensor,
        filler: Tensor | None,
        metrics: MetricSums,
    ) -> Experience:
        collectives, replayed = Collectives(self.trainer), self._replayed
        scores = scores.to(rollout.input_ids.device).float()
        self._see_scores(scores, collectives)
        penalized = self.frozen is not None and self.kl_coef > 0
        select = self.update.high_entropy_fraction < 1
        needs_old = self._takes_several_steps(len(rollout)) or (penalized and self._kl_in_reward)
        # without an update to show it, how far engine and trainer are apart is measured here
        needs_old = needs_old or self._is_frozen(0)
        self.policy.eval()
        # an update that is exactly on-policy needs no old log-probabilities: they are the new ones
        needs_own = penalized if replayed else needs_old
        self._takes_drawn = needs_own and not self._is_frozen(0) and self._draws_exactly(rollout)
        own = self._old_outputs(
            rollout, logprobs=needs_own and not self._takes_drawn, entropy=select
        )
        if self._takes_drawn:
            own = own._replace(logprobs=rollout.sampling_logprobs)
        experience = as_experience(
            rollout,
            scores=scores,
            # whatever the policy is now, a stored response was drawn from the one that was then
            old_logprobs=rollout.sampling_logprobs if replayed else own.logprobs,
            policy_logprobs=own.logprobs if replayed else None,
            ref_logprobs=self._logprobs_of_reference(rollout) if penalized else None,
            values=own.values,
            filler=filler,
        )
        if own.logprobs is not None and not replayed:
            experience = self._weighted(experience, own.logprobs)
        if self.advantage.scale_rewards != "none":
            metrics.add("rollout/running_std", self.moments.deviation, 1.0)
        experience = compute_advantages(
            experience,
            settings=self.advantage,
            reward_kl=(self.reference.kl_estimator or "k1") if self._kl_in_reward else None,
            kl_coef=self.kl_coef,
            num_generations=self.num_generations,
            whiten=collectives.whiten,
            scaled_scores=self.moments.scale(experience.scores, mode=self.advantage.scale_rewards),
            metrics=metrics,
        )
        if not select:
            return experience
        assert own.entropy is not None
        fraction = self.update.high_entropy_fraction
        chosen = high_entropy_mask(own.entropy, experience.loss_mask, fraction=fraction)
        return replace(experience, selected=chosen)

    def _see_scores(self, scores: Tensor, collectives: Collectives) -> None:
        """Take note of an iteration's scores, before anything is made of them."""
        if self.advantage.scale_rewards != "none":
            self.moments.update(scores, collectives)

    def _iteration_inputs(
        self, experience: Experience, filler: Tensor | None, moments: dict[str, Any]
    ) -> StepInputs:
        """Take down what an iteration is judged by.

        Args:
            experience: Of the iteration, before its update.
            filler: `[B]`, rows that only fill the batch.
            moments: The running moments before this iteration's scores.
        """
        inputs = self._step_inputs(ITERATION, {"experience": experience})
        return replace(inputs, extra={**inputs.extra, "filler": filler, "moments": moments})

    def repeat_iteration(self, inputs: StepInputs) -> Experience:
        """Look at the responses of a dump again, with the code that they were looked at with."""
        stored = inputs.batches["experience"].to(self.device)
        assert isinstance(stored, Experience)
        self._replayed = bool(inputs.extra["replayed"])
        self.moments.load_state_dict(inputs.extra["moments"])
        filler = inputs.extra["filler"]
        rollout = Rollout(**{one.name: getattr(stored, one.name) for one in fields(Rollout)})
        with looking_once():
            experience = self._experience(
                rollout,
                stored.scores,
                None if filler is None else filler.to(self.device),
                MetricSums(),
            )
        self._free_gathered()
        return experience

    def _free_gathered(self) -> None:
        """Give back what only the passes without gradients needed."""
        for model in self.trainable_models().values():
            settle(model)
        if self.frozen is not None:
            self.frozen.rest(offload=self.reference.offload)

    def _draws_exactly(self, rollout: Rollout) -> bool:
        """Whether the log-probabilities that responses were drawn with are the policy's own."""
        return (
            self.engine.exact
            and not self._replayed
            and rollout.weight_version is None
            and rollout.kept_mass is None
            and self.sampling.min_new_tokens == 0
            and not torch.is_autocast_enabled(self.device.type)
            and torch.get_float32_matmul_precision() == "highest"
            # shorter numbers are rounded differently in a step of generation and in a whole row
            and all(weight.dtype == torch.float32 for weight in self.policy.parameters())
        )

    def _takes_several_steps(self, rows: int) -> bool:
        return self.update.num_iterations > 1 or self._minibatch_rows(rows) < rows

    def _old_outputs(self, rollout: Rollout, *, logprobs: bool, entropy: bool) -> OldOutputs:
        """Run the policy over the rollout, as far as its outputs are asked for."""
        if not logprobs and not entropy:
            return OldOutputs(None, None, None)
        return self._policy_outputs(rollout, entropy=entropy, value_head=None)

    def _policy_outputs(
        self, rollout: Rollout, *, entropy: bool, value_head: ValueHead | None
    ) -> OldOutputs:
        def forward(part: Rollout) -> list[Tensor | None]:
            out = sequence_outputs(
                self.policy,
                part,
                temperature=self.sampling.temperature,
                chunk_size=self.update.logprob_chunk,
                entropy=entropy,
                value_head=value_head,
            )
            return [out.logprobs, out.entropy, out.values]

        return OldOutputs(*self._in_parts(rollout, self.policy, forward))

    def _logprobs_of_reference(self, rollout: Rollout) -> Tensor | None:
        frozen = self.frozen
        assert frozen is not None
        frozen.to(self.device)
        compute = partial(
            frozen.logprobs,
            temperature=self.sampling.temperature,
            chunk_size=self.update.logprob_chunk,
        )
        return self._in_parts(rollout, frozen.model, lambda part: [compute(part)])[0]

    def _in_parts(
        self,
        rollout: Rollout,
        model: PreTrainedModel | PeftModel,
        function: Callable[[Rollout], Sequence[Tensor | None]],
    ) -> list[Tensor | None]:
        """Apply a function of rows to as many as go through a model together.

        Its results are `[B, T]` each, or None.
        """
        whole: list[Tensor | None] = []
        for rows, *_ in self._passes(rollout, [model], Collectives(self.trainer)):
            parts = function(trim(rollout.select(rows)))
            if not whole:
                blank = rollout.sampling_logprobs
                whole = [None if part is None else torch.zeros_like(blank) for part in parts]
            for output, part in zip(whole, parts, strict=True):
                if output is not None and part is not None:
                    output[rows.to(output.device), : part.shape[1]] = part
        return whole
