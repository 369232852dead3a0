"""All checks on one set of rollouts, and the report."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lrlhf.apps.lab.run_files import plain_json
from lrlhf.apps.verify.answers import ITEMS, Answer
from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.formula_checks import batches, check_advantages, check_kl, check_loss
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.apps.verify.sampling_checks import Evidence, Sampling, check_ratio, check_weights
from lrlhf.apps.verify.token_checks import (
    check_masks,
    check_tokens,
    check_truncated,
    expected_mask,
    read_template,
)

_WIDTH, _PLACES = 100, 3
_MARKS = {"sound": "ok", "fault": "FAULT", "unknown": "not checked"}


class Settings(NamedTuple):
    """What a run is said to do; None: it is not checked, or looked for."""

    algorithm: str | None = None
    """A key of `lrlhf.apps.verify.formula_checks.FORMULAS`, such as ``grpo``."""
    kl: str | None = None
    """``k1``, ``k2`` or ``k3``."""
    kl_in: str | None = None
    """``reward`` or ``loss``."""
    kl_coef: float = 0.0
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
        ValueError: There is no candidate, or a row has ids that are not in the vocabulary.
    """
    settings = settings or Settings()
    if not candidates:
        raise ValueError(
            "verify needs weights that may have sampled the rollouts: --weights NAME=PATH"
        )
    first = candidates[0]
    template = read_template(first.tokenizer, first.end_ids)
    masks = [expected_mask(row, template, first.end_ids) for row in rows]
    answers = [
        *check_masks(rows, masks),
        *check_tokens(rows, masks, first.tokenizer, template, first.end_ids),
        *check_truncated(rows, masks, first.end_ids, settings.truncated, settings.max_new_tokens),
    ]
    usable = [
        (row, mask)
        for row, mask in zip(rows, masks, strict=True)
        if row.ids is not None and mask is not None and len(row.ids) > 1 and bool(mask.any())
    ]
    step = -(-len(usable) // settings.most_rows) or 1
    chosen = usable[::step]
    if chosen:
        evidence = Evidence(
            [r for r, _ in chosen], [m for _, m in chosen], candidates, settings.sampling
        )
        answers += [*check_weights(evidence), *check_ratio(evidence)]
    else:
        text = "the file has no token ids; see the page of this command for how to record them"
        answers += [Answer("weights", "unknown", text), Answer("ratio", "unknown", text)]
    found = list(batches(rows, masks, settings.kl_coef))
    answers += [
        *check_advantages(found, settings.algorithm, settings.kl_in),
        *check_kl(rows, masks, settings.kl),
        *check_loss(rows, masks, settings.loss_average),
    ]
    order = list(ITEMS)
    return Verification(
        len(rows), len(chosen), sorted(answers, key=lambda one: order.index(one.item))
    )
