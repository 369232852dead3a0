"""Asynchronous rollouts: responses of the next iterations, generated while one trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from lrlhf.background import in_background
from lrlhf.media.refs import image_name
from lrlhf.rollout.engines.engine import RolloutEngine
from lrlhf.rollout.engines.synced_engine import EngineFailure, without_recovery
from lrlhf.rollout.records import plain_json
from lrlhf.rollout.responses import prompt_token_ids, repeated_media
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.storage import mask_of_tensors, mask_tensors, media_of_tensors, media_tensors
from lrlhf.types import ROLLOUT_TENSORS, Episode, Media, PromptBatch, Rollout

logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    prompts: list[list[int]]
    """Token ids."""
    rollout: Future[Rollout]


class RolloutQueue:
    """Generates batches in background threads, to be taken in the order of the iterations.

    A batch that is ready before an earlier one waits for it: training on the first that is ready
    would prefer short responses.

    Args:
        engine: A concurrent engine, which generates while the trainer computes.
        max_staleness: Iterations that a batch may be started ahead of its own.
    """

    def __init__(self, engine: RolloutEngine, max_staleness: int) -> None:
        self._engine = engine
        self.max_staleness = max_staleness
        self._pending: dict[int, _Pending] = {}

    @property
    def updates_in_flight(self) -> bool:
        """Whether generation goes on while weights are pushed."""
        return self.max_staleness > 1

    def __contains__(self, step: int) -> bool:
        """Whether generation for iteration ``step`` was started."""
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
        """Start to generate the responses of iteration ``step``, with the engine's weights."""

        def generate() -> Rollout:
            # the policy is trained meanwhile, so its weights must not be pushed
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
        """Wait for the responses of iteration ``step``, and drop those of earlier ones.

        Args:
            step: The current iteration.
            prompts: Its prompts.
            num_generations: Responses per prompt.
            any_rank: Whether a condition holds on any rank; if one rank has to generate now, all
                do.

        Returns:
            None: to be generated now, as nothing was started, the engine failed, or the prompts
            differ (the data or the batch size changed on a resume).
        """
        pending = self._pending.get(step)
        self._pending = {key: value for key, value in self._pending.items() if key > step}
        rollout, failed = None, False
        if pending is not None:
            try:
                # loaded from a checkpoint, it is on the CPU
                rollout = pending.rollout.result().to(prompts.input_ids.device)
            except EngineFailure as failure:
                logger.warning("%s; generating the responses again, with newer weights", failure)
                failed = True
        if any_rank(failed):
            # on all ranks, which push to a shared engine together, once no generation runs
            self.wait()
            self._pending = {
                key: value
                for key, value in self._pending.items()
                if not isinstance(value.rollout.exception(), EngineFailure)
            }
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
        if _shows_turns(rollout):
            return _with_images(rollout, prompts)
        media = repeated_media(prompts.media, num_generations)
        if rollout.episodes is not None and media is not None:
            # an agent may have asked without the prompt's images
            shown = rollout.media or (None,) * len(rollout)
            media = tuple(entry if own else None for own, entry in zip(shown, media, strict=True))
        return replace(rollout, media=media if any(media or ()) else None)

    def wait(self) -> None:
        """Wait until the engine is idle; its responses stay."""
        for pending in self._pending.values():
            pending.rollout.exception()  # raised by `take`

    def drop(self) -> None:
        """Wait, and drop all responses."""
        self.wait()
        self._pending = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the responses generated ahead: a resumed run lacks the weights that sampled them.

        With updates in flight unfinished batches are left out, as waiting for them would stop the
        pipeline.
        """
        if not self.updates_in_flight:
            self.wait()
        return {
            "max_staleness": self.max_staleness,
            "pending": {
                step: _stored(pending)
                for step, pending in self._pending.items()
                if pending.rollout.done() and pending.rollout.exception() is None
            },
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore responses, unless ``max_staleness`` was larger than now."""
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
            episodes = stored["episodes"] and tuple(map(_restored_episode, stored["episodes"]))
            # absent from checkpoints of earlier versions
            media = media_of_tensors(stored.get("media", {}))
            mask = mask_of_tensors({**stored.get("mask", {})})
            rollout = Rollout(
                **stored["rollout"], media=media, episodes=episodes, sampling_mask=mask
            )
            done.set_result(rollout.to(device))
            self._pending[step] = _Pending(stored["prompts"], done)


def _shows_turns(rollout: Rollout) -> bool:
    """Whether rows show images behind their prompts."""
    return any(entry is not None and entry.parts for entry in rollout.media or ())


def _with_images(rollout: Rollout, prompts: PromptBatch) -> Rollout:
    """Give media of a checkpoint, which are tensors and names, their images for logs."""
    shown = [entry for entry in rollout.media or () if entry is not None]
    if all(entry.images for entry in shown):
        return rollout
    copies = len(rollout) // len(prompts)
    restored: dict[int, Media] = {}  # rows and parts share their parts
    media: list[Media | None] = []
    for row, entry in enumerate(rollout.media or ()):
        images = rollout.episodes[row].images if rollout.episodes else ()
        known: dict[tuple[str, ...], tuple[Any, ...]] = {
            (image_name(image),): (image,) for image in images
        }
        of_prompt = prompts.media[row // copies] if prompts.media else None
        if of_prompt is not None:  # other rows may have the same names of files
            known[of_prompt.names] = of_prompt.images
        media.append(None if entry is None else _with_known(entry, known, restored))
    return replace(rollout, media=tuple(media))


def _with_known(
    entry: Media,
    known: Mapping[tuple[str, ...], tuple[Any, ...]],
    restored: dict[int, Media],
) -> Media:
    if id(entry) not in restored:
        parts = tuple(_with_known(part, known, restored) for part in entry.parts)
        if parts:
            there = all(part.names in known for part in parts)
            images = tuple(image for part in parts for image in part.images) if there else ()
        else:
            images = known.get(entry.names, ())
        restored[id(entry)] = replace(entry, images=images, parts=parts)
    return restored[id(entry)]


def _stored(pending: _Pending) -> dict[str, Any]:
    rollout = pending.rollout.result()
    images = {id(each): each for episode in rollout.episodes or () for each in episode.images}
    pixels = {key: torch.from_numpy(np.array(image)) for key, image in images.items()}
    return {
        "prompts": pending.prompts,
        # those of prompts alone come with the prompts again; which of them an agent has shown, not
        "media": media_tensors(rollout) if _shows_turns(rollout) or rollout.episodes else {},
        "mask": mask_tensors(rollout),
        "rollout": {name: getattr(rollout, name) for name in ROLLOUT_TENSORS},
        # without the environments, which end with the process
        "episodes": rollout.episodes
        and [
            {
                "prompt": plain_json(episode.prompt),
                "messages": plain_json(episode.messages),
                "rewards": None if episode.rewards is None else list(episode.rewards),
                "finish_reason": episode.finish_reason,
                "failure": episode.failure,
                "call_contents": [[*call] for call in episode.call_contents],
                "images": [pixels[id(image)] for image in episode.images],
            }
            for episode in rollout.episodes
        ],
    }


def _restored_episode(stored: Mapping[str, Any]) -> Episode:
    prompt, rewards = stored["prompt"], stored["rewards"]
    return Episode(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        messages=tuple(stored["messages"]),
        rewards=None if rewards is None else tuple(rewards),
        finish_reason=stored["finish_reason"],
        failure=stored["failure"],
        # absent from checkpoints of earlier versions
        call_contents=tuple((number, text) for number, text in stored.get("call_contents", ())),
        images=tuple(Image.fromarray(pixels.numpy()) for pixels in stored.get("images", ())),
    )


def _ids(prompts: PromptBatch) -> list[list[int]]:
    return [ids.tolist() for ids in prompt_token_ids(prompts)]
