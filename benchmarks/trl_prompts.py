"""The prompts of the RLOO comparison, and the engines that answer them."""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from trl_models import write_language_model

from lrlhf.media import MediaProcessor
from lrlhf.rollout import (
    Capabilities,
    Response,
    RolloutEngine,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    assemble_rollout,
)
from lrlhf.types import PromptBatch, Rollout

_DRAWN_AT_ONCE = 4
"""Rows whose logits exist together where stored responses get their log-probabilities."""


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write model, prompts and, for the stored engine, responses.

    Raises:
        ValueError: The sizes do not fit together, or the file has too few prompts.
    """
    rows = options.prompts * options.generations
    if rows % options.micro_batch != 0:
        raise ValueError(
            f"--micro-batch is {options.micro_batch}, which does not divide the {rows} responses "
            f"of an iteration (--prompts {options.prompts} x --generations {options.generations})"
        )
    tokenizer = write_language_model(options.model, folder / "model", options.seed)
    count = options.prompts * (options.warm_up + options.steps)
    prompts = _read_prompts(options.data, tokenizer, count, options.prompt_length)
    words = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    drawn = random.Random(options.seed)
    for prompt in prompts:
        prompt["responses"] = [
            drawn.choices(words, k=options.new_tokens) for _ in range(options.generations)
        ]
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")


def _read_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, count: int, length: int | None
) -> list[dict[str, Any]]:
    """Take the first questions, or make prompts of exactly ``length`` tokens out of all of them.

    A question is a chat's first turn, where the tokenizer has a template for chats.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        texts = dict.fromkeys(json.loads(line)["question"] for line in lines)
    rows: list[list[int]] = [_ids(tokenizer, text) for text in texts]
    if length is not None:
        stream = [token for row in rows for token in row]
        rows = [stream[start : start + length] for start in range(0, len(stream), length)]
        rows = [row for row in rows if len(row) == length]
    if len(rows) < count:
        raise ValueError(f"{path} has {len(rows)} prompts, and the run needs {count}")
    # a number in front keeps texts apart that are cut from the same words
    return [
        {"text": f"{index}: {tokenizer.decode(ids)}", "ids": ids}
        for index, ids in enumerate(rows[:count])
    ]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    return list(encoded["input_ids"])


def stored_responses(prompts: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], list[list[int]]]:
    """Return the responses that belong to each prompt's tokens."""
    return {tuple(prompt["ids"]): prompt["responses"] for prompt in prompts}


class StoredEngine(RolloutEngine):
    """Answers known prompts with known responses, and with the policy's log-probabilities.

    Args:
        responses: By the prompt's tokens.
        exact: Say that the log-probabilities can be relied upon, as `TransformersEngine` does.
    """

    def __init__(
        self, responses: dict[tuple[int, ...], list[list[int]]], *, exact: bool = True
    ) -> None:
        self._exact = exact
        self._stored = responses

    @property
    def capabilities(self) -> Capabilities:
        """See `RolloutEngine`."""
        return Capabilities(exact=self._exact)

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        """See `RolloutEngine`."""
        del processor
        self._policy = policy
        self._pad_id = int(tokenizer.pad_token_id)

    @torch.no_grad()
    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        """See `RolloutEngine`."""
        del seeds
        self._policy.eval()
        drawn: list[Response] = []
        for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True):
            prompt = ids[mask]
            stored = torch.tensor(self._stored[tuple(prompt.tolist())], device=ids.device)
            for some in stored.split(_DRAWN_AT_ONCE):
                logprobs = self._logprobs(prompt, some, sampling.temperature)
                drawn += [
                    Response.sampled(row, values, truncated=True)
                    for row, values in zip(some, logprobs, strict=True)
                ]
        return assemble_rollout(
            prompts, drawn, num_generations=num_generations, pad_id=self._pad_id
        )

    def _logprobs(self, prompt: Tensor, responses: Tensor, temperature: float) -> Tensor:
        length = responses.shape[1]
        rows = torch.cat([prompt.expand(len(responses), -1), responses], dim=1)
        logits = self._policy(input_ids=rows, logits_to_keep=length + 1, use_cache=False).logits
        logprobs = (logits[:, :-1].float() / temperature).log_softmax(dim=-1)
        return logprobs.gather(2, responses[:, :, None])[:, :, 0]

    def close(self) -> None:
        """See `RolloutEngine`."""


def build_engine(options: argparse.Namespace, prompts: Sequence[dict[str, Any]]) -> RolloutEngine:
    """Build the engine that the options name."""
    if options.engine == "stored":
        return StoredEngine(stored_responses(prompts), exact=not options.inexact)
    if options.engine == "transformers":
        return TransformersEngine()
    longest = max(len(prompt["ids"]) for prompt in prompts) + options.new_tokens
    return VLLMEngine(dtype=options.dtype, max_model_len=max(128, longest), kv_cache_gib=1.0)


def prompt_batch(rows: Sequence[dict[str, Any]], pad_id: int) -> PromptBatch:
    """Left-pad prompts."""
    longest = max(len(row["ids"]) for row in rows)
    ids = [[pad_id] * (longest - len(row["ids"])) + row["ids"] for row in rows]
    lengths = torch.tensor([len(row["ids"]) for row in rows])
    return PromptBatch(
        input_ids=torch.tensor(ids),
        attention_mask=torch.arange(longest) >= longest - lengths[:, None],
        prompts=tuple(row["text"] for row in rows),
        columns=({},) * len(rows),
    )
