"""Responses as engines return them, made of segments, and their conversion to a batch.

``prompts`` are the unique prompts, and rows of one prompt are consecutive in ``rollout``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lrlhf.types import Media, PromptBatch, Rollout, SamplingMask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Consecutive tokens of a response with one origin.

    Args:
        token_ids: `[L]`, as the engine, or the environment's tokenizer, returned them.
        logprobs: `[L]` float32, under the sampling distribution. None: the policy did not sample
            the tokens (the output of a tool, the text of an environment), and is not trained on
            them.
        kept_mass: `[L]`, probability left by top_p, top_k and min_p at each token; None: no
            truncation.
        mask: Of one row and L columns, the ids left by them at each token; None: not recorded.
        fork: Tokens of the row right before it that it does not follow, see
            `lrlhf.types.SequenceBatch.forks`.
        versions: `[L]`, training iterations behind the weights that sampled each token. None: the
            response's version.
    """

    token_ids: Int[Tensor, " L"]
    logprobs: Float[Tensor, " L"] | None = None
    kept_mass: Float[Tensor, " L"] | None = None
    mask: SamplingMask | None = None
    fork: int = 0
    versions: Int[Tensor, " L"] | None = None

    @property
    def sampled(self) -> bool:
        return self.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Response:
    """All segments behind a prompt, sampled and not.

    Args:
        segments: In order; one for a response of one turn.
        truncated: Whether the last turn reached the length limit before an end-of-sequence token
            or a stop string.
        weight_version: Training iterations behind the oldest weights that sampled any of it; None:
            the policy's own.
        experts: `[N, L, K]` of the tokens in front of the last that was sampled, the prompt's
            included, see `lrlhf.types.SequenceBatch.routed_experts`; None: not recorded.
    """

    segments: tuple[Segment, ...]
    truncated: bool
    weight_version: int | None = None
    experts: Int[Tensor, "N L K"] | None = None

    @classmethod
    def sampled(
        cls,
        token_ids: Int[Tensor, " L"],
        logprobs: Float[Tensor, " L"],
        *,
        truncated: bool,
        kept_mass: Float[Tensor, " L"] | None = None,
        mask: SamplingMask | None = None,
    ) -> Response:
        """Return a response of one turn; ``token_ids`` include an end-of-sequence token, if any."""
        segment = Segment(token_ids=token_ids, logprobs=logprobs, kept_mass=kept_mass, mask=mask)
        return cls(segments=(segment,), truncated=truncated)

    def with_tokens(self, token_ids: Int[Tensor, " L"], *, fork: int = 0) -> Response:
        """Return the response followed by tokens, `[L]`, that the policy did not sample."""
        segment = Segment(token_ids=token_ids, fork=fork)
        return replace(self, segments=(*self.segments, segment))

    def followed_by(self, turn: Response) -> Response:
        """Return the response followed by a further turn."""
        turns = (self, turn)
        versions = [each.weight_version for each in turns if each.weight_version is not None]
        segments = (*self.segments, *turn.segments)
        if len(set(versions)) > 1:
            segments = tuple(
                replace(segment, versions=torch.full_like(segment.token_ids, version))
                if segment.sampled and segment.versions is None
                else segment
                for each, version in zip(turns, versions, strict=True)
                for segment in each.segments
            )
        experts = turn.experts
        if self.experts is not None and experts is not None:  # what sampled a token stays its own
            experts = torch.cat([self.experts, experts[len(self.experts) :]])
        return Response(
            segments=segments,
            truncated=turn.truncated,
            weight_version=min(versions, default=None),
            experts=experts,
        )

    def cut(self, length: int) -> Response:
        """Return a response of one turn truncated to ``length`` tokens."""
        if len(self.token_ids) <= length:
            return self
        (full,) = self.segments
        segment = Segment(
            token_ids=full.token_ids[:length],
            logprobs=None if full.logprobs is None else full.logprobs[:length],
            kept_mass=None if full.kept_mass is None else full.kept_mass[:length],
            mask=full.mask and full.mask.columns(0, length),
            versions=None if full.versions is None else full.versions[:length],
        )
        experts = None if self.experts is None else self.experts[: length - len(full.token_ids)]
        return replace(self, segments=(segment,), truncated=True, experts=experts)

    @property
    def token_ids(self) -> Int[Tensor, " L"]:
        """All tokens behind the prompt."""
        return torch.cat([segment.token_ids for segment in self.segments])


def assemble_rollout(
    prompts: PromptBatch,
    responses: Sequence[Response],
    *,
    num_generations: int,
    pad_id: int,
) -> Rollout:
    """Concatenate prompts and responses into right-padded rows.

    Args:
        prompts: The unique prompts, `[U, P]`.
        responses: ``U * num_generations`` responses, those of one prompt consecutive.
        num_generations: Responses per prompt.
        pad_id: Padding token; it may equal an end-of-sequence id.

    Returns:
        `[U * num_generations, T]` rows with T the longest prompt and response together.

    Raises:
        ValueError: The number of responses differs, only some have a weight_version, a sampling
            mask or experts, or the experts are of other tokens.
    """
    if len(responses) != len(prompts) * num_generations:
        raise ValueError(
            f"the engine returned {len(responses)} responses to {len(prompts)} prompts; "
            f"{len(prompts) * num_generations} were requested"
        )
    versions = [each.weight_version for each in responses if each.weight_version is not None]
    if 0 < len(versions) < len(responses):
        raise ValueError(
            f"{len(versions)} of {len(responses)} responses have a weight_version: set it for all "
            "of them or for none"
        )
    device = prompts.input_ids.device
    contexts = prompt_token_ids(prompts)
    rows = [
        _row(contexts[index // num_generations], response, device)
        for index, response in enumerate(responses)
    ]
    ids, sampled, logprobs, masses, forks, sources, sizes = map(list, zip(*rows, strict=True))
    segments = [segment for response in responses for segment in response.segments]
    masks = [segment.mask for segment in segments if segment.mask is not None]
    if 0 < len(masks) < sum(segment.sampled for segment in segments):
        raise ValueError(
            "only some of the sampled segments have a mask: set it for all or for none"
        )
    truncates = any(segment.kept_mass is not None for segment in segments)
    forking = any(segment.fork for segment in segments)
    mixed = any(segment.versions is not None for segment in segments)
    input_ids = pad_sequence(ids, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row) for row in ids], device=device)
    rollout = Rollout(
        input_ids=input_ids,
        attention_mask=torch.arange(input_ids.shape[1], device=device) < lengths[:, None],
        response_mask=pad_sequence(sampled, batch_first=True),
        sampling_logprobs=pad_sequence(logprobs, batch_first=True),
        kept_mass=pad_sequence(masses, batch_first=True, padding_value=1.0) if truncates else None,
        media=repeated_media(prompts.media, num_generations),
        group_ids=torch.arange(len(rows), device=device) // num_generations,
        truncated=torch.tensor([response.truncated for response in responses], device=device),
        weight_version=torch.tensor(versions, device=device) if versions else None,
        forks=pad_sequence(forks, batch_first=True) if forking else None,
        token_versions=pad_sequence(sources, batch_first=True) if mixed else None,
        sampling_mask=SamplingMask(
            sizes=pad_sequence(sizes, batch_first=True),
            ids=torch.cat([mask.ids.to(device) for mask in masks]),
        )
        if masks
        else None,
    )
    return replace(rollout, routed_experts=_experts(responses, rollout))


def _experts(responses: Sequence[Response], rollout: Rollout) -> Int[Tensor, "B T L K"] | None:
    known = [each.experts for each in responses if each.experts is not None]
    if known and (list(map(len, known)) != _ends(rollout) or rollout.forks is not None):
        raise ValueError(
            "update.replay_routing follows rows without forks, which episodes with history: "
            "template or an agent may have, and Response.experts must be set for all responses or "
            "for none, and for each of their tokens in front of the last one that was sampled"
        )
    width = rollout.input_ids.shape[1]
    padded = [functional.pad(each, (0, 0, 0, 0, 0, width - len(each)), value=-1) for each in known]
    return torch.stack(padded).to(rollout.input_ids.device) if known else None


def _ends(rollout: Rollout) -> list[int]:
    """Return the column of the last sampled token of each row."""
    columns = torch.arange(rollout.input_ids.shape[1], device=rollout.input_ids.device)
    ends: list[int] = (columns * rollout.response_mask).amax(dim=1).tolist()
    return ends


def _row(context: Tensor, response: Response, device: torch.device) -> Iterator[Tensor]:
    """Yield `[L]` of a row: ids, mask, log-probabilities, mass, forks, versions, ids left."""
    parts, version = [], response.weight_version or 0
    for each in (Segment(token_ids=context), *response.segments):
        ids = each.token_ids.to(device)
        zeros = torch.zeros(len(ids), device=device)
        parts.append(
            (
                ids,
                torch.full_like(ids, each.sampled, dtype=torch.bool),
                zeros if each.logprobs is None else each.logprobs.to(device),
                zeros + 1 if each.kept_mass is None else each.kept_mass.to(device),
                torch.tensor([each.fork, *[0] * len(ids)], device=device)[: len(ids)],
                torch.full_like(ids, version if each.sampled else 0)
                if each.versions is None
                else each.versions.to(device),
                torch.zeros_like(ids, dtype=torch.int32)
                if each.mask is None
                else each.mask.sizes[0].to(device),
            )
        )
    return (torch.cat(column) for column in zip(*parts, strict=True))


def responses_of(rollout: Rollout, prompts: PromptBatch) -> list[Response]:
    """Return the responses of a rollout without forks: the inverse of `assemble_rollout`."""
    versions, masses, mixed = rollout.weight_version, rollout.kept_mass, rollout.token_versions
    masks = rollout.sampling_mask and rollout.sampling_mask.rows()
    experts = rollout.routed_experts
    ends = [] if experts is None else _ends(rollout)

    def segment(row: int, run: Run) -> Segment:
        columns = slice(run.start, run.end)
        return Segment(
            token_ids=rollout.input_ids[row, columns],
            logprobs=rollout.sampling_logprobs[row, columns] if run.sampled else None,
            kept_mass=masses[row, columns] if run.sampled and masses is not None else None,
            versions=mixed[row, columns] if run.sampled and mixed is not None else None,
            mask=masks[row].columns(run.start, run.end) if run.sampled and masks else None,
        )

    return [
        Response(
            segments=tuple(segment(row, run) for run in runs),
            truncated=bool(rollout.truncated[row]),
            weight_version=None if versions is None else int(versions[row]),
            experts=None if experts is None else experts[row, : ends[row]],
        )
        for row, runs in enumerate(response_runs(rollout, prompts))
    ]


class Run(NamedTuple):
    """Consecutive columns of a row whose tokens have one origin."""

    start: int
    end: int
    sampled: bool


def response_runs(rollout: Rollout, prompts: PromptBatch) -> list[list[Run]]:
    """Return the columns of the segments of each response.

    Turns that follow each other with nothing in between count as one.
    """
    masks = rollout.response_mask
    forking = torch.zeros_like(masks) if rollout.forks is None else rollout.forks > 0
    starts = response_starts(rollout, prompts)
    result = []
    for sampled, forks, start, end in zip(
        masks.tolist(), forking.tolist(), starts, rollout.lengths.tolist(), strict=True
    ):
        runs = []
        for column in range(start + 1, end + 1):
            if column == end or forks[column] or sampled[column] != sampled[start]:
                runs.append(Run(start, column, sampled[start]))
                start = column
        result.append(runs)
    return result


def response_starts(rollout: Rollout, prompts: PromptBatch) -> list[int]:
    """Return the first column of each response."""
    if rollout.prompt_lengths is not None:
        return [int(length) for length in rollout.prompt_lengths.tolist()]
    num_generations = len(rollout) // len(prompts)
    lengths = prompts.attention_mask.sum(dim=1).tolist()
    return [int(lengths[row // num_generations]) for row in range(len(rollout))]


def response_ids(rollout: Rollout, prompts: PromptBatch, *, given: bool = False) -> list[list[int]]:
    """Return the token ids of each response; with ``given`` also those that were not sampled."""
    rows = zip(rollout.input_ids.tolist(), response_runs(rollout, prompts), strict=True)
    return [
        [token for run in runs if given or run.sampled for token in ids[run.start : run.end]]
        for ids, runs in rows
    ]


def continued_prompts(prompts: PromptBatch, responses: Sequence[Response]) -> PromptBatch:
    """Return the prompts of a further turn, left-padded: prompt and response, with the media."""
    copies = len(responses) // len(prompts)
    repeated = prompts.select(torch.arange(len(responses)) // copies)
    own = [response.token_ids.to(repeated.input_ids.device) for response in responses]
    contexts = map(torch.cat, zip(prompt_token_ids(repeated), own, strict=True))
    input_ids, mask = left_padded([*contexts])
    media = repeated.media and tuple(
        entry and replace(entry, prompt_ids=(*entry.prompt_ids, *ids.tolist()))
        for entry, ids in zip(repeated.media, own, strict=True)
    )
    return replace(repeated, input_ids=input_ids, attention_mask=mask, media=media)


def token_prompts(
    rows: Sequence[Sequence[int]], media: tuple[Media | None, ...] | None = None
) -> PromptBatch:
    """Return prompts from tokens and media alone, without text and columns."""
    input_ids, mask = left_padded([torch.tensor(row) for row in rows])
    return PromptBatch(
        input_ids=input_ids,
        attention_mask=mask,
        prompts=("",) * len(rows),
        columns=({},) * len(rows),
        media=media,
    )


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids and mask of rows, `[B, T]`, padded with a token that every model has."""
    # the last token, because the first may stand for an image, and models do not mask that
    pad_id, device = int(rows[0][-1]), rows[0].device
    ids = pad_sequence(list(rows), batch_first=True, padding_value=pad_id, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]


def repeated_media(
    media: tuple[Media | None, ...] | None, copies: int
) -> tuple[Media | None, ...] | None:
    """Return the media of each response's prompt, one object for all responses to a prompt."""
    return media and tuple(entry for entry in media for _ in range(copies))


def prompt_token_ids(prompts: PromptBatch) -> list[Tensor]:
    """Return each prompt's tokens, `[L]`, without the padding."""
    return [ids[mask] for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
