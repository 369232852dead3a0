"""Reward services of one kind: which is asked next, and which are left alone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lrlhf.rewards.function import RewardError
from lrlhf.rewards.remote.remote_http import ServiceError, one_line

logger = logging.getLogger(__name__)

_BREAKER_FAILURES = 5
_COOLDOWN_S = 10.0
_LONGEST_WAIT_S = 30.0
"""A service may ask to be left alone, and not for longer."""
_LEAST_WAIT_S = 0.05
_LONGEST_PAUSE_S = 15.0
_JITTER = random.Random()
"""Of its own: the state of the global one belongs to the run, and a resumed run repeats it."""


class Service:
    """One address with a circuit breaker.

    After five failures in a row it is left alone for ten seconds; then one single request finds
    out whether it is back.

    Args:
        url: Without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.last_error = ""
        self.version = ""
        """Model and version as last heard; empty: nothing heard."""
        self._failures = 0
        self._free_at = -math.inf
        self._probing = False

    def ready_in(self) -> float:
        """Return the seconds until it may be asked; infinite while one request tries it."""
        return math.inf if self._probing else max(0.0, self._free_at - time.monotonic())

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Count what happens inside as one request to the service."""
        probe = self._failures >= _BREAKER_FAILURES
        self._probing = probe
        self.in_flight += 1
        try:
            yield
        except ServiceError as error:
            self._failed(error)
            raise
        else:
            if self._failures >= _BREAKER_FAILURES:
                self._free_at = -math.inf
                logger.warning("the reward service %s answers again", self.url)
            self._failures = 0
        finally:
            self.in_flight -= 1
            if probe:
                self._probing = False

    def heard(self, reply: Mapping[str, Any]) -> None:
        """Note which model the service says it has, and say so aloud if that changes."""
        said = [reply.get(key) for key in ("model", "version")]
        version = " ".join(one_line(word, 100) for word in said if isinstance(word, str))
        if not version or version == self.version:
            return
        if self.version:
            logger.warning(
                "the reward service %s has another model than before: %s instead of %s. Scores "
                "from now on cannot be compared with earlier ones",
                self.url,
                version,
                self.version,
            )
        else:
            logger.info("the reward service %s has the model %s", self.url, version)
        self.version = version

    def _failed(self, error: ServiceError) -> None:
        self.last_error = str(error)
        if error.wait is not None:  # busy, which is no failure
            wait = min(max(error.wait, _LEAST_WAIT_S), _LONGEST_WAIT_S)
            self._free_at = time.monotonic() + wait
            return
        self._failures += 1
        if self._failures < _BREAKER_FAILURES:
            return
        self._free_at = time.monotonic() + _COOLDOWN_S
        if self._failures == _BREAKER_FAILURES:
            logger.warning(
                "the reward service %s failed %d times in a row and is left alone for %g s at a "
                "time until it answers: %s",
                self.url,
                self._failures,
                _COOLDOWN_S,
                error,
            )


class Services(list[Service]):
    """All addresses that give the same scores; at least one."""

    def __init__(self, urls: Iterable[str]) -> None:
        super().__init__(Service(url) for url in urls)
        self._turn = itertools.count()

    async def next(self, tried: Collection[Service] = ()) -> Service:
        """Wait for a service that may be asked, and return the least busy one.

        Those that were tried are asked only if no other one is ready.
        """
        while not (ready := [service for service in self if not service.ready_in()]):
            wait = min(service.ready_in() for service in self)
            # an infinite wait ends with the request that tries the service
            await asyncio.sleep(with_jitter(wait if math.isfinite(wait) else _LEAST_WAIT_S))
        fresh = [service for service in ready if service not in tried] or ready
        turn = next(self._turn) % len(fresh)
        return min(fresh[turn:] + fresh[:turn], key=lambda service: service.in_flight)

    def check_versions(self) -> None:
        """Compare what models the services have, as far as they said.

        Raises:
            RewardError: They have different ones.
        """
        versions = {service.version: service.url for service in self if service.version}
        if len(versions) > 1:
            said = "; ".join(f"{url} has {version}" for version, url in versions.items())
            raise RewardError(
                f"the reward services have different models, so that scores would depend on who "
                f"answers: {said}. Serve the same one everywhere, or make each a reward of its own"
            )

    def complaints(self) -> str:
        """Return what each service last failed with."""
        return "; ".join(
            f"{service.url}: {service.last_error or 'not asked in time'}" for service in self
        )


def backoff(attempt: int, *, first: float) -> float:
    """Return how many seconds to wait after ``attempt`` rounds of failures, doubled each time."""
    return with_jitter(min(_LONGEST_PAUSE_S, first * 2 ** min(attempt - 1, 30)))


def with_jitter(seconds: float) -> float:
    """Prolong a wait by up to a quarter, so that not all who wait come back at once."""
    return max(_LEAST_WAIT_S, seconds) * _JITTER.uniform(1.0, 1.25)


_SHOWN = 200


def read_models(reply: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what an endpoint tells of its models, by their names.

    Raises:
        ServiceError: It is no list of models.
    """
    try:
        return {str(entry["id"]): {**entry} for entry in reply["data"]}
    except (LookupError, TypeError) as error:
        raise ServiceError("the reply is no list of models") from error


def served_model(url: str, models: Mapping[str, Any], wanted: str | None) -> str:
    """Return the name of the model to ask.

    Args:
        url: Of the endpoint, for the error.
        models: Those that it serves.
        wanted: What the user set; None: the only one.

    Raises:
        RewardError: It is not served, or there are several to choose from.
    """
    name = wanted or (next(iter(models)) if len(models) == 1 else None)
    if name is None or name not in models:
        listed = one_line(", ".join(models), _SHOWN)
        raise RewardError(f"{url} serves {listed or 'no model'}; set model to one")
    return name
