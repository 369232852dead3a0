"""Rollouts with the model that is being trained, through ``transformers.generate``."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from lrlhf.media import MediaProcessor
from lrlhf.models import (
    TokenBudget,
    context_length,
    eos_token_ids,
    evaluating,
    ruled_out_ids,
    sequence_logprobs,
)
from lrlhf.models.modes import ModelRefusalError, in_trial, refusals, trial
from lrlhf.models.sharding import gathered, has_split_weights
from lrlhf.rollout.engines.engine import (
    Capabilities,
    RolloutEngine,
    check_format,
    check_seeds,
    pad_token_id,
)
from lrlhf.rollout.engines.gathering_room import check_room_to_gather
from lrlhf.rollout.engines.generation_batches import Way, best_way, parts, trial_prompts
from lrlhf.rollout.engines.kept_prefixes import KeptPrefixes
from lrlhf.rollout.engines.prompt_sharing import plain_generation_config, prefill
from lrlhf.rollout.engines.token_sampler import Ending, TokenSampler
from lrlhf.rollout.responses import Response, assemble_rollout, continued_prompts
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import PromptBatch, Rollout

logger = logging.getLogger(__name__)

_EXACT_GAP = 1e-4
_ROUNDED_GAP = 0.08
"""Mean distances in nats up to which generation computes what a forward pass does."""


class TransformersEngine(RolloutEngine):
    """Generates with the policy itself, so its weights are never stale.

    Before the first responses it compares what it gives a few tokens with a forward pass, as they
    are trained in. Where a model reads the padding of shorter prompts, or mixes the rows of a
    batch, prompts of equal length go together or every response by itself, see `Batching`; if
    that does not help either, the engine is not exact, and its log-probabilities are treated as
    another model's.

    The prompt is computed once per group where that gives the same probabilities. Every response
    has a random stream of its own: the token at step ``t`` is where the cumulated probabilities
    pass the ``t``-th uniform number of the response's seed.

    Args:
        max_batch_size: Responses computed at the same time; None: all of them. Smaller values
            save memory for keys and values and change nothing else. "auto": on a GPU as many as
            fit, which the first batches find out (`lrlhf.models.TokenBudget`), elsewhere all.
    """

    # what `attach` sets
    _policy: nn.Module
    _tokenizer: PreTrainedTokenizerBase

    def __init__(self, max_batch_size: int | Literal["auto"] | None = "auto") -> None:
        if isinstance(max_batch_size, int) and max_batch_size < 1:
            raise ValueError(f"engine.max_batch_size is {max_batch_size}; it must be 1 or more")
        self.max_batch_size = max_batch_size
        self._budget = TokenBudget()
        self._way = Way()
        self._tried: nn.Module | None = None
        self._kept: KeptPrefixes | None = None
        """Inside a conversation."""
        self._continues: nn.Module | None = None
        """The policy that was found to go on from what is kept as if it computed all of it."""

    @property
    def capabilities(self) -> Capabilities:
        """Exact, unless the trial before the first responses said otherwise."""
        return Capabilities(exact=self._way.exact)

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        check_room_to_gather(policy)

    @property
    def context_length(self) -> int | None:
        return context_length(self._policy)

    @contextlib.contextmanager
    def conversation(self) -> Iterator[None]:
        """Compute of each turn only what is new, where that gives the same probabilities."""
        self._kept = KeptPrefixes()
        try:
            yield
        finally:
            self._kept = None

    @torch.no_grad()
    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        if not hasattr(self, "_policy"):
            raise RuntimeError("TransformersEngine.attach has not been called")
        check_seeds(seeds, prompts, num_generations)
        check_format(self, sampling)
        if isinstance(self.max_batch_size, int) and self.max_batch_size < num_generations:
            raise ValueError(
                f"engine.max_batch_size is {self.max_batch_size}, fewer than the "
                f"{num_generations} responses to one prompt; the nearest value is "
                f"{num_generations}"
            )
        with (
            gathered(self._policy),
            evaluating(self._policy),
            _cached_autocast(prompts.input_ids.device),
        ):
            if self._tried is not self._policy:
                with self._without_conversation():
                    self._way = self._try_ways()
                self._tried = self._policy
            if self._kept is not None and self._continues is not self._policy:
                self._try_to_continue()
            responses = self._generate(self._way, prompts, sampling, seeds)
        pad_id = pad_token_id(self._tokenizer)
        return assemble_rollout(prompts, responses, num_generations=num_generations, pad_id=pad_id)

    def _generate(
        self,
        way: Way,
        prompts: PromptBatch,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> list[Response]:
        answered: dict[int, Response] = {}
        copies, device = len(seeds) // len(prompts), prompts.input_ids.device
        for limit, alike in self._by_limit(prompts, sampling).items():
            longest = prompts.input_ids.shape[1] + limit
            for chosen, wanted in parts(
                prompts.attention_mask.sum(dim=1)[alike].tolist(),
                num_generations=copies,
                prompts_at_once=partial(self._prompts_at_once, copies, longest, device),
                batching=way.batching,
            ):
                asked = prompts.select(torch.tensor([alike[one] for one in chosen]))
                numbers = [alike[one // copies] * copies + one % copies for one in wanted]
                own = [seeds[one] for one in numbers]
                with self._budget.measuring(len(own) * longest, device) as computed:
                    answers = self._respond(way, asked, sampling.at_most(limit), own)
                    # most batches end before their limit
                    came = max(len(answer.segments[0].token_ids) for answer in answers)
                    computed.tokens = len(own) * (prompts.input_ids.shape[1] + came)
                self._budget.update()
                answered.update(zip(numbers, answers, strict=True))
        return [answered[response] for response in range(len(seeds))]

    def _prompts_at_once(self, copies: int, longest: int, device: torch.device) -> int:
        """Return to how many prompts so many responses each may be generated together."""
        if in_trial():
            return sys.maxsize
        if isinstance(self.max_batch_size, int):
            return self.max_batch_size // copies
        tokens = self._budget.limit(self.max_batch_size, device)
        return sys.maxsize if tokens is None else max(1, tokens // (copies * longest))

    def _by_limit(self, prompts: PromptBatch, sampling: Sampling) -> dict[int, list[int]]:
        """Put prompts together that may have as many tokens behind them.

        ``room`` divides them only where a response of full length would not fit into the context:
        rows of a batch go on together, and some models know no further positions.
        """
        groups: dict[int, list[int]] = {}
        lengths = prompts.attention_mask.sum(dim=1).tolist()
        rooms = [sampling.max_new_tokens] * len(prompts)
        if prompts.room is not None and self.context_length is not None:
            fits = self.context_length - sampling.max_new_tokens
            given = zip(lengths, prompts.room.tolist(), rooms, strict=True)
            rooms = [most if length <= fits else min(room, most) for length, room, most in given]
        for prompt, room in enumerate(rooms):
            groups.setdefault(room, []).append(prompt)
        return groups

    def _try_ways(self) -> Way:
        """Find out what may be generated together, and whether that is exact."""
        way = best_way(self._gap, limit=self._allowed_gap())
        if way.reason is not None:
            remedy = "Its responses are weighed, see model.importance_sampling"
            if way.exact:
                remedy = (
                    f"A prompt is computed once for each of its responses, in {way.batching.value}"
                )
            logger.warning(
                "%s does not generate as a forward pass computes it: %s. %s.",
                type(_generator(self._policy)).__name__,
                way.reason,
                remedy,
            )
        return way

    @contextlib.contextmanager
    def _without_conversation(self) -> Iterator[None]:
        kept, self._kept = self._kept, None
        try:
            yield
        finally:
            self._kept = kept

    def _try_to_continue(self) -> None:
        """End the conversation for a model whose cache cannot be gone on from."""
        kept, self._kept = self._kept, KeptPrefixes()
        try:
            with refusals():
                gap = self._continued_gap()
        except ModelRefusalError:
            gap = math.inf
        self._kept = kept if gap <= self._allowed_gap() else None
        if self._kept is not None:
            self._continues = self._policy

    @trial()
    def _continued_gap(self) -> float:
        """Return how far log-probabilities of a second turn are from those of a forward pass."""
        prompts, sampling = trial_prompts(_generator(self._policy)), Sampling(max_new_tokens=4)
        with torch.autocast(prompts.input_ids.device.type, enabled=False):
            seeds = range(len(prompts))
            first = self._generate(self._way, prompts, sampling, seeds)
            given = prompts.input_ids[0, -2:]
            # of unequal lengths, as responses are
            turns = [one.cut(4 - row).given(given) for row, one in enumerate(first)]
            asked = continued_prompts(prompts, turns)
            second = self._generate(self._way, asked, sampling, seeds)
            rollout = assemble_rollout(asked, second, num_generations=1, pad_id=0)
            own = sequence_logprobs(self._policy, rollout)
        return float((own - rollout.sampling_logprobs).abs()[rollout.response_mask].mean())

    def _allowed_gap(self) -> float:
        whole = all(weight.dtype == torch.float32 for weight in self._policy.parameters())
        # weights that are split are gathered in 16 bits, also where autocast is off
        whole = whole and not has_split_weights(self._policy)
        exact = whole and torch.get_float32_matmul_precision() == "highest"
        return _EXACT_GAP if exact else _ROUNDED_GAP

    @trial()
    def _gap(self, way: Way) -> float:
        """Return how far log-probabilities of generation are from those of a forward pass."""
        prompts, seeds = trial_prompts(_generator(self._policy)), list(range(6))
        with torch.autocast(prompts.input_ids.device.type, enabled=False):
            responses = self._generate(way, prompts, Sampling(max_new_tokens=4), seeds)
            rollout = assemble_rollout(prompts, responses, num_generations=2, pad_id=0)
            own = sequence_logprobs(self._policy, rollout)
        return float((own - rollout.sampling_logprobs).abs()[rollout.response_mask].mean())

    def _respond(
        self, way: Way, prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Response]:
        model, num_generations = _generator(self._policy), len(seeds) // len(prompts)
        eos = sorted(eos_token_ids(model, self._tokenizer))
        keeps = self._kept is not None and prompts.media is None and not model._is_stateful
        continued = None
        if self._kept is not None and keeps and num_generations == 1:
            continued = self._kept.continued(prompts)
        input_ids, mask, cache = continued or self._begin(way, prompts, num_generations)
        if cache is None and keeps:
            cache = DynamicCache(config=model.config)
        width = input_ids.shape[1]
        sampler = TokenSampler(
            sampling, seeds, prompt_mask=mask.bool(), ruled_out=ruled_out_ids(model.config)
        )
        ending = Ending(eos, sampling.stop, self._tokenizer, prompt_width=width)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,  # the processor samples
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens or None,
            eos_token_id=eos,
            pad_token_id=pad_token_id(self._tokenizer),
        )
        with plain_generation_config(model):
            sequences: Tensor = model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([ending]),
                past_key_values=cache,
            )
        responses = sampler.responses(sequences[:, width:], ending.ends)
        if self._kept is not None and keeps and cache is not None:
            self._kept.keep(cache, sequences, mask, responses)
        return responses

    def _begin(
        self, way: Way, prompts: PromptBatch, num_generations: int
    ) -> tuple[Tensor, Tensor, DynamicCache | None]:
        """Return prompts for each response, their mask, and what is computed of them already."""
        model = _generator(self._policy)
        width = int(prompts.attention_mask.sum(dim=1).max())
        input_ids = prompts.input_ids[:, -width:]
        mask = prompts.attention_mask[:, -width:].long()
        if model._is_stateful:
            # RecurrentGemma's layers keep states, which a pass that keeps none clears: a prompt of
            # one token would go on from those of the responses before
            model.base_model(input_ids=input_ids[:, :1], use_cache=False)
        cache = prefill(
            model,
            input_ids,
            mask,
            prompts.media,
            num_generations=num_generations,
            share=way.shares_prompts,
        )
        copies = num_generations
        return (
            input_ids.repeat_interleave(copies, dim=0),
            mask.repeat_interleave(copies, dim=0),
            cache,
        )


@contextlib.contextmanager
def _cached_autocast(device: torch.device) -> Iterator[None]:
    """Cast each weight once per call instead of once per token.

    Lightning runs training steps under an autocast whose cache is off. Casts made here carry no
    gradient, so none may be left behind for the update that follows.
    """
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=True):
            yield
    finally:
        torch.clear_autocast_cache()


def _generator(policy: nn.Module) -> PreTrainedModel:
    model = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"TransformersEngine needs a transformers model, got {type(model).__name__}"
        )
    return model
