"""Adaptive prompt sampling: prompts are drawn by what their responses have scored so far."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.datamodules.loading.loader import EpochOrder, TrainLoader
from lrlhf.options.conversion import settings

logger = logging.getLogger(__name__)

Rates = Float[Tensor, " N"]
RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")

_PRIOR = 0.5
"""Both parameters of a prompt's Beta distribution before anything was observed (Jeffreys)."""
_Source = tuple[str, Tensor, float]
"""Name of a source (empty: no metrics), indices of its prompts, share in any unit."""


@settings
@dataclass(frozen=True, kw_only=True)
class AdaptivePrompts:
    """Draws the prompts from which a policy learns most at present (an automatic curriculum).

    Each prompt has a Beta posterior of its success rate p, from Jeffreys' prior and the responses
    to it, which are forgotten with the iterations as the policy changes. A batch is drawn without
    replacement, by the expected learnability of each prompt: p (1 − p) for a target of 0.5, the
    variance of a right-or-wrong reward.

    Args:
        target: Success rate of the prompts that are drawn most, between 0 and 1.
        exploration: Share of the draws that are uniform over all prompts, retired ones included;
            above 0, and 1 for uniform draws alone.
        half_life: Iterations after which a response counts half.
        hopeless: A prompt whose expected success rate is at most this is retired: it is drawn by
            exploration alone. It returns as its responses are forgotten, or when some are right.
            Below 0.5, the rate of a prompt without responses.
        solved: A prompt whose expected success rate is at least this is retired too; above 0.5.
        threshold: Least score of a response that counts as a success; None: scores are 0 or 1.
        source_column: Column that names the source of a prompt; data of several sources has
            ``source``.
        source_weights: Share of the draws of each source by its name, in any unit. None: of
            `Weighted` sources their weights, else one pool of all prompts.

    Raises:
        ValueError: A value is out of its range.

    Reference:
        Qu et al. 2025 (MoPPS), https://arxiv.org/abs/2507.04632: discounted Beta posteriors.
        Foster et al. 2025, https://arxiv.org/abs/2502.12272: draws by learnability.
        Differs from MoPPS: responses fade with iterations, not visits, and expected learnability
        takes the place of posterior samples near the target.
    """

    target: float = 0.5
    exploration: float = 0.1
    half_life: float = 50.0
    hopeless: float = 0.1
    solved: float = 0.9
    threshold: float | None = None
    source_column: str = "source"
    source_weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        weights = {f"source_weights.{name}": w for name, w in (self.source_weights or {}).items()}
        weights |= {"exploration": self.exploration, "half_life": self.half_life}
        for name, value in weights.items():
            if not 0 < value < math.inf:
                raise ValueError(f"prompt_sampler.{name} is {value}; it must be above 0 and finite")
        if self.exploration > 1:
            raise ValueError(f"prompt_sampler.exploration is {self.exploration}; it is a share")
        # an unseen prompt has an expected success rate of 0.5 and is not to be retired
        least, most = sorted((self.target, 0.5))
        if not 0 <= self.hopeless < least <= most < self.solved <= 1:
            raise ValueError(
                f"prompt_sampler.hopeless, target and solved are {self.hopeless}, {self.target} "
                f"and {self.solved}; they must ascend between 0 and 1, hopeless below 0.5 and "
                "solved above it"
            )
        if not math.isfinite(self.threshold or 0.0):
            raise ValueError(f"prompt_sampler.threshold is {self.threshold}; it must be finite")

    def source_of(self, columns: Mapping[str, Any]) -> str:
        """Return the name of a prompt's source, or raise `ValueError` if that has no weight."""
        weights, name = self.source_weights or {}, str(columns.get(self.source_column))
        if name not in weights:
            raise ValueError(
                f"prompt_sampler.source_weights names {', '.join(sorted(weights))}, and a train "
                f"prompt has {name} in the column {self.source_column!r}: give it a weight"
            )
        return name

    def count(self, scores: Float[Tensor, " G"]) -> tuple[int, int]:
        """Count successes and failures among scores, NaN as neither; refuse what may be either."""
        scored = scores[~scores.isnan()]
        fractions = scored[(scored != 0) & (scored != 1)]
        if self.threshold is None and len(fractions):
            raise ValueError(
                f"a response has score {fractions[0]:.9g}, which is neither 0 nor 1: set "
                "data.prompt_sampler.threshold to the least score that counts as a success"
            )
        # compared in the precision of the scores
        successes = int((scored >= (1.0 if self.threshold is None else self.threshold)).sum())
        return successes, len(scored) - successes


def learnability(successes: Rates, failures: Rates, *, target: float = 0.5) -> Rates:
    """Expected learnability of prompts under the Beta posteriors of their success rates p.

        u(p) = c p^(2ρ) (1 − p)^(2(1 − ρ)),            c so that u(ρ) = 1
        E[u] = c B(α + 2ρ, β + 2(1 − ρ)) / B(α, β),    α = ½ + successes, β = ½ + failures

    For a target ρ of 0.5, u is 4 p (1 − p).
    """
    alpha, beta = successes + _PRIOR, failures + _PRIOR
    up, down = 2 * target, 2 * (1 - target)
    rising = (alpha + up).lgamma() - alpha.lgamma() + (beta + down).lgamma() - beta.lgamma()
    most = up * math.log(target) + down * math.log(1 - target)
    return (rising - most).exp() / ((alpha + beta) * (alpha + beta + 1))


class PromptPool:
    """The posteriors of all prompts, each of one source, and draws from them."""

    def __init__(self, options: AdaptivePrompts, sources: Sequence[_Source], seed: int) -> None:
        self._options, self._sources, self._seed = options, sources, seed
        size = sum(len(rows) for _, rows, _ in sources)
        self.counts = torch.zeros(2, size, dtype=torch.float64)
        """Successes and failures of each prompt, discounted."""

    @property
    def success_rates(self) -> Rates:
        """Expected success rate of each prompt: the mean of its posterior."""
        return (self.counts[0] + _PRIOR) / (self.counts.sum(dim=0) + 2 * _PRIOR)

    def probabilities(self) -> Rates:
        """Probability of each prompt to be drawn next."""
        options, rates = self._options, self.success_rates
        weights = learnability(*self.counts, target=options.target)
        weights[(rates <= options.hopeless) | (rates >= options.solved)] = 0.0
        probabilities = torch.empty_like(weights)
        for _, rows, share in self._sources:
            own, uniform = weights[rows], 1 / len(rows)
            total = math.fsum(own.tolist())  # the same for any number of threads
            # a source whose prompts are all retired keeps its share
            learnable = own / total if total else uniform
            mixed = (1 - options.exploration) * learnable + options.exploration * uniform
            probabilities[rows] = share * mixed
        return probabilities / sum(share for _, _, share in self._sources)

    def draw(self, number: int, count: int) -> list[int]:
        """Draw batch ``number`` one by one without replacement (Efraimidis and Spirakis 2006)."""
        generator = np.random.default_rng([self._seed, 2, number])  # 0, 1: `EpochOrder`
        waits = torch.from_numpy(generator.exponential(size=self.counts.shape[1]))
        order = (waits / self.probabilities()).argsort(stable=True)
        return [int(row) for row in order[:count]]

    def observe(self, scores: Mapping[int, Float[Tensor, " G"]]) -> None:
        """Update the posteriors by an iteration's scores of prompts, by their index."""
        counted = {row: self._options.count(group) for row, group in scores.items()}
        self.counts *= 0.5 ** (1 / self._options.half_life)
        for row, counts in counted.items():
            self.counts[:, row] += torch.tensor(counts)

    def metrics(self) -> dict[str, float]:
        """Summarise the pool under the names of logged metrics."""
        rates, seen = self.success_rates, self.counts.sum(dim=0) > 0
        summary = {
            "prompts/effective": float(1 / self.probabilities().square().sum()),
            "prompts/solved": float((rates >= self._options.solved).sum()),
            "prompts/hopeless": float((rates <= self._options.hopeless).sum()),
            "prompts/unseen": float((~seen).sum()),
        }
        named = [(f"/{name}", rows) for name, rows, _ in self._sources if name]
        for name, rows in (("", torch.arange(len(rates))), *named):
            if seen[rows].any():
                summary[f"prompts/success_rate{name}"] = float(rates[rows][seen[rows]].mean())
        return summary


class AdaptiveLoader(TrainLoader[RowT, BatchT]):
    """Train batches of one rank, drawn as `AdaptivePrompts` describes.

    A batch is drawn when it is first needed, for all ranks alike, and stays what it is. With
    generation ahead that is before the batches in between were scored.
    """

    draws_epochs = False

    def __init__(self, *args: Any, adaptive: AdaptivePrompts, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self._order, EpochOrder)
        sources = _sources_of(self._rows, self._order, adaptive)
        self.pool = PromptPool(adaptive, sources, self._order.seed)
        self._drawn: dict[int, list[int]] = {}

    def _rest_of_epoch(self, number: int) -> list[list[int]]:
        """Return the rows of batch ``number`` alone: those behind it depend on its scores."""
        if number not in self._drawn:
            last = self._done - 1  # which is still to be observed
            self._drawn = {old: rows for old, rows in self._drawn.items() if old >= last}
            self._drawn[number] = self.pool.draw(number, self.batch_size * self._ranks.world)
        start = self._ranks.rank * self.batch_size
        return [self._drawn[number][start : start + self.batch_size]]

    def observe(
        self, scores: Float[Tensor, "P G"], gather: Callable[[Any], list[Any]]
    ) -> dict[str, float]:
        """Update the posteriors by scores of the last batch's first prompts; returns metrics."""
        (rows,) = self._rest_of_epoch(self._done - 1)
        own = dict(zip(rows, scores.cpu(), strict=False))  # the first ones were answered
        self.pool.observe({row: group for part in gather(own) for row, group in part.items()})
        return self.pool.metrics()

    def state_dict(self) -> dict[str, Any]:
        prompts = {"counts": self.pool.counts.clone(), "drawn": dict(self._drawn)}
        return {**super().state_dict(), "prompts": prompts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        prompts, own = state.get("prompts"), super().state_dict()
        if prompts is None or any(state.get(name) != own.get(name) for name in ("rows", "data")):
            logger.warning("the checkpoint has no success rates of these prompts: they start anew")
            return
        self.pool.counts = prompts["counts"].clone()
        size = self.batch_size * self._ranks.world
        self._drawn = {
            number: rows for number, rows in prompts["drawn"].items() if len(rows) == size
        }


def _sources_of(rows: Sequence[Any], order: EpochOrder, adaptive: AdaptivePrompts) -> list[_Source]:
    shares = adaptive.source_weights
    if shares is None:
        weighted = zip(order.members, order.weights or (), strict=False)
        sources = [("", torch.tensor(rows), weight) for rows, weight in weighted]
        return sources or [("", torch.arange(len(order)), 1.0)]
    if order.weights is not None:
        raise ValueError("data.train and prompt_sampler.source_weights both have weights: drop one")
    members: dict[str, list[int]] = {name: [] for name in shares}
    for index, row in enumerate(rows):
        members[adaptive.source_of(row.columns)].append(index)
    if empty := [name for name, own in members.items() if not own]:
        raise ValueError(
            f"prompt_sampler.source_weights: no train prompt is of {empty[0]}; drop it"
        )
    return [(name, torch.tensor(own), shares[name]) for name, own in members.items()]
