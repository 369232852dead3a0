"""What a rollout engine does, what it may be able to do besides, and how to wrap one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from lrlhf.arguments import KeepsArguments
from lrlhf.media import MediaProcessor
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Message, PromptBatch, Rollout


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do; callers check these and never the engine's class.

    Args:
        holds_copy: It generates with its own copy of the weights, which has to be pushed.
        concurrent: It computes elsewhere, so that it can generate while the trainer computes.
        exact: Its log-probabilities are the policy's own, up to rounding. An engine that has to
            find that out knows it once it has generated.
        tells_kept_mass: It says how much probability top_p, top_k, min_p and min_new_tokens left.
        media: It takes prompts with images or videos.
        updates_in_flight: It takes new weights while it generates, goes on with them, and says of
            each token which weights sampled it.
        structured: It holds responses to a format (`Sampling.structured`).
        ranks_together: Ranks of the trainer that it is split over, all of which have to call it.
    """

    holds_copy: bool = False
    concurrent: bool = False
    exact: bool = False
    tells_kept_mass: bool = True
    media: bool = True
    updates_in_flight: bool = False
    structured: bool = False
    ranks_together: int = 1


class RendersChat(Protocol):
    """Renders messages as the data's chat template has them."""

    def render(self, messages: Sequence[Message], row: Mapping[str, Any], *, prompt: bool) -> str:
        """Return the text of messages; a ``prompt`` leaves the assistant's turn open."""
        ...


class ProbeGap(NamedTuple):
    """Distance between log-probabilities of engine and trainer, in nats."""

    typical: float
    """Of the response that differs most, the median over its tokens: other weights move them all,
    rounding that sends a token to another expert moves a few by far."""
    mean: float
    max: float
    low_precision: bool
    """Whether engine or policy computes in less than float32."""


class RolloutEngine(KeepsArguments, ABC):
    """Generates responses. Token ids go in and come out; text is never tokenised again.

    The methods about weights are for engines that hold a copy of them (`Capabilities`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities()

    @abstractmethod
    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        """Get to know the policy before the first call of ``generate``.

        Args:
            policy: The model.
            tokenizer: Its tokenizer.
            processor: What it sees images and videos with; None: it reads text only.
        """

    def use_chat(self, chat: RendersChat) -> None:
        """Hear how the data renders chats, for engines that go on with them."""

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
            sampling: How tokens are sampled.
            num_generations: Responses per prompt; rows of one prompt are consecutive.
            seeds: One per response. A response depends on its prompt and its seed, not on what
                else is in the batch, up to rounding.

        Returns:
            Right-padded rows, one per response, on the device of the prompts; see
            `lrlhf.rollout.assemble_rollout`.
        """

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest prompt and response together; None: not known, or not yet."""
        return None

    def conversation(self) -> AbstractContextManager[None]:
        """Return a context in which prompts go on from earlier responses.

        An engine may keep in it what it has computed of them; the weights change meanwhile only
        where updates in flight are allowed.
        """
        return nullcontext()

    def sleep(self) -> None:
        """Give back what the device lacks for an update; the next push undoes it."""

    def close(self) -> None:
        """Give back what it holds; ``generate`` or ``push`` may start it again."""

    # ------------------------------------------------------------------ a copy of the weights

    @property
    def version(self) -> int | None:
        """Training iterations behind the engine's weights; None: it has none, or unknown ones."""
        return None

    def push(self, version: int) -> None:
        """Give the engine the policy's weights, and check that they arrived.

        Args:
            version: Training iterations behind these weights.

        Raises:
            WeightSyncError: A weight is missing or has other values in the engine; names it.
            EngineFailure: The engine failed again and again.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights of its own")

    def outdate(self) -> None:
        """Count its weights as unknown: it generates nothing before the next push."""

    def policy_moved(self, version: int) -> None:
        """Hear how many iterations are behind the policy's weights, for a push after a restart."""

    def allow_updates_in_flight(self, allowed: bool) -> None:
        """Let responses that are generated during a push go on with the new weights.

        Without it a push breaks them off.

        Raises:
            ValueError: The engine cannot, see `Capabilities`.
        """
        if allowed and not self.capabilities.updates_in_flight:
            raise ValueError(
                f"{type(self).__name__} does not take new weights while it generates: take "
                "lrlhf.rollout.VLLMServerEngine, whose adapters, if any, are merged "
                "(engine.lora: merged)"
            )

    def forget(self) -> None:
        """Drop what is kept of earlier prompts; a push does so too.

        Keys and values out of a cache can differ in their last bit from those that are computed
        together with the rest of a prompt, so what a run samples would depend on what else it has
        sampled since the push.
        """

    def probe(self) -> ProbeGap:
        """Compare log-probabilities of a few sampled tokens with those of the policy.

        Returns:
            Absolute differences; float32 on both sides gives about 1e-6.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights of its own")


class EngineWrapper(RolloutEngine):
    """Forwards everything to another engine: override ``generate`` to change its responses.

    Args:
        engine: The wrapped engine.
    """

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
        """Make the wrapped engine known to the policy; ``tokenizer`` is kept for subclasses."""
        self.tokenizer = tokenizer
        self.engine.attach(policy, tokenizer, processor)

    def use_chat(self, chat: RendersChat) -> None:
        self.engine.use_chat(chat)

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


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return what rows are padded with.

    Raises:
        ValueError: The tokenizer has no pad token.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError("the tokenizer has no pad token; set tokenizer.pad_token")
    return int(tokenizer.pad_token_id)


def check_seeds(seeds: Sequence[int], prompts: PromptBatch, num_generations: int) -> None:
    """Check that there is one seed per response.

    Raises:
        ValueError: There is not.
    """
    if len(seeds) != len(prompts) * num_generations:
        raise ValueError(
            f"{len(seeds)} seeds for {len(prompts)} prompts x {num_generations} generations"
        )


def check_format(engine: RolloutEngine, sampling: Sampling, *, option: str = "sampling") -> None:
    """Check that the engine can hold responses to the format that is asked for, if any.

    Raises:
        ValueError: It cannot.
    """
    if sampling.structured is not None and not engine.capabilities.structured:
        raise ValueError(
            f"{option}.structured: {type(engine).__name__} holds no responses to a format; leave "
            "it out, or take lrlhf.rollout.VLLMEngine or VLLMServerEngine"
        )
