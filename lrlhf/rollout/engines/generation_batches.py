"""Which responses are generated together, so that none depends on the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from transformers import PreTrainedModel

from lrlhf.models import ruled_out_ids
from lrlhf.models.modes import ModelRefusalError, refusals
from lrlhf.models.sharding import device_of
from lrlhf.rollout.responses import untold_prompts
from lrlhf.types import PromptBatch


class Batching(Enum):
    """What may go through a model at the same time, the fastest first."""

    TOGETHER = "batches of any prompts"
    EQUAL_LENGTHS = "batches of prompts of equal length"
    """For recurrent states and convolutions that read the padding on the left."""
    SINGLE = "batches of one response"
    """For models that mix the rows of a batch."""


class Way(NamedTuple):
    """How responses are generated."""

    shares_prompts: bool = False
    """Whether a prompt is computed once for all of its responses."""
    batching: Batching = Batching.TOGETHER
    exact: bool = True
    """Whether it gives the log-probabilities of a forward pass."""
    reason: str | None = None
    """Why a faster way is not taken, or why none is exact; None: the fastest is."""


def parts(
    lengths: Sequence[int],
    *,
    num_generations: int,
    prompts_at_once: Callable[[], int],
    batching: Batching,
) -> Iterator[tuple[list[int], list[int]]]:
    """Divide the responses to some prompts.

    Args:
        lengths: Tokens of each prompt.
        num_generations: Responses to each.
        prompts_at_once: Says how many at most, each time; a single response ignores it.
        batching: What may go together.

    Yields:
        Prompts and responses that go together, by number; as many of each prompt.
    """
    if batching is Batching.SINGLE:
        for response in range(len(lengths) * num_generations):
            yield [response // num_generations], [response]
        return
    groups: dict[int, list[int]] = {}
    for prompt, length in enumerate(lengths):
        key = length if batching is Batching.EQUAL_LENGTHS else 0
        groups.setdefault(key, []).append(prompt)
    for group in groups.values():
        while group:
            most = prompts_at_once()
            chosen, group = group[:most], group[most:]
            copies = range(num_generations)
            yield chosen, [one * num_generations + copy for one in chosen for copy in copies]


def best_way(gap_of: Callable[[Way], float], *, limit: float) -> Way:
    """Find the fastest way that is exact; where none is, the fastest of those that come close.

    Args:
        gap_of: Mean distance in nats between a way's log-probabilities and a forward pass's.
        limit: Up to which a way is exact.

    Raises:
        ModelRefusalError: The model cannot generate at all.
    """
    gaps: dict[Way, float] = {}
    reasons: list[str] = []
    for way in (Way(shares_prompts=True), *(Way(batching=one) for one in Batching)):
        try:
            with refusals():
                gap = gap_of(way)
        except ModelRefusalError as error:
            if not way.shares_prompts:
                raise
            reasons.append(f"it refuses a copied cache ({error})")
            continue
        # what is not finite is the guard's to report, and no way is better than another
        gaps[way] = gap if math.isfinite(gap) else math.inf
        if gap <= limit:
            break
        reasons.append(f"log-probabilities were {gap:.2g} nats off on average")
    best = min(gaps.values())
    # what helps little need not slow it down
    way, gap = next((way, gap) for way, gap in gaps.items() if gap <= 2 * best)
    return way._replace(exact=gap <= limit, reason=reasons[0] if reasons else None)


def trial_prompts(model: PreTrainedModel) -> PromptBatch:
    """Return a few prompts of unequal lengths, padded on the left."""
    known = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    marks = set(ruled_out_ids(model.config))
    ids = [token for token in range(min(known, 64)) if token not in marks]
    ids *= math.ceil(9 / len(ids))  # a toy has fewer
    return untold_prompts([ids[-6:], ids[-9:-6], ids[-1:]]).to(device_of(model))
