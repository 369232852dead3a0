"""The responses of the next iterations, generated while the present one trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lrlhf.background import in_background
from lrlhf.rollout.engines.engine import RolloutEngine
from lrlhf.rollout.engines.synced_engine import EngineFailure, without_recovery
from lrlhf.rollout.episodes.scores import restored_episode, stored_episode
from lrlhf.rollout.responses import prompt_token_ids, repeated_media
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import ROLLOUT_TENSORS, PromptBatch, Rollout

logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    prompts: list[list[int]]
    """Token ids."""
    rollout: Future[Rollout]

    @property
    def usable(self) -> bool:
        """Whether all of it has been generated."""
        return self.rollout.done() and self.rollout.exception() is None


class RolloutQueue:
    """Generates whole batches beside the main thread, to be taken in the order of the iterations.

    A batch that is ready sooner than an earlier one waits for it. To train on what is ready first
    would be to prefer short responses, and their groups, for as long as the policy changes.

    Args:
        engine: A concurrent one, so that generation and training do not stand in each other's way.
        max_staleness: Iterations that a batch may be begun ahead of its own.
    """

    def __init__(self, engine: RolloutEngine, max_staleness: int) -> None:
        self._engine = engine
        self.max_staleness = max_staleness
        self._pending: dict[int, _Pending] = {}

    @property
    def updates_in_flight(self) -> bool:
        """Whether responses are in the making when the next weights are there."""
        return self.max_staleness > 1

    def __contains__(self, step: int) -> bool:
        """Whether what iteration ``step`` trains on was begun."""
        return step in self._pending

    def start(
        self,
        step: int,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> None:
        """Begin to generate what iteration ``step`` trains on, with the engine as it is."""

        def generate() -> Rollout:
            # the policy is being trained meanwhile: its weights are not to be pushed now
            with without_recovery():
                return self._engine.generate(
                    prompts, sampling, num_generations=num_generations, seeds=seeds
                )

        future = in_background(generate, name=f"rollout-{step}")
        self._pending[step] = _Pending(_ids(prompts), future)

    def take(
        self,
        step: int,
        prompts: PromptBatch,
        *,
        num_generations: int,
        any_rank: Callable[[bool], bool],
    ) -> Rollout | None:
        """Wait for the responses of iteration ``step``, and forget those of earlier ones.

        Args:
            step: The iteration that is about to train.
            prompts: Its prompts.
            num_generations: Responses per prompt.
            any_rank: Whether a condition holds on any rank; all generate anew if one has to.

        Returns:
            None: nothing was begun, the engine failed, or the responses answer other prompts (the
            data or the batch size changed on a resume). They are to be generated now.
        """
        pending = self._pending.get(step)
        self._pending = {later: one for later, one in self._pending.items() if later > step}
        rollout, failed = None, False
        if pending is not None:
            try:
                # one of a checkpoint was read to the CPU
                rollout = pending.rollout.result().to(prompts.input_ids.device)
            except EngineFailure as failure:
                logger.warning("%s; generating the responses again, with newer weights", failure)
                failed = True
        if any_rank(failed):
            # on all ranks: they push to a shared engine together
            self._forget_failures()
            self._engine.outdate()
        if rollout is not None and (
            pending is None
            or pending.prompts != _ids(prompts)
            or len(rollout) != len(prompts) * num_generations
        ):
            logger.warning(
                "the responses generated ahead answer other prompts; generating them again"
            )
            rollout = None
        if any_rank(rollout is None) or rollout is None:
            return None
        return replace(rollout, media=repeated_media(prompts.media, num_generations))

    def _forget_failures(self) -> None:
        """Forget what the engine has failed at, when nothing is in the making any more."""
        self.wait()
        self._pending = {
            step: one
            for step, one in self._pending.items()
            if not isinstance(one.rollout.exception(), EngineFailure)
        }

    def wait(self) -> None:
        """Wait until the engine is idle; what it generated stays."""
        for pending in self._pending.values():
            # whatever went wrong there is told by `take`
            pending.rollout.exception()

    def drop(self) -> None:
        """Wait, and forget what was generated."""
        self.wait()
        self._pending = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was generated ahead: the weights that sampled it will be gone.

        Batches that are unfinished are left out where others would be in the making by the next
        push: to wait for them would be to lose what the queue is for.
        """
        if not self.updates_in_flight:
            self.wait()
        finished = {step: one for step, one in self._pending.items() if one.usable}
        return {
            "max_staleness": self.max_staleness,
            "pending": {step: _stored(one) for step, one in finished.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on with what `state_dict` returned, unless it may be older than is allowed now."""
        if state["max_staleness"] > self.max_staleness:
            logger.warning(
                "max_staleness was %d in the checkpoint and is %d now: generating its responses "
                "again, with newer weights",
                state["max_staleness"],
                self.max_staleness,
            )
            return
        for step, stored in state["pending"].items():
            done: Future[Rollout] = Future()
            episodes = stored["episodes"] and tuple(map(restored_episode, stored["episodes"]))
            done.set_result(Rollout(**stored["rollout"], episodes=episodes).to(device))
            self._pending[step] = _Pending(stored["prompts"], done)


def _stored(pending: _Pending) -> dict[str, Any]:
    rollout = pending.rollout.result()
    return {
        "prompts": pending.prompts,
        # what it shows comes with the prompts again
        "rollout": {name: getattr(rollout, name) for name in ROLLOUT_TENSORS},
        # without the environments, which end with the process
        "episodes": rollout.episodes and [stored_episode(one) for one in rollout.episodes],
    }


def _ids(prompts: PromptBatch) -> list[list[int]]:
    return [ids.tolist() for ids in prompt_token_ids(prompts)]
