"""Has services score responses part by part, and tells what they left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from lrlhf.rewards.function import LogMetric, PartialValues
from lrlhf.rewards.remote.service_client import Calls, ServiceClient, ServicesDownError, all_of

PartT = TypeVar("PartT")


async def scores_of_parts(
    client: ServiceClient,
    parts: Sequence[tuple[PartT, int]],
    ask: Callable[[Calls, PartT], Awaitable[Sequence[float | None] | None]],
    log_metric: LogMetric,
    *,
    name: str,
) -> list[float | None]:
    """Score all parts side by side.

    Args:
        client: Of the services.
        parts: Each with the number of its responses.
        ask: Returns the scores of a part; None: no service gave any.
        log_metric: Told latencies, retries and failures.
        name: Before the names of these metrics.

    Returns:
        One score per response, in order; `PartialValues` where a part has none.

    Raises:
        ServicesDownError: No part has any.
    """
    async with client.calls() as calls:
        answers = await all_of([ask(calls, part) for part, _ in parts])
    for seconds in calls.latencies:
        log_metric(f"{name}/latency_s", seconds)
    sizes = [size for _, size in parts]
    unanswered = sum(size for size, answer in zip(sizes, answers, strict=True) if answer is None)
    log_metric(f"{name}/retries", calls.retries)
    log_metric(f"{name}/failures", unanswered)
    scores = list(
        itertools.chain.from_iterable(
            [math.nan] * size if answer is None else answer
            for size, answer in zip(sizes, answers, strict=True)
        )
    )
    if not unanswered:
        return scores
    failure = (
        f"no reward service scored {unanswered} of {len(scores)} responses: "
        f"{client.services.complaints()}"
    )
    if unanswered == len(scores):
        raise ServicesDownError(failure)
    return PartialValues(scores, failure)
