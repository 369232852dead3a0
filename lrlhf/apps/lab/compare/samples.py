"""The lines of an evaluation that answer one prompt, and what they come to together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lrlhf.statistics.repeated_samples import judged_together, usual_sizes
from lrlhf.statistics.temperatures import plain_name

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
    found: dict[Key, dict[str, float]] = {}
    for key, samples in groups.items():
        found[key] = {}
        for label, own in _by_label(samples).items():
            values = _means(own) | _together(own, most[label], sizes)
            found[key] |= {f"{label}{name}": value for name, value in values.items()}
    return found


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
    judged = [sample.values.get(RIGHT) for sample in samples]
    rights = [None if value is None else value == 1 for value in judged]
    if most < 2 or not any(right is not None for right in rights):
        return {}
    tried = sorted({*usual_sizes(most), *sizes})
    names = [f"pass@{k}" for k in tried if 1 < k <= most]
    if all(sample.votes for sample in samples):
        names.append(f"maj@{most}")
    return judged_together(names, rights, [vote for sample in samples for vote in sample.votes])
