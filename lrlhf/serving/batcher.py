"""The queue in front of the model, and the one thread that asks it."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final, NamedTuple

from lrlhf.serving.limits import QueueOptions
from lrlhf.serving.measures import Measures
from lrlhf.serving.refused import RefusedRequestError
from lrlhf.serving.score_request import ScoreRequest
from lrlhf.serving.scorer import Scorer, Scores, Served

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 10.0


class _Job(NamedTuple):
    request: ScoreRequest
    future: Future[Scores]


class Ticket:
    """A request's place in the service, from its head to its answer."""

    def __init__(self) -> None:
        self.being_read = True


class Batcher:
    """Scores requests that are there at the same time together.

    Args:
        scorer: Loaded in this object's thread, and asked there.
        options: How many are scored together, and how many may wait.
        measures: Told of every batch.
    """

    def __init__(self, scorer: Scorer, options: QueueOptions, measures: Measures) -> None:
        self._scorer = scorer
        self._options = options
        self._measures = measures
        self._changed = threading.Condition()
        self._jobs: collections.deque[_Job] = collections.deque()
        self._admitted = 0
        self._being_read = 0
        self._closing = False
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
    def admitted(self) -> Iterator[Ticket]:
        """Hold a place from the head of a request to its answer.

        Raises:
            RefusedRequestError: All places are taken, or the service ends.
        """
        ticket = self._admit()
        try:
            yield ticket
        finally:
            with self._changed:
                self._admitted -= 1
                self._measures.waiting.set(self._admitted)
                self._leave_reading(ticket)

    def submit(self, request: ScoreRequest, ticket: Ticket) -> Future[Scores]:
        """Have a request scored.

        Returns:
            Its scores, or a `RefusedRequestError`; may be cancelled while it waits.
        """
        job = _Job(request, Future())
        with self._changed:
            self._jobs.append(job)
            self._leave_reading(ticket)
        return job.future

    def _admit(self) -> Ticket:
        with self._changed:
            if self._closing:
                raise RefusedRequestError(
                    "the service ends", status=503, reason="closing", retry_after=5
                )
            if self._admitted >= self._options.max_queue:
                raise RefusedRequestError(
                    f"{self._admitted} requests wait already: try again, or raise the service's "
                    "max_queue",
                    status=429,
                    reason="queue full",
                    retry_after=1,
                )
            self._admitted += 1
            self._being_read += 1
            self._measures.waiting.set(self._admitted)
        return Ticket()

    def _leave_reading(self, ticket: Ticket) -> None:
        if ticket.being_read:
            ticket.being_read = False
            self._being_read -= 1
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            self.served = self._scorer.load()
        except BaseException as error:  # noqa: BLE001  whatever it is, the server is told
            logger.error("what is to be served could not be loaded: %s", error)
            self.failure = error
            return
        while jobs := self._next_batch():
            started = time.perf_counter()
            results = self._scorer.score([job.request for job in jobs])
            self._measures.scoring.observe(time.perf_counter() - started)
            self._measures.batches.observe(sum(len(job.request) for job in jobs))
            for job, result in zip(jobs, results, strict=True):
                self._settle(job, result)

    def _settle(self, job: _Job, result: Scores | Exception) -> None:
        if isinstance(result, Exception):
            job.future.set_exception(result)
            return
        self._measures.items.inc(len(result))
        self._measures.unscored.inc(result.count(None))
        job.future.set_result(result)

    def _next_batch(self) -> list[_Job]:
        """Wait for requests; none: the service has ended."""
        with self._changed:
            while True:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if not self._jobs:
                    return []
                self._wait_for_others()
                if jobs := self._taken():
                    return jobs

    def _wait_for_others(self) -> None:
        """Wait a little for what is being read, unless there is enough for a batch."""
        until = time.monotonic() + self._options.max_wait_ms / 1e3
        while self._being_read and not self._closing:
            items = sum(len(job.request) for job in self._jobs)
            remaining = until - time.monotonic()
            if items >= self._options.max_batch_size or remaining <= 0:
                return
            self._changed.wait(remaining)

    def _taken(self) -> list[_Job]:
        """Take what is scored together, the longest waiting first; what was given up is dropped."""
        jobs: list[_Job] = []
        left: list[_Job] = []
        items = 0
        while self._jobs:
            job = self._jobs.popleft()
            room = items + len(job.request) <= self._options.max_batch_size
            if jobs and not (room and self._scorer.fits(jobs[0].request, job.request)):
                left.append(job)
            elif job.future.set_running_or_notify_cancel():
                jobs.append(job)
                items += len(job.request)
        self._jobs.extend(left)
        return jobs
