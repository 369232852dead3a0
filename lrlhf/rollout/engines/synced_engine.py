"""Base of engines with a copy of the policy's weights: versions, checks, and recovery."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.media import MediaProcessor
from lrlhf.models import evaluating, sequence_logprobs
from lrlhf.models.sharding import device_of
from lrlhf.rollout.engines.engine import (
    Capabilities,
    ProbeGap,
    RolloutEngine,
    check_seeds,
    gather_ranks,
    pad_token_id,
)
from lrlhf.rollout.engines.policy_weights import (
    PolicyWeights,
    WeightSyncError,
    compare_fingerprints,
)
from lrlhf.rollout.responses import Response, assemble_rollout, prompt_token_ids, token_prompts
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Media, PromptBatch, Rollout
from lrlhf.vllm_worker.fingerprint import Fingerprinted, as_text

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

PROBE_RESPONSE = 8
"""Tokens of each response of a probe."""
_PROBE_PROMPTS = 4
_PROBE_TOKENS = 80
_PROBE_IMAGE = 64

_recovers: ContextVar[bool] = ContextVar("recovers", default=True)


class EngineFailure(RuntimeError):  # noqa: N818  a failure of the engine, not of the caller
    """An engine failed in a way that a restart may repair."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response."""

    prompt_ids: list[int]
    """As the policy reads them, with all placeholder tokens of an image or audio."""
    seed: int
    max_tokens: int
    media: Media | None = None

    @property
    def short_ids(self) -> list[int]:
        """The prompt with one placeholder per image, video or audio."""
        return self.prompt_ids if self.media is None else list(self.media.prompt_ids)


@contextlib.contextmanager
def without_recovery() -> Iterator[None]:
    """Disable restarts of a failed engine in this thread, as the policy's weights change."""
    token = _recovers.set(False)
    try:
        yield
    finally:
        _recovers.reset(token)


def may_recover() -> bool:
    """Whether a failed engine may be restarted in this thread; see `without_recovery`."""
    return _recovers.get()


class SyncedEngine(RolloutEngine):
    """Generates with a copy of the policy, which `push` updates.

    After a failure (a crash, a hang, an incomplete push) the engine is restarted, gets the policy's
    weights again, and generates the same responses from the same seeds.

    Args:
        max_restarts: Consecutive restarts of the engine within a call before it fails.
    """

    # set by `attach`
    _policy: nn.Module
    _tokenizer: PreTrainedTokenizerBase
    _processor: MediaProcessor | None
    _weights: PolicyWeights

    def __init__(self, *, max_restarts: int = 2) -> None:
        if max_restarts < 0:
            raise ValueError(f"engine.max_restarts is {max_restarts}; it must be 0 or more")
        self.max_restarts = max_restarts
        self._version: int | None = None
        self._policy_version = 0
        self._turn = 0
        self.restarts = 0
        self._running = False
        self._in_flight = False
        """Whether generation continues during a push."""

    # ------------------------------------------------------------------ for subclasses

    @abstractmethod
    def _start(self) -> None:
        """Start with the policy's architecture and arbitrary weights."""

    @abstractmethod
    def _stop(self) -> None:
        """Stop, in any state, and release all resources."""

    @abstractmethod
    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        """Replace all weights, and clear caches.

        Returns:
            Fingerprints of the tensors that each worker received, see `as_text`.
        """

    @abstractmethod
    def _reset_caches(self) -> None:
        """Clear keys, values and image features."""

    @abstractmethod
    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Generate one response per request.

        A response without ``weight_version`` has that of the last push.
        """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Type of the running engine's weights."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""

    # ------------------------------------------------------------------ interface

    @property
    def capabilities(self) -> Capabilities:
        """A copy of the weights; vLLM does not return the kept mass."""
        return Capabilities(holds_copy=True, reports_kept_mass=False)

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        if policy is not getattr(self, "_policy", None):
            # the running engine has the architecture of the other one
            self.close()
            self._weights = PolicyWeights(policy)
        self._policy, self._tokenizer, self._processor = policy, tokenizer, processor

    def close(self) -> None:
        """Stop the engine; the next push starts it again."""
        self._version = None
        if self._running:
            self._running = False
            self._stop()

    @property
    def version(self) -> int | None:
        return self._version

    def outdate(self) -> None:
        self._version = None

    def policy_moved(self, version: int) -> None:
        self._policy_version = version

    def allow_updates_in_flight(self, allowed: bool) -> None:
        super().allow_updates_in_flight(allowed)
        self._in_flight = allowed

    def forget(self) -> None:
        self._with_restarts(self._reset_caches)

    def push(self, version: int) -> None:
        if not hasattr(self, "_weights"):
            raise RuntimeError(f"{type(self).__name__}.attach has not been called")
        self._policy_version = version
        try:
            self._with_restarts(lambda: self._push_once(version), repush=False)
        except Exception:
            self._version = None
            raise

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        """Generate responses; see `RolloutEngine.generate`.

        Raises:
            WeightSyncError: The engine has no weights yet.
            EngineFailure: The engine failed more than ``max_restarts`` times in a row, or once
                where it may not recover, see `without_recovery`.
            ValueError: A prompt leaves no room for the response, or has unsupported media.
        """
        if self._version is None:
            if not _recovers.get():  # another thread is about to push weights
                raise EngineFailure(f"{type(self).__name__} has no weights at the moment")
            raise WeightSyncError(
                f"{type(self).__name__} was given no weights: add lrlhf.callbacks.VLLMWeightSync "
                "to trainer.callbacks, or call engine.push(version=0)"
            )
        check_seeds(seeds, prompts, num_generations)
        contexts = [ids.tolist() for ids in prompt_token_ids(prompts)]
        media = prompts.media or (None,) * len(prompts)
        limits = [sampling.max_new_tokens] * len(prompts)
        if prompts.room is not None:
            limits = prompts.room.clamp(max=sampling.max_new_tokens).tolist()
        groups = [row // num_generations for row in range(len(seeds))]
        requests = [
            Request(contexts[group], seed, limits[group], media[group])
            for group, seed in zip(groups, seeds, strict=True)
        ]

        def respond() -> list[Response]:
            self._check_requests(requests)
            with torch.autocast(self._device.type, enabled=False):
                return self._respond(requests, sampling)

        responses = self._with_restarts(respond) if _recovers.get() else respond()
        return assemble_rollout(
            prompts,
            [
                # after a restart the weights may be newer
                replace(response, weight_version=self._version)
                if response.weight_version is None
                else response
                for response in responses
            ],
            num_generations=num_generations,
            pad_id=pad_token_id(self._tokenizer),
        )

    @torch.no_grad()
    def probe(self) -> ProbeGap:
        prompts = _probe_prompts(
            self._tokenizer, self._processor, max_model_len=self.max_model_len
        ).to(self._device)
        sampling = Sampling(max_new_tokens=PROBE_RESPONSE)
        rollout = self.generate(prompts, sampling, num_generations=1, seeds=range(len(prompts)))
        with evaluating(self._policy), torch.autocast(self._device.type, enabled=False):
            own = sequence_logprobs(self._policy, rollout)
        kinds = {self.dtype, *(weight.dtype for weight in self._policy.parameters())}
        low_precision = bool(kinds & {torch.bfloat16, torch.float16})
        gaps, mask = (own - rollout.sampling_logprobs).abs(), rollout.response_mask
        # a row with NaN among its tokens has NaN as its median
        medians = [row[counts].median() for row, counts in zip(gaps, mask, strict=True)]
        typical = float(torch.stack(medians).max())
        return ProbeGap(typical, float(gaps[mask].mean()), float(gaps[mask].max()), low_precision)

    # ------------------------------------------------------------------ pushes and restarts

    # tensors of inference mode, as in validation, could not be written by later pushes
    @torch.inference_mode(False)
    @torch.no_grad()
    def _push_once(self, version: int) -> None:
        if not self._in_flight:
            self._version = None
        # adapters are merged in the precision of the weights, not of the training step's autocast
        with torch.autocast(self._device.type, enabled=False):
            self._start_together()
            self._turn += 1
            tensors = Fingerprinted(self._tensors(), turn=self._turn)
            try:
                arrived = self._send(tensors)
            except Exception:
                # other ranks still gather their weights
                self._exhaust(tensors)
                raise
            for _ in tensors:
                pass  # the fingerprints of all are compared
        expected = as_text(tensors.seen)
        for fingerprints in arrived:
            compare_fingerprints(expected, fingerprints)
        self._version = version

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a push; all ranks must iterate over sharded weights."""
        return self._weights.tensors(self.dtype)

    def _start_together(self) -> None:
        """Start; where ranks act together, fail unless all started."""
        if self._running:
            return
        self._running = True
        try:
            self._start()
        except BaseException as error:
            self.close()
            if self._acts_with_ranks and isinstance(error, Exception):
                self._worst_of_ranks(1 if isinstance(error, EngineFailure) else 2)
            raise
        if self._worst_of_ranks(0) > 0:
            raise EngineFailure("the engine did not start on another rank")

    def _with_restarts(self, call: Callable[[], ResultT], *, repush: bool = True) -> ResultT:
        failures = 0
        while True:
            failure, fatal = None, None
            try:
                if failures and repush:
                    self._push_once(self._policy_version)
                result = call()
            except EngineFailure as error:
                failure = str(error)
            except Exception as error:  # noqa: BLE001  raised below, after the exchange of ranks
                fatal = error
            worst = self._worst_of_ranks(2 if fatal else 1 if failure else 0)
            if worst == 0:
                return result
            if fatal is not None:
                raise fatal
            failure = failure or "the engine failed on another rank"
            if worst == 2:
                raise EngineFailure(f"{failure}, which cannot be mended")
            # outside of the handler, whose traceback would keep the engine's memory
            self.close()
            if failures == self.max_restarts:
                raise EngineFailure(f"{failure}, after {failures} restarts (engine.max_restarts)")
            failures += 1
            self.restarts += 1
            logger.warning("%s; starting the engine again", failure)

    def _exhaust(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Iterate over the remaining tensors, where other ranks need this rank's shards."""
        if self._weights.are_split:
            for _ in tensors:
                pass

    @property
    def _acts_with_ranks(self) -> bool:
        """Whether ranks share this engine, or the sharded weights of a push."""
        return self._weights.are_split

    def _worst_of_ranks(self, status: int) -> int:
        """Return the largest status (0: fine, 1: failed, 2: fatal) of ranks that act together."""
        return max(gather_ranks(status)) if self._acts_with_ranks else status

    @property
    def _device(self) -> torch.device:
        return device_of(self._policy)

    def _check_requests(self, requests: Sequence[Request]) -> None:
        """Raise ``ValueError`` for requests that are too long."""
        longest = max(requests, key=lambda each: len(each.prompt_ids) + each.max_tokens)
        needed = len(longest.prompt_ids) + longest.max_tokens
        if needed > self.max_model_len:
            raise ValueError(
                f"a prompt has {len(longest.prompt_ids)} tokens and sampling.max_new_tokens is "
                f"{longest.max_tokens}, together more than the engine's "
                f"{self.max_model_len} (engine.max_model_len): raise it to {needed}, or set "
                "data.max_prompt_tokens"
            )


def _probe_prompts(
    tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None, *, max_model_len: int
) -> PromptBatch:
    """Return fixed prompts, for a multimodal policy with an image or audio too.

    They fill several blocks of a prefix cache, so that stale blocks of older weights show up.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    length = max(1, min(_PROBE_TOKENS, max_model_len - PROBE_RESPONSE))
    numbers = np.random.Generator(np.random.Philox(0))
    rows: list[list[int]] = numbers.choice(ordinary, (_PROBE_PROMPTS, length)).tolist()
    media: list[Media | None] = [None] * _PROBE_PROMPTS
    if processor is not None:
        specimen = processor.specimen(tokenizer, size=_PROBE_IMAGE)
        if len(specimen.input_ids) + PROBE_RESPONSE <= max_model_len:
            rows.append(specimen.input_ids)
            media.append(specimen.media)
    return token_prompts(rows, tuple(media))
