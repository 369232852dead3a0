"""The teacher of a run: how it is loaded and asked, and how far the policy is from it."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.functional.distillation import TeacherRows, TeacherStatistics
from lrlhf.functional.masking import masked_sum
from lrlhf.models import CausalLM
from lrlhf.models.teacher import (
    TeacherModel,
    check_same_tokens,
    own_teacher,
    top_rows,
    vocabulary_size,
)
from lrlhf.models.text_limits import context_length
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.policy.load_policy import LoadedPolicy
from lrlhf.modules.policy.privileged import PrivilegedContext
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.modules.settings import Teacher
from lrlhf.rollout import RolloutEngine
from lrlhf.rollout.vllm.teacher_server import TeacherServer
from lrlhf.run.quiet_output import quiet
from lrlhf.types import PromptBatch, Rollout, SequenceBatch, TeacherTokens

Asking: TypeAlias = Literal["sampling", "eval_sampling"]
"""The option that says how the responses are sampled which a teacher is asked about."""
EVALUATED = ("teacher_reverse_kl", "teacher_reverse_kl_sampled", "teacher_top_agreement")
"""Names of what an evaluation measures of each response."""


class RunTeacher:
    """What says how probable tokens are to the teacher.

    Args:
        policy: Learns from it.
        settings: Of the run, with a teacher.
        engine: Generates the responses.

    Raises:
        ValueError: The teacher has another tokenizer than the policy, or no response fits into what
            it reads.
    """

    def __init__(
        self, policy: LoadedPolicy, settings: PolicySettings, engine: RolloutEngine
    ) -> None:
        assert settings.teacher is not None
        self.settings: Teacher = settings.teacher
        self._temperature = settings.sampling.temperature
        self._chunk_size = settings.update.logprob_chunk
        self._policy = policy
        self._engine = engine
        self._plays = settings.episodes is not None
        self._responses: dict[Asking, int] = {
            "sampling": settings.sampling.max_new_tokens,
            "eval_sampling": settings.eval_sampling.max_new_tokens,
        }
        self.model: TeacherModel | None = None
        """None: a server holds it."""
        self._server: TeacherServer | None = None
        self._checked = False
        self.context: PrivilegedContext | None = None
        if self.settings.model is not None:
            self.model = _loaded(self.settings.model, policy)
            for option in self._responses:
                self._check_room(1, option)
        elif self.settings.server is not None:
            self._server = TeacherServer(self.settings.server)
        else:
            self.model = own_teacher(policy.model, self.settings.update_rate)
        if self.settings.context is not None:
            limit = None if self.model is None else context_length(self.model.model)
            self.context = PrivilegedContext(
                self.settings.context, policy.tokenizer, self.settings.threshold, limit
            )

    def check_prompts(self, prompts: PromptBatch, option: Asking, chat: ChatFormat) -> None:
        """Refuse prompts whose responses may become longer than what the teacher reads.

        It would answer, far off what it was trained for, and long responses may come late in a run.

        Args:
            prompts: Of an iteration or an evaluation.
            option: How these are sampled.
            chat: How prompts are rendered.

        Raises:
            ValueError: They may.
        """
        longest = int(prompts.attention_mask.sum(dim=1).max())
        if self.context is not None:
            longest = max(longest, self.context.longest_prompt(prompts, chat))
        self._check_room(longest, option)

    def _check_room(self, prompt: int, option: Asking) -> None:
        limit = None if self.model is None else context_length(self.model.model)
        response = self._responses[option]
        if limit is None or prompt + response <= limit or self._ends_within(limit):
            return
        context = "" if self.context is None else "shorten teacher.context, "
        raise ValueError(
            f"{'the policy' if self.settings.is_policy else 'teacher.model'} reads {limit} tokens, "
            f"fewer than a prompt of {prompt} and {option}.max_new_tokens, {response}: "
            f"lower {option}.max_new_tokens, {context}leave out longer prompts (max_prompt_tokens "
            "of the data), or take a teacher with a longer context"
        )

    def _ends_within(self, limit: int) -> bool:
        """Whether the engine ends episodes before they are too long, or may, once it has started.

        The teacher looks at the length of what it is given again.
        """
        if not self._plays:
            return False
        if not self._engine.capabilities.holds_copy:
            end = context_length(self._policy.model)  # which may not be attached yet
            return end is not None and end <= limit
        end = self._engine.context_length
        return end is None or end <= limit

    @property
    def in_loss(self) -> bool:
        """Whether the update asks for the divergence."""
        return self.settings.placement == "loss"

    @property
    def keeps_tokens(self) -> bool:
        """Whether the teacher is asked once for each rollout, and what it said is kept."""
        return self._server is not None or self.settings.top_k is not None

    @property
    def moves(self) -> bool:
        """Whether it is a moving average of the policy."""
        return self.settings.is_policy and 0 < self.settings.update_rate < 1

    def follow(self, policy: PreTrainedModel | PeftModel) -> None:
        """Move an average by an iteration."""
        if self.moves:
            assert self.model is not None
            self.model.mix(policy, self.settings.update_rate)

    def tokens(self, rollout: Rollout) -> TeacherTokens:
        """Ask the server about a rollout, or the model about a micro-batch of it."""
        read, shape = rollout.privileged or rollout, rollout.input_ids.shape
        mask, own = read.response_mask, rollout.response_mask
        # beside the policy's tokens, in whatever columns the teacher has read them
        return self._tokens(read).map(
            lambda value: value.new_zeros(*shape, *value.shape[2:]).index_put((own,), value[mask])
        )

    def _tokens(self, rollout: SequenceBatch) -> TeacherTokens:
        num_ids = self.settings.top_k or 1
        vocabulary = vocabulary_size(self._policy.model)
        if self.model is not None:
            return self.model.to(rollout.input_ids.device).best(
                rollout,
                num_ids=num_ids,
                vocabulary=vocabulary,
                temperature=self._temperature,
                chunk_size=self._chunk_size,
            )
        assert self._server is not None
        if not self._checked:
            self._server.check_tokens(self._policy.tokenizer)
            self._checked = True
        return self._server.ask(rollout, num_ids=num_ids, vocabulary=vocabulary)

    def rows(self, batch: SequenceBatch) -> TeacherRows:
        """Return what the teacher says of a micro-batch: what is kept, or what it is asked now."""
        if isinstance(batch, Rollout) and batch.teacher is not None:
            return top_rows(batch, batch.teacher)
        assert self.model is not None, "what a server says is kept with the rollout"
        model = self.model.to(batch.input_ids.device)
        read = (isinstance(batch, Rollout) and batch.privileged) or batch
        return model.rows(read, temperature=self._temperature)

    def reshard(self) -> None:
        """Free what its passes have gathered, and with ``offload`` its place on the device."""
        if self.model is not None:
            self.model.reshard(offload=self.settings.offload)

    def close(self) -> None:
        """Break off what is asked of a server; a later run looks at its tokens anew."""
        if self._server is not None:
            self._server.close()
            self._checked = False


@quiet()
def _loaded(source: str | CausalLM, policy: LoadedPolicy) -> TeacherModel:
    spec = CausalLM(source=source, dtype="auto") if isinstance(source, str) else source
    check_same_tokens(policy.tokenizer, spec.load_tokenizer(), source=spec.source)
    return TeacherModel(spec.load(trainable=False))


def measure_distance(
    distance: TeacherStatistics, logprobs: Tensor, mask: Tensor, metrics: MetricSums
) -> None:
    """How far the policy is from its teacher, per token.

    Args:
        distance: `[B, T]` each.
        logprobs: `[B, T]` of the policy.
        mask: `[B, T]`, the tokens that count.
        metrics: Told.
    """
    add = partial(_add_mean, mask=mask, metrics=metrics)
    add("teacher/reverse_kl", distance.reverse_kl)
    add("teacher/reverse_kl_sampled", logprobs.detach() - distance.logprobs)
    add("teacher/top_agreement", distance.agrees.to(logprobs.dtype))


def _add_mean(name: str, values: Tensor, *, mask: Tensor, metrics: MetricSums) -> None:
    metrics.add(name, masked_sum(values, mask), mask.sum())


def distance_of_responses(
    distance: TeacherStatistics, logprobs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """`[B]` by name: means over the tokens of each response; NaN: it has none."""
    columns = (distance.reverse_kl, logprobs - distance.logprobs, distance.agrees.float())
    return {
        name: masked_sum(column, mask, dim=1)
        / torch.where(mask.any(dim=1), mask.sum(dim=1), torch.nan)
        for name, column in zip(EVALUATED, columns, strict=True)
    }
