"""The interface of rollout engines, their capabilities, and a base class of wrappers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.arguments import KeepsArguments
from lrlhf.media import MediaOptions, MediaProcessor
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Message, PromptBatch, Rollout

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of an engine; callers check these and never the engine's class.

    Args:
        holds_copy: It generates with its own copy of the weights, which has to be pushed.
        concurrent: It can generate while the trainer computes.
        exact: Its log-probabilities are the policy's own, up to rounding; may be known only after
            the first responses.
        reports_kept_mass: It returns the probability that top_p, top_k, min_p and min_new_tokens
            leave.
        max_sampling_mask: Most ids per token of the sampling masks that it returns
            (``Sampling.keep_mask``), which ``top_k`` has to bound; 0: it returns none, None: there
            is no limit.
        records_experts: It returns the experts that each token went through
            (``Sampling.keep_experts``).
        updates_in_flight: It accepts new weights while it generates, continues with them, and
            returns the version of the weights of each token.
        structured: It supports structured output (`Sampling.structured`).
        ranks_together: Ranks of the trainer that it is split over, all of which have to call it.
    """

    holds_copy: bool = False
    concurrent: bool = False
    exact: bool = False
    reports_kept_mass: bool = True
    max_sampling_mask: int | None = 0
    records_experts: bool = False
    updates_in_flight: bool = False
    structured: bool = False
    ranks_together: int = 1


class RendersChat(Protocol):
    """Renders messages by the chat template of the data."""

    def render(self, messages: Sequence[Message], row: Mapping[str, Any], *, prompt: bool) -> str:
        """Return the text of messages; a ``prompt`` ends with an open turn of the assistant."""
        ...


class ProbeGap(NamedTuple):
    """Distance between log-probabilities of engine and trainer, in nats."""

    typical: float
    """Median over the tokens of the response that differs most: other weights change all tokens,
    rounding that routes a token to another expert changes a few."""
    mean: float
    max: float
    low_precision: bool
    """Whether engine or policy computes in less than float32."""


class RolloutEngine(KeepsArguments, ABC):
    """Generates responses as token ids to prompts as token ids; text is never tokenised again.

    The methods about weights are for engines with a copy of them (`Capabilities.holds_copy`).
    """

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @abstractmethod
    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Set the policy, before the first call of ``generate``.

        Args:
            policy: The model.
            tokenizer: Its tokenizer.
            processor: Its processor of images and videos; None: a text model.
        """

    def use_chat(self, chat: RendersChat, media: MediaOptions = MediaOptions()) -> None:  # noqa: B008  frozen
        """Set how the data render chats and read images, for engines of several turns."""

    @abstractmethod
    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        """Generate ``num_generations`` responses to each prompt.

        Args:
            prompts: Unique prompts.
            sampling: Sampling options.
            num_generations: Responses per prompt; rows of one prompt are consecutive.
            seeds: One per response. A response depends on its prompt and its seed, not on the
                batch, up to rounding.

        Returns:
            Right-padded rows, one per response, on the device of the prompts; see
            `lrlhf.rollout.assemble_rollout`.
        """

    @property
    def context_length(self) -> int | None:
        """Most tokens of prompt and response together; None: not known, or not yet."""
        return None

    def conversation(self) -> AbstractContextManager[None]:
        """Return a context in which prompts continue earlier responses.

        An engine may cache keys and values in it; the weights change meanwhile only where updates
        in flight are allowed.
        """
        return nullcontext()

    def sleep(self) -> None:
        """Release device memory for an update, until the next push."""

    def close(self) -> None:
        """Release all resources; ``generate`` or ``push`` may start the engine again."""

    # ------------------------------------------------------------------ a copy of the weights

    @property
    def version(self) -> int | None:
        """Training iterations behind the engine's weights; None: no or unknown weights."""
        return None

    def push(self, version: int) -> None:
        """Copy the policy's weights to the engine, and check the copy.

        Args:
            version: Training iterations behind these weights.

        Raises:
            WeightSyncError: A weight is missing or differs in the engine; names it.
            EngineFailure: The engine failed, also after restarts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights of its own")

    @property
    def pushed_bytes(self) -> tuple[int, int] | None:
        """Bytes of the last push for each worker, and of all weights; None: they have no copy."""
        return None

    def outdate(self) -> None:
        """Mark its weights as unknown: it generates nothing before the next push."""

    def policy_moved(self, version: int) -> None:
        """Set the training iterations behind the policy's weights, for a push after a restart."""

    def allow_updates_in_flight(self, allowed: bool) -> None:
        """Let responses that are generated during a push continue with the new weights.

        Else a push aborts them.

        Raises:
            ValueError: The engine does not support it, see `Capabilities`.
        """
        if allowed and not self.capabilities.updates_in_flight:
            raise ValueError(
                f"{type(self).__name__} does not accept new weights while it generates: take "
                "lrlhf.rollout.VLLMServerEngine, whose adapters, if any, are merged "
                "(engine.lora: merged)"
            )

    def forget(self) -> None:
        """Clear caches of earlier prompts, as a push does.

        Cached keys and values can differ in their last bit from those that are computed with the
        complete prompt, so samples would depend on all earlier ones since the push.
        """

    def probe(self) -> ProbeGap:
        """Compare log-probabilities of a few sampled tokens with the policy's.

        Returns:
            Absolute differences; about 1e-6 with float32 on both sides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights of its own")


class EngineWrapper(RolloutEngine):
    """Delegates to another engine: override ``generate`` to change its responses."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Attach the wrapped engine; ``tokenizer`` becomes an attribute for subclasses."""
        self.tokenizer = tokenizer
        self.engine.attach(policy, tokenizer, processor)

    def use_chat(self, chat: RendersChat, media: MediaOptions = MediaOptions()) -> None:  # noqa: B008  frozen
        self.engine.use_chat(chat, media)

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        return self.engine.generate(prompts, sampling, num_generations=num_generations, seeds=seeds)

    @property
    def context_length(self) -> int | None:
        return self.engine.context_length

    def conversation(self) -> AbstractContextManager[None]:
        return self.engine.conversation()

    def sleep(self) -> None:
        self.engine.sleep()

    def close(self) -> None:
        self.engine.close()

    @property
    def version(self) -> int | None:
        return self.engine.version

    def push(self, version: int) -> None:
        self.engine.push(version)

    @property
    def pushed_bytes(self) -> tuple[int, int] | None:
        return self.engine.pushed_bytes

    def outdate(self) -> None:
        self.engine.outdate()

    def policy_moved(self, version: int) -> None:
        self.engine.policy_moved(version)

    def allow_updates_in_flight(self, allowed: bool) -> None:
        self.engine.allow_updates_in_flight(allowed)

    def forget(self) -> None:
        self.engine.forget()

    def probe(self) -> ProbeGap:
        return self.engine.probe()


def gather_ranks(value: ValueT) -> list[ValueT]:
    """Return the value of every rank, in order, on every rank; collective."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the pad token; raises ``ValueError`` without one."""
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token")
    return int(tokenizer.pad_token_id)


def check_seeds(seeds: Sequence[int], prompts: PromptBatch, num_generations: int) -> None:
    """Raise ``ValueError`` unless there is one seed per response."""
    if len(seeds) != len(prompts) * num_generations:
        raise ValueError(
            f"{len(seeds)} seeds for {len(prompts)} prompts x {num_generations} generations"
        )


def check_format(engine: RolloutEngine, sampling: Sampling, *, option: str = "sampling") -> None:
    """Raise ``ValueError`` if the engine does not support the structured output of ``sampling``."""
    if sampling.structured is not None and not engine.capabilities.structured:
        raise ValueError(
            f"{option}.structured: {type(engine).__name__} holds no responses to a format; leave "
            "it out, or take lrlhf.rollout.VLLMEngine or VLLMServerEngine"
        )
