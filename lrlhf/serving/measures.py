"""What ``GET /metrics`` tells, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Measures:
    """Counters of one service; several in a process do not share them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "lrlhf_reward_requests",
            "Requests by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self.rejected = Counter(
            "lrlhf_reward_rejected",
            "Requests without an answer, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.latency = Histogram(
            "lrlhf_reward_request_seconds",
            "From the head of a scoring request to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.scoring = Histogram(
            "lrlhf_reward_scoring_seconds",
            "Time of the model per batch.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.batches = Histogram(
            "lrlhf_reward_batch_items",
            "Responses that were scored together.",
            buckets=_ITEMS,
            registry=self.registry,
        )
        self.items = Counter(
            "lrlhf_reward_items", "Responses that were scored.", registry=self.registry
        )
        self.unscored = Counter(
            "lrlhf_reward_unscored_items",
            "Responses that got null: too long, or no finite score.",
            registry=self.registry,
        )
        self.waiting = Gauge(
            "lrlhf_reward_queue_requests",
            "Requests that are read, wait or are scored.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return all values as Prometheus reads them."""
        return generate_latest(self.registry)
