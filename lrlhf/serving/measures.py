"""What ``GET /metrics`` tells, in the text format of Prometheus."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Measures:
    """Counters of one service; several in a process do not share them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = {"namespace": "lrlhf", "subsystem": "reward", "registry": self._registry}
        counter, histogram = partial(Counter, **own), partial(Histogram, **own)
        self.requests = counter("requests", "Requests by path and status.", ["path", "status"])
        self.rejected = counter("rejected", "Requests without an answer, by reason.", ["reason"])
        self.latency = histogram(
            "request_seconds",
            "From the head of a scoring request to the end of its answer.",
            buckets=_SECONDS,
        )
        self.scoring = histogram(
            "scoring_seconds", "Time of the model per batch.", buckets=_SECONDS
        )
        self.batches = histogram(
            "batch_items", "Responses that were scored together.", buckets=_ITEMS
        )
        self.items = counter("items", "Responses that were scored.")
        self.unscored = counter(
            "unscored_items", "Responses that got null: too long, or no finite score."
        )
        self.waiting = Gauge("queue_requests", "Requests that are read, wait or are scored.", **own)

    def text(self) -> bytes:
        """Return all values as Prometheus reads them."""
        return generate_latest(self._registry)
