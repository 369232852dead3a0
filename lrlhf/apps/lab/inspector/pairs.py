"""Pairs that a reward model judged: which ones a page shows, and what all of them say."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.inspector.sampling import even_shares
from lrlhf.apps.lab.inspector.texts import Texts, short_number
from lrlhf.apps.lab.run_files import records

_BINS = 10
_OWN = {
    "step",
    "set",
    "dataloader",
    "source",
    "row",
    "prompt",
    "candidate0",
    "candidate1",
    "labels",
    "scores0",
}
_OWN |= {"scores1", "margins", "info", "media"}


class Judged(NamedTuple):
    """What one head made of one pair that people have judged."""

    margin: float
    """Score of candidate 0 less that of candidate 1."""
    label: float
    """1: candidate 0 is better, -1: candidate 1."""
    length: int | None
    """Characters of candidate 0 less those of candidate 1; None: there is no text."""

    @property
    def signed(self) -> float:
        """By how much the better candidate won."""
        return self.margin * self.label


def judged_pairs(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Judged]]]:
    """Yield the pairs of an evaluation, and by head those that are labelled and not equal.

    Raises:
        ValueError: A line is no pair; names file and line.
    """
    for number, record in enumerate(records(path), start=1):
        margins, labels = record.get("margins"), record.get("labels")
        if not isinstance(margins, dict) or not isinstance(labels, dict):
            raise ValueError(f"{path}, line {number}: a pair needs margins and labels by head")
        first, second = record.get("candidate0"), record.get("candidate1")
        length = None
        if isinstance(first, str) and isinstance(second, str):
            length = len(first) - len(second)
        found = {
            head: Judged(margin, labels[head], length)
            for head, value in margins.items()
            if (margin := short_number(value)) is not None and labels.get(head) in (1, -1)
        }
        yield record, found


def page_of(path: Path, count: int, texts: Texts) -> list[dict[str, Any]]:
    """Return an evaluation as the page reads it, each validation set by itself.

    Args:
        path: Its file.
        count: Pairs to show at most, as many of each set as of every other; of a set that has
            more, half are the worst mistakes, and the others are taken at even distances. The
            statistics are of all pairs.
        texts: Takes the texts.

    Raises:
        ValueError: A line is no pair; names file and line.
    """
    judged: dict[str, dict[str, list[Judged]]] = {}
    worst: dict[str, list[float]] = {}
    for record, by_head in judged_pairs(path):
        name = _set_of(record)
        least = min((pair.signed for pair in by_head.values()), default=math.inf)
        worst.setdefault(name, []).append(least)
        heads = judged.setdefault(name, {})
        for head, pair in by_head.items():
            heads.setdefault(head, []).append(pair)
    shares = even_shares([len(own) for own in worst.values()], count)
    chosen = {
        name: _chosen(own, share) for (name, own), share in zip(worst.items(), shares, strict=True)
    }
    shown: dict[str, list[dict[str, Any]]] = {name: [] for name in worst}
    numbers: Counter[str] = Counter()
    for record, _ in judged_pairs(path):
        name = _set_of(record)
        if numbers[name] in chosen[name]:
            shown[name].append(_row(record, texts))
        numbers[name] += 1
    return [
        {
            "set": name,
            "total": len(worst[name]),
            "pairs": shown[name],
            "heads": {head: head_statistics(pairs) for head, pairs in judged[name].items()},
        }
        for name in worst
    ]


def _set_of(record: Mapping[str, Any]) -> str:
    return str(record.get("set", record.get("dataloader", "")))


def head_statistics(pairs: Sequence[Judged]) -> dict[str, Any]:
    """Return what the labelled pairs say of a head.

    ``accuracy``: the share of pairs in which the better candidate has the higher score, where equal
    scores count half, here and below. ``calibration``: for ten ranges of the predicted
    probability, sigmoid(|margin|) in [0.5, 1], that the candidate with the higher score is better:
    pairs, mean prediction, and share in which it is. ``calibration_error``: the mean distance of
    the two, weighted by pairs. ``length``: shares of pairs in which model and people prefer the
    longer text, and the correlation of margin and difference in length.
    """
    bins: list[list[Judged]] = [[] for _ in range(_BINS)]
    for pair in pairs:
        place = int((_sigmoid(abs(pair.margin)) - 0.5) * 2 * _BINS)
        bins[min(place, _BINS - 1)].append(pair)
    calibration = [
        {
            "pairs": len(part),
            "predicted": statistics.fmean(_sigmoid(abs(pair.margin)) for pair in part),
            "right": _share_won(pair.signed for pair in part),
        }
        for part in bins
        if part
    ]
    gaps = (entry["pairs"] * abs(entry["predicted"] - entry["right"]) for entry in calibration)
    return {
        "pairs": len(pairs),
        "accuracy": _share_won(pair.signed for pair in pairs),
        "calibration": calibration,
        "calibration_error": sum(gaps) / len(pairs),
        "length": _length_bias(pairs),
    }


def _length_bias(pairs: Sequence[Judged]) -> dict[str, Any] | None:
    told = [(pair, pair.length) for pair in pairs if pair.length]
    if not told:
        return None
    margins, lengths = [pair.margin for pair, _ in told], [length for _, length in told]
    varied = min(len(set(margins)), len(set(lengths))) > 1
    return {
        "pairs": len(told),
        "model_prefers_longer": _share_won(pair.margin * length for pair, length in told),
        "people_prefer_longer": _share_won(pair.label * length for pair, length in told),
        "correlation": statistics.correlation(margins, lengths) if varied else None,
    }


def _chosen(worst: Sequence[float], count: int) -> set[int]:
    if len(worst) <= count:
        return set(range(len(worst)))
    order = sorted(range(len(worst)), key=worst.__getitem__)
    half, rest = order[: count // 2], sorted(order[count // 2 :])
    even = count - len(half)
    return {*half, *(rest[index * len(rest) // even] for index in range(even))}


def _row(record: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    def numbers(values: Any) -> dict[str, Any]:
        return {head: short_number(value) for head, value in (values or {}).items()}

    more = {key: value for key, value in record.items() if key not in _OWN}
    return {
        **{key: texts.number(record.get(key)) for key in ("prompt", "candidate0", "candidate1")},
        **{key: numbers(record.get(key)) for key in ("labels", "scores0", "scores1", "margins")},
        "place": texts.number(_place(record)),
        "media": texts.json_number(record.get("media")),
        "more": texts.json_number({**more, **(record.get("info") or {})}),
    }


def _place(record: Mapping[str, Any]) -> str | None:
    return f"{record['source']}:{record.get('row')}" if record.get("source") else None


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def _share_won(gaps: Iterable[float]) -> float:
    return statistics.fmean(0.5 if gap == 0 else float(gap > 0) for gap in gaps)
