"""One readable line per response: for logs, for evaluation files, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import CompletionText, CompletionTurns, RewardResult
from lrlhf.rollout.responses import response_ids
from lrlhf.types import PromptBatch, Rollout


def completions_for_rewards(
    prompts: PromptBatch, texts: Sequence[CompletionText], *, num_generations: int
) -> list[CompletionText | CompletionTurns]:
    """Shape the texts as rewards expect them: as a chat turn where the prompt is a chat."""
    return [
        text
        if isinstance(prompts.prompts[index // num_generations], str)
        else CompletionTurns(text)
        for index, text in enumerate(texts)
    ]


def rollout_records(
    prompts: PromptBatch,
    rollout: Rollout,
    texts: Sequence[CompletionText],
    rewards: RewardResult,
    *,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
) -> list[dict[str, Any]]:
    """Describe each response in JSON types.

    Args:
        prompts: The unique prompts.
        rollout: Their responses, rows of one prompt consecutive.
        texts: The responses as text, special tokens left out.
        rewards: What the rewards said.
        tokenizer: Decodes the prompts.
        step: The iteration that the rollout belongs to.
    """
    num_generations = len(rollout) // len(prompts)
    prompt_texts = [tokenizer.decode(ids) for ids in _readable_ids(prompts)]
    records = []
    for row, token_ids in enumerate(response_ids(rollout, prompts)):
        group = row // num_generations
        records.append(
            {
                "step": step,
                "group": group,
                "prompt": prompt_texts[group],
                "completion": str(texts[row]),
                **_segments(texts[row]),
                "token_ids": token_ids,
                "score": _number(rewards.scores[row]),
                "rewards": {
                    name: _number(rewards.per_function[row, column])
                    for column, name in enumerate(rewards.names)
                },
                "length": int(rollout.response_mask[row].sum()),
                "finish_reason": "length" if bool(rollout.truncated[row]) else "stop",
                "weight_version": step
                if rollout.weight_version is None
                else int(rollout.weight_version[row]),
                "columns": plain_json(prompts.columns[group]),
                **_media_names(prompts, group),
                "extras": {
                    name: plain_json(values[row]) for name, values in rewards.extras.items()
                },
            }
        )
    return records


def _readable_ids(prompts: PromptBatch) -> list[list[int]]:
    """Return each prompt's tokens, with one placeholder per image or video."""
    media = prompts.media or (None,) * len(prompts)
    return [
        ids[mask].tolist() if entry is None else list(entry.prompt_ids)
        for ids, mask, entry in zip(prompts.input_ids, prompts.attention_mask, media, strict=True)
    ]


def _segments(text: CompletionText) -> dict[str, list[dict[str, Any]]]:
    """Tell what the policy wrote from what it was given, where it was given anything."""
    if all(segment.sampled for segment in text.segments):
        return {}
    return {
        "segments": [
            {"sampled": segment.sampled, "text": segment.text} for segment in text.segments
        ]
    }


def _media_names(prompts: PromptBatch, row: int) -> dict[str, list[str]]:
    media = None if prompts.media is None else prompts.media[row]
    return {} if media is None else {"media": list(media.names)}


def plain_json(value: Any) -> Any:
    """Turn a column's value into JSON types; what JSON cannot hold becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _number(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
