"""An engine that takes new weights while it generates, as a server does."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lrlhf.rollout import Capabilities, EngineFailure, Response, Sampling, Segment
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.vllm_worker.fingerprint import Fingerprinted
from tests.rollout.copy_engine import CopyEngine


class Generated(NamedTuple):
    """One call that generated responses."""

    started: float
    ended: float
    """Seconds, as ``time.perf_counter`` says."""
    versions: list[int]
    """Of each token of the longest response."""


class _Column(NamedTuple):
    """A token of every response; those that have ended go on and do not count."""

    ids: Tensor
    logprobs: Tensor
    counts: Tensor
    version: int


class FlightEngine(CopyEngine):
    """Generates token by token; a push takes effect between two of them.

    What older weights have computed of a response stays in its cache, so some of the tokens come
    from a distribution that no single version of the weights has.

    Args:
        delay: Seconds that a token takes beside its computation, on average.
        seed: Of the delays, which are anything between none and twice that; None: all are equal.
        patience: Seconds that a response waits in its middle for newer weights than it began with,
            so that there are some however slow the machine is.
        options: See `CopyEngine`; a failing ``respond`` does so after its first token.
    """

    def __init__(
        self, *, delay: float = 0.0, seed: int | None = None, patience: float = 0.0, **options: Any
    ) -> None:
        super().__init__(concurrent=True, **options)
        self.generated: list[Generated] = []
        self.pushes_in_flight = 0
        self.busy = 0
        self._delay = delay
        self._random = None if seed is None else random.Random(seed)
        self._patience = patience
        self._weights_lock = threading.RLock()
        self._updated = threading.Condition(self._weights_lock)
        self._held = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, updates_in_flight=True)

    def push(self, version: int) -> None:
        with self._weights_lock:
            self._coming = version
            super().push(version)

    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        assert self._in_flight or not self.busy, "weights changed under responses in the making"
        self.pushes_in_flight += self.busy > 0
        arrived = super()._send(tensors)
        self._held = self._coming
        self._updated.notify_all()
        return arrived

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        with self._weights_lock:
            self.busy += 1
        try:
            return self._one_by_one(requests, sampling)
        finally:
            with self._weights_lock:
                self.busy -= 1

    @torch.no_grad()
    def _one_by_one(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        model, started = self._model, time.perf_counter()
        longest = max(len(one.prompt_ids) for one in requests)
        padded = [[0] * (longest - len(one.prompt_ids)) + one.prompt_ids for one in requests]
        ids = torch.tensor(padded)
        mask = torch.tensor(
            [[at >= longest - len(one.prompt_ids) for at in range(longest)] for one in requests]
        )
        columns: list[_Column] = []
        cache, ended = DynamicCache(), torch.zeros(len(requests), dtype=torch.bool)
        generators = [torch.Generator().manual_seed(one.seed) for one in requests]
        while len(columns) < sampling.max_new_tokens and not ended.all():
            self._wait()
            if len(columns) == sampling.max_new_tokens // 2:
                self._wait_for_more_than(columns[0].version)
            logits, version = self._logits(model, ids, mask, cache)
            if not columns:
                with self._weights_lock:
                    self._count("respond")
            drawn, logprobs = _draw(logits, sampling.temperature, generators)
            columns.append(_Column(drawn, logprobs, ~ended, version))
            ended = ended | (drawn == self._tokenizer.eos_token_id)
            ids, mask = drawn[:, None], torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        versions = [one.version for one in columns]
        self.generated.append(Generated(started, time.perf_counter(), versions))
        eos = int(self._tokenizer.eos_token_id)
        return [_response(row, columns, eos) for row in range(len(requests))]

    def _wait(self) -> None:
        factor = 1.0 if self._random is None else 2 * self._random.random()
        time.sleep(factor * self._delay)

    def _wait_for_more_than(self, version: int) -> None:
        with self._updated:
            self._updated.wait_for(lambda: self._held > version, timeout=self._patience)

    def _logits(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, int]:
        with self._weights_lock:
            if self._broken or self._copy is not model:
                raise EngineFailure("the engine is gone")
            places = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(ids, attention_mask=mask.long(), position_ids=places, past_key_values=cache)
            return out.logits[:, -1].float(), self._held


def _draw(
    logits: Tensor, temperature: float, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    logprobs = (logits / (temperature or 1.0)).log_softmax(dim=-1)
    drawn = logits.argmax(dim=-1)
    if temperature:
        drawn = torch.cat(
            [
                torch.multinomial(row.exp(), 1, generator=generator)
                for row, generator in zip(logprobs, generators, strict=True)
            ]
        )
    return drawn, logprobs.gather(1, drawn[:, None])[:, 0]


def _response(row: int, columns: Sequence[_Column], eos: int) -> Response:
    kept = [(one.ids[row], one.logprobs[row], one.version) for one in columns if one.counts[row]]
    ids, logprobs, versions = map(list, zip(*kept, strict=True))
    segment = Segment(
        token_ids=torch.stack(ids), logprobs=torch.stack(logprobs), versions=torch.tensor(versions)
    )
    truncated = int(ids[-1]) != eos
    return Response(segments=(segment,), truncated=truncated, weight_version=min(versions))
