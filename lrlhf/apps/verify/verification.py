"""All checks on one set of rollouts, and the report."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lrlhf.apps.lab.run_files import plain_json
from lrlhf.apps.verify.answers import ITEMS, Answer
from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.formula_checks import batches, check_advantages, check_kl, check_loss
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.apps.verify.sampling_checks import Evidence, check_ratio, check_weights, sampling_of
from lrlhf.apps.verify.token_checks import (
    check_masks,
    check_tokens,
    check_truncated,
    expected_mask,
    read_template,
)
from lrlhf.rollout import Sampling

_WIDTH, _PLACES = 100, 3
_MARKS = {"sound": "ok", "fault": "FAULT", "unknown": "unknown"}


class Settings(NamedTuple):
    """What a run is said to do; None: it is not checked, or looked for."""

    algorithm: str | None = None
    """A key of `lrlhf.apps.verify.formula_checks.FORMULAS`, such as ``grpo``."""
    kl: str | None = None
    """``k1``, ``k2`` or ``k3``."""
    kl_in: str | None = None
    """``reward`` or ``loss``."""
    kl_coef: float = 0.0
    """Strength of a penalty in the reward."""
    reference: str | None = None
    """The candidate whose log-probabilities are those of the reference, where none are recorded."""
    truncated: str | None = None
    """``train`` or ``mask``."""
    max_new_tokens: int | None = None
    loss_average: str | None = None
    """``token_mean`` or ``sequence_mean``."""
    sampling: Sampling = Sampling()
    """Of rows that do not record theirs."""
    most_rows: int = 256
    """Rows that the models compute, spread over the file; the other checks read all."""


class Verification(NamedTuple):
    """The conclusions about a set of rollouts."""

    rows: int
    computed: int
    """Rows that the models computed."""
    answers: list[Answer]

    @property
    def faults(self) -> list[Answer]:
        """The conclusions that are faults."""
        return [answer for answer in self.answers if answer.verdict == "fault"]

    def as_text(self) -> str:
        """Return the report as lines for a terminal."""
        return "\n".join(self._lines())

    def as_json(self) -> dict[str, Any]:
        """Return the report in JSON types."""
        answers = [plain_json(answer) for answer in self.answers]
        return {"rows": self.rows, "computed": self.computed, "answers": answers}

    def _lines(self) -> Iterator[str]:
        yield f"{self.rows:,} responses; the weights were compared on {self.computed:,} of them"
        for item, question in ITEMS.items():
            yield f"\n{question}?"
            for answer in (one for one in self.answers if one.item == item):
                text = f"{_MARKS[answer.verdict]}: {answer.text}"
                yield from textwrap.wrap(
                    text, _WIDTH, initial_indent="  ", subsequent_indent="    "
                )
                if answer.verdict == "fault" and answer.rows:
                    more = len(answer.rows) - _PLACES
                    rest = f" and {more:,} more" if more > 0 else ""
                    yield f"    {', '.join(answer.rows[:_PLACES])}{rest}"
        count = len(self.faults)
        yield f"\n{count} fault{'s' * (count != 1)}" if count else "\nno fault was found"


def verify(
    rows: Sequence[Row], candidates: Sequence[Candidate], settings: Settings | None = None
) -> Verification:
    """Check rollouts against weights and against what a run is said to do.

    Args:
        rows: The rollouts, in the order of their groups.
        candidates: Weights that may have sampled them, at least one; the first should have.
        settings: What the run is said to do; None: nothing is named.

    Raises:
        ValueError: There is no candidate, none has the name of the reference, or a row has ids that
            are not in the vocabulary.
    """
    settings = settings or Settings()
    if not candidates:
        raise ValueError("verify needs weights that may have sampled the rows: --weights NAME=PATH")
    first, by_name = candidates[0], {each.name: each for each in candidates}
    if settings.reference not in {None, *by_name}:
        raise ValueError(
            f"--reference is {settings.reference}; the weights are {', '.join(by_name)}"
        )
    end_ids, sampling = first.end_ids, settings.sampling
    template = read_template(first.tokenizer, end_ids)
    readable = [
        (at, min(each.reads(row) for each in candidates))
        for at, row in enumerate(rows)
        if row.ids is not None and row.response[1:].any()
    ]
    usable = [at for at, complete in readable if complete]
    spread = {*usable[:: -(-len(usable) // settings.most_rows) or 1]}

    def recomputed(row: Row) -> Tensor:
        return first.facts(row, sampling_of(row, sampling).temperature).logprobs

    rows = [
        replace(
            row, written=expected_mask(row, template, end_ids, recomputed if at in spread else None)
        )
        for at, row in enumerate(rows)
    ]
    chosen = [rows[at] for at in sorted(spread)]
    chosen = [row for row in chosen if row.written is not None and row.written[1:].any()]
    answers = [
        *check_masks(rows),
        *check_tokens(rows, first.tokenizer, template, end_ids),
        *check_truncated(rows, end_ids, settings.truncated, settings.max_new_tokens),
    ]
    noise = 0.0
    if chosen:
        evidence = Evidence(chosen, candidates, sampling)
        answers += [*check_weights(evidence), *check_ratio(evidence)]
        if settings.reference is not None:
            noise = evidence.noise
            rows = [
                _with_reference(row, sampling, first, by_name[settings.reference]) for row in rows
            ]
    else:
        text = "the file does not record which tokens the policy wrote"
        if not readable:
            text = "the file has no token ids of responses: docs/verify.md shows how to record them"
        elif not usable:
            text = "the prompts have images, video or audio, which these files do not hold"
        answers += [Answer("weights", "unknown", text), Answer("ratio", "unknown", text)]
    found = list(batches(rows, settings.kl, settings.kl_coef, noise))
    answers += check_advantages(found, settings.algorithm, penalized=settings.kl_in == "reward")
    answers += [*check_kl(rows, settings.kl), *check_loss(rows, settings.loss_average)]
    order = list(ITEMS)
    answers.sort(key=lambda answer: order.index(answer.item))
    return Verification(len(rows), len(chosen), answers)


def _with_reference(row: Row, sampling: Sampling, policy: Candidate, reference: Candidate) -> Row:
    """Compute the reference's log-probabilities, and the policy's, of a row that has none."""
    if row.ids is None or "ref" in row.tokens:
        return row
    new = {"ref": reference} if row.policy in row.tokens else {"old": policy, "ref": reference}
    temperature = sampling_of(row, sampling).temperature
    computed = {name: each.facts(row, temperature).logprobs for name, each in new.items()}
    return replace(row, tokens=row.tokens | computed)
