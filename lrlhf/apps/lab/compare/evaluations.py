"""One evaluation as numbers: what each prompt, or each pair, came to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.run_files import RunFiles, records
from lrlhf.statistics.repeated_samples import (
    joint_metrics,
    plain_name,
    temperature_prefix,
    usual_sizes,
)

Key = tuple[str, ...]
RIGHT = "pass@1"
"""Of one line, whether it is right; its mean over the lines of a prompt is pass@1."""


class Sample(NamedTuple):
    """One line of an evaluation file."""

    place: Key | None
    """Evaluation set, source and row; None: the line does not say."""
    text: Key
    """Evaluation set, and the prompt or the pair itself."""
    label: str
    """What its metrics' names begin with: nothing, or another temperature, ``t0.7/``."""
    values: Mapping[str, float]
    """Each metric that this line has, without the label."""
    answer: str
    """The whole text."""
    votes: tuple[str | None, ...]
    """What it answers, None if nothing; empty: the line does not say."""
    columns: Mapping[str, Any]
    """What subsets can be made of."""
    cluster: str = ""
    """Equal for pairs of one prompt; empty: the line does not say."""


Groups = dict[Key, list[Sample]]


def grouped(samples: Iterable[Sample], *, by_row: bool) -> Groups:
    """Return the lines of each prompt."""
    groups: Groups = {}
    for sample in samples:
        key = sample.place if by_row and sample.place is not None else sample.text
        groups.setdefault(key, []).append(sample)
    return groups


def most_samples(groups: Groups) -> dict[str, int]:
    """Return how many lines the prompt with the most has, by label."""
    most: defaultdict[str, int] = defaultdict(int)
    for samples in groups.values():
        for label, own in _by_label(samples).items():
            most[label] = max(most[label], len(own))
    return dict(most)


def prompt_values(groups: Groups, sizes: Iterable[int] = ()) -> dict[Key, dict[str, float]]:
    """Return the metrics of each prompt: means over its lines, and pass@k and maj@n of several.

    Args:
        groups: The lines of each prompt of one evaluation.
        sizes: Each k of pass@k beside the usual ones.
    """
    most = most_samples(groups)
    values_of: dict[Key, dict[str, float]] = {}
    for key, samples in groups.items():
        values_of[key] = {}
        for label, own in _by_label(samples).items():
            values = _means(own) | _together(own, most[label], sizes)
            values_of[key] |= {f"{label}{name}": value for name, value in values.items()}
    return values_of


def sizes_of(metric: str | None) -> tuple[int, ...]:
    """Return the k of a ``pass@k``; of any other metric nothing."""
    size = plain_name(metric or "").removeprefix("pass@")
    return (int(size),) if size.isdecimal() else ()


def is_share_of_answers(metric: str) -> bool:
    """Whether it says how often an answer, or one of several, is right."""
    return plain_name(metric).startswith(("pass@", "maj@"))


def _by_label(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    labels: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        labels[sample.label].append(sample)
    return labels


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.values.items():
            columns[name].append(value)
    return {name: math.fsum(own) / len(own) for name, own in columns.items()}


def _together(samples: Sequence[Sample], most: int, sizes: Iterable[int]) -> dict[str, float]:
    values = [sample.values.get(RIGHT) for sample in samples]
    rights = [None if value is None else value == 1 for value in values]
    if most < 2 or not any(right is not None for right in rights):
        return {}
    tried = sorted({*usual_sizes(most), *sizes})
    names = [f"pass@{k}" for k in tried if 1 < k <= most]
    if all(sample.votes for sample in samples):
        names.append(f"maj@{most}")
    return joint_metrics(names, rights, [vote for sample in samples for vote in sample.votes])


_PARTS = ("set", "dataloader")
"""What tells evaluation sets of one file apart."""
_MAIN = ("score", "accuracy", "mean_logprob")


class RunEvaluation(NamedTuple):
    """The evaluation of one run after a step."""

    folder: Path
    step: int
    temperature: float | None
    """Of the metrics whose names begin with no temperature; None: the file does not say."""
    samples: list[Sample]

    def mean(self, metric: str) -> float:
        """Return the mean over all prompts; NaN: none has the metric."""
        by_row = all(sample.place is not None for sample in self.samples)
        values_of = prompt_values(grouped(self.samples, by_row=by_row), sizes_of(metric))
        values = [own.get(metric, math.nan) for own in values_of.values()]
        known = [value for value in values if math.isfinite(value)]
        return math.fsum(known) / len(known) if known else math.nan


def read_evaluation(
    folder: Path, step: str, metric: str | None, temperature: float | None = None
) -> RunEvaluation:
    """Read an evaluation of a run.

    Args:
        folder: Of the run.
        step: ``last``, ``best`` (highest mean of the metric; of equal ones the first) or a number.
        metric: What ``best`` means; None: `main_metric`.
        temperature: Of the responses whose metrics have plain names, those at others have names
            such as ``t0.7/score``; None: the first one in the file.

    Raises:
        FileNotFoundError: There is no such run, or it has no evaluation.
        KeyError: It has none of that step; names those that there are.
        ValueError: A line is no record of an evaluation, or none is of that temperature; names the
            file.
    """
    steps = RunFiles(folder).evaluations
    if not steps:
        raise FileNotFoundError(
            f"{folder} has no evaluation (eval_scores_<step>.jsonl): lrlhf validate --config "
            f"{folder / 'config.yaml'} --ckpt_path CHECKPOINT makes one, if its config has "
            "validation data"
        )
    if step == "best":
        evaluations = [_read(folder, one, path, temperature) for one, path in steps.items()]
        # of equal ones the first
        return max(evaluations, key=lambda each: _finite(each.mean(metric or main_metric(each))))
    number = list(steps)[-1] if step == "last" else int(step)
    if number not in steps:
        there = ", ".join(map(str, steps))
        raise KeyError(f"{folder} has no evaluation of step {number}; there are {there}")
    return _read(folder, number, steps[number], temperature)


def main_metric(evaluation: RunEvaluation) -> str:
    """Return what an evaluation is about.

    A policy's ``score``, the ``accuracy`` on pairs, the ``mean_logprob`` of given texts.
    """
    names = {name for sample in evaluation.samples for name in sample.values}
    return next((name for name in _MAIN if name in names), min(names, default=""))


def _read(folder: Path, step: int, path: Path, temperature: float | None) -> RunEvaluation:
    samples: list[Sample] = []
    there: dict[float | None, None] = {}
    for number, record in enumerate(records(path), start=1):
        known = "score" in record or isinstance(record.get("labels"), Mapping)
        if "steps" in record or "label" in record:
            of = (
                "a process reward model, whose steps" if "steps" in record else "KTO, whose answers"
            )
            raise ValueError(
                f"{path} is of {of} are not compared: compare the metrics of both evaluations, "
                "eval/… in metrics.csv"
            )
        if not (known or _is_scored_text(record)):
            raise ValueError(
                f"{path}, line {number} has neither a score nor labels nor the log-probability of "
                "a text: it is no line that EvalJSONL has written"
            )
        own = _numbers({"of": record.get("temperature")}).get("of")
        there.setdefault(own)
        temperature = own if temperature is None and not samples else temperature
        samples.append(_sample(record, temperature_prefix(own, temperature)))
    if not samples:
        raise ValueError(f"{path} is empty")
    if not any(sample.label == "" for sample in samples):
        raise ValueError(
            f"{path} has responses at temperature {', '.join(f'{each:g}' for each in there)} and "
            f"none at {temperature:g}, at which the first run was evaluated: evaluate both at the "
            "same"
        )
    return RunEvaluation(folder, step, temperature, samples)


def _sample(record: Mapping[str, Any], label: str) -> Sample:
    part = tuple(str(record.get(name, "")) for name in _PARTS)
    place = None
    if "source" in record and "row" in record:
        place = (*part, str(record["source"]), str(record["row"]))
    prompt_keys = ("candidate0", "candidate1", *(["completion"] if _is_scored_text(record) else []))
    shown = (str(record.get(name, "")) for name in ("prompt", *prompt_keys))
    info = record.get("info")
    own = [info.get(name, "") for name in ("media0", "media1")] if isinstance(info, Mapping) else []
    media = " ".join(map(str, filter(None, (record.get("media", ""), *own))))
    metadata = [record.get(name) for name in ("columns", "info")]
    columns: dict[str, Any] = {name: record[name] for name in _PARTS if name in record}
    for each in metadata:
        columns |= each if isinstance(each, Mapping) else {}
    answered = record.get("answer")
    return Sample(
        place=place,
        text=(*part, *shown, media),
        label=label,
        values=measures(record),
        answer=str(record.get("completion", "")),
        votes=(None if answered is None else str(answered),) if "answer" in record else (),
        columns=columns,
        cluster="" if record.get("prompt_id") is None else str(record["prompt_id"]),
    )


def measures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line; what could not be scored or is not labelled is left out."""
    if _is_scored_text(record):
        return _of_text(record)
    return _of_pair(record) if "labels" in record else _of_response(record)


def _is_scored_text(record: Mapping[str, Any]) -> bool:
    """Whether it is about a text that a model was given, rather than one that it wrote."""
    return "logprob" in record and "tokens" in record


def _of_text(record: Mapping[str, Any]) -> dict[str, float]:
    """Log-probability of a token of the text; none of a text without one that is learnt."""
    values = _numbers({name: record[name] for name in ("logprob", "tokens")})
    if "logprob" not in values or not values.get("tokens"):
        return {}
    return {"mean_logprob": values["logprob"] / values["tokens"]}


def _of_response(record: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, Any] = {"score": record.get("score")}
    for name, value in _mapping(record.get("rewards")).items():
        values[f"rewards/{name}"] = value
    values[RIGHT] = record.get("correct")
    values["length"] = record.get("length")
    if "finish_reason" in record:
        values["truncated"] = float(record["finish_reason"] == "length")
    values["turns"] = record.get("turns")
    return _numbers(values)


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
    values = {"accuracy": math.fsum(right.values()) / len(right)}
    values["margin"] = math.fsum(margins.values()) / len(margins)
    if len(_mapping(record["labels"])) > 1:
        values |= {f"accuracy/{head}": value for head, value in right.items()}
        values |= {f"margin/{head}": value for head, value in margins.items()}
    return values


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
