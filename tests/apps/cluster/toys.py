"""What the runs on a cluster are scored by."""

import os
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from lrlhf.rewards import RewardFunction, completion_segments
from lrlhf.rewards.function import LogExtra, LogMetric, StepReward, StepValues, completion_text
from lrlhf.types import Episode
from tests.modules.policy_runs import letters


def slow_letters(completions: Sequence[str], **_: Any) -> list[float]:
    """Long enough for a test to see what it interrupts."""
    time.sleep(0.4)
    return letters(completions)


def sampled_characters(completions: Sequence[str], **_: Any) -> list[float]:
    return [
        float(sum(len(part.text) for part in completion_segments(one) if part.sampled))
        for one in completions
    ]


def letters_of_a_picture(
    completions: Sequence[Any], images: Sequence[Any], log_metric: LogMetric
) -> list[float]:
    """Letters count by how bright the first pixel is."""
    log_metric("images", sum(map(len, images)))
    said = letters([completion_text(one) for one in completions])
    bright = [sum(own[0].getpixel((0, 0))) / 765 for own in images]
    return [value * factor for value, factor in zip(said, bright, strict=True)]


def darkened(
    images: Sequence[Any],
    videos: Sequence[Any],
    audios: Sequence[Any],
    log_metric: LogMetric,
    log_extra: LogExtra,
) -> list[float]:
    """Sums up what was shown and played, and writes into it, as in-place arithmetic does."""
    for sound in (one for own in audios for one in own):
        sound.samples[:] -= sound.samples.mean()
    for video in (one for own in videos for one in own):
        video.frames[0] = 0
    log_metric("images", sum(map(len, images)))
    log_extra("modes", [[one.mode for one in own] for own in images])
    log_extra("pixels", [[one.getpixel((0, 0)) for one in own] for own in images])
    return [
        sum(np.asarray(one).astype(float).sum() for one in pictures)
        + sum(one.frames.astype(float).sum() / one.fps for one in clips)
        + sum(float(np.abs(one.samples).sum()) * one.sampling_rate for one in sounds)
        for pictures, clips, sounds in zip(images, videos, audios, strict=True)
    ]


class CountsTurns(RewardFunction):
    """Goes through the turns of episodes, each of which is a step."""

    gives_steps = True

    def __call__(
        self,
        *,
        completions: Sequence[Any],
        episodes: Sequence[Episode],
        log_metric: LogMetric,
        log_extra: LogExtra,
        **_: Any,
    ) -> StepValues:
        log_metric("turns", sum(one.turns for one in episodes) / len(episodes))
        log_extra("ends", [one.finish_reason for one in episodes])
        log_extra("roles", [[turn["role"] for turn in one] for one in completions])
        log_extra(
            "sampled", [[part.sampled for part in completion_segments(one)] for one in completions]
        )
        calls = [sum(len(turn.get("tool_calls", ())) for turn in one) for one in completions]
        steps = []
        for one, called in zip(completions, calls, strict=True):
            ends = accumulate(len(part.text) for part in completion_segments(one))
            steps.append([StepReward(end, called + 0.25) for end in ends])
        return StepValues([sum(step.value for step in own) for own in steps], steps)


class RefusedByRankZero(L.Callback):
    """Cannot be made by rank 0, for which the others then wait."""

    def __init__(self) -> None:
        if os.environ.get("RANK") == "0":
            raise ValueError("rank 0 refuses this")


class TellsDevice(L.Callback):
    """Writes the device of a trainer, the GPUs that it sees and ``OWN`` into the run folder."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seen = [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "OWN")]
        told = " ".join([str(pl_module.device), *seen])
        Path(trainer.default_root_dir, "device").write_text(told)
