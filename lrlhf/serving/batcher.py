"""The queue in front of the model, and the one thread that asks it."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from lrlhf.serving.limits import QueueOptions
from lrlhf.serving.measures import Measures
from lrlhf.serving.places import Place, Places
from lrlhf.serving.score_request import ScoreRequest
from lrlhf.serving.scorer import Part, Scorer, Scores, Served

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 10.0


class _Job:
    """A request that waits, in the parts that it is scored in."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = collections.deque(parts)
        self.scores: Scores = []
        self.future: Future[Scores] = Future()


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
        self.places = Places(options, measures, self._changed)
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
            if self._thread is None and not self.places.closing:
                # a daemon: a reward that hangs must not keep the process alive
                self._thread = threading.Thread(target=self._run, name="reward-model", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Score what waits, and end the thread."""
        with self._changed:
            self.places.closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def submit(self, request: ScoreRequest, place: Place) -> Future[Scores]:
        """Have a request scored.

        Returns:
            Its scores, or a `RefusedRequestError`. Where it is cancelled nothing of the request is
            kept, and what is left of it is not scored.
        """
        job = _Job(self._scorer.parts(request))
        with self._changed:
            place.being_read = False
            if place.left:
                job.future.cancel()
            else:
                self._jobs.append(job)
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
            while True:
                while not self._jobs and not self.places.closing:
                    self._changed.wait()
                if not self._jobs:
                    return {}
                self._wait_for_others()
                if jobs := self._taken():
                    return {job: job.parts.popleft().request for job in jobs}

    def _wait_for_others(self) -> None:
        """Wait a little for what is being read, unless there is enough for a batch."""
        until = time.monotonic() + self._options.max_wait_ms / 1e3
        while self.places.being_read and not self.places.closing:
            items = sum(len(job.parts[0].request) for job in self._jobs)
            remaining = until - time.monotonic()
            if items >= self._options.max_batch_size or remaining <= 0:
                return
            self._changed.wait(remaining)

    def _taken(self) -> list[_Job]:
        """Take those whose next parts are scored together.

        The request with the fewest parts left leads, so that a long one holds nobody up, and every
        second time the one that came first, so that it is not held up for ever itself.
        """
        if not self._jobs:  # they were given up in the meantime
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
