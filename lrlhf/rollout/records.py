"""One readable line per response: for logs, for evaluation files, for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import CompletionText, RewardResult, TextSegment, completion_text
from lrlhf.rollout.responses import Run, prompt_token_ids, response_ids, response_runs
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.texts import ResponseView, token_texts
from lrlhf.types import Episode, Experience, Prompt, PromptBatch, Rollout


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

    Args:
        prompts: The unique prompts.
        rollout: Their responses, rows of one prompt consecutive.
        views: What is read of the responses.
        rewards: What the rewards said.
        tokenizer: Decodes the prompts.
        sampling: Of the responses.
        step: The iteration that the rollout belongs to.
        weight_version: Of the policy, where the rollout does not tell.
    """
    num_generations = len(rollout) // len(prompts)
    places = prompts.places or ("",) * len(prompts)
    media = prompts.media or (None,) * len(prompts)
    prompt_texts = _prompt_texts(prompts, rollout, tokenizer)
    episodes = rollout.episodes or (None,) * len(rollout)
    records = []
    token_ids = response_ids(rollout, prompts, given=True)
    runs = response_runs(rollout, prompts)
    for row, view in enumerate(views):
        group = row // num_generations
        shown = media[group]
        version = rollout.weight_version
        episode = episodes[row]
        records.append(
            {
                "step": step,
                **origin(places[group]),
                "group": group,
                "prompt": prompt_texts[row],
                **_messages(view.prompt),
                "completion": str(view.text),
                **_given(view, runs[row]),
                "token_ids": token_ids[row],
                "score": plain_json(float(rewards.scores[row])),
                "rewards": {
                    name: plain_json(float(rewards.per_function[row, column]))
                    for column, name in enumerate(rewards.names)
                },
                **_weights(rewards, row),
                "length": int(rollout.response_mask[row].sum()),
                "finish_reason": "length" if bool(rollout.truncated[row]) else "stop",
                **({} if episode is None else _played(episode)),
                "weight_version": weight_version if version is None else int(version[row]),
                **_versions(rollout, row),
                "columns": plain_json(prompts.columns[group]),
                **({} if shown is None else {"media": list(shown.names)}),
                "extras": {
                    name: plain_json(values[row]) for name, values in rewards.extras.items()
                },
                **how_drawn(sampling),
            }
        )
    return records


def _given(view: ResponseView, runs: Sequence[Run]) -> dict[str, Any]:
    """Tell what the policy was given from what it wrote, in letters and in tokens."""
    segments = [{"sampled": part.sampled, "text": part.text} for part in view.text.segments]
    if all(run.sampled for run in runs) and len(segments) < 2:
        return {}
    given = [
        [run.start - runs[0].start, run.end - runs[0].start] for run in runs if not run.sampled
    ]
    return {"segments": segments, "given_tokens": given}


def segments_of(record: Mapping[str, Any]) -> list[TextSegment]:
    """Return the parts of a recorded response."""
    known = record.get("segments") or [{"sampled": True, "text": record["completion"]}]
    return [TextSegment(one["text"], one["sampled"]) for one in known]


def written_text(record: Mapping[str, Any]) -> str:
    """Return what the policy wrote of a recorded response, see `completion_text`."""
    return completion_text(CompletionText(segments_of(record)))


def written_ids(record: Mapping[str, Any]) -> list[int]:
    """Return the token ids that the policy wrote of a recorded response."""
    given = {place for span in record.get("given_tokens", ()) for place in range(*span)}
    return [token for place, token in enumerate(record["token_ids"]) if place not in given]


def how_drawn(sampling: Sampling) -> dict[str, Any]:
    """Return what the probabilities of a response's tokens depend on beside the policy."""
    hot = {"first_temperature": sampling.first_temperature, "first_top_k": sampling.first_top_k}
    return {"temperature": sampling.temperature, **(hot if sampling.starts_hot else {})}


def _weights(rewards: RewardResult, row: int) -> dict[str, Any]:
    """Return what each reward counts in the score; null: it was not asked."""
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


def _played(episode: Episode) -> dict[str, Any]:
    """Describe the turns of an episode."""
    told: dict[str, Any] = {
        "finish_reason": episode.finish_reason,
        "turns": episode.turns,
        "episode": plain_json(episode.completion),
    }
    if episode.rewards is not None:
        told["turn_rewards"] = plain_json(episode.rewards)
    if episode.failure:
        told["failure"] = episode.failure
    return told


def _versions(rollout: Rollout, row: int) -> dict[str, Any]:
    """Return how many tokens in a row each version of the weights has sampled, if several have."""
    if rollout.token_versions is None:
        return {}
    of_tokens = rollout.token_versions[row, rollout.response_mask[row]].tolist()
    spans = [[version, len(list(tokens))] for version, tokens in groupby(of_tokens)]
    return {"weight_versions": spans} if len(spans) > 1 else {}


def _messages(prompt: Prompt) -> dict[str, Any]:
    """Return the turns of a chat, of which ``prompt`` is what the template makes."""
    return {} if isinstance(prompt, str) else {"messages": plain_json(prompt)}


def origin(place: str) -> dict[str, Any]:
    """Return source and row number of a place such as ``train.jsonl:17``; of none: nothing."""
    source, _, row = place.rpartition(":")
    return {"source": source, "row": int(row)} if place else {}


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


_DIGITS = 4


def token_values(
    experience: Experience, row: int, token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[Any]]:
    """Describe the tokens of a response, given ones included.

    Args:
        experience: Of this rank, before the update.
        row: The response.
        token_ids: Its tokens, the last ones of the row.
        tokenizer: The policy's.

    Returns:
        Lists with an entry per token: ``texts`` (see `token_texts`), and the values that the update
        has: ``advantage``; ``engine_logprob``, of the weights and engine that sampled the token;
        ``logprob``, of the policy before its update, where it was computed; ``ref_logprob``;
        ``entropy``; ``value``; ``weight``, what the token's loss is multiplied by for the
        difference between engine and trainer. Values have four digits; they are None for tokens
        that were not sampled, and where they are not finite.
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
        float(f"{value:.{_DIGITS}g}") if counts and math.isfinite(value) else None
        for value, counts in zip(values.tolist(), sampled, strict=True)
    ]
