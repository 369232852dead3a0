"""From scored responses to what an update needs: log-probabilities, values, advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.functional.policy import high_entropy_mask
from lrlhf.models import ReferencePolicy, ValueHead, sequence_outputs
from lrlhf.models.sharding import settle
from lrlhf.modules.metric_sums import MetricSums
from lrlhf.modules.policy_objective import as_experience, compute_advantages
from lrlhf.modules.policy_update import PolicyUpdate
from lrlhf.modules.running_moments import RunningMoments
from lrlhf.modules.settings import Advantage
from lrlhf.rollout import Collected, micro_batch_rows, trim
from lrlhf.strategies import Collectives
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
        collected: Collected,
        filler: Tensor | None,
        metrics: MetricSums,
        *,
        replayed: bool,
    ) -> Experience:
        rollout = collected.rollout
        collectives = Collectives(self.trainer)
        penalized = self.frozen is not None and self.kl_coef > 0
        select = self.update.high_entropy_fraction < 1
        needs_old = self._takes_several_steps(len(rollout)) or (penalized and self._kl_in_reward)
        # without an update to show it, how far engine and trainer are apart is measured here
        needs_old = needs_old or self._is_frozen(0)
        self.policy.eval()
        # an update that is exactly on-policy needs no old log-probabilities: they are the new ones
        needs_own = penalized if replayed else needs_old
        own = self._old_outputs(rollout, logprobs=needs_own, entropy=select)
        experience = as_experience(
            rollout,
            scores=collected.rewards.scores.to(rollout.input_ids.device),
            # whatever the policy is now, a stored response was drawn from the one that was then
            old_logprobs=rollout.sampling_logprobs if replayed else own.logprobs,
            policy_logprobs=own.logprobs if replayed else None,
            ref_logprobs=self._in_parts(rollout, self._reference_logprobs)[0]
            if penalized
            else None,
            values=own.values,
            filler=filler,
        )
        if own.logprobs is not None and not replayed:
            experience = self._weighted(experience, own.logprobs)
        if self.advantage.scale_rewards != "none":
            self.moments.update(experience.scores, collectives)
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

    def _free_gathered(self) -> None:
        """Give back what only the passes without gradients needed."""
        for model in self.trainable_models().values():
            settle(model)
        if self.frozen is not None:
            self.frozen.rest(offload=self.reference.offload)

    def _takes_several_steps(self, rows: int) -> bool:
        size = self.update.minibatch_size
        return self.update.num_iterations > 1 or (
            size is not None and size < rows * self.trainer.world_size
        )

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

        return OldOutputs(*self._in_parts(rollout, forward))

    def _reference_logprobs(self, part: Rollout) -> list[Tensor | None]:
        assert self.frozen is not None
        self.frozen.to(self.device)
        return [
            self.frozen.logprobs(
                part, temperature=self.sampling.temperature, chunk_size=self.update.logprob_chunk
            )
        ]

    def _in_parts(
        self, rollout: Rollout, function: Callable[[Rollout], Sequence[Tensor | None]]
    ) -> list[Tensor | None]:
        """Apply a function of rows to groups of them; its results are `[B, T]` each, or None."""
        whole: list[Tensor | None] = []
        groups = micro_batch_rows(
            rollout.lengths,
            max_tokens=self.update.micro_batch_tokens,
            at_least=self._passes(rollout, Collectives(self.trainer)),
        )
        for rows in groups:
            parts = function(trim(rollout.select(rows)))
            if not whole:
                blank = rollout.sampling_logprobs
                whole = [None if part is None else torch.zeros_like(blank) for part in parts]
            for output, part in zip(whole, parts, strict=True):
                if output is not None and part is not None:
                    output[rows.to(output.device), : part.shape[1]] = part
        return whole
