"""Records of responses in JSON types, for logs and evaluation files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.media.refs import image_name
from lrlhf.rewards import CompletionText, RewardResult, TextSegment, completion_text
from lrlhf.rollout.responses import Run, prompt_token_ids, response_ids, response_runs
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import ResponseView, token_texts
from lrlhf.types import Episode, Experience, Media, PromptBatch, Rollout


def rollout_records(
    prompts: PromptBatch,
    rollout: Rollout,
    views: Sequence[ResponseView],
    rewards: RewardResult,
    *,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    step: int,
    weight_version: int,
) -> list[dict[str, Any]]:
    """Describe each response in JSON types.

    ``prompts`` are unique, and rows of one prompt are consecutive in ``rollout``, whose
    ``weight_version``, if any, takes precedence.
    """
    num_generations = len(rollout) // len(prompts)
    sources = prompts.places or ("",) * len(prompts)
    media = prompts.media or (None,) * len(prompts)
    prompt_texts = _prompt_texts(prompts, rollout, tokenizer)
    episodes = rollout.episodes or (None,) * len(rollout)
    row_media = rollout.media or (None,) * len(rollout)
    records = []
    token_ids = response_ids(rollout, prompts, given=True)
    runs = response_runs(rollout, prompts)
    for row, view in enumerate(views):
        group = row // num_generations
        version = rollout.weight_version
        episode, shown = episodes[row], media[group]
        records.append(
            {
                "step": step,
                **origin(sources[group]),
                "group": group,
                "prompt": prompt_texts[row],
                # the messages of a chat, of which ``prompt`` is the rendering
                **({} if isinstance(view.prompt, str) else {"messages": plain_json(view.prompt)}),
                "completion": str(view.text),
                **_segments(view, runs[row]),
                "token_ids": token_ids[row],
                "score": plain_json(float(rewards.scores[row])),
                "rewards": {
                    name: plain_json(float(rewards.per_function[row, column]))
                    for column, name in enumerate(rewards.names)
                },
                **_reward_weights(rewards, row),
                "length": int(rollout.response_mask[row].sum()),
                "finish_reason": "length" if bool(rollout.truncated[row]) else "stop",
                **({} if episode is None else _episode(episode)),
                "weight_version": weight_version if version is None else int(version[row]),
                **_versions(rollout, row),
                "columns": plain_json(prompts.columns[group]),
                **_media(shown, episode, row_media[row]),
                "extras": {
                    name: plain_json(values[row]) for name, values in rewards.extras.items()
                },
                **sampling_options(sampling),
            }
        )
    return records


def _media(shown: Media | None, episode: Episode | None, of_row: Media | None) -> dict[str, Any]:
    """Name what the prompt shows, and the images behind it, in order."""
    names = [] if shown is None else list(shown.names)
    if episode is not None:
        images, of_prompt = episode.images, () if shown is None else shown.images
        count, others = len(of_prompt), names[len(of_prompt) :]  # videos and audio
        own = (one is other or one == other for one, other in zip(images, of_prompt, strict=False))
        if len(images) < count or not all(own):
            count = 0  # an agent sends its own
        # names of pixels take their time: those of the row's own images are known
        known = (
            {} if of_row is None else dict(zip(map(id, of_row.images), of_row.names, strict=False))
        )
        own_names = [known.get(id(one)) or image_name(one) for one in images[count:]]
        names = [*names[:count], *own_names, *others]
    return {"media": names} if names else {}


def _segments(view: ResponseView, runs: Sequence[Run]) -> dict[str, Any]:
    """Distinguish sampled text and tokens from those that the policy did not write."""
    segments = [{"sampled": part.sampled, "text": part.text} for part in view.text.segments]
    if all(run.sampled for run in runs) and len(segments) < 2:
        return {}
    given_spans = [
        [run.start - runs[0].start, run.end - runs[0].start] for run in runs if not run.sampled
    ]
    return {"segments": segments, "given_tokens": given_spans}


def segments_of(record: Mapping[str, Any]) -> list[TextSegment]:
    """Return the segments of a recorded response."""
    segments = record.get("segments") or [{"sampled": True, "text": record["completion"]}]
    return [TextSegment(segment["text"], segment["sampled"]) for segment in segments]


def written_text(record: Mapping[str, Any]) -> str:
    """Return the sampled text of a recorded response, see `completion_text`."""
    return completion_text(CompletionText(segments_of(record)))


def written_ids(record: Mapping[str, Any]) -> list[int]:
    """Return the sampled token ids of a recorded response."""
    given_positions = {index for span in record.get("given_tokens", ()) for index in range(*span)}
    return [
        token for index, token in enumerate(record["token_ids"]) if index not in given_positions
    ]


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """Return the options that the probabilities of a response's tokens depend on."""
    hot = {"first_temperature": sampling.first_temperature, "first_top_k": sampling.first_top_k}
    return {"temperature": sampling.temperature, **(hot if sampling.starts_hot else {})}


def _reward_weights(rewards: RewardResult, row: int) -> dict[str, Any]:
    """Return the weight of each reward in the score; null: it was not computed."""
    if rewards.weights is None:
        return {}
    weights = rewards.weights[row].tolist()
    return {"weights": plain_json(dict(zip(rewards.names, weights, strict=True)))}


def _prompt_texts(
    prompts: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Decode the prompt of each response, with one placeholder per image or video."""
    num_generations = len(rollout) // len(prompts)
    if rollout.prompt_lengths is not None:
        starts = rollout.prompt_lengths.tolist()
        rows = zip(rollout.input_ids, starts, rollout.media or (None,) * len(rollout), strict=True)
        shown = [(ids[:start], media) for ids, start, media in rows]
        num_generations = 1
    else:
        media_of = prompts.media or (None,) * len(prompts)
        shown = list(zip(prompt_token_ids(prompts), media_of, strict=True))
    texts = [
        str(tokenizer.decode(ids.tolist() if media is None else list(media.prompt_ids)))
        for ids, media in shown
    ]
    return [text for text in texts for _ in range(num_generations)]


def _episode(episode: Episode) -> dict[str, Any]:
    record: dict[str, Any] = {
        "finish_reason": episode.finish_reason,
        "turns": episode.turns,
        "episode": plain_json(episode.completion),
    }
    if episode.rewards is not None:
        record["turn_rewards"] = plain_json(episode.rewards)
    if episode.failure:
        record["failure"] = episode.failure
    return record


def _versions(rollout: Rollout, row: int) -> dict[str, Any]:
    """Return runs of tokens by version of the weights, ``[version, count]``, if versions differ."""
    if rollout.token_versions is None:
        return {}
    versions = rollout.token_versions[row, rollout.response_mask[row]].tolist()
    spans = [[version, len(list(tokens))] for version, tokens in groupby(versions)]
    return {"weight_versions": spans} if len(spans) > 1 else {}


def origin(place: str) -> dict[str, Any]:
    """Return source and row number of a place such as ``train.jsonl:17``; empty: nothing."""
    source, _, row = place.rpartition(":")
    return {"source": source, "row": int(row)} if place else {}


_MAX_ELEMENTS = 1000


def plain_json(value: Any) -> Any:
    """Convert a column's value to JSON types; other types become text, NaN and infinity None.

    Arrays become lists; of those with more than 1,000 elements type and shape are written instead.
    """
    if isinstance(value, Mapping):
        return {str(key): plain_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, np.ndarray | np.generic | Tensor):
        large = math.prod(value.shape) > _MAX_ELEMENTS
        return f"{value.dtype} {[*value.shape]}" if large else plain_json(value.tolist())
    return str(value)


def token_values(
    experience: Experience, row: int, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Any]]:
    """Describe the tokens of a response, the last of a row, those that were not sampled included.

    Returns:
        Lists with an entry per token: ``texts`` (see `token_texts`); ``advantage``;
        ``engine_logprob``, by the engine and weights that sampled the token; ``logprob``, by the
        policy before its update, where it was computed; ``ref_logprob``; ``entropy``; ``value``;
        ``weight``, the importance weight for the difference between engine and trainer. Values
        have four digits; they are None for tokens that were not sampled, and where not finite.
    """
    end = int(experience.attention_mask[row].nonzero().max()) + 1
    start = end - len(token_ids)
    sampled = experience.response_mask[row, start:end].tolist()
    own = experience.policy_logprobs
    columns = {
        "advantage": experience.advantages,
        "logprob": experience.old_logprobs if own is None else own,
        "engine_logprob": experience.engine_logprobs,
        "ref_logprob": experience.ref_logprobs,
        "entropy": experience.entropy,
        "value": experience.values,
        "weight": experience.importance_weights,
    }
    before = experience.input_ids[row, :start].tolist()
    return {
        "texts": token_texts(tokenizer, before, token_ids),
        **{
            name: _rounded(column[row, start:end], sampled)
            for name, column in columns.items()
            if column is not None
        },
    }


def _rounded(values: Tensor, sampled: Sequence[bool]) -> list[float | None]:
    return [
        float(f"{value:.4g}") if counts and math.isfinite(value) else None
        for value, counts in zip(values.tolist(), sampled, strict=True)
    ]
