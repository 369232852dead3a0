"""Rollouts with the model that is being trained, through ``transformers.generate``."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Literal, NamedTuple

import psutil
import torch
from jaxtyping import Int
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
from transformers.cache_utils import DynamicLayer

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
from lrlhf.models.sharding import device_of, gathered, gathered_bytes, has_split_weights
from lrlhf.models.token_budget import memory_of
from lrlhf.rollout.engines.engine import (
    Capabilities,
    RolloutEngine,
    check_format,
    check_seeds,
    pad_token_id,
)
from lrlhf.rollout.engines.prompt_sharing import plain_generation_config, prefill
from lrlhf.rollout.engines.token_sampler import Ending, TokenSampler
from lrlhf.rollout.responses import (
    Response,
    assemble_rollout,
    continued_prompts,
    left_padded,
    prompt_token_ids,
    untold_prompts,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import PromptBatch, Rollout

_SHARE_OF_FREE = 0.8
"""Of the memory that is free, what gathered weights may take; keys and values are beside them."""


def check_room_to_gather(policy: nn.Module) -> None:
    """Refuse to gather a split policy that leaves too little memory for generating with it.

    Raises:
        ValueError: Its weights take more than `_SHARE_OF_FREE` of what is free.
    """
    needed = gathered_bytes(policy)
    if not needed:
        return
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    memory = memory_of(device_of(policy))
    if memory is not None:
        place, free = "GPU", memory.room()
    else:
        place = "main memory for each process"
        free = psutil.virtual_memory().available // ranks
    if ranks > 1:  # all go on, or none
        rooms = [free] * ranks
        torch.distributed.all_gather_object(rooms, free)
        free = min(rooms)
    if needed > _SHARE_OF_FREE * free:
        raise ValueError(
            f"TransformersEngine gathers the whole policy on every process to generate, "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the {place} are free: "
            "take engine: VLLMServerEngine, which gets the weights one at a time"
        )


class Batching(Enum):
    """What may go through a model at the same time, the fastest first."""

    TOGETHER = "batches of any prompts"
    EQUAL_LENGTHS = "batches of prompts of equal length"
    """For recurrent states and convolutions that read the padding on the left."""
    SINGLE = "batches of one response"
    """For models that mix the rows of a batch."""


class Way(NamedTuple):
    """How responses are generated."""

    shares_prompts: bool = False
    """Whether a prompt is computed once for all of its responses."""
    batching: Batching = Batching.TOGETHER
    exact: bool = True
    """Whether it gives the log-probabilities of a forward pass."""
    reason: str | None = None
    """Why a faster way is not taken, or why none is exact; None: the fastest is."""


def parts(
    lengths: Sequence[int],
    *,
    num_generations: int,
    prompts_at_once: Callable[[], int],
    batching: Batching,
) -> Iterator[tuple[list[int], list[int]]]:
    """Divide the responses to some prompts.

    Args:
        lengths: Tokens of each prompt.
        num_generations: Responses to each.
        prompts_at_once: Says how many at most, each time; a single response ignores it.
        batching: What may go together.

    Yields:
        Prompts and responses that go together, by number; as many of each prompt.
    """
    if batching is Batching.SINGLE:
        for response in range(len(lengths) * num_generations):
            yield [response // num_generations], [response]
        return
    groups: dict[int, list[int]] = {}
    for prompt, length in enumerate(lengths):
        key = length if batching is Batching.EQUAL_LENGTHS else 0
        groups.setdefault(key, []).append(prompt)
    for group in groups.values():
        while group:
            most = prompts_at_once()
            chosen, group = group[:most], group[most:]
            copies = range(num_generations)
            yield chosen, [one * num_generations + copy for one in chosen for copy in copies]


def best_way(gap_of: Callable[[Way], float], *, limit: float) -> Way:
    """Find the fastest way that is exact; where none is, the fastest of those that come close.

    Args:
        gap_of: Mean distance in nats between a way's log-probabilities and a forward pass's.
        limit: Up to which a way is exact.

    Raises:
        ModelRefusalError: The model cannot generate at all.
    """
    gaps: dict[Way, float] = {}
    reasons: list[str] = []
    for way in (Way(shares_prompts=True), *(Way(batching=one) for one in Batching)):
        try:
            with refusals():
                gap = gap_of(way)
        except ModelRefusalError as error:
            if not way.shares_prompts:
                raise
            reasons.append(f"it refuses a copied cache ({error})")
            continue
        # what is not finite is the guard's to report, and no way is better than another
        gaps[way] = gap if math.isfinite(gap) else math.inf
        if gap <= limit:
            break
        reasons.append(f"log-probabilities were {gap:.2g} nats off on average")
    best = min(gaps.values())
    # what helps little need not slow it down
    way, gap = next((way, gap) for way, gap in gaps.items() if gap <= 2 * best)
    return way._replace(exact=gap <= limit, reason=reasons[0] if reasons else None)


def trial_prompts(model: PreTrainedModel) -> PromptBatch:
    """Return a few prompts of unequal lengths, padded on the left."""
    known = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    marks = set(ruled_out_ids(model.config))
    ids = [token for token in range(min(known, 64)) if token not in marks]
    ids *= math.ceil(9 / len(ids))  # a toy has fewer
    return untold_prompts([ids[-6:], ids[-9:-6], ids[-1:]]).to(device_of(model))


class Continued(NamedTuple):
    """Prompts whose beginnings need not be computed again."""

    input_ids: Int[Tensor, "B W"]
    """What is kept, with gaps where shorter responses ended, then what is new."""
    mask: Int[Tensor, "B W"]
    """1 on the tokens of the prompts."""
    cache: DynamicCache
    """Of the first columns."""


class KeptPrefixes:
    """What the last turns of several conversations left in a model's cache.

    A turn would otherwise compute all turns before it once more. Only caches of full attention are
    kept, whose rows may have gaps.
    """

    def __init__(self) -> None:
        self._cache: DynamicCache | None = None
        self._ids = torch.zeros(0, 0, dtype=torch.long)
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._prompts: list[int] = []
        """Tokens of each row's prompt."""

    def keep(
        self,
        cache: DynamicCache,
        sequences: Int[Tensor, "B W"],
        prompt_mask: Int[Tensor, "B P"],
        responses: Sequence[Response],
    ) -> None:
        """Keep what a call has computed.

        Args:
            cache: Of all columns but the last ones.
            sequences: Prompts and responses, as they were generated.
            prompt_mask: 1 on the tokens of the prompts.
            responses: What belongs to each row behind its prompt.
        """
        self._cache = None
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            return
        lengths = torch.tensor([len(one.token_ids) for one in responses], device=sequences.device)
        behind = torch.arange(sequences.shape[1] - prompt_mask.shape[1], device=sequences.device)
        mask = torch.cat([prompt_mask.bool(), behind < lengths[:, None]], dim=1)
        columns = cache.get_seq_length()
        self._cache = cache
        self._ids, self._mask = sequences[:, :columns], mask[:, :columns]
        self._prompts = prompt_mask.sum(dim=1).tolist()

    def continued(self, prompts: PromptBatch) -> Continued | None:
        """Return prompts that go on from what is kept; None: some of them do not.

        What nobody goes on from is dropped.
        """
        cache, self._cache = self._cache, None
        if cache is None:
            return None
        kept = [ids[mask] for ids, mask in zip(self._ids, self._mask, strict=True)]
        rows: list[int] = []
        lengths, new = [], []
        for ids in prompt_token_ids(prompts):
            found = self._find(ids, kept, (rows[-1] + 1) if rows else 0)
            if found is None:
                return None
            row, length = found
            rows.append(row)
            lengths.append(length)
            new.append(ids[length:])
        chosen = torch.tensor(rows, device=self._ids.device)
        cache.batch_select_indices(chosen)
        before = self._mask[chosen]
        # of a response that was cut, the end is not gone on from
        before &= before.cumsum(dim=1) <= torch.tensor(lengths, device=before.device)[:, None]
        ids, mask = left_padded(new)
        return Continued(
            torch.cat([self._ids[chosen], ids], dim=1),
            torch.cat([before, mask], dim=1).long(),
            cache,
        )

    def _find(self, ids: Tensor, kept: Sequence[Tensor], first: int) -> tuple[int, int] | None:
        """Return which row a prompt goes on from, and how many of its tokens."""
        for row in range(first, len(kept)):
            if _common(ids, kept[row]) == len(kept[row]):
                return row, len(kept[row])
        if first < len(kept) and (common := _common(ids, kept[first])) >= self._prompts[first]:
            return first, common
        return None


def _common(ids: Tensor, kept: Tensor) -> int:
    """Count the tokens that two rows begin with alike; one of ``ids`` is left to be computed."""
    length = min(len(ids) - 1, len(kept))
    different = (ids[:length] != kept[:length]).nonzero()
    return int(different[0]) if len(different) else length


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
