"""What the policy, the reference and the critic make of a rollout before its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.functional.distillation import TeacherStatistics, teacher_advantages
from lrlhf.models import ReferencePolicy, ValueHead, cached_vision_features, sequence_outputs
from lrlhf.models.sharding import reshard
from lrlhf.modules.metrics.rollout_metrics import measure_kl, measure_mismatch
from lrlhf.modules.policy.critic import ValueFunction
from lrlhf.modules.policy.experience import before_update
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.policy.teacher import RunTeacher, distance_of_responses, measure_distance
from lrlhf.modules.policy.update import plan_micro_batches
from lrlhf.rollout import RolloutEngine, trim
from lrlhf.types import Experience, Rollout, TeacherTokens

RolloutT = TypeVar("RolloutT", bound=Rollout)


class _Outputs(NamedTuple):
    logprobs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    distance: TeacherStatistics | None = None


class Scorer:
    """Runs models over a rollout without gradients, as far as the update asks for them.

    Args:
        policy: The model that is trained.
        reference: The policy it is kept close to; None: there is no KL penalty.
        critic: Its values are wanted; None: there is none.
        engine: Generated the rollout.
        settings: Of the run.
        models: All trained models, whose gathered weights are released afterwards.
        teacher: The teacher; None: there is none.
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
        teacher: RunTeacher | None = None,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._engine = engine
        self._settings = settings
        self._models = dict(models)
        self._teacher = teacher

    @torch.no_grad()
    def __call__(self, experience: Experience, it: Iteration) -> Experience:
        """Fill in what the update needs of the models, and measure it.

        Args:
            experience: Responses of this rank and their scores.
            it: The iteration.
        """
        experience = self.ask_teacher(experience, it)
        recorded = experience.old_source == "recorded"
        penalized = self._reference is not None and it.kl_coef > 0
        taught = self._teacher is not None and not self._teacher.in_loss
        select = self._settings.update.high_entropy_fraction < 1
        rewarded = (penalized and self._settings.kl_in_reward) or taught
        needs_own = (
            penalized or taught if recorded else self._needs_old(experience, it, rewarded=rewarded)
        )
        from_engine = (
            needs_own
            and not recorded
            and it.step >= self._settings.update.freeze_steps
            and self._generates_exactly(experience, it)
        )
        with cached_vision_features():
            self._policy.eval()
            logprobs = needs_own and not from_engine
            own = self._own(experience, it, logprobs=logprobs, entropy=select, taught=taught)
            reference = self._of_reference(experience, it) if penalized else None
        self._free_gathered()
        experience = replace(
            _with_old(experience, own.logprobs, from_engine=from_engine),
            ref_logprobs=reference,
            entropy=own.entropy,
            values=own.values,
        )
        measure_kl(experience, it.metrics)
        if own.distance is not None:
            experience = self._with_teacher(experience, own.distance, it)
        if experience.old_source == "policy":
            assert experience.old_logprobs is not None
            measure_mismatch(experience.old_logprobs, experience, it.metrics)
        return experience

    def _with_teacher(
        self, experience: Experience, distance: TeacherStatistics, it: Iteration
    ) -> Experience:
        """Measure the distance to the teacher, and turn it into a part of the advantages."""
        policy, mask = before_update(experience), experience.taught(experience.response_mask)
        measure_distance(distance, policy, mask, it.metrics)
        assert self._teacher is not None
        teacher = self._teacher.settings
        advantages = teacher_advantages(
            policy, distance.logprobs, mask, coef=teacher.coef, discount=teacher.discount
        )
        return replace(experience, teacher_advantages=advantages)

    def _needs_old(self, rollout: Rollout, it: Iteration, *, rewarded: bool) -> bool:
        """An update that is exactly on-policy needs no old log-probabilities: they are the new."""
        update, rows = self._settings.update, len(rollout)
        several = update.num_iterations > 1 or self._settings.minibatch_rows(rows, it.ranks) < rows
        # without an update to show it, how far engine and trainer are apart is measured here
        frozen = it.step < update.freeze_steps
        return several or frozen or rewarded

    def _generates_exactly(self, rollout: Rollout, it: Iteration) -> bool:
        """Whether the log-probabilities of the engine are the policy's own."""
        return (
            self._engine.capabilities.exact
            and rollout.weight_version is None
            and (
                rollout.sampling_mask is not None
                or (rollout.kept_mass is None and self._settings.sampling.min_new_tokens == 0)
            )
            and not torch.is_autocast_enabled(it.device.type)
            and torch.get_float32_matmul_precision() == "highest"
            # shorter numbers are rounded differently in a step of generation and in a whole row
            and all(weight.dtype == torch.float32 for weight in self._policy.parameters())
        )

    @torch.no_grad()
    def ask_teacher(self, rollout: RolloutT, it: Iteration) -> RolloutT:
        """Have the teacher say what is kept with a rollout, where it is asked only once."""
        teacher = self._teacher
        if teacher is None or not teacher.keeps_tokens:
            return rollout
        if teacher.model is None:
            return replace(rollout, teacher=teacher.tokens(rollout))
        with cached_vision_features():
            columns = self._in_micro_batches(
                rollout, [teacher.model.model], lambda part: _columns(teacher.tokens(part)), it
            )
        teacher.reshard()
        chosen, ids, logprobs = cast(list[Tensor], columns)
        tokens = TeacherTokens(logprobs=chosen, top_ids=ids, top_logprobs=logprobs)
        return replace(rollout, teacher=tokens)

    @torch.no_grad()
    def distance(self, rollout: Rollout, it: Iteration) -> dict[str, Tensor]:
        """Compare policy and teacher on responses of an evaluation; `[B]` by name."""
        assert self._teacher is not None
        if self._teacher.model is None:
            rollout = self.ask_teacher(rollout, it)
        self._policy.eval()
        with cached_vision_features():
            own = self._of_policy(rollout, it, entropy=False, value_head=None, taught=True)
        self._free_gathered()
        assert own.distance is not None
        assert own.logprobs is not None
        mask = rollout.taught(rollout.response_mask)
        return distance_of_responses(own.distance, own.logprobs, mask)

    def _own(
        self, rollout: Rollout, it: Iteration, *, logprobs: bool, entropy: bool, taught: bool
    ) -> _Outputs:
        critic = self._critic
        if critic is not None and critic.network is None:
            # one pass over the shared backbone gives both
            return self._of_policy(
                rollout, it, entropy=entropy, value_head=critic.head, taught=taught
            )
        outputs = _Outputs(None, None, None)
        if logprobs or entropy or taught:
            outputs = self._of_policy(rollout, it, entropy=entropy, value_head=None, taught=taught)
        if critic is None or critic.network is None:
            return outputs
        network = critic.network.eval()
        values = self._in_micro_batches(
            rollout, [network.backbone], lambda part: [network(part)], it
        )[0]
        return outputs._replace(values=values)

    def _of_policy(
        self,
        rollout: Rollout,
        it: Iteration,
        *,
        entropy: bool,
        value_head: ValueHead | None,
        taught: bool,
    ) -> _Outputs:
        teacher = self._teacher

        def forward(part: Rollout) -> list[Tensor | None]:
            out = sequence_outputs(
                self._policy,
                part,
                temperature=self._settings.sampling.temperature,
                chunk_size=self._settings.update.logprob_chunk,
                entropy=entropy,
                value_head=value_head,
                teacher=teacher.rows if teacher and taught else None,
                replay=True,
            )
            return [out.logprobs, out.entropy, out.values, *(out.teacher or ())]

        models = [self._policy]
        if teacher and taught and teacher.model is not None and rollout.teacher is None:
            models.append(teacher.model.model)
        logprobs, own_entropy, values, *distance = self._in_micro_batches(
            rollout, models, forward, it
        )
        return _Outputs(
            logprobs,
            own_entropy,
            values,
            TeacherStatistics(*cast(list[Tensor], distance)) if distance else None,
        )

    def _of_reference(self, rollout: Rollout, it: Iteration) -> Tensor | None:
        reference = self._reference
        assert reference is not None
        reference.to(it.device)
        compute = partial(
            reference.logprobs,
            temperature=self._settings.sampling.temperature,
            chunk_size=self._settings.update.logprob_chunk,
        )
        return self._in_micro_batches(rollout, [reference.model], lambda part: [compute(part)], it)[
            0
        ]

    def _in_micro_batches(
        self,
        rollout: Rollout,
        models: Sequence[PreTrainedModel | PeftModel],
        function: Callable[[Rollout], Sequence[Tensor | None]],
        it: Iteration,
    ) -> list[Tensor | None]:
        """Apply a function of rows to as many as go through some models together.

        Its results are `[B, T]` each, perhaps with further axes, or None.
        """
        outputs: list[Tensor | None] = []
        update = self._settings.update
        micro_batches = plan_micro_batches(
            rollout,
            models,
            it,
            max_tokens=update.micro_batch_tokens,
            shared=update.router_loss_coef == 0,
        )
        for micro in micro_batches:
            parts = function(trim(rollout.select(micro.rows)))
            if not outputs:
                blank = rollout.sampling_logprobs
                outputs = [None if part is None else _blank(blank, part) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                if output is not None and part is not None:
                    output[micro.rows.to(output.device), : part.shape[1]] = part
        return outputs

    def _free_gathered(self) -> None:
        """Release what only the passes without gradients needed."""
        for model in self._models.values():
            reshard(model)
        if self._reference is not None:
            self._reference.reshard(offload=self._settings.reference.offload)
        if self._teacher is not None:
            self._teacher.reshard()


def _with_old(experience: Experience, own: Tensor | None, *, from_engine: bool) -> Experience:
    """Set the log-probabilities that the update starts from, and say where they come from.

    Args:
        experience: Responses of this rank.
        own: `[B, T]`, the policy's as it is now; None: not computed, as the update's first pass
            computes them, or the engine's are the same.
        from_engine: The engine's are the policy's own.
    """
    engine = experience.engine_logprobs
    if experience.old_source == "recorded":
        return replace(experience, old_logprobs=engine, policy_logprobs=own)
    if from_engine:
        return replace(experience, old_logprobs=engine, old_source="engine")
    return replace(experience, old_logprobs=own, old_source=None if own is None else "policy")


def _columns(tokens: TeacherTokens) -> list[Tensor]:
    return [tokens.logprobs, tokens.top_ids, tokens.top_logprobs]


def _blank(like: Tensor, part: Tensor) -> Tensor:
    """Return zeros for the whole of what ``part`` is a part of."""
    dtype = like.dtype if part.is_floating_point() else part.dtype
    return torch.zeros(*like.shape, *part.shape[2:], dtype=dtype, device=like.device)
