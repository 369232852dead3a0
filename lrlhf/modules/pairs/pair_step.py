"""Pairs as rows of one batch, a gradient that is their mean however it is split, and records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from lrlhf.guard.anomalies import shortened, shown
from lrlhf.rollout.records import origin, plain_json
from lrlhf.run.collectives import Collectives
from lrlhf.types import PreferenceBatch, SequenceBatch, joined_media


class PairScores(NamedTuple):
    """Scores of both candidates of every pair, [B, H] each."""

    candidate0: Tensor
    candidate1: Tensor


def concatenate(first: SequenceBatch, second: SequenceBatch, *, pad_id: int) -> SequenceBatch:
    """Stack the rows of two batches, right-padded to one length.

    Rows with the same place in both may begin with the same tokens, and are marked so.
    """
    length = max(first.input_ids.shape[1], second.input_ids.shape[1])

    def stacked(column: str, value: int | bool) -> Tensor:
        parts = [getattr(batch, column) for batch in (first, second)]
        return torch.cat(
            [functional.pad(part, (0, length - part.shape[1]), value=value) for part in parts]
        )

    return SequenceBatch(
        input_ids=stacked("input_ids", pad_id),
        attention_mask=stacked("attention_mask", value=False),
        response_mask=stacked("response_mask", value=False),
        media=joined_media([first, second]),
        group_ids=torch.arange(len(first)).repeat(2),
    )


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an id for padding."""
    # every tokenizer that lrlhf loads has one; padding is masked, so any id would do
    pad_id = tokenizer.pad_token_id
    return pad_id if isinstance(pad_id, int) else 0


class PairBatch(NamedTuple):
    """One forward pass of an optimizer step, for the guard."""

    batch: PreferenceBatch
    """The pairs, as the loader delivered them: images are not kept on the device."""
    scores: PairScores
    """Where they were computed, without gradient."""
    seed: tuple[int, ...]
    """Arguments of `seed_everything_for` before it."""


class PairMean(NamedTuple):
    """What turns the accumulated gradients into those of the mean."""

    correction: float
    """What they must be multiplied by."""
    finite: bool
    """Whether every loss on every rank was finite."""


@dataclass
class PairStep:
    """The micro-batches between two optimizer steps.

    Lightning divides each loss by ``accumulate_grad_batches`` and averages gradients over the
    ranks. That is the mean over all pairs only while every micro-batch of every rank is of one
    size and there are as many as expected; the last ones of an epoch are often neither. So each
    micro-batch contributes its summed loss over one common number of pairs, and the gradients are
    corrected once, by a factor that is exactly 1 in the regular case.
    """

    micro_batches: list[PairBatch] = field(default_factory=list)
    _common: float = 0.0
    _infinite: list[Tensor] = field(default_factory=list)

    def add(self, loss_sum: Tensor, micro_batch: PairBatch, ranks: Collectives) -> Tensor:
        """Add a micro-batch, as every rank does its own; return the loss to run backward from.

        Args:
            loss_sum: Sum of the losses of its pairs.
            micro_batch: What it was; held, not copied.
            ranks: All ranks.
        """
        if not self.micro_batches:
            pairs = torch.tensor(float(len(micro_batch.batch)), device=loss_sum.device)
            self._common = (
                float(ranks.max(pairs)) if ranks.world_size > 1 else len(micro_batch.batch)
            )
        self.micro_batches.append(micro_batch)
        self._infinite.append(~loss_sum.detach().isfinite())
        return loss_sum / self._common

    def close(self, accumulated: int, ranks: Collectives) -> PairMean:
        """Finish at an optimizer step, which all ranks take; Lightning ``accumulated`` so many."""
        infinite = torch.stack(self._infinite).sum().float()
        pairs = torch.full_like(infinite, sum(len(batch.batch) for batch in self.micro_batches))
        total_infinite, total_pairs = ranks.sum(torch.stack([infinite, pairs])).tolist()
        correction = accumulated * self._common * ranks.world_size / total_pairs
        return PairMean(correction, finite=total_infinite == 0)


def score_records(
    scores: PairScores,
    batch: PreferenceBatch,
    head_names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    head_weights: Sequence[float],
    margin: float = 0.0,
) -> list[dict[str, Any]]:
    """Return one JSON-ready line per pair: texts, and what its loss is made of.

    Where it stands in the data (``source``, ``row``); of texts ``prompt``, ``candidate0`` and
    ``candidate1``; by head ``labels`` (1: candidate 0 is better, as is ``chosen``; None: not
    labelled), ``scores0``, ``scores1`` and ``margins``, the first less the second, and
    ``head_weights`` of the loss; ``margin``, by how much the better candidate should win;
    ``prompt_id``, equal for pairs of one prompt; ``info``.

    Args:
        scores: Of the candidates.
        batch: The pairs.
        head_names: Of the scores.
        tokenizer: Reads the texts back.
        head_weights: Of the heads' losses.
        margin: Of pairs that have none of their own.
    """

    def by_head(values: Tensor) -> dict[str, Any]:
        return dict(zip(head_names, plain_json(values.tolist()), strict=True))

    batch = batch.host or batch
    labels, first, second = (part.float().cpu() for part in (batch.labels, *scores))
    own = [math.nan] * len(batch) if batch.margin is None else batch.margin.tolist()
    prompts = [None] * len(batch) if batch.prompt_ids is None else batch.prompt_ids.tolist()
    weights = dict(zip(head_names, head_weights, strict=True))
    return [
        {
            **origin(place),
            **_texts(batch, row, tokenizer),
            "labels": by_head(labels[row]),
            "scores0": by_head(first[row]),
            "scores1": by_head(second[row]),
            "margins": by_head(first[row] - second[row]),
            "head_weights": weights,
            "margin": margin if math.isnan(own[row]) else plain_json(own[row]),
            "prompt_id": prompts[row],
            "info": dict(batch.info[row]),
        }
        for row, place in enumerate(batch.places or ("",) * len(batch))
    ]


def step_records(
    micro_batches: Sequence[PairBatch],
    head_names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """Describe each pair of an optimizer step in JSON types, its texts included."""

    def by_head(values: Tensor) -> dict[str, float | str]:
        return dict(zip(head_names, map(shown, values), strict=True))

    records: list[dict[str, Any]] = []
    for batch, scores, _ in micro_batches:
        first, second = batch.candidate0, batch.candidate1
        for row in range(len(batch)):
            records.append(
                {
                    "row": len(records),
                    "candidate0": _text(first, row, tokenizer),
                    "scores0": by_head(scores.candidate0[row]),
                    "candidate1": _text(second, row, tokenizer),
                    "scores1": by_head(scores.candidate1[row]),
                    "length": int(first.lengths[row]) + int(second.lengths[row]),
                    "labels": by_head(batch.labels[row]),
                    "margin": None if batch.margin is None else shown(batch.margin[row]),
                    "info": plain_json(batch.info[row]),
                }
            )
    return records


def bad_place(
    micro_batches: Sequence[PairBatch],
    head_names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Say where a step's first score or margin is that is not finite; empty: there is none."""
    before = 0
    for batch, scores, _ in micro_batches:
        for index, (part, candidate) in enumerate(
            zip(scores, (batch.candidate0, batch.candidate1), strict=True)
        ):
            for pair, head in (~part.isfinite()).nonzero().tolist():
                begins = shortened(_text(candidate, pair, tokenizer))
                what = (
                    f"the score {head_names[head]!r} of candidate {index} of pair {before + pair}"
                )
                return f"first in {what}, which begins {begins!r}"
        # of the margins NaN stands for the constant one
        margins = [] if batch.margin is None else batch.margin.tolist()
        for pair in [index for index, margin in enumerate(margins) if math.isinf(margin)]:
            begins = shortened(_text(batch.candidate0, pair, tokenizer))
            where = f"the margin of pair {before + pair} is {margins[pair]}"
            return f"{where}, which begins {begins!r}"
        before += len(batch)
    return ""


def _texts(batch: PreferenceBatch, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the prompt and the two answers; nothing where one of them shows something."""
    first, second = batch.candidate0, batch.candidate1
    if any(part.media is not None and part.media[row] is not None for part in (first, second)):
        return {}
    stored = batch.source_texts[row] if batch.source_texts else None
    if stored is not None:
        return dict(zip(("prompt", "candidate0", "candidate1"), stored, strict=True))
    # an answer of several turns has some that are not learnt
    prompt = first.input_ids[row, first.attention_mask[row] & ~_answered(first, row)]
    answers = (part.input_ids[row, _answered(part, row)] for part in (first, second))
    decoded = (str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)) for ids in answers)
    texts = (str(tokenizer.decode(prompt.tolist())), *decoded)
    return dict(zip(("prompt", "candidate0", "candidate1"), texts, strict=True))


def _answered(part: SequenceBatch, row: int) -> Tensor:
    """Return the mask of an answer, `[T]`, from its first token that is learnt."""
    return part.attention_mask[row] & (part.response_mask[row].cumsum(0) > 0)


def _text(candidate: SequenceBatch, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """What a candidate says, its prompt included."""
    ids = candidate.input_ids[row, candidate.attention_mask[row]].tolist()
    return str(tokenizer.decode(ids))
