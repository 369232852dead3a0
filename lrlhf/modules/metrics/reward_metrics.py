"""How well scores agree with labels, over all pairs of all ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lrlhf.modules.metrics.measurement import Measurement
from lrlhf.run import Collectives
from lrlhf.statistics.intervals import share_interval

INTERVAL = ("accuracy_low", "accuracy_high", "pairs")
"""What an evaluation says of an accuracy: its interval, and the pairs behind it."""
METRICS = (
    *("loss", "accuracy", *INTERVAL, "margin", "chosen_mean", "rejected_mean", "score_ties"),
    *("score_mean", "score_std", "score_min", "score_max", "calibration_error", "longer_wins"),
    *("length_correlation", "tie_gap", "tie_threshold", "three_way_accuracy"),
)
"""All that an evaluation may find of a head."""
OF_SOURCES = ("loss", "accuracy", *INTERVAL, "margin")
"""What is told of each source of a mixture."""
_CALIBRATION_BINS = 20  # even, so that no bin lies across one half


class HeadPairs(NamedTuple):
    """All pairs of one head."""

    scores0: Float[Tensor, " N"]
    scores1: Float[Tensor, " N"]
    labels: Float[Tensor, " N"]
    """1: candidate 0 is better, -1: candidate 1, 0: equal, NaN: not labelled."""
    losses: Float[Tensor, " N"]
    lengths: Float[Tensor, "N 2"]
    """Tokens of both candidates."""
    prompts: Int[Tensor, " N"]
    """Equal for pairs of one prompt."""


class RewardSummary(NamedTuple):
    """Metrics by name, ``/head`` appended where there are several, and the pairs behind them."""

    metrics: dict[str, float]
    heads: dict[str, HeadPairs]
    sets: Mapping[int, RewardSummary] = MappingProxyType({})
    """Of the pairs of each validation set, by its number."""
    sources: Mapping[int, RewardSummary] = MappingProxyType({})
    """Of the pairs of each source of a mixture, by its number."""

    @property
    def main_metrics(self) -> dict[str, float]:
        """What `OF_SOURCES` names, of each head."""
        return {k: value for k, value in self.metrics.items() if k.split("/")[0] in OF_SOURCES}


class RewardMetrics(Metric):
    """Collects the scored pairs of all ranks and sums them up.

    Args:
        head_names: Names of the heads, in the order of the scores' columns.
        head_weights: Weight of each head in the loss.
        intervals: Whether accuracies get their interval, which asks every pair on the CPU.
    """

    full_state_update = False
    pairs: list[Tensor]
    lengths: list[Tensor]
    sets: list[Tensor]
    sources: list[Tensor]
    prompts: list[Tensor]

    def __init__(
        self, head_names: Sequence[str], head_weights: Sequence[float], *, intervals: bool = True
    ) -> None:
        super().__init__()
        self._intervals = intervals
        self.head_names = tuple(head_names)
        self.head_weights = tuple(head_weights)
        self.add_state("pairs", default=[], dist_reduce_fx="cat")
        self.add_state("lengths", default=[], dist_reduce_fx="cat")
        self.add_state("sets", default=[], dist_reduce_fx="cat")
        self.add_state("sources", default=[], dist_reduce_fx="cat")
        self.add_state("prompts", default=[], dist_reduce_fx="cat")

    def update(
        self,
        scores0: Tensor,
        scores1: Tensor,
        losses: Tensor,
        labels: Tensor,
        lengths: Tensor,
        number: int = -1,
        sources: Tensor | None = None,
        prompts: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            scores0: Scores of candidate 0, [B, H].
            scores1: Scores of candidate 1, [B, H].
            losses: Unweighted loss of every label, [B, H].
            labels: 1: candidate 0 is better, -1: candidate 1, 0: equal, NaN: no label; [B, H].
            lengths: Tokens of both candidates, [B, 2].
            number: Of the validation set that they are from, which is summed up too; -1: of none.
            sources: Numbers [B] of the sources of the mixture that they are from, which are summed
                up too; -1, and None: of none.
            prompts: Ids [B] of their prompts, 0 or more; None: each has its own.
        """
        columns = (scores0, scores1, labels, losses)
        self.pairs.append(torch.stack([column.detach().float() for column in columns], dim=-1))
        self.lengths.append(lengths.float())
        self.sets.append(torch.full((len(lengths),), number, device=lengths.device))
        nothing = torch.full_like(self.sets[-1], -1)
        self.sources.append(nothing if sources is None else sources)
        self.prompts.append(nothing if prompts is None else prompts)

    def update_with_nothing(self) -> None:
        """Take part in the sum although this rank may have seen no pair.

        A rank without any state would offer a tensor with fewer axes than the others' and break
        their gathering.
        """
        none = torch.empty(0, len(self.head_names), device=self.device)
        self.update(none, none, none, none, torch.empty(0, 2, device=self.device))

    def seen(self) -> dict[str, Tensor]:
        """Return this rank's pairs since the last reset, on the CPU; empty: there are none."""
        own_states = {
            "pairs": self.pairs,
            "lengths": self.lengths,
            "sources": self.sources,
            "prompts": self.prompts,
        }
        states = own_states if self.pairs else {}
        return {name: dim_zero_cat(state).cpu() for name, state in states.items()}

    def resume(self, seen: Sequence[Mapping[str, Tensor]], ranks: Collectives) -> None:
        """Go on from what each rank had `seen`; of another number of ranks the first gets all."""
        self.reset()
        same = len(seen) == ranks.world_size
        own = [seen[ranks.rank]] if same else seen if ranks.rank == 0 else []
        for part in filter(None, own):
            states = {name: state.to(self.device) for name, state in part.items()}
            scores0, scores1, labels, losses = states["pairs"].unbind(dim=-1)
            lengths, sources = states["lengths"], states.get("sources")
            prompts = states.get("prompts")
            self.update(scores0, scores1, losses, labels, lengths, sources=sources, prompts=prompts)

    @staticmethod
    def renumbered(seen: Mapping[str, Tensor], numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return what was `seen`, its sources counted otherwise.

        Args:
            seen: Of one rank.
            numbers: Of each source by its number then; -1: it is no more.
        """
        if "sources" not in seen:  # from before there were any
            return dict(seen)
        # -1, which stands for no source, is the last index
        return {**seen, "sources": torch.tensor([*numbers, -1])[seen["sources"]]}

    def compute(self) -> RewardSummary:
        """Return every metric that the collected pairs define, and the pairs themselves."""
        states = (self.pairs, self.lengths, self.sets, self.sources, self.prompts)
        pairs, lengths, sets, sources, prompts = map(dim_zero_cat, states)
        # a pair without an id is a prompt of its own
        prompts = torch.where(prompts < 0, -1 - torch.arange(len(prompts)).to(prompts), prompts)

        def parts(numbers: Tensor, among: Tensor) -> dict[int, Tensor]:
            present = sorted({*torch.unique(numbers[among]).tolist()} - {-1})
            return {number: among & (numbers == number) for number in present}

        def summary(rows: Tensor, mixed: Tensor) -> RewardSummary:
            """Sum up some rows, and the sources of some of them."""
            own = parts(sources, mixed).items()
            return part(rows)._replace(sources={number: part(one) for number, one in own})

        def part(rows: Tensor) -> RewardSummary:
            return self._summary(pairs[rows], lengths[rows], prompts[rows])

        everything = torch.ones_like(sets, dtype=torch.bool)
        named = parts(sets, everything).items()
        # sources are numbered within their set
        return summary(everything, sets == -1)._replace(
            sets={number: summary(rows, rows) for number, rows in named}
        )

    def _summary(self, pairs: Tensor, lengths: Tensor, prompts: Tensor) -> RewardSummary:
        heads = {}
        for index, name in enumerate(self.head_names):
            scores0, scores1, labels, losses = pairs[:, index].unbind(dim=-1)
            heads[name] = HeadPairs(scores0, scores1, labels, losses, lengths, prompts)
        if len(pairs) == 0:
            return RewardSummary({}, heads)
        weighted = [
            w * head.losses for w, head in zip(self.head_weights, heads.values(), strict=True)
        ]
        metrics = {"loss": float(torch.stack(weighted).sum(dim=0).mean())}
        if len(heads) == 1:
            (head,) = heads.values()
            return RewardSummary(head_metrics(head, intervals=self._intervals) | metrics, heads)
        everything = [decided_pairs(head) for head in heads.values()]
        gaps, ids = map(torch.cat, zip(*everything, strict=True))
        metrics |= accuracy_metrics(gaps, ids, intervals=self._intervals)
        for name, head in heads.items():
            own = head_metrics(head, intervals=self._intervals)
            metrics |= {f"{key}/{name}": value for key, value in own.items()}
        return RewardSummary(metrics, heads)


def head_metrics(head: HeadPairs, *, intervals: bool = True) -> dict[str, float]:
    """Return the metrics of one head; those that its pairs leave undefined are left out."""
    labelled = ~head.labels.isnan()
    decided = labelled & (head.labels != 0)
    scores = torch.stack([head.scores0, head.scores1], dim=1)
    metrics = {
        "score_mean": scores.mean(),
        "score_std": scores.std(correction=0),
        "score_min": scores.min(),
        "score_max": scores.max(),
    }
    if labelled.any():
        metrics["loss"] = head.losses[labelled].mean()
    if (head.labels == 0).any():
        metrics["tie_gap"] = (head.scores0 - head.scores1)[head.labels == 0].abs().mean()
    if decided.any():
        metrics |= _preference_metrics(head, decided)
    correlation = pearson(scores.flatten(), head.lengths.flatten())
    if correlation is not None:
        metrics["length_correlation"] = correlation
    accuracy = accuracy_metrics(*decided_pairs(head), intervals=intervals)
    return {k: float(v) for k, v in metrics.items()} | accuracy


def _preference_metrics(head: HeadPairs, decided: Tensor) -> dict[str, Tensor]:
    gaps = decided_pairs(head)[0]
    middle = (head.scores0 + head.scores1)[decided] / 2
    longer = (head.lengths[:, 0] - head.lengths[:, 1])[decided] * head.labels[decided]
    return {
        "margin": gaps.mean(),
        "chosen_mean": (middle + gaps / 2).mean(),
        "rejected_mean": (middle - gaps / 2).mean(),
        "score_ties": (gaps == 0).float().mean(),
        "calibration_error": calibration_error(gaps),
        "longer_wins": win_rate(longer),
    }


def accuracy_metrics(
    gaps: Float[Tensor, " N"],
    prompts: Tensor | Sequence[Hashable] | None = None,
    *,
    intervals: bool = True,
) -> dict[str, float]:
    """Return the share of pairs in the right order, with its 95 % confidence interval.

    Args:
        gaps: Chosen less rejected score of each pair.
        prompts: What each is about: pairs of one prompt depend on each other, see `share_interval`.
            None: each is about its own.
        intervals: False: the share alone.
    """
    if len(gaps) == 0:
        return {}
    accuracy = float(win_rate(gaps))
    if not intervals:
        return {"accuracy": accuracy}
    clusters = range(len(gaps)) if prompts is None else prompts
    if isinstance(clusters, Tensor):
        clusters = clusters.tolist()
    low, high = share_interval(_wins(gaps).tolist(), clusters)
    return {"accuracy": accuracy, "accuracy_low": low, "accuracy_high": high, "pairs": len(gaps)}


def measurements_of(values: Mapping[str, float], prefix: str) -> list[Measurement]:
    """Return the metrics of an evaluation; accuracies have an interval.

    Args:
        values: By metric, ``/head`` appended where there are several heads.
        prefix: What they are logged under, such as ``eval/set/``.
    """
    measurements = []
    for name, value in values.items():
        metric, slash, head = name.partition("/")
        if metric in INTERVAL:
            continue
        low, high, pairs = (
            values.get(f"{end}{slash}{head}") if metric == "accuracy" else None for end in INTERVAL
        )
        interval = (math.nan if low is None else low, math.nan if high is None else high)
        measurements.append(Measurement(f"{prefix}{name}", value, *interval, int(pairs or 0)))
    return measurements


def decided_pairs(head: HeadPairs) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
    """Return chosen minus rejected score of every pair that has a preference, and its prompt."""
    decided = ~head.labels.isnan() & (head.labels != 0)
    return ((head.scores0 - head.scores1) * head.labels)[decided], head.prompts[decided]


def win_rate(gaps: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return the share of gaps above zero; a gap of exactly zero is half a win."""
    return _wins(gaps).mean()


def _wins(gaps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    return (gaps > 0).float() + (gaps == 0).float() / 2


def calibration_error(gaps: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """Return how far σ(gap) is, on average, from the share of wins at that gap.

    Each pair counts in both orders, so that it does not matter which candidate comes first.
    """
    if not gaps.isfinite().all():
        return torch.full((), torch.nan)
    probabilities = torch.cat([gaps, -gaps]).sigmoid()
    targets = torch.cat([torch.ones_like(gaps), torch.zeros_like(gaps)]).long()
    # loads every metric of torchmetrics, which takes a second
    classification = import_module("torchmetrics.functional.classification")
    error: Tensor = classification.binary_calibration_error(
        probabilities, targets, n_bins=_CALIBRATION_BINS
    )
    return error


def pearson(x: Float[Tensor, " N"], y: Float[Tensor, " N"]) -> Float[Tensor, ""] | None:
    """Return the linear correlation, or None where one of the two does not vary."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    norm = x.norm() * y.norm()
    return x @ y / norm if norm > 0 else None


def fit_tie_threshold(head: HeadPairs) -> float | None:
    """Return the gap below which calling a pair a tie gets most labels right.

    Thresholds half way between neighbouring gaps are tried, besides none and all; None where no
    pair is labelled a tie.
    """
    ties = (head.labels == 0).nonzero().flatten()
    if len(ties) == 0:
        return None
    won = decided_pairs(head)[0]
    tied = (head.scores0 - head.scores1)[ties].abs().sort().values
    right = won[won > 0].sort().values
    gaps: Tensor = torch.unique(torch.cat([tied, won.abs()]))
    tried = torch.cat([gaps.new_zeros(1), (gaps[1:] + gaps[:-1]) / 2, 2 * gaps[-1:] + 1])
    caught = torch.searchsorted(tied, tried)
    lost = torch.searchsorted(right, tried)
    return float(tried[(caught - lost).argmax()])


def three_way_accuracy(head: HeadPairs, threshold: float) -> float:
    """Return the share of labels that scores predict: better, worse, or equal below a gap."""
    gap = head.scores0 - head.scores1
    predicted = torch.where(gap.abs() < threshold, torch.zeros_like(gap), gap.sign())
    labelled = ~head.labels.isnan()
    return float((predicted == head.labels)[labelled].float().mean())
