"""A frozen model that another one learns from, token by token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Int
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.functional.distillation import BatchDistribution, TopRows
from lrlhf.models.heads import OutputHead, output_head, plain_model
from lrlhf.models.packed.packing import compact, unfold
from lrlhf.models.reference import ReferencePolicy, WithFirstAdapters, frozen_reference
from lrlhf.models.sharding import has_split_weights, within
from lrlhf.models.text_limits import context_length
from lrlhf.models.token_logprobs import Predicting, predicting_states, to_predicting
from lrlhf.types import SequenceBatch, TeacherTokens

logger = logging.getLogger(__name__)


class TeacherModel(ReferencePolicy):
    """A teacher in this process; loaded, split and moved as a reference is."""

    @torch.no_grad()
    def rows(self, batch: SequenceBatch, *, temperature: float = 1.0) -> BatchDistribution:
        """Run the body over a batch; the logits are computed later, chunk by chunk.

        Args:
            batch: As the policy reads it.
            temperature: Logits are divided by it.

        Raises:
            ValueError: The batch holds a token that the teacher has no embedding for, or a row that
                is longer than what it reads.
        """
        return self._read(batch, temperature)[1]

    @torch.no_grad()
    def best(
        self,
        batch: SequenceBatch,
        *,
        num_ids: int,
        vocabulary: int,
        temperature: float = 1.0,
        chunk_size: int = 1024,
    ) -> TeacherTokens:
        """Return the most probable ids at each response token; see `rows`.

        Args:
            batch: As the policy reads it.
            num_ids: K.
            vocabulary: Ids that the policy has; those beyond are left out.
            temperature: Logits are divided by it.
            chunk_size: Positions whose logits exist at the same time.
        """
        states, head = self._read(batch, temperature)
        chosen, ids, logprobs = [], [], []
        for start in range(0, len(states.targets), chunk_size):
            rows = slice(start, start + chunk_size)
            known = head.logprobs(rows, vocabulary)
            chosen.append(known.gather(1, states.targets[rows, None])[:, 0])
            top = known.topk(min(num_ids, known.shape[1]), dim=1)
            ids.append(top.indices)
            logprobs.append(top.values)
        spread = states.spread
        return TeacherTokens(
            logprobs=spread(torch.cat(chosen)),
            top_ids=torch.stack([spread(each) for each in torch.cat(ids).T], dim=2),
            top_logprobs=torch.stack([spread(item) for item in torch.cat(logprobs).T], dim=2),
        )

    def _read(
        self, batch: SequenceBatch, temperature: float
    ) -> tuple[Predicting, BatchDistribution]:
        plain = plain_model(self.model)
        _refuse_unknown(batch.input_ids, vocabulary_size(plain))
        if (limit := context_length(plain)) is not None:
            _refuse_longer(batch, limit)
        with self.as_reference():
            states, head = within(
                self.model, lambda: (predicting_states(plain, batch), _kept_head(plain))
            )
        return states, BatchDistribution(states.predicting, head, temperature)


class PresentPolicy(TeacherModel):
    """The policy that is trained, asked without gradient as it is at the moment."""

    def __init__(self, policy: PreTrainedModel | PeftModel) -> None:
        self.model = policy

    def split(self, shard: Callable[[nn.Module], None]) -> None:
        """Leave the model to the policy, whose it is."""


class FirstPolicy(TeacherModel, WithFirstAdapters):
    """The policy with the adapters that it started with while it is asked."""


def own_teacher(policy: PreTrainedModel | PeftModel, update_rate: float) -> TeacherModel:
    """Make a policy its own teacher, see `Teacher.update_rate`; `mix` moves an average.

    Raises:
        ValueError: The weights that it starts with would have to be copied beside adapters.
    """
    if update_rate == 1:
        return PresentPolicy(policy)
    if not isinstance(policy, PeftModel):
        return TeacherModel(frozen_reference(policy).model)
    if update_rate > 0:
        raise ValueError(
            f"teacher.update_rate is {update_rate}, but the first weights of a LoRA policy stay as "
            "they are: set it to 1 (the policy as it is) or 0 (as it started), or train all weights"
        )
    if any(weight.requires_grad for weight in output_head(policy).projection.parameters()):
        raise ValueError(
            "teacher.update_rate is 0, and lora trains the output head, which the teacher's logits "
            "come from: leave it out of target_modules and modules_to_save, or set the rate to 1"
        )
    return FirstPolicy(policy)


def vocabulary_size(model: PreTrainedModel | PeftModel) -> int:
    """Return how many ids a model has, padding of its embedding included."""
    return int(plain_model(model).config.get_text_config().vocab_size)


def _kept_head(plain: PreTrainedModel) -> OutputHead:
    """Return the head, with a copy of a weight that is whole only during the pass."""
    head = output_head(plain)
    layer = head.projection
    if not has_split_weights(plain) or not isinstance(layer, nn.Linear):
        return head
    copied = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    copied.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    if layer.bias is not None:
        copied.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    return replace(head, projection=copied)


def _refuse_unknown(input_ids: Int[Tensor, "B T"], rows: int) -> None:
    largest = int(input_ids.max())
    if largest >= rows:
        raise ValueError(
            f"the policy has sampled token {largest}, a row of its embedding that is no token: the "
            f"teacher's embedding has {rows} rows. Rule such ids out, or take a teacher whose "
            "embedding is as large"
        )


def _refuse_longer(batch: SequenceBatch, limit: int) -> None:
    longest = int(batch.attention_mask.sum(dim=1).max())
    if longest > limit and batch.forks is not None:  # no branch need be as long as its row
        branches = unfold(compact(batch.input_ids, batch.attention_mask, batch.forks))
        longest = int(branches.rows.attention_mask.sum(dim=1).max())
    if longest > limit:
        raise ValueError(
            f"a prompt and its response have {longest} tokens, and the teacher reads {limit}: "
            "leave out longer prompts (max_prompt_tokens of the data), lower max_new_tokens (of "
            "sampling, or in an evaluation of eval_sampling), or take a teacher with a longer "
            "context"
        )


def top_rows(batch: SequenceBatch, tokens: TeacherTokens) -> TopRows:
    """Bring what is known of a batch's tokens into the order of the policy's hidden states."""
    columns = (tokens.top_ids, tokens.top_logprobs, tokens.logprobs)
    ids, logprobs, chosen = (to_predicting(batch, column) for column in columns)
    return TopRows(ids, logprobs, chosen)


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, source: str
) -> None:
    """Refuse a teacher that reads token ids otherwise than the policy.

    Every id must be the same token in both, special tokens included. Rows of an embedding beyond
    the tokenizer are padding and may differ in number. A teacher may end its responses with another
    of these tokens, which is only said.

    Args:
        tokenizer: Of the policy.
        teacher: Of the teacher.
        source: What the teacher is called.

    Raises:
        ValueError: They differ; says at which id first.
    """
    own = {index: token for token, index in tokenizer.get_vocab().items()}
    other = {index: token for token, index in teacher.get_vocab().items()}
    different = sorted(index for index in own.keys() | other if own.get(index) != other.get(index))
    if different:
        first = different[0]
        raise ValueError(
            f"teacher.model {source} has another tokenizer than the policy: of "
            f"{len(other)} and {len(own)} tokens {len(different)} differ, the first is id "
            f"{first}, which is {other.get(first)!r} to the teacher and "
            f"{own.get(first)!r} to the policy. Take a teacher of the policy's family, or train on "
            "the teacher's responses with SFT"
        )
    if teacher.eos_token_id != tokenizer.eos_token_id:
        logger.warning(
            "teacher %s ends with %r and the policy with %r: the policy learns to end as the "
            "teacher does",
            source,
            teacher.eos_token,
            tokenizer.eos_token,
        )
