"""What the guard is shown of a reward model's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.guard.anomalies import shortened
from lrlhf.guard.dump import StepInputs
from lrlhf.modules.pairs.pair_batches import PairScores
from lrlhf.modules.policy.policy_guard import shown
from lrlhf.rollout.records import plain_json
from lrlhf.types import PreferenceBatch, SequenceBatch

STAGE = "reward"


class _Taken(NamedTuple):
    batch: PreferenceBatch
    scores: PairScores
    random: Mapping[str, Any] | None


class TakenPairs:
    """The micro-batches of the optimizer step that is being added up.

    Args:
        head_names: Of the scores' columns.
        tokenizer: Writes the pairs.
    """

    def __init__(self, head_names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._head_names = tuple(head_names)
        self._tokenizer = tokenizer
        self._taken: list[_Taken] = []

    def add(
        self,
        batch: PreferenceBatch,
        scores: PairScores,
        random: Mapping[str, Any] | None,
        *,
        several: bool,
    ) -> None:
        """Keep a micro-batch until the step is taken.

        Args:
            batch: The pairs.
            scores: What the model made of them.
            random: State of the random number generators before; None: it is not to be dumped.
            several: Whether the step has several: they are kept off the device then.
        """
        kept = batch if random is not None else _without_media(batch)
        kept = kept.to("cpu") if several else kept
        self._taken.append(_Taken(kept, PairScores(*(part.detach() for part in scores)), random))

    def clear(self) -> None:
        """Forget them: the step is taken."""
        self._taken = []

    def place(self) -> str:
        """Say where the first score or margin is that is not finite; empty: there is none."""
        row = 0
        for batch, scores, _ in self._taken:
            pairs = zip(scores, (batch.candidate0, batch.candidate1), strict=True)
            for index, (part, candidate) in enumerate(pairs):
                found = (~part.isfinite()).nonzero().tolist()
                if found:
                    pair, head = found[0]
                    what = f"the score {self._head_names[head]!r} of candidate {index}"
                    return f"first in {what} of pair {row + pair}, {self._said(candidate, pair)}"
            if batch.margin is not None and not bool(batch.margin.isfinite().all()):
                pair = int((~batch.margin.isfinite()).nonzero()[0])
                said = self._said(batch.candidate0, pair)
                return f"the margin of pair {row + pair} is {float(batch.margin[pair])}, {said}"
            row += len(batch)
        return ""

    def _said(self, candidate: SequenceBatch, row: int) -> str:
        return f"which begins {shortened(_text(candidate, row, self._tokenizer))!r}"

    def inputs(self) -> StepInputs | None:
        """Return what the step is taken with; None: it was not kept."""
        if not self._taken or any(one.random is None for one in self._taken):
            return None
        return StepInputs(
            stage=STAGE,
            batches={str(index): one.batch for index, one in enumerate(self._taken)},
            random=[one.random for one in self._taken if one.random is not None],
            records=self.records(),
        )

    def records(self) -> list[dict[str, Any]]:
        """Describe each pair in JSON types."""
        rows = [(one, row) for one in self._taken for row in range(len(one.batch))]
        return [
            {"row": index, **self._described(one, row)} for index, (one, row) in enumerate(rows)
        ]

    def _described(self, taken: _Taken, row: int) -> dict[str, Any]:
        batch, candidates = taken.batch, (taken.batch.candidate0, taken.batch.candidate1)
        described: dict[str, Any] = {}
        for side, (candidate, scores) in enumerate(zip(candidates, taken.scores, strict=True)):
            described[f"candidate{side}"] = _text(candidate, row, self._tokenizer)
            described[f"scores{side}"] = self._by_head(scores[row])
        described["length"] = sum(int(candidate.lengths[row]) for candidate in candidates)
        described["labels"] = self._by_head(batch.labels[row])
        described["margin"] = None if batch.margin is None else shown(batch.margin[row])
        described["info"] = plain_json(batch.info[row])
        return described

    def _by_head(self, values: Tensor) -> dict[str, float | str]:
        return dict(zip(self._head_names, map(shown, values), strict=True))


def _text(candidate: SequenceBatch, row: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """What a candidate says, its prompt included."""
    ids = candidate.input_ids[row, candidate.attention_mask[row]].tolist()
    return str(tokenizer.decode(ids))


def _without_media(batch: PreferenceBatch) -> PreferenceBatch:
    """What the place of a number is told by, which needs no images."""
    first, second = (replace(one, media=None) for one in (batch.candidate0, batch.candidate1))
    return replace(batch, candidate0=first, candidate1=second)
