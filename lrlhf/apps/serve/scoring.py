"""A reward function as the service calls it: rows of several requests at once."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from lrlhf.apps.serve.score_request import ScoreRequest
from lrlhf.rewards import LearnedReward, RewardError, RewardFunction
from lrlhf.rewards.dispatch import Call, Dispatcher, is_async
from lrlhf.rewards.learned import TextMarks
from lrlhf.rewards.lookup import bind_functions, chosen_arguments, filled_by_python
from lrlhf.rewards.reward_values import Journal, check_values
from lrlhf.web import RefusedRequestError, log_defect

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


class Part(NamedTuple):
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
        taken = inspect.signature(self._bound.function).parameters.get("completion_ids")
        if taken is not None and taken.default is inspect.Parameter.empty:
            raise ValueError(
                f"reward function {self._bound.name!r} reads the token ids of responses, which are "
                "the policy's own and are not sent to a service: use it in the run itself"
            )
        self._name = name
        self._dispatcher = Dispatcher(timeout=None)
        self._is_learned = isinstance(self._bound.function, LearnedReward)

    def load(self) -> Served:
        """Load the model."""
        function = self._bound.function
        if isinstance(function, RewardFunction):
            function.prepare()
        if isinstance(function, LearnedReward):
            facts = function.describe()
            name = self._name or facts.source
            return Served(name, facts.fingerprint, facts.heads, facts.head, facts.marks)
        own = self._bound.name
        found = hashlib.blake2b(f"{own}\n{version('lrlhf')}".encode(), digest_size=8).hexdigest()
        return Served(self._name or own, found, (own,), own, TextMarks())

    def parts(self, request: ScoreRequest) -> list[Part]:
        """Split a request that others would wait long for, if its rows are scored one by one."""
        if not self._is_learned:
            return [Part(request, 0)]
        parts: list[Part] = []
        start = cost = 0
        for row in range(len(request)):
            one = request.cost(row)
            if row > start and cost + one > _PART_COST:
                parts.append(Part(request.rows(start, row), cost))
                start, cost = row, 0
            cost += one
        return [*parts, Part(request.rows(start, len(request)), cost)]

    def fits(self, one: Part, other: Part, cost: int) -> bool:
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
        given = _joined(requests) | ({} if self._is_learned else self._columns(requests)) | logs
        arguments = chosen_arguments(
            self._bound.name, inspect.signature(function), given, filled_by_python(function)
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
        media = [getattr(one, kind) or [()] * len(one) for one in requests]
        if any(row for rows in media for row in rows):
            arguments[kind] = list(itertools.chain.from_iterable(media))
    return arguments
