"""The next iteration's responses, drawn while the present iteration trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lrlhf.rollout.engines.background import in_background
from lrlhf.rollout.engines.engine import prompt_token_ids, repeated_media
from lrlhf.rollout.engines.synced_engine import EngineFailure, SyncedEngine
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import PromptBatch, Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    rollout: Future[Rollout]


class RolloutAhead:
    """Draws beside the main thread, at most one iteration ahead.

    Args:
        engine: Computes elsewhere, so that drawing and training do not stand in each other's way.
    """

    def __init__(self, engine: SyncedEngine) -> None:
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
        """Begin to draw the responses of iteration ``step`` with the engine's present weights."""
        self.wait()

        def draw() -> Rollout:
            # the policy is being trained meanwhile: its weights are not to be pushed now
            return self._engine.generate(
                prompts, sampling, num_generations=num_generations, seeds=seeds, recover=False
            )

        self._pending = _Pending(step, in_background(draw, name="rollout-ahead"))

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
            any_rank: Whether a condition holds on any rank; all draw anew if one has to.

        Returns:
            None: nothing was begun, the engine failed, or the responses answer other prompts (the
            data or the batch size changed on a resume). They are to be drawn now.
        """
        pending, self._pending = self._pending, None
        rollout, failed = None, False
        if pending is not None and pending.step == step:
            try:
                # one of a checkpoint was read to the CPU
                rollout = pending.rollout.result().to(prompts.input_ids.device)
            except EngineFailure as failure:
                logger.warning("%s; drawing the responses again, with newer weights", failure)
                failed = True
        if any_rank(failed):
            # on all ranks: they push to a shared engine together
            self._engine.version = None
        if rollout is not None and not _answers(rollout, prompts, num_generations):
            logger.warning("the responses drawn ahead answer other prompts; drawing them again")
            rollout = None
        if rollout is not None:
            rollout = replace(rollout, media=repeated_media(prompts.media, num_generations))
        return None if any_rank(rollout is None) else rollout

    def wait(self) -> None:
        """Wait until the engine is idle; what it drew stays."""
        if self._pending is not None:
            # whatever went wrong there is told by `take`
            self._pending.rollout.exception()

    def drop(self) -> None:
        """Wait, and forget what was drawn."""
        self.wait()
        self._pending = None

    def state_dict(self) -> dict[str, Any] | None:
        """Return what was drawn ahead: the weights it was drawn with will be gone."""
        if self._pending is None or self._pending.rollout.exception() is not None:
            return None
        rollout = self._pending.rollout.result()
        # what it shows comes with the prompts again
        names = [field.name for field in fields(rollout) if field.name != "media"]
        tensors = {name: getattr(rollout, name) for name in names}
        return {"step": self._pending.step, "rollout": tensors}

    def load_state_dict(self, state: dict[str, Any] | None, device: torch.device) -> None:
        """Go on with what `state_dict` returned."""
        if state is None:
            return
        done: Future[Rollout] = Future()
        tensors: dict[str, Tensor | None] = state["rollout"]
        rollout = Rollout(**tensors)  # type: ignore[arg-type]
        done.set_result(rollout.to(device))
        self._pending = _Pending(state["step"], done)


def _answers(rollout: Rollout, prompts: PromptBatch, num_generations: int) -> bool:
    if len(rollout) != len(prompts) * num_generations:
        return False
    asked = [ids.tolist() for ids in prompt_token_ids(prompts)]
    context = rollout.attention_mask & ~rollout.response_mask
    return all(
        ids[mask].tolist() == asked[row // num_generations]
        for row, (ids, mask) in enumerate(zip(rollout.input_ids, context, strict=True))
    )
