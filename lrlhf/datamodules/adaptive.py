"""Adaptive prompt sampling: prompts are drawn by what their responses have scored so far."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.datamodules.loading.loader import EpochOrder, Order, TrainLoader
from lrlhf.options.conversion import settings

logger = logging.getLogger(__name__)

Rates = Float[Tensor, " N"]
RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")

_PRIOR = 0.5
"""Both parameters of a prompt's Beta distribution before anything was observed (Jeffreys)."""
_STREAM = 2
"""Keeps these draws apart from those of `EpochOrder`."""


@settings
@dataclass(frozen=True, kw_only=True)
class AdaptivePrompts:
    """Draws the prompts from which a policy learns most at present (an automatic curriculum).

    Each prompt has a Beta posterior of its success rate p, from Jeffreys' prior and the responses
    to it, which are forgotten with the iterations as the policy changes. A batch is drawn without
    replacement, by the expected learnability of each prompt: p (1 − p) for a target of 0.5, the
    variance of a right-or-wrong reward, to which the gradient of a group is proportional.

    Args:
        target: Success rate of the prompts that are drawn most, between 0 and 1.
        exploration: Share of the draws that are uniform over all prompts, retired ones included;
            above 0, and 1 for uniform draws alone.
        half_life: Iterations after which a response counts half.
        hopeless: A prompt whose expected success rate is at most this is retired: it is drawn by
            exploration alone. It returns as its responses are forgotten, or when some are right.
        solved: A prompt whose expected success rate is at least this is retired likewise.
        threshold: Least score of a response that counts as a success; None: scores are 0 or 1.
        source_column: Column of the prompts that names their source. Data of several sources has
            a column ``source``.
        source_weights: Share of the draws of each source by its name, in any unit. None: of
            `Weighted` sources their weights, else one pool of all prompts.

    Raises:
        ValueError: A value is out of its range.

    Reference:
        Qu et al. 2025 (MoPPS), §3, https://arxiv.org/abs/2507.04632, for the discounted posterior.
        Foster et al. 2025, https://arxiv.org/abs/2502.12272, for draws by learnability. Differs
        from MoPPS: responses fade with iterations rather than with visits, and expected
        learnability takes the place of posterior samples close to the target.
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
        if not 0 < self.exploration <= 1:
            raise ValueError(
                f"prompt_sampler.exploration is {self.exploration}; it must be above 0, as retired "
                "prompts are drawn by exploration alone, and at most 1"
            )
        if not (self.half_life > 0 and math.isfinite(self.half_life)):
            raise ValueError(
                f"prompt_sampler.half_life is {self.half_life}; it must be a number of iterations "
                "above 0"
            )
        if not 0 <= self.hopeless < self.target < self.solved <= 1:
            raise ValueError(
                f"prompt_sampler.hopeless, target and solved are {self.hopeless}, {self.target} "
                f"and {self.solved}; they must ascend between 0 and 1, or no prompt could be drawn "
                "by its success rate"
            )
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"prompt_sampler.threshold is {self.threshold}; it must be finite")
        for name, weight in (self.source_weights or {}).items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(
                    f"prompt_sampler.source_weights gives {name!r} {weight}; it must be above 0"
                )

    def count(self, scores: Float[Tensor, " G"]) -> tuple[int, int]:
        """Count the successes and the failures among the scores of a group; NaN is neither.

        Raises:
            ValueError: There is no threshold, and a score is neither 0 nor 1.
        """
        scored = scores[~scores.isnan()]
        fractions = scored[(scored != 0) & (scored != 1)]
        if self.threshold is None and len(fractions):
            raise ValueError(
                f"prompt_sampler counts successes, and a response has score {fractions[0]:g}, "
                "which is neither 0 nor 1: set data.prompt_sampler.threshold to the least score of "
                "a response that is right"
            )
        least = 1.0 if self.threshold is None else self.threshold
        successes = int((scored >= least).sum())  # compared in the precision of the scores
        return successes, len(scored) - successes


def learnability(successes: Rates, failures: Rates, *, target: float = 0.5) -> Rates:
    """Expected learnability of prompts under the Beta posteriors of their success rates p.

        u(p) = c p^(2ρ) (1 − p)^(2(1 − ρ)),            c so that u(ρ) = 1
        E[u] = c B(α + 2ρ, β + 2(1 − ρ)) / B(α, β),    α = ½ + successes, β = ½ + failures

    It is 1 at the target ρ and 0 at p = 0 and 1; for ρ = 0.5 it is 4 p (1 − p).

    Args:
        successes: Of each prompt, discounted.
        failures: Of each prompt, discounted.
        target: ρ, the success rate of most learnability.
    """
    alpha, beta = _PRIOR + successes, _PRIOR + failures
    up, down = 2 * target, 2 * (1 - target)
    most = up * math.log(target) + down * math.log(1 - target)
    return (_log_beta(alpha + up, beta + down) - _log_beta(alpha, beta) - most).exp()


def _log_beta(alpha: Rates, beta: Rates) -> Rates:
    return alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()


class PromptSource(NamedTuple):
    """Prompts that get a share of the draws."""

    name: str
    """Of its metrics; empty: it has none of its own."""
    rows: Tensor
    """Indices of its prompts."""
    weight: float
    """Its share, in any unit."""


class PromptPool:
    """The posteriors of all prompts, and draws from them.

    Args:
        options: How to draw.
        sources: All prompts, each in one of them.
        seed: Of the draws.
    """

    def __init__(
        self, options: AdaptivePrompts, sources: Sequence[PromptSource], seed: int
    ) -> None:
        self._options, self._sources, self._seed = options, sources, seed
        size = sum(len(source.rows) for source in sources)
        self.successes, self.failures = torch.zeros(2, size, dtype=torch.float64)

    @property
    def success_rates(self) -> Rates:
        """Expected success rate of each prompt: the mean of its posterior."""
        alpha, beta = _PRIOR + self.successes, _PRIOR + self.failures
        rates: Rates = alpha / (alpha + beta)
        return rates

    def probabilities(self) -> Rates:
        """Probability of each prompt to be the next one that is drawn."""
        options, rates = self._options, self.success_rates
        weights = learnability(self.successes, self.failures, target=options.target)
        weights[(rates <= options.hopeless) | (rates >= options.solved)] = 0.0
        probabilities = torch.empty_like(weights)
        for _, rows, share in self._sources:
            own, uniform = weights[rows], 1 / len(rows)
            total = math.fsum(own.tolist())  # the same for any number of threads
            # a source whose prompts are all retired keeps its share
            learnable = own / total if total else uniform
            mixed = (1 - options.exploration) * learnable + options.exploration * uniform
            probabilities[rows] = share * mixed
        return probabilities / sum(source.weight for source in self._sources)

    def draw(self, number: int, count: int) -> list[int]:
        """Draw the prompts of batch ``number``, one after the other without replacement.

        Any first part of them is such a draw too.

        Reference:
            Efraimidis and Spirakis 2006, https://doi.org/10.1016/j.ipl.2005.11.003
        """
        generator = np.random.default_rng([self._seed, _STREAM, number])
        waits = torch.from_numpy(generator.exponential(size=len(self.successes)))
        drawn: list[int] = (waits / self.probabilities()).argsort(stable=True)[:count].tolist()
        return drawn

    def observe(self, scores: Mapping[int, Float[Tensor, " G"]]) -> None:
        """Update the posteriors by one iteration.

        Args:
            scores: Of the responses to each prompt that was answered, by its index.

        Raises:
            ValueError: A score says neither success nor failure.
        """
        counted = {row: self._options.count(group) for row, group in scores.items()}
        kept = 0.5 ** (1 / self._options.half_life)
        self.successes *= kept
        self.failures *= kept
        for row, (successes, failures) in counted.items():
            self.successes[row] += successes
            self.failures[row] += failures

    def metrics(self) -> dict[str, float]:
        """Summarise the pool under the names of logged metrics."""
        rates, probabilities = self.success_rates, self.probabilities()
        seen = self.successes + self.failures > 0
        summary = {
            "prompts/effective": float(1 / probabilities.square().sum()),
            "prompts/solved": float((rates >= self._options.solved).sum()),
            "prompts/hopeless": float((rates <= self._options.hopeless).sum()),
            "prompts/unseen": float((~seen).sum()),
        }
        named = [(f"/{source.name}", source.rows) for source in self._sources if source.name]
        for name, rows in (("", torch.arange(len(rates))), *named):
            if seen[rows].any():
                summary[f"prompts/success_rate{name}"] = float(rates[rows][seen[rows]].mean())
        return summary


class AdaptiveLoader(TrainLoader[RowT, BatchT]):
    """Train batches of one rank, drawn as `AdaptivePrompts` describes.

    Batch ``s`` is drawn when it is first needed, for all ranks alike, and stays what it is. With
    generation ahead that is before the batches in between were scored. The state has the posteriors
    and the batches that were drawn ahead.

    Args:
        rows: All rows, with columns.
        order: Has the rows of each source, and their weights.
        batch_size: Rows per batch and rank.
        adaptive: How to draw.
        **options: Those of `TrainLoader`.

    Raises:
        ValueError: The sources of the rows are not those that have weights.
    """

    draws_epochs = False

    def __init__(
        self,
        rows: Sequence[RowT],
        order: Order,
        batch_size: int,
        *,
        adaptive: AdaptivePrompts,
        **options: Any,
    ) -> None:
        super().__init__(rows, order, batch_size, **options)
        assert isinstance(order, EpochOrder)
        self.pool = PromptPool(adaptive, _sources_of(rows, order, adaptive), order.seed)
        self._drawn: dict[int, list[int]] = {}

    def _rest_of_epoch(self, number: int) -> list[list[int]]:
        """Return the rows of batch ``number`` alone: those behind it depend on its scores."""
        if number not in self._drawn:
            last = self._done - 1  # is still to be observed
            self._drawn = {key: rows for key, rows in self._drawn.items() if key >= last}
            self._drawn[number] = self.pool.draw(number, self.batch_size * self._ranks.world)
        start = self._ranks.rank * self.batch_size
        return [self._drawn[number][start : start + self.batch_size]]

    def observe(
        self, scores: Float[Tensor, "P G"], gather: Callable[[Any], list[Any]]
    ) -> dict[str, float]:
        """Update the posteriors by the responses to the last batch.

        Args:
            scores: Of the responses to its first P prompts on this rank; NaN: unscorable.
            gather: Returns the values of all ranks.

        Returns:
            Metrics, the same on every rank.

        Raises:
            ValueError: A score says neither success nor failure.
        """
        (rows,) = self._rest_of_epoch(self._done - 1)
        own = dict(zip(rows, scores.cpu(), strict=False))  # the first ones were answered
        self.pool.observe({row: group for part in gather(own) for row, group in part.items()})
        return self.pool.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return position, digests, posteriors, and the batches that were drawn ahead."""
        prompts = {
            "successes": self.pool.successes.clone(),
            "failures": self.pool.failures.clone(),
            "drawn": {key: rows for key, rows in self._drawn.items() if key >= self._done},
        }
        return {**super().state_dict(), "prompts": prompts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; see `TrainLoader.load_state_dict`."""
        super().load_state_dict(state)
        prompts, own = state.get("prompts"), super().state_dict()
        if prompts is None or any(state.get(name) != own.get(name) for name in ("rows", "data")):
            logger.warning("the checkpoint has no success rates of these prompts: they start anew")
            return
        self.pool.successes = prompts["successes"].clone()
        self.pool.failures = prompts["failures"].clone()
        size = self.batch_size * self._ranks.world
        # of another size they are drawn again
        self._drawn = {key: rows for key, rows in prompts["drawn"].items() if len(rows) == size}


def _sources_of(
    rows: Sequence[Any], order: EpochOrder, adaptive: AdaptivePrompts
) -> list[PromptSource]:
    """Return the sources of the rows."""
    column, shares = adaptive.source_column, adaptive.source_weights
    if shares is None:
        weighted = zip(order.members, order.weights or (), strict=False)
        sources = [PromptSource("", torch.tensor(rows), weight) for rows, weight in weighted]
        return sources or [PromptSource("", torch.arange(len(order)), 1.0)]
    if order.weights is not None:
        raise ValueError(
            "data.train has weights of its sources, and prompt_sampler.source_weights has others: "
            "drop one of the two"
        )
    named: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        named.setdefault(str(row.columns.get(column)), []).append(index)
    if named.keys() != shares.keys():
        raise ValueError(
            f"prompt_sampler.source_weights names {', '.join(sorted(shares))}, and the column "
            f"{column!r} of the train data has {', '.join(sorted(named))}: give each source of "
            "the data a weight"
        )
    return [PromptSource(name, torch.tensor(own), shares[name]) for name, own in named.items()]
