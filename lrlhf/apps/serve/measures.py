"""What ``GET /metrics`` tells, in the text format of Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Measures:
    """Counters of one service; several in a process do not share them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "lrlhf_reward", "registry": self._registry}
        seconds: dict[str, Any] = {"buckets": _SECONDS, **own}
        paths = ["path", "status"]
        self.requests = Counter("requests", "Requests by path and status.", paths, **own)
        self.rejected = Counter("rejected", "Requests without an answer.", ["reason"], **own)
        told = "From the head of a scoring request to the end of its answer."
        self.latency = Histogram("request_seconds", told, **seconds)
        self.scoring = Histogram("scoring_seconds", "Time of the model per batch.", **seconds)
        together = "Responses that were scored together."
        self.batches = Histogram("batch_items", together, buckets=_ITEMS, **own)
        self.items = Counter("items", "Responses that were scored.", **own)
        unscored = "Responses that got null: too long, or no finite score."
        self.unscored = Counter("unscored_items", unscored, **own)
        held = "Requests that are read, wait or are scored."
        self.waiting = Gauge("queue_requests", held, **own)

    def text(self) -> bytes:
        """Return all values as Prometheus reads them."""
        return generate_latest(self._registry)
