"""What several answers to one prompt say: whether one of a few is right, and what most of them say.

Both depend on which answers there are, and not on their order.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate pass@k without bias: the share of the sets of ``k`` answers that have a right one.

        1 - C(n - c, k) / C(n, k) = 1 - ∏ (1 - k / i),  i = n - c + 1 … n

    It estimates how often one of ``k`` fresh answers is right. The product stays
    between 0 and 1, where the binomial coefficients would be too large for a float.

    Args:
        samples: Answers to the prompt, n.
        right: How many of them are right, c.
        k: Answers of which one has to be right, at most ``samples``.

    Raises:
        ValueError: ``k`` or ``right`` is out of its range.

    Reference:
        Chen et al. 2021, eq. 1, https://arxiv.org/abs/2107.03374
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(
            f"pass@k of {samples} answers with {right} right ones and k = {k}: both are at most "
            f"{samples}, and k is at least 1"
        )
    if samples - right < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - right + 1, samples + 1)))


def majority_score(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer: maj@k of ``k`` answers to one prompt.

    Answers that are equal may differ in their scores, such as where a part of the score is for the
    form; their mean counts. Among answers that are equally frequent one is drawn, so that the mean
    of theirs is the expected score. Where nobody has answered, it is 0.

    Args:
        answers: What each response says; None: it has no answer, and no vote.
        scores: Of the responses.

    Reference:
        Wang et al. 2022 (self-consistency), https://arxiv.org/abs/2203.11171
    """
    votes: defaultdict[Hashable, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes[answer].append(score)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    # sorted, so that the sum of ties does not depend on the order of the answers
    tied = sorted(float(np.mean(sorted(own))) for own in votes.values() if len(own) == most)
    return float(np.mean(tied))


def usual_sizes(samples: int) -> tuple[int, ...]:
    """Return each k of the pass@k that ``samples`` answers are shown by: powers of two, and all."""
    return tuple(sorted({samples, *(1 << power for power in range(samples.bit_length()))}))


def joint_metrics(
    names: Sequence[str], rights: Sequence[bool | None], answers: Sequence[Hashable | None]
) -> dict[str, float]:
    """Return metrics of several answers to one prompt by their names.

    Args:
        names: ``pass@k`` with any k, and ``maj@n`` with n answers.
        rights: Whether each answer is right; None: nobody could say, and it does not count.
        answers: What each says, see `majority_score`; needed for ``maj@n`` only.

    Returns:
        NaN where too few answers could be judged.
    """
    known = [right for right in rights if right is not None]
    metrics = {}
    for name in names:
        kind, _, number = name.partition("@")
        if len(known) < (int(number) if kind == "pass" else 1):
            metrics[name] = math.nan
        elif kind == "pass":
            metrics[name] = pass_at_k(len(known), sum(known), int(number))
        else:
            pairs = zip(answers, rights, strict=True)
            votes = [(answer, float(right)) for answer, right in pairs if right is not None]
            metrics[name] = majority_score(*zip(*votes, strict=True))
    return metrics


_PREFIX = re.compile(r"^t[\d.e+-]+/")


def temperature_name(temperature: float) -> str:
    """Return what the metrics of a temperature are grouped by, such as ``t0.7``."""
    return f"t{temperature:g}"


def temperature_prefix(temperature: float | None, main: float | None) -> str:
    """Return what metrics of an answer begin with beside others, such as ``t0.7/``.

    Args:
        temperature: Of the answer; None: nobody says.
        main: The temperature whose metrics have plain names.

    Returns:
        Nothing for answers at the main temperature, which those are taken to be that do not say.
    """
    return "" if temperature in (None, main) else f"{temperature_name(temperature)}/"


def plain_name(metric: str) -> str:
    """Return what a metric is called without its temperature."""
    return _PREFIX.sub("", metric)
