"""The next iteration's responses, generated while the present iteration trains."""

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
    step: int
    prompts: list[list[int]]
    """Token ids."""
    rollout: Future[Rollout]


class RolloutAhead:
    """Generates beside the main thread, at most one iteration ahead.

    Args:
        engine: A concurrent one, so that generation and training do not stand in each other's way.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._pending: _Pending | None = None

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
        self.wait()

        def generate() -> Rollout:
            # the policy is being trained meanwhile: its weights are not to be pushed now
            with without_recovery():
                return self._engine.generate(
                    prompts, sampling, num_generations=num_generations, seeds=seeds
                )

        self._pending = _Pending(step, _ids(prompts), in_background(generate, name="rollout-ahead"))

    def take(
        self,
        step: int,
        prompts: PromptBatch,
        *,
        num_generations: int,
        any_rank: Callable[[bool], bool],
    ) -> Rollout | None:
        """Wait for the responses of iteration ``step``.

        Args:
            step: The iteration that is about to train.
            prompts: Its prompts.
            num_generations: Responses per prompt.
            any_rank: Whether a condition holds on any rank; all generate anew if one has to.

        Returns:
            None: nothing was begun, the engine failed, or the responses answer other prompts (the
            data or the batch size changed on a resume). They are to be generated now.
        """
        pending, self._pending = self._pending, None
        rollout, failed = None, False
        if pending is not None and pending.step == step:
            try:
                # one of a checkpoint was read to the CPU
                rollout = pending.rollout.result().to(prompts.input_ids.device)
            except EngineFailure as failure:
                logger.warning("%s; generating the responses again, with newer weights", failure)
                failed = True
        if any_rank(failed):
            # on all ranks: they push to a shared engine together
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

    def wait(self) -> None:
        """Wait until the engine is idle; what it generated stays."""
        if self._pending is not None:
            # whatever went wrong there is told by `take`
            self._pending.rollout.exception()

    def drop(self) -> None:
        """Wait, and forget what was generated."""
        self.wait()
        self._pending = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was generated ahead: the weights that sampled it will be gone."""
        pending = self._pending
        if pending is None or pending.rollout.exception() is not None:
            return None
        rollout = pending.rollout.result()
        # what it shows comes with the prompts again
        tensors = {name: getattr(rollout, name) for name in ROLLOUT_TENSORS}
        # without the environments, which end with the process
        episodes = rollout.episodes and [stored_episode(one) for one in rollout.episodes]
        return {
            "step": pending.step,
            "prompts": pending.prompts,
            "rollout": tensors,
            "episodes": episodes,
        }

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Go on with what `state_dict` returned."""
        if state is None:
            return
        done: Future[Rollout] = Future()
        stored = state.get("episodes")
        episodes = stored and tuple(map(restored_episode, stored))
        done.set_result(Rollout(**state["rollout"], episodes=episodes).to(device))
        self._pending = _Pending(state["step"], state["prompts"], done)


def _ids(prompts: PromptBatch) -> list[list[int]]:
    return [ids.tolist() for ids in prompt_token_ids(prompts)]
