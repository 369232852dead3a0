"""Engines with a copy of the policy's weights: versions, checks, and recovery."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.models import evaluating, sequence_logprobs
from lrlhf.rollout.engines.engine import (
    Response,
    assemble_rollout,
    check_seeds,
    pad_token_id,
    prompt_token_ids,
)
from lrlhf.rollout.engines.policy_weights import (
    PolicyWeights,
    WeightSyncError,
    compare_fingerprints,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Media, PromptBatch, Rollout
from lrlhf.vllm_worker.fingerprint import Fingerprinted

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_PROBES = 4
_PROBE_PROMPT = 80
_PROBE_RESPONSE = 8
_PROBE_IMAGE = 64


class EngineFailure(RuntimeError):  # noqa: N818  the name says what happened to the engine
    """An engine stopped working in a way that a restart may mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response that is asked for."""

    prompt_ids: list[int]
    """As the policy reads them, every placeholder of an image counted out."""
    seed: int
    media: Media | None = None

    @property
    def short_ids(self) -> list[int]:
        """The prompt with one placeholder per image or video."""
        return self.prompt_ids if self.media is None else list(self.media.prompt_ids)


class SyncReport(NamedTuple):
    """What a push took."""

    version: int
    seconds: float
    restarts: int


class ProbeGap(NamedTuple):
    """Distance between log-probabilities of engine and trainer, in nats."""

    typical: float
    """Of the response that differs most, the median over its tokens: other weights move them all,
    rounding that sends a token to another expert moves a few by far."""
    mean: float
    max: float


class SyncedEngine(ABC):
    """Generates with a copy of the policy, which `push` brings up to date.

    A failure (a crash, a hang, a push that did not come through) ends the engine; it is started
    anew, given the policy's weights again, and the same responses are drawn with the same seeds.

    Args:
        max_restarts: How often in a row a call may start the engine anew before it gives up.
    """

    exact = False
    concurrent = False
    """Whether it computes in a process of its own, so that it can draw while the policy trains."""

    def __init__(self, *, max_restarts: int = 2) -> None:
        if max_restarts < 0:
            raise ValueError(f"engine.max_restarts is {max_restarts}; it must be 0 or more")
        self.max_restarts = max_restarts
        self.version: int | None = None
        """Training iterations behind the engine's weights; None: it was given none yet."""
        self.policy_version = 0
        """Training iterations behind the policy's weights, which a restarted engine gets."""
        self.restarts = 0
        self._policy: nn.Module | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._processor: MediaProcessor | None = None
        self._weights: PolicyWeights | None = None
        self._running = False

    # ------------------------------------------------------------------ what an engine brings

    @abstractmethod
    def _start(self) -> None:
        """Start with the policy's architecture and any weights."""

    @abstractmethod
    def _stop(self) -> None:
        """End, whatever state it is in; leaves nothing behind."""

    @abstractmethod
    def _send(self, tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
        """Replace all weights; returns each worker's fingerprints of what it was given."""

    @abstractmethod
    def _reset_caches(self) -> None:
        """Forget keys, values and image features that the old weights computed."""

    @abstractmethod
    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Draw one response per request."""

    @property
    def rounds(self) -> bool:
        """Whether engine or policy computes in less than float32."""
        assert self._policy is not None
        kinds = {weight.dtype for weight in self._policy.parameters()}
        return bool({self.dtype, *kinds} & {torch.bfloat16, torch.float16})

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What the running engine keeps its weights in."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and response together."""

    # ------------------------------------------------------------------ contract

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Get to know the policy; it starts with the first push."""
        if policy is not self._policy:
            # what runs has the architecture of the other one
            self.close()
            self._weights = PolicyWeights(policy)
        self._policy, self._tokenizer, self._processor = policy, tokenizer, processor

    def close(self) -> None:
        """End the engine; the next push starts it again."""
        self.version = None
        if self._running:
            self._running = False
            self._stop()

    def sleep(self) -> None:  # noqa: B027  most engines leave the trainer's memory alone
        """Give back what the device lacks for an update; the next push undoes it."""

    def forget(self) -> None:
        """Drop what is kept of earlier prompts; a push does so too.

        Keys and values out of a cache can differ in their last bit from those that are computed
        together with the rest of a prompt, so what a run draws would depend on what else it has
        drawn since the push.

        Raises:
            EngineFailure: The engine failed more than ``max_restarts`` times in a row.
        """
        self._with_restarts(self._reset_caches)

    def push(self, version: int) -> SyncReport:
        """Give the engine the policy's weights, and check that they arrived.

        Args:
            version: Training iterations behind these weights.

        Raises:
            WeightSyncError: A weight is missing or has other values in the engine; names it.
            EngineFailure: The engine failed more than ``max_restarts`` times in a row.
        """
        if self._weights is None:
            raise RuntimeError(f"{type(self).__name__}.attach has not been called")
        self.policy_version = version
        start, restarts = time.perf_counter(), self.restarts
        self._with_restarts(lambda: self._push_once(version), repush=False)
        return SyncReport(version, time.perf_counter() - start, self.restarts - restarts)

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
        recover: bool = True,
    ) -> Rollout:
        """Draw responses; see `RolloutEngine.generate`.

        Args:
            prompts: Unique prompts.
            sampling: How tokens are drawn.
            num_generations: Responses per prompt.
            seeds: One per response.
            recover: Start a failed engine anew with the policy's present weights. Off where these
                are no longer the ones that the responses are to be drawn with.

        Raises:
            WeightSyncError: The engine has no weights yet.
            EngineFailure: The engine failed more than ``max_restarts`` times in a row, or once
                with ``recover`` off.
            ValueError: A prompt leaves no room for the response.
        """
        if self.version is None:
            raise WeightSyncError(
                f"{type(self).__name__} was given no weights: add lrlhf.callbacks.VLLMWeightSync "
                "to trainer.callbacks, or call engine.push(version=0)"
            )
        assert self._tokenizer is not None
        check_seeds(seeds, prompts, num_generations)
        contexts = [ids.tolist() for ids in prompt_token_ids(prompts)]
        requests = [
            Request(
                prompt_ids=contexts[row // num_generations],
                seed=seed,
                media=None if prompts.media is None else prompts.media[row // num_generations],
            )
            for row, seed in enumerate(seeds)
        ]

        def respond() -> list[Response]:
            self._check_room(max(map(len, contexts)), sampling)
            with torch.autocast(self._device.type, enabled=False):
                return self._respond(requests, sampling)

        responses = self._with_restarts(respond) if recover else respond()
        return assemble_rollout(
            prompts,
            responses,
            num_generations=num_generations,
            pad_id=pad_token_id(self._tokenizer),
            weight_version=self.version,
        )

    @torch.no_grad()
    def probe(self) -> ProbeGap:
        """Compare log-probabilities of a few drawn tokens with those of the policy.

        The prompts are the same every time and fill several blocks of the prefix cache, so states
        that older weights left there show up too. A vision-language policy is shown an image also.

        Returns:
            Absolute differences; float32 on both sides gives about 1e-6.
        """
        assert self._policy is not None
        prompts = self._probe_prompts()
        rollout = self.generate(
            prompts,
            Sampling(max_new_tokens=_PROBE_RESPONSE),
            num_generations=1,
            seeds=list(range(len(prompts))),
        )
        with evaluating(self._policy), torch.autocast(self._device.type, enabled=False):
            own = sequence_logprobs(self._policy, rollout)
        return _gap_between(own, rollout)

    # ------------------------------------------------------------------ how it is done

    # inference mode, as in validation, would leave tensors that no later push could write to
    @torch.inference_mode(False)
    @torch.no_grad()
    def _push_once(self, version: int) -> None:
        assert self._weights is not None
        self.version = None
        # adapters are merged in the precision of the weights, whatever the training step casts to
        with torch.autocast(self._device.type, enabled=False):
            self._start_together()
            tensors = Fingerprinted(self._weights.tensors(self.dtype))
            arrived: list[dict[str, str]] = []
            problem: Exception | None = None
            try:
                arrived = self._send(tensors)
            except Exception as error:  # noqa: BLE001  raised again below
                problem = error
            # whether or not this rank's engine took them, others put their weights together
            self._bring_parts(tensors)
            try:
                if problem is not None:
                    raise problem
            finally:
                problem = None  # else its traceback would keep this frame, and the engine, alive
            for _ in tensors:
                pass  # what the engine did not ask for was to arrive too
            self._reset_caches()
        for fingerprints in arrived:
            compare_fingerprints(tensors.seen, fingerprints)
        self.version = version

    def _start_together(self) -> None:
        """Start, and where ranks put weights together for each other, only if all did."""
        if self._running:
            return
        self._running = True
        try:
            self._start()
        except BaseException as error:
            self.close()
            if self._takes_all_ranks and isinstance(error, Exception):
                self._worst_of_ranks(1 if isinstance(error, EngineFailure) else 2)
            raise
        if self._takes_all_ranks and self._worst_of_ranks(0) > 0:
            raise EngineFailure("the engine did not start on another rank")

    def _with_restarts(self, call: Callable[[], ResultT], *, repush: bool = True) -> ResultT:
        failures = 0
        while True:
            failure, fatal = None, None
            try:
                if failures and repush:
                    self._push_once(self.policy_version)
                result = call()
            except EngineFailure as error:
                failure = str(error)
            except Exception as error:  # noqa: BLE001  raised again once every rank knows of it
                fatal = error
            worst = self._worst_of_ranks(2 if fatal else 1 if failure else 0)
            if worst == 0:
                return result
            if fatal is not None:
                raise fatal
            failure = failure or "the engine failed on another rank"
            if worst == 2:
                raise EngineFailure(f"{failure}, which cannot be mended")
            # only here, where the error's traceback holds the engine's memory no more
            self.close()
            if failures == self.max_restarts:
                raise EngineFailure(f"{failure}, after {failures} restarts (engine.max_restarts)")
            failures += 1
            self.restarts += 1
            logger.warning("%s; starting the engine again", failure)

    def _bring_parts(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Go through what is left, where other ranks need this one's parts of it."""
        if self._takes_all_ranks:
            for _ in tensors:
                pass

    @property
    def _takes_all_ranks(self) -> bool:
        return self._weights is not None and self._weights.are_split

    def _worst_of_ranks(self, trouble: int) -> int:
        """Return the largest number of the ranks that act together.

        Those share this engine, or parts of the weights that a restarted one is given.
        """
        if not self._takes_all_ranks:
            return trouble
        worst = torch.tensor(trouble, device=self._device)
        torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
        return int(worst)

    @property
    def _device(self) -> torch.device:
        assert self._policy is not None
        return next(self._policy.parameters()).device

    def _check_room(self, longest_prompt: int, sampling: Sampling) -> None:
        if longest_prompt + sampling.max_new_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt has {longest_prompt} tokens and sampling.max_new_tokens is "
                f"{sampling.max_new_tokens}, together more than the engine's "
                f"{self.max_model_len} (engine.max_model_len): raise it to "
                f"{longest_prompt + sampling.max_new_tokens}, or set data.max_prompt_tokens"
            )

    def _probe_prompts(self) -> PromptBatch:
        assert self._tokenizer is not None
        assert self._policy is not None
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        ordinary = [token for token in range(len(self._tokenizer)) if token not in special]
        length = max(1, min(_PROBE_PROMPT, self.max_model_len - _PROBE_RESPONSE))
        numbers = np.random.Generator(np.random.Philox(0))
        rows: list[list[int]] = numbers.choice(ordinary, (_PROBES, length)).tolist()
        media: list[Media | None] = [None] * _PROBES
        if self._processor is not None:
            seen = self._processor.specimen(self._tokenizer, size=_PROBE_IMAGE)
            if len(seen.input_ids) + _PROBE_RESPONSE <= self.max_model_len:
                rows.append(seen.input_ids)
                media.append(seen.media)
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        return PromptBatch(
            input_ids=ids,
            attention_mask=mask,
            prompts=("",) * len(rows),
            columns=({},) * len(rows),
            media=tuple(media),
        ).to(self._device)


def _gap_between(own: Tensor, rollout: Rollout) -> ProbeGap:
    """Compare log-probabilities `[B, T]` with those that a rollout was drawn with."""
    mask = rollout.response_mask
    gaps = (own - rollout.sampling_logprobs).abs()
    # a row with NaN among its tokens has NaN as its median
    medians = [row[counts].median() for row, counts in zip(gaps, mask, strict=True)]
    typical = torch.stack(medians).max()
    return ProbeGap(float(typical), float(gaps[mask].mean()), float(gaps[mask].max()))
