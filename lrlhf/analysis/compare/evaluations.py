"""One evaluation as numbers: what each prompt, or each pair, came to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.analysis.run_files import RunFiles, records

Key = tuple[str, ...]
_PARTS = ("set", "dataloader")
"""What tells evaluation sets of one file apart."""


class Sample(NamedTuple):
    """One line of an evaluation file."""

    place: Key | None
    """Evaluation set, source and row; None: the line does not say."""
    text: Key
    """Evaluation set, and the prompt or the pair itself."""
    values: Mapping[str, float]
    """Each metric that this line has."""
    answer: str
    columns: Mapping[str, Any]
    """What subsets can be made of."""


class Evaluation(NamedTuple):
    """The evaluation of one run after a step."""

    folder: Path
    step: int
    samples: list[Sample]

    def mean(self, metric: str) -> float:
        """Return the mean over all lines; NaN: none has the metric."""
        values = [one.values[metric] for one in self.samples if metric in one.values]
        return math.fsum(values) / len(values) if values else math.nan


def read_evaluation(folder: Path, step: str, metric: str | None) -> Evaluation:
    """Read an evaluation of a run.

    Args:
        folder: Of the run.
        step: ``last``, ``best`` (highest mean of the metric; of equal ones the first) or a number.
        metric: What ``best`` means; None: `main_metric`.

    Raises:
        FileNotFoundError: There is no such run, or it has no evaluation.
        KeyError: It has none of that step; names those that there are.
        ValueError: A line is no record of an evaluation; names file and line.
    """
    steps = RunFiles(folder).evaluations
    if not steps:
        raise FileNotFoundError(
            f"{folder} has no evaluation (eval_scores_<step>.jsonl): lrlhf validate --config "
            f"{folder / 'config.yaml'} --ckpt_path CHECKPOINT makes one, if its config has "
            "validation data"
        )
    if step == "best":
        found = [_read(folder, one, path) for one, path in steps.items()]
        means = [one.mean(metric or main_metric(one)) for one in found]
        return found[max(range(len(found)), key=lambda index: (_finite(means[index]), -index))]
    number = list(steps)[-1] if step == "last" else int(step)
    if number not in steps:
        there = ", ".join(map(str, steps))
        raise KeyError(f"{folder} has no evaluation of step {number}; there are {there}")
    return _read(folder, number, steps[number])


def main_metric(evaluation: Evaluation) -> str:
    """Return what an evaluation is about: a policy's ``score``, a reward model's ``accuracy``."""
    names = {name for one in evaluation.samples for name in one.values}
    return next((name for name in ("score", "accuracy") if name in names), min(names, default=""))


def _read(folder: Path, step: int, path: Path) -> Evaluation:
    """Read a file; metrics at other temperatures than the first are called ``t0.7/score``."""
    samples: list[Sample] = []
    temperature = None
    for number, record in enumerate(records(path), start=1):
        if "score" not in record and not isinstance(record.get("labels"), Mapping):
            raise ValueError(
                f"{path}, line {number} has neither a score nor labels: it is no line that "
                "EvalJSONL has written"
            )
        values = measures(record)
        temperature = record.get("temperature") if not samples else temperature
        if record.get("temperature") != temperature:
            values = {f"t{record.get('temperature')}/{name}": one for name, one in values.items()}
        samples.append(_sample(record, values))
    if not samples:
        raise ValueError(f"{path} is empty")
    return Evaluation(folder, step, samples)


def _sample(record: Mapping[str, Any], values: Mapping[str, float]) -> Sample:
    part = tuple(str(record.get(name, "")) for name in _PARTS)
    place = None
    if "source" in record and "row" in record:
        place = (*part, str(record["source"]), str(record["row"]))
    shown = (str(record.get(name, "")) for name in ("prompt", "candidate0", "candidate1"))
    media = str(record.get("media", ""))
    told = [record.get(name) for name in ("columns", "info")]
    columns: dict[str, Any] = {name: record[name] for name in _PARTS if name in record}
    for one in told:
        columns |= one if isinstance(one, Mapping) else {}
    answer = str(record.get("completion", ""))
    return Sample(place, (*part, *shown, media), values, answer, columns)


def measures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line; what could not be scored or is not labelled is left out."""
    return _of_pair(record) if "labels" in record else _of_response(record)


def _of_response(record: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, Any] = {"score": record.get("score")}
    for name, value in _mapping(record.get("rewards")).items():
        found[f"rewards/{name}"] = value
    found["correct"] = record.get("correct")
    found["length"] = record.get("length")
    if "finish_reason" in record:
        found["truncated"] = float(record["finish_reason"] == "length")
    found["turns"] = record.get("turns")
    return _numbers(found)


def _of_pair(record: Mapping[str, Any]) -> dict[str, float]:
    """Right order and margin, by head where there are several.

    As in training, a gap of zero is half right, and a pair that is labelled equal has neither.
    """
    labels = _numbers(_mapping(record["labels"]))
    gaps = _numbers(_mapping(record.get("margins")))
    margins = {head: label * gaps[head] for head, label in labels.items() if label and head in gaps}
    if not margins:
        return {}
    right = {head: (1 + (gap > 0) - (gap < 0)) / 2 for head, gap in margins.items()}
    found = {"accuracy": math.fsum(right.values()) / len(right)}
    found["margin"] = math.fsum(margins.values()) / len(margins)
    if len(_mapping(record["labels"])) > 1:
        found |= {f"accuracy/{head}": value for head, value in right.items()}
        found |= {f"margin/{head}": value for head, value in margins.items()}
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
