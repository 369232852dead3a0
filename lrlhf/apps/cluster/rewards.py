"""Rewards that processes elsewhere in a Ray cluster compute."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from lrlhf.apps.cluster.connection import import_ray, joined
from lrlhf.rewards import Rewards
from lrlhf.rewards.function import Completion, RewardError, with_segments
from lrlhf.rewards.reward_values import RewardResult
from lrlhf.types import Prompt

NAME: Final = "reward-"
"""What the names of the actors begin with."""
RETRIES: Final = 3
"""How often a batch is scored once more by a worker that was started again."""


class RayRewards(Rewards):
    """`Rewards` whose functions run in reward workers of ``lrlhf launch``, which puts it in place.

    A batch goes as a whole to the worker of this rank, so that a function which compares responses
    sees the same ones as without workers. Ray starts a worker that died again, on another node if
    need be, and asks it once more, up to three times for a batch. A worker counts ``max_failures``
    for the ranks that it serves, and from 0 when it is started again.

    Takes the arguments of `Rewards`.
    """

    stands_for: ClassVar = "lrlhf.rewards.Rewards"
    """The class that the user named, which the saved config has."""
    _worker: Any = None
    _own_failures = False

    def with_own_failures(self) -> RayRewards:
        """Return the same functions, whose failures the workers count apart from the run's."""
        own = copy.copy(self)
        own._own_failures = True
        return own

    def prepare(self) -> None:
        """Wait until the worker of this rank has loaded what the functions need.

        Raises:
            RewardError: A function cannot be loaded there, or wants environments.
        """
        if self._worker is not None:
            return
        if names := self.asking_for("environments"):
            raise RewardError(
                f"reward function {names[0]!r} asks for environments, which live in the trainer: "
                "set rewards.workers of the cluster to 0"
            )
        ray = joined(type(self).__name__)
        listed = [name for name in ray.util.list_named_actors() if name.startswith(NAME)]
        rank = int(os.environ.get("RANK", "0"))
        self._worker = ray.get_actor(sorted(listed)[rank % len(listed)])
        self._result_of(self._worker.prepare.remote())

    def close(self) -> None:
        """Do nothing: the workers end with the launch."""

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        *,
        on_request: Mapping[str, Sequence[Any]] | None = None,
        **options: Any,
    ) -> RewardResult:
        """Score responses, see `Rewards.score`."""
        self.prepare()
        episodes = (on_request or {}).get("episodes", ())
        # an environment, and what gives it back, stays where it is
        plain_episodes = [replace(episode, environment=None, release=None) for episode in episodes]
        result: RewardResult = self._result_of(
            self._worker.score.remote(
                list(prompts),
                packed(completions),
                [list(ids) for ids in completion_ids],
                list(columns),
                on_request={"episodes": plain_episodes} if plain_episodes else None,
                with_own_failures=self._own_failures,
                **options,
            )
        )
        return result

    @staticmethod
    def _result_of(answer: Any) -> Any:
        ray = import_ray()
        try:
            return ray.get(answer)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RewardError):
                raise error.cause from None  # it says all, and Ray's has the worker's traceback
            raise
        except ray.exceptions.RayActorError as error:
            raise RewardError(
                f"a reward worker was lost, and {RETRIES} times again on the same batch: a reward "
                "function may end its process, or take more memory than its node has"
            ) from error


class RewardWorker:
    """An actor that scores responses.

    Args:
        rewards: Pickled `Rewards`.
        path: Folders of the user's code.
    """

    def __init__(self, rewards: bytes, path: Sequence[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]
        self._rewards: Rewards = pickle.loads(rewards)
        self._own_failures = self._rewards.with_own_failures()

    def prepare(self) -> None:
        """Load what the functions need."""
        self._rewards.prepare()

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Iterable[PackedCompletion],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        *,
        with_own_failures: bool = False,
        **options: Any,
    ) -> RewardResult:
        """Score responses, see `Rewards.score` and `Rewards.with_own_failures`."""
        rewards = self._own_failures if with_own_failures else self._rewards
        # Ray gives arrays that nobody can write to, such as frames, and a function may
        prompts, completions, columns, options = copy.deepcopy(
            (prompts, completions, columns, options)
        )
        return rewards.score(prompts, unpacked(completions), completion_ids, columns, **options)


PackedCompletion = tuple[Completion, Any]
"""A completion as a plain text or list, and its segments if it knows them."""


def packed(completions: Iterable[Completion]) -> list[PackedCompletion]:
    """Put the segments of completions beside them: pickled, a completion forgets its own."""
    return [(completion, getattr(completion, "segments", None)) for completion in completions]


def unpacked(completions: Iterable[PackedCompletion]) -> list[Completion]:
    """Return what `packed` was given."""
    return [with_segments(*completion) for completion in completions]
