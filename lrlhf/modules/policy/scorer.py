"""What the policy, the reference and the critic make of a rollout before its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import ReferencePolicy, ValueHead, looking_once, sequence_outputs
from lrlhf.models.sharding import settle
from lrlhf.modules.policy.critic import ValueFunction
from lrlhf.modules.policy.experience import Scored
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.policy_settings import PolicySettings
from lrlhf.modules.policy.update_batches import plan_micro_batches
from lrlhf.rollout import RolloutEngine, trim
from lrlhf.types import Rollout


class _Outputs(NamedTuple):
    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None


class Scorer:
    """Runs models over a rollout without gradients, as far as the update asks for them.

    Args:
        policy: The model that is trained.
        reference: The policy it is kept close to; None: there is no KL penalty.
        critic: Its values are wanted; None: there is none.
        engine: Generated the rollout.
        settings: Of the run.
        models: All trained models, whose gathered weights are given back afterwards.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        reference: ReferencePolicy | None,
        engine: RolloutEngine,
        settings: PolicySettings,
        *,
        critic: ValueFunction | None = None,
        models: Mapping[str, nn.Module],
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._engine = engine
        self._settings = settings
        self._models = dict(models)

    @torch.no_grad()
    def __call__(self, rollout: Rollout, it: Iteration, *, stored: bool, kl_coef: float) -> Scored:
        """Compute what the update needs of a rollout.

        Args:
            rollout: Of this rank.
            it: The iteration.
            stored: Whether an earlier run's policy generated it.
            kl_coef: Strength of the KL penalty; 0: the reference is not asked.
        """
        penalized = self._reference is not None and kl_coef > 0
        select = self._settings.update.high_entropy_fraction < 1
        needs_own = penalized if stored else self._needs_old(rollout, it, penalized=penalized)
        learns = it.step >= self._settings.update.freeze_steps
        from_engine = needs_own and learns and not stored and self._generates_exactly(rollout, it)
        with looking_once():
            self._policy.eval()
            own = self._own(rollout, it, logprobs=needs_own and not from_engine, entropy=select)
            reference = self._of_reference(rollout, it) if penalized else None
        self._free_gathered()
        old = rollout.sampling_logprobs if from_engine or stored else own.logprobs
        return Scored(
            old_logprobs=old,
            policy_logprobs=own.logprobs if stored else None,
            ref_logprobs=reference,
            entropy=own.entropy,
            values=own.values,
            from_engine=from_engine,
        )

    def _needs_old(self, rollout: Rollout, it: Iteration, *, penalized: bool) -> bool:
        """An update that is exactly on-policy needs no old log-probabilities: they are the new."""
        update, rows = self._settings.update, len(rollout)
        several = update.num_iterations > 1 or self._settings.minibatch_rows(rows, it.ranks) < rows
        # without an update to show it, how far engine and trainer are apart is measured here
        waits = it.step < update.freeze_steps
        return several or waits or (penalized and self._settings.kl_in_reward)

    def _generates_exactly(self, rollout: Rollout, it: Iteration) -> bool:
        """Whether the log-probabilities of the engine are the policy's own."""
        return (
            self._engine.capabilities.exact
            and rollout.weight_version is None
            and rollout.kept_mass is None
            and self._settings.sampling.min_new_tokens == 0
            and not torch.is_autocast_enabled(it.device.type)
            and torch.get_float32_matmul_precision() == "highest"
            # shorter numbers are rounded differently in a step of generation and in a whole row
            and all(weight.dtype == torch.float32 for weight in self._policy.parameters())
        )

    def _own(self, rollout: Rollout, it: Iteration, *, logprobs: bool, entropy: bool) -> _Outputs:
        critic = self._critic
        if critic is not None and critic.network is None:
            # one pass over the shared backbone gives both
            return self._of_policy(rollout, it, entropy=entropy, value_head=critic.head)
        outputs = _Outputs(None, None, None)
        if logprobs or entropy:
            outputs = self._of_policy(rollout, it, entropy=entropy, value_head=None)
        if critic is None or critic.network is None:
            return outputs
        network = critic.network.eval()
        values = self._in_micro_batches(
            rollout, network.backbone, lambda part: [network(part)], it
        )[0]
        return outputs._replace(values=values)

    def _of_policy(
        self, rollout: Rollout, it: Iteration, *, entropy: bool, value_head: ValueHead | None
    ) -> _Outputs:
        def forward(part: Rollout) -> list[Tensor | None]:
            out = sequence_outputs(
                self._policy,
                part,
                temperature=self._settings.sampling.temperature,
                chunk_size=self._settings.update.logprob_chunk,
                entropy=entropy,
                value_head=value_head,
            )
            return [out.logprobs, out.entropy, out.values]

        return _Outputs(*self._in_micro_batches(rollout, self._policy, forward, it))

    def _of_reference(self, rollout: Rollout, it: Iteration) -> Tensor | None:
        reference = self._reference
        assert reference is not None
        reference.to(it.device)
        compute = partial(
            reference.logprobs,
            temperature=self._settings.sampling.temperature,
            chunk_size=self._settings.update.logprob_chunk,
        )
        return self._in_micro_batches(rollout, reference.model, lambda part: [compute(part)], it)[0]

    def _in_micro_batches(
        self,
        rollout: Rollout,
        model: PreTrainedModel | PeftModel,
        function: Callable[[Rollout], Sequence[Tensor | None]],
        it: Iteration,
    ) -> list[Tensor | None]:
        """Apply a function of rows to as many as go through a model together.

        Its results are `[B, T]` each, or None.
        """
        whole: list[Tensor | None] = []
        update = self._settings.update
        micro_batches = plan_micro_batches(
            rollout,
            [model],
            it,
            max_tokens=update.micro_batch_tokens,
            shared=update.router_loss_coef == 0,
        )
        for micro in micro_batches:
            parts = function(trim(rollout.select(micro.rows)))
            if not whole:
                blank = rollout.sampling_logprobs
                whole = [None if part is None else torch.zeros_like(blank) for part in parts]
            for output, part in zip(whole, parts, strict=True):
                if output is not None and part is not None:
                    output[micro.rows.to(output.device), : part.shape[1]] = part
        return whole

    def _free_gathered(self) -> None:
        """Give back what only the passes without gradients needed."""
        for model in self._models.values():
            settle(model)
        if self._reference is not None:
            self._reference.rest(offload=self._settings.reference.offload)
