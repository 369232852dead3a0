"""The requests that the service holds, and the one thread that asks the model about them."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from lrlhf.apps.serve.limits import QueueOptions
from lrlhf.apps.serve.measures import Measures
from lrlhf.apps.serve.score_request import ScoreRequest
from lrlhf.apps.serve.scoring import Part, Scorer, Scores, Served
from lrlhf.web import RefusedRequestError

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 10.0
_LIGHT: Final = 250_000
"""Bytes of a body that is taken whatever the others weigh."""


_SLOW: Final = 100_000
"""Bytes per second; a heavy body that comes more slowly makes room for others."""
_GRACE_SECONDS: Final = 2.0


@dataclass(eq=False)
class Place:
    """A request in the service, from its head to its answer."""

    leave: Callable[[], None] = lambda: None
    """Ends the reading of the body."""
    weight: int = 0
    """Bytes of the body so far."""
    has_arrived: bool = False
    """All of it is there."""
    made_room: bool = False
    """It was given up for others, as its body came too slowly."""
    paid_until: float = field(default_factory=time.monotonic)
    """When the bytes so far would have come at the least speed; not later than the last of them."""

    def note(self, weight: int) -> None:
        """Note how many bytes of the body have come."""
        paid_until = self.paid_until + (weight - self.weight) / _SLOW
        self.paid_until = min(paid_until, time.monotonic())
        self.weight = weight

    def is_slow(self) -> bool:
        """Whether its body takes longer to arrive than others should wait for."""
        return not self.has_arrived and time.monotonic() > self.paid_until + _GRACE_SECONDS

    def make_room(self) -> None:
        """Give the request up for others."""
        self.weight, self.made_room = 0, True
        self.leave()


class _Job:
    """A request that waits, in the parts that it is scored in."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = collections.deque(parts)
        self.scores: Scores = []
        self.future: Future[Scores] = Future()


class Batcher:
    """Scores requests that are there at the same time together, in one thread that loads too."""

    def __init__(self, scorer: Scorer, options: QueueOptions, measures: Measures) -> None:
        self._scorer = scorer
        self._options = options
        self._measures = measures
        self._changed = threading.Condition()
        self.places: set[Place] = set()
        self._closing = False
        self._jobs: list[_Job] = []
        self._oldest_first = False
        self._thread: threading.Thread | None = None
        self.served: Served | None = None
        """What is served; None: it is not loaded yet."""
        self.failure: BaseException | None = None
        """Why it could not be loaded."""

    def start(self) -> None:
        """Start to load the model; does nothing when that was done before."""
        with self._changed:
            if self._thread is None and not self._closing:
                # a daemon: a reward that hangs must not keep the process alive
                self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Score what waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    @contextlib.contextmanager
    def entered(self) -> Iterator[Place]:
        """Hold a request from its head to its answer.

        A body that is still to come takes no place in the queue: clients that send slowly, or stop
        in the middle, keep nobody out.
        """
        place = Place()
        with self._changed:
            if self._closing:
                raise RefusedRequestError(
                    "the service ends", status=503, reason="closing", retry_after=5
                )
            self.places.add(place)
            self._measures.waiting.set(len(self.places))
        try:
            yield place
        finally:
            with self._changed:
                self.places.remove(place)
                self._measures.waiting.set(len(self.places))

    def weigh(self, place: Place, weight: int) -> None:
        """Note how many bytes of a body have come; if all are too heavy, one gives way.

        That is the heavy one that lies furthest behind the least speed, and if none does this one.
        """
        with self._changed:
            place.note(weight)
            while weight > _LIGHT:
                heavy = [each for each in self.places if each.weight > _LIGHT]
                total = sum(each.weight for each in heavy)
                if len(heavy) == 1 or total <= self._options.max_queue_mb * 1e6:
                    return
                slow = [each for each in heavy if each is not place and each.is_slow()]
                if not slow:
                    raise _full(len(heavy), "max_queue_mb")
                min(slow, key=lambda each: each.paid_until).make_room()

    def queue(self, place: Place) -> None:
        """Give a request whose body is there its place in the queue, or refuse it."""
        with self._changed:
            waiting = sum(each.has_arrived for each in self.places)
            if waiting >= self._options.max_queue:
                raise _full(waiting, "max_queue")
            place.has_arrived = True

    def submit(self, request: ScoreRequest, place: Place) -> Future[Scores]:
        """Have a request scored.

        Returns:
            Its scores, or a `RefusedRequestError`. Where it is cancelled nothing of the request is
            kept, and what is left of it is not scored.
        """
        job = _Job(self._scorer.parts(request))
        with self._changed:
            if place in self.places:
                self._jobs.append(job)
            else:  # it was given up while its media were decoded
                job.future.cancel()
            self._changed.notify_all()
        job.future.add_done_callback(lambda _: self._drop(job))
        return job.future

    def _drop(self, job: _Job) -> None:
        with self._changed:
            job.parts.clear()
            if job in self._jobs:
                self._jobs.remove(job)

    def _run(self) -> None:
        try:
            self.served = self._scorer.load()
        except BaseException as error:  # noqa: BLE001  whatever it is, the server is told
            logger.error("what is to be served could not be loaded: %s", error)
            self.failure = error
            return
        while jobs := self._next_batch():
            self._score(jobs)

    def _score(self, jobs: dict[_Job, ScoreRequest]) -> None:
        started = time.perf_counter()
        results = self._scorer.score(list(jobs.values()))
        self._measures.scoring.observe(time.perf_counter() - started)
        self._measures.batches.observe(sum(map(len, jobs.values())))
        for job, result in zip(jobs, results, strict=True):
            self._go_on(job, result)
        jobs.clear()  # media are not kept while the next ones are waited for

    def _go_on(self, job: _Job, result: Scores | Exception) -> None:
        if not isinstance(result, Exception):
            job.scores += result
            if job.parts:
                with self._changed:
                    if not job.future.cancelled():
                        self._jobs.append(job)
                return
        if not job.future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            job.future.set_exception(result)
            return
        self._measures.items.inc(len(job.scores))
        self._measures.unscored.inc(job.scores.count(None))
        job.future.set_result(job.scores)

    def _next_batch(self) -> dict[_Job, ScoreRequest]:
        """Wait for requests, and take the rows that are scored next; none: the service ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            return {job: job.parts.popleft().request for job in self._taken()}

    def _taken(self) -> list[_Job]:
        """Take those whose next parts are scored together.

        The request with the fewest parts left leads, so that a long one holds nobody up, and every
        second time the one that came first, so that it is not held up for ever itself.
        """
        if not self._jobs:  # the service ends
            return []
        self._oldest_first = not self._oldest_first
        first = min(self._jobs, key=lambda job: 0 if self._oldest_first else len(job.parts))
        jobs, part = [first], first.parts[0]
        items, cost = len(part.request), part.cost
        for job in self._jobs:
            other = job.parts[0]
            items_with, cost_with = items + len(other.request), cost + other.cost
            if (
                job is not first
                and items_with <= self._options.max_batch_size
                and self._scorer.fits(part, other, cost_with)
            ):
                jobs.append(job)
                items, cost = items_with, cost_with
        self._jobs = [job for job in self._jobs if job not in jobs]
        return jobs


def _full(count: int, limit: str) -> RefusedRequestError:
    return RefusedRequestError(
        f"{count} requests wait already: try again, or raise the service's {limit}",
        status=429,
        reason="queue full",
        retry_after=1,
    )
