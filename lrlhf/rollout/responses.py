"""Responses as engines return them, made of segments, and how they become a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lrlhf.types import Media, PromptBatch, Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Consecutive tokens of a response that have one origin.

    Args:
        token_ids: `[L]`, as the engine returned them, or as they were given.
        logprobs: `[L]` float32, of the distribution that they were sampled from. None: they were
            given, such as the output of a tool or the text of an environment. The policy is shown
            given tokens, and not trained on them.
        kept_mass: `[L]`, probability that top_p, top_k and min_p left at each token; None: nothing
            was cut off.
        fork: Tokens of the row right before it that it does not follow, see
            `lrlhf.types.SequenceBatch.forks`.
        versions: `[L]`, training iterations behind the weights that sampled each token. None: all
            of one version, that of the response.
    """

    token_ids: Int[Tensor, " L"]
    logprobs: Float[Tensor, " L"] | None = None
    kept_mass: Float[Tensor, " L"] | None = None
    fork: int = 0
    versions: Int[Tensor, " L"] | None = None

    @property
    def sampled(self) -> bool:
        """Whether the policy wrote it."""
        return self.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Response:
    """All that follows a prompt: what the policy wrote, and perhaps what it was given in between.

    Args:
        segments: In their order; of a response of one turn a single one.
        truncated: The length limit came before an end-of-sequence token or a stop string, in the
            last turn.
        weight_version: Training iterations behind the oldest weights that sampled any of it; None:
            the policy's own.
    """

    segments: tuple[Segment, ...]
    truncated: bool
    weight_version: int | None = None

    @classmethod
    def sampled(
        cls,
        token_ids: Int[Tensor, " L"],
        logprobs: Float[Tensor, " L"],
        *,
        truncated: bool,
        kept_mass: Float[Tensor, " L"] | None = None,
    ) -> Response:
        """Return a response of one turn.

        Args:
            token_ids: `[L]`, the end-of-sequence token included where there is one.
            logprobs: `[L]` float32, of the distribution that was sampled from.
            truncated: See `Response`.
            kept_mass: See `Segment`.
        """
        segment = Segment(token_ids=token_ids, logprobs=logprobs, kept_mass=kept_mass)
        return cls(segments=(segment,), truncated=truncated)

    def given(self, token_ids: Int[Tensor, " L"], *, fork: int = 0) -> Response:
        """Return the response with tokens behind it that the policy did not write.

        Args:
            token_ids: `[L]`.
            fork: See `Segment`.
        """
        given = Segment(token_ids=token_ids, fork=fork)
        return replace(self, segments=(*self.segments, given))

    def followed_by(self, turn: Response) -> Response:
        """Return the response with a further turn behind it."""
        versions = [one.weight_version for one in (self, turn) if one.weight_version is not None]
        parts = (self.segments, turn.segments)
        if len(set(versions)) > 1:
            parts = (_with_versions(self), _with_versions(turn))
        return Response(
            segments=(*parts[0], *parts[1]),
            truncated=turn.truncated,
            weight_version=min(versions, default=None),
        )

    def cut(self, length: int) -> Response:
        """Return a response of one turn with at most so many tokens."""
        if len(self.token_ids) <= length:
            return self
        (whole,) = self.segments
        kept = Segment(
            token_ids=whole.token_ids[:length],
            logprobs=None if whole.logprobs is None else whole.logprobs[:length],
            kept_mass=None if whole.kept_mass is None else whole.kept_mass[:length],
            versions=None if whole.versions is None else whole.versions[:length],
        )
        return replace(self, segments=(kept,), truncated=True)

    @property
    def token_ids(self) -> Int[Tensor, " L"]:
        """All tokens behind the prompt."""
        return torch.cat([segment.token_ids for segment in self.segments])


def _with_versions(response: Response) -> tuple[Segment, ...]:
    """Return the segments, with the response's version in those that have none of their own."""
    version = response.weight_version
    assert version is not None
    return tuple(
        replace(one, versions=torch.full_like(one.token_ids, version))
        if one.sampled and one.versions is None
        else one
        for one in response.segments
    )


class Run(NamedTuple):
    """Consecutive columns of a row whose tokens have one origin."""

    start: int
    end: int
    sampled: bool


def assemble_rollout(
    prompts: PromptBatch,
    responses: Sequence[Response],
    *,
    num_generations: int,
    pad_id: int,
) -> Rollout:
    """Put prompts and responses into right-padded rows.

    Args:
        prompts: The unique prompts, `[U, P]`.
        responses: ``U * num_generations`` responses, those of one prompt consecutive.
        num_generations: Responses per prompt.
        pad_id: What fills the rows; it may equal an end-of-sequence id.

    Returns:
        `[U * num_generations, T]` rows with T the longest prompt and response together.

    Raises:
        ValueError: There are more or fewer responses, or some say what weights sampled them and
            others do not.
    """
    if len(responses) != len(prompts) * num_generations:
        raise ValueError(
            f"the engine returned {len(responses)} responses to {len(prompts)} prompts; "
            f"{len(prompts) * num_generations} were asked for"
        )
    versions = [one.weight_version for one in responses if one.weight_version is not None]
    if 0 < len(versions) < len(responses):
        raise ValueError(
            f"{len(versions)} of {len(responses)} responses say what weights sampled them: give "
            "weight_version for all of them or for none"
        )
    device = prompts.input_ids.device
    contexts = prompt_token_ids(prompts)
    rows = [
        _row(contexts[index // num_generations], response, device)
        for index, response in enumerate(responses)
    ]
    ids, sampled, logprobs, masses, forks, sources = map(list, zip(*rows, strict=True))
    cut = any(one.kept_mass is not None for each in responses for one in each.segments)
    forking = any(one.fork for each in responses for one in each.segments)
    mixed = any(one.versions is not None for each in responses for one in each.segments)
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row) for row in ids], device=device)
    return Rollout(
        input_ids=input_ids,
        attention_mask=torch.arange(input_ids.shape[1], device=device) < lengths[:, None],
        response_mask=pad_sequence(sampled, batch_first=True),
        sampling_logprobs=pad_sequence(logprobs, batch_first=True),
        kept_mass=pad_sequence(masses, batch_first=True, padding_value=1.0) if cut else None,
        media=repeated_media(prompts.media, num_generations),
        group_ids=torch.arange(len(rows), device=device) // num_generations,
        truncated=torch.tensor([response.truncated for response in responses], device=device),
        weight_version=torch.tensor(versions, device=device) if versions else None,
        forks=pad_sequence(forks, batch_first=True) if forking else None,
        token_versions=pad_sequence(sources, batch_first=True) if mixed else None,
    )


def _row(context: Tensor, response: Response, device: torch.device) -> Iterator[Tensor]:
    """Go through `[L]` of a row: ids, mask, log-probabilities, mass, forks and versions."""
    parts, version = [], response.weight_version or 0
    for one in (Segment(token_ids=context), *response.segments):
        ids = one.token_ids.to(device)
        nothing = torch.zeros(len(ids), device=device)
        parts.append(
            (
                ids,
                torch.full_like(ids, one.sampled, dtype=torch.bool),
                nothing if one.logprobs is None else one.logprobs.to(device),
                nothing + 1 if one.kept_mass is None else one.kept_mass.to(device),
                torch.tensor([one.fork, *[0] * len(ids)], device=device)[: len(ids)],
                torch.full_like(ids, version if one.sampled else 0)
                if one.versions is None
                else one.versions.to(device),
            )
        )
    return (torch.cat(column) for column in zip(*parts, strict=True))


def responses_of(rollout: Rollout, prompts: PromptBatch) -> list[Response]:
    """Take a rollout apart again, into what `assemble_rollout` would make it of.

    Args:
        rollout: Without forks. Rows of one prompt are consecutive.
        prompts: That it answers.
    """
    versions, masses, mixed = rollout.weight_version, rollout.kept_mass, rollout.token_versions

    def segment(row: int, run: Run) -> Segment:
        columns = slice(run.start, run.end)
        return Segment(
            token_ids=rollout.input_ids[row, columns],
            logprobs=rollout.sampling_logprobs[row, columns] if run.sampled else None,
            kept_mass=masses[row, columns] if run.sampled and masses is not None else None,
            versions=mixed[row, columns] if run.sampled and mixed is not None else None,
        )

    return [
        Response(
            segments=tuple(segment(row, run) for run in runs),
            truncated=bool(rollout.truncated[row]),
            weight_version=None if versions is None else int(versions[row]),
        )
        for row, runs in enumerate(response_runs(rollout, prompts))
    ]


def response_runs(rollout: Rollout, prompts: PromptBatch) -> list[list[Run]]:
    """Find where the segments of each response are.

    Turns that follow each other without anything given between them count as one.
    """
    rows = (response_starts(rollout, prompts), rollout.lengths.tolist())
    forking = (
        torch.zeros_like(rollout.response_mask) if rollout.forks is None else rollout.forks > 0
    )
    masks = (rollout.response_mask.tolist(), forking.tolist())
    return [
        list(_runs(sampled, forks, start, end))
        for sampled, forks, start, end in zip(*masks, *rows, strict=True)
    ]


def response_starts(rollout: Rollout, prompts: PromptBatch) -> list[int]:
    """Return the column at which each response begins."""
    if rollout.prompt_lengths is not None:
        return [int(length) for length in rollout.prompt_lengths.tolist()]
    num_generations = len(rollout) // len(prompts)
    lengths = prompts.attention_mask.sum(dim=1).tolist()
    return [int(lengths[row // num_generations]) for row in range(len(rollout))]


def _runs(sampled: Sequence[bool], forks: Sequence[bool], start: int, end: int) -> Iterator[Run]:
    for column in range(start + 1, end + 1):
        if column == end or forks[column] or sampled[column] != sampled[start]:
            yield Run(start, column, sampled[start])
            start = column


def response_ids(rollout: Rollout, prompts: PromptBatch, *, given: bool = False) -> list[list[int]]:
    """Return the token ids of each response, as the engine returned them.

    Args:
        rollout: The responses, rows of one prompt consecutive.
        prompts: The unique prompts.
        given: Those that the policy did not write too.
    """
    rows = zip(rollout.input_ids.tolist(), response_runs(rollout, prompts), strict=True)
    return [
        [token for run in runs if given or run.sampled for token in ids[run.start : run.end]]
        for ids, runs in rows
    ]


def continued_prompts(prompts: PromptBatch, responses: Sequence[Response]) -> PromptBatch:
    """Return the prompts of a further turn: each response with its prompt before it.

    Args:
        prompts: The unique prompts.
        responses: So far, those of one prompt consecutive.

    Returns:
        One prompt per response, left-padded, which shows what its prompt shows.
    """
    copies = len(responses) // len(prompts)
    repeated = prompts.select(torch.arange(len(responses)) // copies)
    rows = zip(prompt_token_ids(repeated), responses, strict=True)
    return in_contexts(
        repeated,
        [torch.cat([ids, response.token_ids.to(ids.device)]) for ids, response in rows],
    )


def in_contexts(prompts: PromptBatch, contexts: Sequence[Tensor]) -> PromptBatch:
    """Return prompts with other tokens; those that show something begin as they did.

    Args:
        prompts: `[B, P]`.
        contexts: `[L]`, of each.
    """
    input_ids, mask = left_padded(contexts)
    media = None
    if prompts.media is not None:
        lengths = prompts.attention_mask.sum(dim=1).tolist()
        behind = zip(prompts.media, lengths, contexts, strict=True)
        media = tuple(_shown_before(entry, ids[length:]) for entry, length, ids in behind)
    return replace(prompts, input_ids=input_ids, attention_mask=mask, media=media)


def untold_prompts(
    rows: Sequence[Sequence[int]], media: tuple[Media | None, ...] | None = None
) -> PromptBatch:
    """Return prompts of which only the tokens are known, and what they show."""
    input_ids, mask = left_padded([torch.tensor(row) for row in rows])
    return PromptBatch(
        input_ids=input_ids,
        attention_mask=mask,
        prompts=("",) * len(rows),
        columns=({},) * len(rows),
        media=media,
    )


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids and mask of rows, `[B, T]`; the padding is a token, which every model knows."""
    pad_id, device = int(rows[0][0]), rows[0].device
    ids = pad_sequence(list(rows), batch_first=True, padding_value=pad_id, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]


def _shown_before(media: Media | None, ids: Tensor) -> Media | None:
    if media is None:
        return None
    return replace(media, prompt_ids=(*media.prompt_ids, *ids.tolist()))


def repeated_media(
    media: tuple[Media | None, ...] | None, copies: int
) -> tuple[Media | None, ...] | None:
    """Return what each response's prompt shows: one object for all of a prompt's responses."""
    return media and tuple(entry for entry in media for _ in range(copies))


def prompt_token_ids(prompts: PromptBatch) -> list[Tensor]:
    """Return each prompt's tokens, `[L]`, without the padding."""
    return [ids[mask] for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
