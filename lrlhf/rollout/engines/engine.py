"""What a rollout engine does, and how its answer becomes a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Media, PromptBatch, Rollout


class RolloutEngine(Protocol):
    """Draws responses. Token ids go in and come out; text is never tokenised again."""

    exact: bool
    """Whether its log-probabilities are the policy's own, up to rounding; known once it has
    generated."""

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Get to know the policy before the first call of ``generate``.

        Args:
            policy: The model.
            tokenizer: Its tokenizer.
            processor: What it sees images and videos with; None: it reads text only.
        """
        ...

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        """Draw ``num_generations`` responses to each prompt.

        Args:
            prompts: Unique prompts.
            sampling: How tokens are drawn.
            num_generations: Responses per prompt; rows of one prompt are consecutive.
            seeds: One per response. A response depends on its prompt and its seed, not on what
                else is in the batch, up to rounding.

        Returns:
            Right-padded rows, one per response, on the device of the prompts.
        """
        ...

    def close(self) -> None:
        """Give back what it holds; ``generate`` may start it again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response as an engine returned it."""

    token_ids: Tensor
    """`[L]`, the end-of-sequence token included where there is one."""
    logprobs: Tensor
    """`[L]` float32, of the distribution that was sampled from."""
    truncated: bool
    """The length limit came before an end-of-sequence token or a stop string."""
    kept_mass: Tensor | None = None
    """`[L]`: probability that top_p, top_k and min_p left at each token; None: nothing was cut."""


def assemble_rollout(
    prompts: PromptBatch,
    responses: Sequence[Response],
    *,
    num_generations: int,
    pad_id: int,
    weight_version: int | None = None,
) -> Rollout:
    """Put prompts and responses into right-padded rows.

    Args:
        prompts: The unique prompts, `[U, P]`.
        responses: ``U * num_generations`` responses, those of one prompt consecutive.
        num_generations: Responses per prompt.
        pad_id: What fills the rows; it may equal an end-of-sequence id.
        weight_version: Of the weights that drew them; None: the policy's own.

    Returns:
        `[U * num_generations, T]` rows with T the longest prompt and response together.
    """
    if len(responses) != len(prompts) * num_generations:
        raise ValueError(
            f"the engine returned {len(responses)} responses to {len(prompts)} prompts; "
            f"{len(prompts) * num_generations} were asked for"
        )
    device = prompts.input_ids.device
    contexts = prompt_token_ids(prompts)
    rows, logprobs, masses, starts = [], [], [], []
    for index, response in enumerate(responses):
        context = contexts[index // num_generations]
        nothing = torch.zeros(len(context), device=device)
        rows.append(torch.cat([context, response.token_ids.to(device)]))
        logprobs.append(torch.cat([nothing, response.logprobs.to(device)]))
        if response.kept_mass is not None:
            masses.append(torch.cat([nothing + 1, response.kept_mass.to(device)]))
        starts.append(len(context))
    lengths = torch.tensor([len(row) for row in rows], device=device)
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    positions = torch.arange(input_ids.shape[1], device=device)
    attention_mask = positions < lengths[:, None]
    return Rollout(
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=attention_mask & (positions >= torch.tensor(starts, device=device)[:, None]),
        sampling_logprobs=pad_sequence(logprobs, batch_first=True),
        kept_mass=pad_sequence(masses, batch_first=True, padding_value=1.0) if masses else None,
        media=repeated_media(prompts.media, num_generations),
        group_ids=torch.arange(len(rows), device=device) // num_generations,
        truncated=torch.tensor([response.truncated for response in responses], device=device),
        weight_version=None
        if weight_version is None
        else torch.full((len(rows),), weight_version, device=device),
    )


def repeated_media(
    media: tuple[Media | None, ...] | None, copies: int
) -> tuple[Media | None, ...] | None:
    """Return what each response's prompt shows: one object for all of a prompt's responses."""
    return media and tuple(entry for entry in media for _ in range(copies))


def prompt_token_ids(prompts: PromptBatch) -> list[Tensor]:
    """Return each prompt's tokens, `[L]`, without the padding."""
    return [ids[mask] for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return what rows are padded with.

    Raises:
        ValueError: The tokenizer has no pad token.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token")
    return int(tokenizer.pad_token_id)


def check_seeds(seeds: Sequence[int], prompts: PromptBatch, num_generations: int) -> None:
    """Check that there is one seed per response.

    Raises:
        ValueError: There is not.
    """
    if len(seeds) != len(prompts) * num_generations:
        raise ValueError(
            f"{len(seeds)} seeds for {len(prompts)} prompts x {num_generations} generations"
        )
