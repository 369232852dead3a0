"""An engine that says what a test wants it to say, and remembers it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lrlhf.rollout import Capabilities, Response, RolloutEngine, Sampling, assemble_rollout
from lrlhf.types import PromptBatch, Rollout

Script = Callable[[str], str]
"""From all text so far to the next turn."""


class ScriptedEngine(RolloutEngine):
    """Writes ``script(text)``, cut at the limit; the log-probability of a token is minus its id.

    Args:
        script: What to write.
        concurrent: As an engine in a process of its own.
        seconds: For each call.
    """

    def __init__(self, script: Script, *, concurrent: bool = False, seconds: float = 0.0) -> None:
        self.script = script
        self.concurrent = concurrent
        self.seconds = seconds
        self.calls: list[int] = []
        """Responses of each call."""
        self.wrote: list[list[int]] = []
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(concurrent=self.concurrent)

    def attach(self, policy: Any, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        time.sleep(self.seconds)
        contexts = [
            self.tokenizer.decode(ids[mask])
            for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)
        ]
        responses = []
        for row in range(len(seeds)):
            text = self.script(contexts[row // num_generations])
            whole = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = whole[: sampling.max_new_tokens]
            responses.append(
                Response.sampled(
                    torch.tensor(ids),
                    -torch.tensor(ids, dtype=torch.float32),
                    truncated=len(ids) < len(whole),
                )
            )
            with self._lock:
                self.wrote.append(ids)
        self.calls.append(len(seeds))
        return assemble_rollout(
            prompts, responses, num_generations=num_generations, pad_id=self.tokenizer.pad_token_id
        )
