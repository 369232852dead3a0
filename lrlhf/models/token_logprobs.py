"""Log-probabilities that a language model gives to the tokens of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.functional.distillation import TeacherRows, TeacherStatistics, compared_statistics
from lrlhf.functional.logprobs import TokenStatistics, token_statistics
from lrlhf.functional.online_softmax import Support
from lrlhf.models.backbone import hidden_states
from lrlhf.models.experts import load_balancing_loss
from lrlhf.models.heads import output_head, plain_model
from lrlhf.models.media_inputs import ruled_out_ids
from lrlhf.models.packed.packing import Compacted, compact
from lrlhf.models.sharding import within
from lrlhf.types import SamplingMask, SequenceBatch


class SequenceOutputs(NamedTuple):
    """What one forward pass over a batch says about its response tokens."""

    logprobs: Float[Tensor, "B T"]
    """At least float32; 0 outside ``response_mask`` and on a row's first token."""
    entropy: Float[Tensor, "B T"] | None
    """Of every next-token distribution, over its sampling mask if there is one, in nats; None: not
    asked for."""
    is_top: Bool[Tensor, "B T"]
    """Whether no token is more probable; False outside ``response_mask``."""
    values: Float[Tensor, "B T"] | None
    """Value of the state in which each token was chosen; None: there was no head."""
    router_loss: Float[Tensor, ""] | None
    """Load-balancing loss of a mixture of experts, unweighted; None: not asked for."""
    teacher: TeacherStatistics | None
    """`[B, T]` each, 0 outside ``response_mask``; None: there is no teacher."""


def loss_tokens(model: PreTrainedModel | PeftModel, batch: SequenceBatch) -> Bool[Tensor, "B T"]:
    """Tell which response tokens a model can say: not a row's first, none that stands for media."""
    ruled_out = torch.tensor(ruled_out_ids(model.config), device=batch.input_ids.device)
    predicted = batch.response_mask & batch.attention_mask & ~torch.isin(batch.input_ids, ruled_out)
    return predicted & (batch.attention_mask.cumsum(dim=1) > 1)


def sequence_outputs(  # noqa: PLR0913  what one pass can give
    model: PreTrainedModel | PeftModel,
    batch: SequenceBatch,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: bool = False,
    value_head: Callable[[Tensor], Tensor] | None = None,
    router_loss: bool = False,
    teacher: Callable[[SequenceBatch], TeacherRows] | None = None,
    beta: float = 1.0,
    replay: bool = False,
) -> SequenceOutputs:
    """Compute ``log p(input_ids[b, t] | what precedes it)`` on the response tokens, and more.

    The body runs once over the batch. The output head sees only the positions that predict a
    response token, in chunks that the backward pass recomputes, so ``[B, T, V]`` never exists.

    Args:
        model: A causal language model, with or without LoRA adapters.
        batch: Tokens outside ``attention_mask`` are invisible, wherever they are. Probabilities are
            renormalised over its ``sampling_mask``.
        temperature: Logits are divided by it.
        chunk_size: Positions whose logits exist at the same time.
        entropy: Also return the entropy of every next-token distribution.
        value_head: From hidden states ``[N, H]`` to values ``[N]``, to read off the same pass.
        router_loss: Also return the load-balancing loss of the model's experts.
        teacher: What a teacher says of a batch; also return the distance to it.
        beta: Of the divergence, see `lrlhf.functional.generalized_jsd`.
        replay: Send tokens through the batch's ``routed_experts``, if any, see `allow_replay`.

    Raises:
        ValueError: ``router_loss`` of a model that has no experts, or a ``teacher``, whose
            distributions are over all ids, of a batch with a ``sampling_mask``.
    """
    if teacher is not None and batch.sampling_mask is not None:
        raise ValueError(
            "the responses were sampled with top_p, top_k, min_p or min_new_tokens, and their "
            "probabilities are over the ids that these left, the teacher's over all: sample "
            "without them, or with allow_truncated_sampling: true"
        )
    plain = plain_model(model)
    rows = None if teacher is None else teacher(batch)
    options: dict[str, Any] = {
        "temperature": temperature,
        "chunk_size": chunk_size,
        "return_entropy": entropy,
    }

    def forward() -> tuple[Predicting, TokenStatistics, TeacherStatistics | None]:
        body = predicting_states(plain, batch, router_logits=router_loss, replay=replay)
        head, states, targets = output_head(plain), body.predicting, body.targets
        if rows is None:
            mask = batch.sampling_mask
            support = None if mask is None else _support(batch, mask)
            result = token_statistics(states, head.fastest(), targets, **options, support=support)
            return body, result, None
        return body, *compared_statistics(states, head, targets, rows, beta=beta, **options)

    body, result, distance = within(model, forward)
    return SequenceOutputs(
        logprobs=body.spread(result.logprobs),
        entropy=None if result.entropy is None else body.spread(result.entropy),
        is_top=body.spread(result.is_top),
        values=None if value_head is None else body.spread(value_head(body.predicting)),
        router_loss=None
        if body.router_logits is None
        else load_balancing_loss(plain, body.router_logits, body.computed),
        teacher=distance and TeacherStatistics(*(body.spread(each) for each in distance)),
    )


def sequence_logprobs(
    model: PreTrainedModel | PeftModel,
    batch: SequenceBatch,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> Float[Tensor, "B T"]:
    """Compute the log-probabilities of :func:`sequence_outputs` alone."""
    return sequence_outputs(model, batch, temperature=temperature, chunk_size=chunk_size).logprobs


def sequence_values(
    backbone: PreTrainedModel | PeftModel,
    head: Callable[[Tensor], Tensor],
    batch: SequenceBatch,
    *,
    train_backbone: bool = True,
    replay: bool = False,
) -> Float[Tensor, "B T"]:
    """Compute the value of the state in which each response token was chosen.

    Args:
        backbone: A causal model, with or without an output head of its own, which stays unused.
        head: From hidden states ``[N, H]`` to values ``[N]``.
        batch: Tokens outside ``attention_mask`` are invisible, wherever they are.
        train_backbone: False: only the head's gradient is kept track of.
        replay: Send tokens through the batch's ``routed_experts``, if any, see `allow_replay`.

    Returns:
        ``[B, T]``, aligned with the tokens like log-probabilities: column t is the value before
        token t. 0 outside ``response_mask`` and on a row's first token.
    """
    with torch.set_grad_enabled(train_backbone and torch.is_grad_enabled()):
        plain = plain_model(backbone)
        body = within(backbone, lambda: predicting_states(plain, batch, replay=replay))
    return body.spread(head(body.predicting))


class Predicting(NamedTuple):
    """Hidden states of the positions that predict a response token."""

    predicting: Float[Tensor, "M H"]
    targets: Int[Tensor, " M"]
    """The tokens that they predict."""
    positions: Bool[Tensor, "B T"]
    """Where those are, in rows whose attended tokens come first."""
    counts: Bool[Tensor, "B T"]
    order: Int[Tensor, "B T"]
    computed: Bool[Tensor, "R L"]
    router_logits: tuple[Tensor, ...] | None

    def spread(self, values: Shaped[Tensor, " M"]) -> Shaped[Tensor, "B T"]:
        """Put values where they were asked for, zero elsewhere, in the original columns."""
        positions, counts = self.positions, self.counts
        spread = torch.zeros(positions.shape, dtype=values.dtype, device=values.device)
        spread = spread.masked_scatter(positions, values).masked_fill(~counts, 0)
        return torch.zeros_like(spread).scatter(1, self.order, spread)


def predicting_states(
    plain: PreTrainedModel,
    batch: SequenceBatch,
    *,
    router_logits: bool = False,
    replay: bool = False,
) -> Predicting:
    """Run the body of a model over a batch."""
    options: dict[str, Any] = {"output_router_logits": True} if router_logits else {}
    # experts are balanced over the tokens of whole rows
    options |= {"use_cache": False, "share": not router_logits, "replay": replay}
    hidden = hidden_states(plain, batch, **options)
    rows = hidden.rows
    counts, positions = _positions(batch, rows)
    return Predicting(
        predicting=hidden.before(positions),
        targets=rows.input_ids[positions],
        positions=positions,
        counts=counts,
        order=rows.order,
        computed=hidden.computed,
        router_logits=hidden.router_logits if router_logits else None,
    )


def to_predicting(
    batch: SequenceBatch, values: Shaped[Tensor, "B T ..."]
) -> Shaped[Tensor, "M ..."]:
    """Return the values of a batch's tokens in the order of `Predicting.targets`."""
    rows = compact(batch.input_ids, batch.attention_mask, batch.forks)
    order = rows.order.view(*rows.order.shape, *(1,) * (values.dim() - 2))
    ordered = values.gather(1, order.expand(values.shape))
    return ordered[_positions(batch, rows)[1]]


def _support(batch: SequenceBatch, mask: SamplingMask) -> Support:
    """Return the ids that truncated sampling left, in the order of `Predicting.targets`."""
    sizes, starts = to_predicting(batch, mask.sizes), to_predicting(batch, mask.starts)
    return Support.of(mask.ids_at(starts, sizes), sizes)


def _positions(
    batch: SequenceBatch, rows: Compacted
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Tell which tokens of ``rows`` count, and which are asked for."""
    counts = (batch.response_mask & batch.attention_mask).gather(1, rows.order)
    counts &= rows.previous >= 0  # else nothing precedes it
    # of a batch without responses one position is asked for, and masked, so that every parameter
    # is used: under DDP one without a gradient on one rank stops all of them
    positions = counts.clone()
    positions[:1, 1:2] |= ~counts.any()
    return counts, positions
