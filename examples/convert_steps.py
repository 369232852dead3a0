"""Converts published sets of judged steps into the rows of `StepwiseDataModule`.

    python -m lrlhf.examples.convert_steps math_shepherd math-shepherd.jsonl steps.jsonl

The source is a file, folder, pattern or hub id. A row has ``prompt``, ``completions``, ``labels``
and ``source``, the name of the set. Rows that are not of its form are left out, and said.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lrlhf.datamodules import BadDataError, BadRow
from lrlhf.datamodules.loading.sources import Row, resolve_source
from lrlhf.datamodules.rows.bad_rows import missing_column
from lrlhf.datamodules.rows.columns import structure_of, text_of, wrong_type

NEUTRAL: Mapping[str, float | None] = {"correct": 1.0, "wrong": 0.0, "unlabelled": None}
_SIGNS = {"+": 1.0, "-": 0.0}
_FIRST_STEP = re.compile(r"(?<!\S)Step 1:")


def main(arguments: list[str] | None = None) -> None:
    """Write the rows of a set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=["prm800k", "math_shepherd", "processbench"])
    parser.add_argument("source", help="file, folder, pattern or hub id of its rows")
    parser.add_argument("output", type=Path, help="JSONL to write")
    parser.add_argument(
        "--neutral", choices=[*NEUTRAL], default="correct", help="what a rating of 0 in prm800k is"
    )
    parser.add_argument("--step-tag", default="ки", help="mark behind steps of math_shepherd")
    given = parser.parse_args(arguments)
    if not given.step_tag:
        parser.error("--step-tag is empty; it must be the mark behind each step")
    expand: dict[str, Callable[[Row], Iterable[Row]]] = {
        "prm800k": partial(prm800k, neutral=NEUTRAL[given.neutral]),
        "math_shepherd": partial(math_shepherd, tag=given.step_tag),
        "processbench": processbench,
    }
    written, left_out = 0, Counter[str]()
    with given.output.open("w", encoding="utf-8") as file:
        for source in resolve_source(given.source):
            source.prepare()
            for row in source:
                try:
                    if isinstance(row, BadRow):
                        raise row
                    for one in expand[given.set](row):
                        line = json.dumps({**one, "source": given.set}, ensure_ascii=False)
                        file.write(f"{line}\n")
                        written += 1
                except BadRow as problem:
                    if not left_out[problem.reason]:
                        sys.stderr.write(f"left out: {problem.reason}: {problem.detail}\n")
                    left_out[problem.reason] += 1
    sys.stdout.write(f"{written} rows in {given.output}, {left_out.total()} left out\n")
    if not written:
        sys.exit(f"error: no row of {given.source} is of the form of {given.set}")


def _answer(prompt: str, steps: Iterable[str], labels: Iterable[float | None]) -> Row:
    return {"prompt": prompt, "completions": list(steps), "labels": list(labels)}


def prm800k(row: Row, *, neutral: float | None) -> Iterator[Row]:
    """Lightman et al. 2023, https://github.com/openai/prm800k: steps with rated completions.

    Each rated completion is learnt once: the chosen ones of an answer are one row, each alternative
    is a row of its own, where the steps before it have no label.
    """
    prompt = text_of(_mapping(row, "question"), "problem")
    said: list[str] = []
    labels: list[float | None] = []
    others: list[Row] = []
    for step in _list(_mapping(row, "label"), "steps"):
        rated, chosen = _rated_completions(step, neutral)
        for number, (text, label) in enumerate(rated):
            if number != chosen and label is not None:
                others.append(_answer(prompt, [*said, text], [*[None] * len(said), label]))
        if chosen is None:
            break
        said.append(rated[chosen][0])
        labels.append(rated[chosen][1])
    if any(label is not None for label in labels):
        yield _answer(prompt, said, labels)
    elif not others:
        raise BadRow("no labels", "none of its completions has a rating")
    yield from others


def _rated_completions(
    step: Any, neutral: float | None
) -> tuple[list[tuple[str, float | None]], int | None]:
    """Return the completions of a step with labels, and which the answer goes on with."""
    if not isinstance(step, Mapping):
        raise wrong_type("label.steps", "a list of mappings", step)
    labels = {1: 1.0, 0: neutral, -1: 0.0, None: None}
    rated = []
    for one in step.get("completions") or ():
        if not isinstance(one, Mapping) or one.get("rating") not in labels:
            raise BadRow("unknown label", f"a completion has no rating -1, 0 or 1: {one!r:.60}")
        rated.append((text_of(one, "text"), labels[one.get("rating")]))
    chosen, human = step.get("chosen_completion"), step.get("human_completion")
    if chosen is None and isinstance(human, Mapping):  # a labeller wrote it
        return [*rated, (text_of(human, "text"), 1.0)], len(rated)
    if chosen is not None and chosen not in range(len(rated)):
        raise BadRow("unknown label", f"chosen_completion is {chosen!r:.60}: there is none")
    return rated, chosen


def math_shepherd(row: Row, *, tag: str) -> Iterator[Row]:
    """Wang et al. 2024, https://arxiv.org/abs/2312.08935: marks in a text, signs in its copy."""
    said, judged = text_of(row, "input"), text_of(row, "label")
    labels: list[float] = []
    pieces, place = said.split(tag), 0
    for piece in pieces[:-1]:
        place += len(piece)
        sign = judged[place : place + 1]
        if sign not in _SIGNS or judged[place - len(piece) : place] != piece:
            raise BadRow(
                "unknown label",
                f"step {len(labels) + 1} has no sign + or - in column 'label', in the place of "
                f"{tag!r} in 'input': {judged[max(0, place - 20) : place + 5]!r}",
            )
        labels.append(_SIGNS[sign])
        place += 1
    if not labels:
        raise BadRow(
            "no steps", f"column 'input' has no step tag {tag!r}", remedy="give --step-tag"
        )
    if pieces[-1].strip():
        raise BadRow("no label", f"nothing marks the end of the last step: {pieces[-1]!r:.60}")
    starts = [*_FIRST_STEP.finditer(pieces[0])]
    if not starts:
        raise BadRow("no steps", f"nothing begins with 'Step 1:' in {pieces[0][-60:]!r}")
    start = starts[-1]  # a question may have steps of its own
    steps = [pieces[0][start.start() :], *pieces[1:-1]]
    yield _answer(said[: start.start()].strip(), [step.strip() for step in steps], labels)


def processbench(row: Row) -> Iterator[Row]:
    """Zheng et al. 2024, https://arxiv.org/abs/2412.06559: the index of the first error, or -1.

    Steps before the first error are correct, it is wrong, those behind it have no label.
    """
    steps, error = _list(row, "steps"), row.get("label")
    if not isinstance(error, int) or isinstance(error, bool) or not -1 <= error < len(steps):
        raise BadRow(
            "unknown label", f"column 'label' is {error!r:.60}, not -1 or one of {len(steps)} steps"
        )
    labels: list[float | None] = [1.0] * len(steps)
    if error >= 0:
        labels[error:] = [0.0, *[None] * (len(steps) - error - 1)]
    yield _answer(text_of(row, "problem"), steps, labels)


def _mapping(row: Row, column: str) -> dict[str, Any]:
    if column not in row:
        raise missing_column(column, row)
    found: dict[str, Any] | None = structure_of(row, column, dict)
    if found is None:
        raise wrong_type(column, "a mapping", row[column])
    return found


def _list(row: Row, column: str) -> list[Any]:
    if column not in row:
        raise missing_column(column, row)
    found: list[Any] | None = structure_of(row, column, list)
    if not found:
        raise wrong_type(column, "a list of steps", row[column])
    return found


if __name__ == "__main__":
    try:
        main()
    except BadDataError as error:
        sys.exit(f"error: {error}")
