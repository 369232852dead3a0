"""The requests that the service holds, and the one thread that asks the model about them."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import inspect
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lrlhf.apps.serve.score_request import QueueOptions, ScoreRequest
from lrlhf.rewards import LearnedReward, RewardError, RewardFunction
from lrlhf.rewards.dispatch import Call, Dispatcher, is_async
from lrlhf.rewards.learned import TextMarks
from lrlhf.rewards.lookup import bind_functions, chosen_arguments, filled_by_python
from lrlhf.rewards.reward_values import Journal, check_values
from lrlhf.web import RefusedRequestError, log_defect

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
        duration = "From the head of a scoring request to the end of its answer."
        self.latency = Histogram("request_seconds", duration, **seconds)
        self.scoring = Histogram("scoring_seconds", "Time of the model per batch.", **seconds)
        together = "Responses that were scored together."
        self.batches = Histogram("batch_items", together, buckets=_ITEMS, **own)
        self.items = Counter("items", "Responses that were scored.", **own)
        unscored = "Responses that got null: too long, or no finite score."
        self.unscored = Counter("unscored_items", unscored, **own)
        in_service = "Requests that are read, wait or are scored."
        self.waiting = Gauge("queue_requests", in_service, **own)

    def text(self) -> bytes:
        """Return all values as Prometheus reads them."""
        return generate_latest(self._registry)


logger = logging.getLogger(__name__)

Scores = list[float | None]

_PART_COST = 200_000
"""Letters that are scored before others have their turn: a fraction of a second of a tokenizer."""


class Served(NamedTuple):
    """What a service says of itself once its model is there."""

    model: str
    version: str
    """Changes with everything that scores depend on."""
    heads: tuple[str, ...]
    """Of the model; a reward function has one."""
    head: str
    """The one that is served."""
    marks: TextMarks


class ScoreBatch(NamedTuple):
    """Rows of a request that are scored at once."""

    request: ScoreRequest
    cost: int
    """Letters, or what takes as long; 0 where only the function knows."""


class Scorer:
    """Scores requests with one reward function.

    Args:
        function: Trained model or any other reward function, see `lrlhf.rewards.RewardFunction`.
            It is asked in one thread only, the one that loads it.
        name: What clients are told as the model; None: the model's source, or the function's name.
            As its version they are told a fingerprint of the model's weights and settings, or for
            other functions one of their name and of this library's version.

    Raises:
        ValueError: It is no reward function.
    """

    def __init__(
        self, function: RewardFunction | Callable[..., Any] | str, *, name: str | None = None
    ) -> None:
        self._bound = bind_functions([function])[0]
        token_ids = inspect.signature(self._bound.function).parameters.get("completion_ids")
        if token_ids is not None and token_ids.default is inspect.Parameter.empty:
            raise ValueError(
                f"reward function {self._bound.name!r} reads the token ids of responses, which are "
                "the policy's own and are not sent to a service: use it in the run itself"
            )
        self._name = name
        self._dispatcher = Dispatcher(timeout=None)
        self._is_learned = isinstance(self._bound.function, LearnedReward)

    def load(self) -> Served:
        function = self._bound.function
        if isinstance(function, RewardFunction):
            function.prepare()
        if isinstance(function, LearnedReward):
            facts = function.describe()
            name = self._name or facts.source
            return Served(name, facts.fingerprint, facts.heads, facts.head, facts.marks)
        own = self._bound.name
        fingerprint = hashlib.blake2b(
            f"{own}\n{version('lrlhf')}".encode(), digest_size=8
        ).hexdigest()
        return Served(self._name or own, fingerprint, (own,), own, TextMarks())

    def parts(self, request: ScoreRequest) -> list[ScoreBatch]:
        """Split a request that others would wait long for, if its rows are scored one by one."""
        if not self._is_learned:
            return [ScoreBatch(request, 0)]
        parts: list[ScoreBatch] = []
        start = cost = 0
        for row in range(len(request)):
            one = request.cost(row)
            if row > start and cost + one > _PART_COST:
                parts.append(ScoreBatch(request.rows(start, row), cost))
                start, cost = row, 0
            cost += one
        return [*parts, ScoreBatch(request.rows(start, len(request)), cost)]

    def fits(self, one: ScoreBatch, other: ScoreBatch, cost: int) -> bool:
        """Whether parts of two requests can be scored together, with others of this cost in all."""
        if self._is_learned:
            return cost <= _PART_COST
        return one.request.columns.keys() == other.request.columns.keys()

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores | Exception]:
        """Score the rows of several requests together.

        Returns:
            Per request one score per response, None where there is none; or why it has no scores,
            which is no other request's fault.
        """
        if len(requests) > 1:
            try:
                return list(self._together(requests))
            except Exception as error:  # noqa: BLE001  one of them: asked again, each by itself
                logger.debug("%d requests are scored again: %s", len(requests), type(error))
        return [self._alone(request) for request in requests]

    def _alone(self, request: ScoreRequest) -> Scores | Exception:
        try:
            return self._together([request])[0]
        except RewardError as error:
            return RefusedRequestError(str(error), reason="refused by the reward")
        except torch.OutOfMemoryError:
            return RefusedRequestError(
                "out of memory: send fewer or shorter responses at once",
                status=503,
                reason="out of memory",
                retry_after=5,
            )
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told
            log_defect("the reward raised", error)
            return RefusedRequestError(
                f"the reward failed with {type(error).__name__}; the service's log says where",
                status=500,
                reason="reward failed",
            )

    def _together(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        sizes = [len(request) for request in requests]
        returned = self._ask(requests) if any(sizes) else []
        try:
            checked = check_values(returned, function=self._bound.name, rows=range(sum(sizes)))
        except RewardError as error:  # the function's fault, not the client's
            raise RuntimeError(str(error)) from error
        flat = iter([None if math.isnan(value) else value for value in checked.values])
        return [list(itertools.islice(flat, size)) for size in sizes]

    def _ask(self, requests: Sequence[ScoreRequest]) -> Any:
        function = self._bound.function
        if isinstance(function, RewardFunction):
            function.prepare()
        journal = Journal(sum(len(request) for request in requests))
        logs = {"log_metric": journal.log_metric, "log_extra": journal.log_extra}
        keywords = _joined(requests) | ({} if self._is_learned else self._columns(requests)) | logs
        arguments = chosen_arguments(
            self._bound.name, inspect.signature(function), keywords, filled_by_python(function)
        )
        call = Call(self._bound.name, function, arguments)
        if not is_async(function):
            try:
                return function(**call.arguments)
            except (SystemExit, KeyboardInterrupt) as error:  # would end the one scoring thread
                raise RuntimeError(f"it raised {type(error).__name__}") from error
        (outcome,) = self._dispatcher.run([call])
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _columns(self, requests: Sequence[ScoreRequest]) -> dict[str, Any]:
        names = set.intersection(*(set(request.columns) for request in requests))
        return {
            name: [value for request in requests for value in request.columns[name]]
            for name in names
        }


def _joined(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Return what every reward function may read of the rows of all requests."""
    arguments: dict[str, Any] = {
        "prompts": [prompt for request in requests for prompt in request.prompts],
        "completions": [text for request in requests for text in request.completions],
    }
    for kind in ("images", "videos"):
        media = [getattr(each, kind) or [()] * len(each) for each in requests]
        if any(row for rows in media for row in rows):
            arguments[kind] = list(itertools.chain.from_iterable(media))
    return arguments


_CLOSE_SECONDS: Final = 10.0
_LIGHT: Final = 250_000
"""Bytes of a body that is taken whatever the others weigh."""


_SLOW: Final = 100_000
"""Bytes per second; a heavy body that comes more slowly makes room for others."""
_GRACE_SECONDS: Final = 2.0


@dataclass(eq=False)
class ActiveRequest:
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

    def __init__(self, parts: Sequence[ScoreBatch]) -> None:
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
        self.places: set[ActiveRequest] = set()
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
    def entered(self) -> Iterator[ActiveRequest]:
        """Hold a request from its head to its answer.

        A body that is still to come takes no place in the queue: clients that send slowly, or stop
        in the middle, keep nobody out.
        """
        active = ActiveRequest()
        with self._changed:
            if self._closing:
                raise RefusedRequestError(
                    "the service ends", status=503, reason="closing", retry_after=5
                )
            self.places.add(active)
            self._measures.waiting.set(len(self.places))
        try:
            yield active
        finally:
            with self._changed:
                self.places.remove(active)
                self._measures.waiting.set(len(self.places))

    def weigh(self, active: ActiveRequest, weight: int) -> None:
        """Note how many bytes of a body have come; if all are too heavy, one gives way.

        That is the heavy one that lies furthest behind the least speed, and if none does this one.
        """
        with self._changed:
            active.note(weight)
            while weight > _LIGHT:
                heavy = [each for each in self.places if each.weight > _LIGHT]
                total = sum(each.weight for each in heavy)
                if len(heavy) == 1 or total <= self._options.max_queue_mb * 1e6:
                    return
                slow = [each for each in heavy if each is not active and each.is_slow()]
                if not slow:
                    raise _full(len(heavy), "max_queue_mb")
                min(slow, key=lambda each: each.paid_until).make_room()

    def queue(self, active: ActiveRequest) -> None:
        """Give a request whose body is there its place in the queue, or refuse it."""
        with self._changed:
            waiting = sum(each.has_arrived for each in self.places)
            if waiting >= self._options.max_queue:
                raise _full(waiting, "max_queue")
            active.has_arrived = True

    def submit(self, request: ScoreRequest, active: ActiveRequest) -> Future[Scores]:
        """Have a request scored.

        Returns:
            Its scores, or a `RefusedRequestError`. Where it is cancelled nothing of the request is
            kept, and what is left of it is not scored.
        """
        job = _Job(self._scorer.parts(request))
        with self._changed:
            if active in self.places:
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
