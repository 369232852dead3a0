"""Places for requests: who is let in, and who has to make room."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from lrlhf.serving.limits import QueueOptions
from lrlhf.serving.measures import Measures
from lrlhf.serving.refused import RefusedRequestError

_LIGHT: Final = 1_000_000
"""Bytes of a body that is let in whatever the others weigh."""
_SLOW: Final = 100_000
"""Bytes per second; a client that sends fewer makes room for others."""
_GRACE_SECONDS: Final = 1.0


class Place:
    """A request's place in the service, from its head to its answer.

    Args:
        weight: Bytes that its body has, or may have.
    """

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.received = 0
        """Bytes of the body so far."""
        self.has_arrived = False
        """All of it is there."""
        self.being_read = True
        """It is to be scored soon, and is not there yet or not parsed."""
        self.left = False
        """Nobody waits for the scores any more."""
        self.leave: Callable[[], None] = lambda: None
        """Ends the reading of the body."""
        self._since = time.monotonic()

    def is_slow(self) -> bool:
        """Whether its body takes longer to arrive than others should wait for."""
        seconds = time.monotonic() - self._since
        return not self.has_arrived and seconds > max(_GRACE_SECONDS, self.received / _SLOW)


class Places:
    """All places of a service.

    Args:
        options: How many, and how heavy.
        measures: Told how many are taken.
        changed: Notified when a place is left.
    """

    def __init__(
        self, options: QueueOptions, measures: Measures, changed: threading.Condition
    ) -> None:
        self._options = options
        self._measures = measures
        self._changed = changed
        self._places: dict[Place, None] = {}  # as a set that keeps the order
        self.closing = False

    def __len__(self) -> int:
        return len(self._places)

    @property
    def being_read(self) -> bool:
        """Whether a body is being read."""
        return any(place.being_read for place in self._places)

    @contextlib.contextmanager
    def taken(self, weight: int) -> Iterator[Place]:
        """Hold a place from the head of a request to its answer.

        Args:
            weight: Bytes of its body.

        Raises:
            RefusedRequestError: There is none, or the service ends.
        """
        place = Place(weight)
        with self._changed:
            self._make_room(weight)
            self._places[place] = None
            self._measures.waiting.set(len(self._places))
        try:
            yield place
        finally:
            self._end(place)

    def _end(self, place: Place) -> None:
        with self._changed:
            place.left = True
            place.being_read = False
            self._places.pop(place, None)
            self._measures.waiting.set(len(self._places))
            self._changed.notify_all()

    def _make_room(self, weight: int) -> None:
        if self.closing:
            raise RefusedRequestError(
                "the service ends", status=503, reason="closing", retry_after=5
            )
        for place in [place for place in self._places if place.is_slow()]:
            if self._lacks(weight) is None:
                return
            self._end(place)
            place.leave()
        if lacking := self._lacks(weight):
            raise RefusedRequestError(
                f"{len(self._places)} requests wait already: try again, or raise the service's "
                f"{lacking}",
                status=429,
                reason="queue full",
                retry_after=1,
            )

    def _lacks(self, weight: int) -> str | None:
        """Return the limit that a further request would exceed."""
        if len(self._places) >= self._options.max_queue:
            return "max_queue"
        heavy = sum(place.weight for place in self._places if place.weight > _LIGHT)
        too_heavy = heavy + weight > self._options.max_queue_mb * 1e6
        return "max_queue_mb" if weight > _LIGHT and heavy and too_heavy else None
