"""Rollouts with the policy itself, through ``transformers.generate``."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

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
    allow_replay,
    backbone_inputs,
    check_media,
    context_length,
    eos_token_ids,
    evaluating,
    forget_offsets,
    numbers_media,
    repeat_offsets,
    ruled_out_ids,
    sequence_logprobs,
)
from lrlhf.models.modes import ModelRefusalError, in_trial, refusals, trial
from lrlhf.models.routing_replay import Record, recording, repeat_record
from lrlhf.models.sharding import device_of, gathered, gathered_bytes, has_split_weights
from lrlhf.models.token_budget import memory_of
from lrlhf.models.transformers_internals import CACHE_ARGUMENT, keeps_states
from lrlhf.rollout.engines.engine import (
    Capabilities,
    RolloutEngine,
    check_format,
    check_seeds,
    gather_ranks,
    pad_token_id,
)
from lrlhf.rollout.engines.token_sampler import RecordedStop, TokenSampler
from lrlhf.rollout.responses import (
    Response,
    assemble_rollout,
    continued_prompts,
    left_padded,
    prompt_token_ids,
    repeated_media,
    token_prompts,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Media, PromptBatch, Rollout

logger = logging.getLogger(__name__)

_EXACT_GAP = 1e-4
_ROUNDED_GAP = 0.08
"""Mean differences in nats up to which generation equals a forward pass."""
_SHARE_OF_FREE = 0.8
"""Of the free memory, for gathered weights; the remainder is for keys and values."""


class Batching(Enum):
    """Responses that a model may compute in one batch, the fastest first."""

    TOGETHER = "batches of any prompts"
    EQUAL_LENGTHS = "batches of prompts of equal length"
    """For recurrent states and convolutions that depend on the padding on the left."""
    SINGLE = "batches of one response"
    """For models that mix the rows of a batch."""


class GenerationMode(NamedTuple):
    """A way to batch responses, and its exactness."""

    shares_prompts: bool = False
    """Whether a prompt is computed once for all of its responses."""
    batching: Batching = Batching.TOGETHER
    exact: bool = True
    """Whether log-probabilities are those of a forward pass."""
    reason: str | None = None
    """Reason against a faster mode, or that none is exact; None: it is the fastest."""


class TransformersEngine(RolloutEngine):
    """Generates with the policy itself, so its weights are never stale.

    Before the first responses it compares log-probabilities of a few tokens with a forward pass.
    Where a model depends on the padding of shorter prompts, or on the other rows of a batch,
    prompts of equal length or single responses form batches, see `Batching`; if that does not help
    either, the engine is not exact, and its log-probabilities are treated as another model's.

    The prompt is computed once per group where that gives the same probabilities. Every response
    has its own random stream: the token at step ``t`` is where the cumulative probability passes
    the ``t``-th uniform number of the response's seed.

    Args:
        max_batch_size: Responses computed at the same time; None: all. Smaller values save memory
            for keys and values and change nothing else. "auto": on a GPU as many as fit, as
            measured by the first batches (`lrlhf.models.TokenBudget`), elsewhere all.
    """

    # set by `attach`
    _policy: nn.Module
    _tokenizer: PreTrainedTokenizerBase

    def __init__(self, max_batch_size: int | Literal["auto"] | None = "auto") -> None:
        if isinstance(max_batch_size, int) and max_batch_size < 1:
            raise ValueError(f"engine.max_batch_size is {max_batch_size}; it must be 1 or more")
        self.max_batch_size = max_batch_size
        self._budget = TokenBudget()
        self._mode = GenerationMode()
        self._tried_policy: nn.Module | None = None
        self._prefixes: PrefixCache | None = None
        """Of the current conversation, if any."""
        self._continuing_policy: nn.Module | None = None
        """The policy whose cache was tested to continue exactly."""

    @property
    def capabilities(self) -> Capabilities:
        """Exact, unless the trial before the first responses differed."""
        return Capabilities(exact=self._mode.exact, max_sampling_mask=None, records_experts=True)

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        _check_memory_to_gather(policy)

    @property
    def context_length(self) -> int | None:
        return context_length(self._policy)

    @contextlib.contextmanager
    def conversation(self) -> Iterator[None]:
        """Compute only new tokens of each turn, where that gives the same probabilities."""
        self._prefixes = PrefixCache()
        try:
            yield
        finally:
            self._prefixes = None

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
        if sampling.keep_experts:
            allow_replay(_plain_model(self._policy))
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
            if self._tried_policy is not self._policy:
                prefixes, self._prefixes = self._prefixes, None
                try:
                    self._mode = self._try_modes()
                finally:
                    self._prefixes = prefixes
                self._tried_policy = self._policy
            if self._prefixes is not None and self._continuing_policy is not self._policy:
                self._try_continuation()
            responses = self._generate(self._mode, prompts, sampling, seeds)
        pad_id = pad_token_id(self._tokenizer)
        return assemble_rollout(prompts, responses, num_generations=num_generations, pad_id=pad_id)

    def _generate(
        self,
        mode: GenerationMode,
        prompts: PromptBatch,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> list[Response]:
        responses: dict[int, Response] = {}
        copies, device = len(seeds) // len(prompts), prompts.input_ids.device
        width = prompts.input_ids.shape[1]
        for limit, group in self._by_limit(prompts, sampling).items():
            for chosen, own in _batches(
                prompts.attention_mask.sum(dim=1)[group].tolist(),
                num_generations=copies,
                prompts_at_once=partial(self._prompts_at_once, copies, width + limit, device),
                batching=mode.batching,
            ):
                batch = prompts.select(torch.tensor([group[prompt] for prompt in chosen]))
                rows = [group[row // copies] * copies + row % copies for row in own]
                with self._budget.measuring(len(rows) * (width + limit), device) as computed:
                    results = self._respond(
                        mode, batch, sampling.at_most(limit), [seeds[row] for row in rows]
                    )
                    # most batches end before their limit
                    longest = max(len(result.segments[0].token_ids) for result in results)
                    computed.tokens = len(rows) * (width + longest)
                self._budget.update()
                responses.update(zip(rows, results, strict=True))
        return [responses[row] for row in range(len(seeds))]

    def _prompts_at_once(self, copies: int, longest: int, device: torch.device) -> int:
        """Return the largest number of prompts in a batch with ``copies`` responses each."""
        if in_trial():
            return sys.maxsize
        if isinstance(self.max_batch_size, int):
            return self.max_batch_size // copies
        tokens = self._budget.limit(self.max_batch_size, device)
        return sys.maxsize if tokens is None else max(1, tokens // (copies * longest))

    def _by_limit(self, prompts: PromptBatch, sampling: Sampling) -> dict[int, list[int]]:
        """Group prompts by the length limit of their responses.

        ``room`` is a limit only where a response of full length would not fit into the context:
        rows of a batch continue together, and some models have no further positions.
        """
        groups: dict[int, list[int]] = {}
        most = sampling.max_new_tokens
        limits = [most] * len(prompts)
        if prompts.room is not None and self.context_length is not None:
            fits = (prompts.attention_mask.sum(dim=1) <= self.context_length - most).tolist()
            rooms = zip(fits, prompts.room.tolist(), strict=True)
            limits = [most if fit else min(room, most) for fit, room in rooms]
        for prompt, limit in enumerate(limits):
            groups.setdefault(limit, []).append(prompt)
        return groups

    def _try_modes(self) -> GenerationMode:
        """Return the fastest exact mode by a trial, with a warning if it is not the fastest."""
        mode = self._fastest_mode()
        if mode.reason is not None:
            remedy = "Its responses are weighed, see model.importance_sampling"
            if mode.exact:
                remedy = (
                    f"A prompt is computed once for each of its responses, in {mode.batching.value}"
                )
            logger.warning(
                "%s does not generate as a forward pass computes it: %s. %s.",
                type(_plain_model(self._policy)).__name__,
                mode.reason,
                remedy,
            )
        return mode

    def _fastest_mode(self) -> GenerationMode:
        """Return the fastest exact mode, or, without one, the fastest near the smallest error."""
        limit = self._allowed_gap()
        gaps: dict[GenerationMode, float] = {}
        reasons: list[str] = []
        for mode in (
            GenerationMode(shares_prompts=True),
            *(GenerationMode(batching=each) for each in Batching),
        ):
            try:
                with refusals():
                    gap = self._gap(mode)
            except ModelRefusalError as error:
                if not mode.shares_prompts:
                    raise
                reasons.append(f"it refuses a copied cache ({error})")
                continue
            # values that are not finite are reported by the guard
            gaps[mode] = gap if math.isfinite(gap) else math.inf
            if gap <= limit:
                break
            reasons.append(f"log-probabilities were {gap:.2g} nats off on average")
        best = min(gaps.values())
        # a slower mode must halve the error
        mode, gap = next((mode, gap) for mode, gap in gaps.items() if gap <= 2 * best)
        return mode._replace(exact=gap <= limit, reason=reasons[0] if reasons else None)

    def _try_continuation(self) -> None:
        """Drop the cache of the conversation for a model that does not continue it exactly."""
        prefixes, self._prefixes = self._prefixes, PrefixCache()
        try:
            with refusals():
                gap = self._continued_gap()
        except ModelRefusalError:
            gap = math.inf
        self._prefixes = prefixes if gap <= self._allowed_gap() else None
        if self._prefixes is not None:
            self._continuing_policy = self._policy

    @trial()
    def _continued_gap(self) -> float:
        """Return the mean error of log-probabilities of a second turn against a forward pass."""
        prompts, sampling = trial_prompts(_plain_model(self._policy)), Sampling(max_new_tokens=4)
        with torch.autocast(prompts.input_ids.device.type, enabled=False):
            seeds = range(len(prompts))
            first = self._generate(self._mode, prompts, sampling, seeds)
            observation = prompts.input_ids[0, -2:]
            # of unequal lengths, as responses are
            turns = [each.cut(4 - row).with_tokens(observation) for row, each in enumerate(first)]
            prompts = continued_prompts(prompts, turns)
            second = self._generate(self._mode, prompts, sampling, seeds)
            return self._error(prompts, second)

    def _error(self, prompts: PromptBatch, responses: Sequence[Response]) -> float:
        """Return the mean distance of responses' log-probabilities from those of a forward pass."""
        copies = len(responses) // len(prompts)
        rollout = assemble_rollout(prompts, responses, num_generations=copies, pad_id=0)
        own = sequence_logprobs(self._policy, rollout)
        return float((own - rollout.sampling_logprobs).abs()[rollout.response_mask].mean())

    def _allowed_gap(self) -> float:
        float32 = all(weight.dtype == torch.float32 for weight in self._policy.parameters())
        # sharded weights are gathered in 16 bits, also where autocast is off
        float32 = float32 and not has_split_weights(self._policy)
        exact = float32 and torch.get_float32_matmul_precision() == "highest"
        return _EXACT_GAP if exact else _ROUNDED_GAP

    @trial()
    def _gap(self, mode: GenerationMode) -> float:
        """Return the mean error of log-probabilities of generation against a forward pass."""
        prompts = trial_prompts(_plain_model(self._policy))
        with torch.autocast(prompts.input_ids.device.type, enabled=False):
            responses = self._generate(mode, prompts, Sampling(max_new_tokens=4), range(6))
            return self._error(prompts, responses)

    def _respond(
        self, mode: GenerationMode, prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Response]:
        model, num_generations = _plain_model(self._policy), len(seeds) // len(prompts)
        eos = sorted(eos_token_ids(model, self._tokenizer))
        cacheable = prompts.media is None and not keeps_states(model)
        prefixes = self._prefixes if cacheable else None
        record = Record(model) if sampling.keep_experts else None
        continued = None
        if prefixes is not None and num_generations == 1:
            continued = prefixes.continued(prompts, record)
        with recording(record):
            input_ids, mask, cache = continued or self._begin(mode, prompts, num_generations)
        if cache is None and prefixes is not None:
            cache = DynamicCache(config=model.config)
        width = input_ids.shape[1]
        sampler = TokenSampler(
            sampling, seeds, prompt_mask=mask.bool(), ruled_out=ruled_out_ids(model.config)
        )
        stop = RecordedStop(eos, sampling.stop, self._tokenizer, prompt_width=width)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,  # `sampler` samples
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens or None,
            eos_token_id=eos,
            pad_token_id=pad_token_id(self._tokenizer),
        )
        with plain_generation_config(model), recording(record):
            sequences: Tensor = model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([stop]),
                **{CACHE_ARGUMENT: cache},
            )
        responses = sampler.responses(sequences[:, width:], stop.ends)
        if prefixes is not None and cache is not None:
            prefixes.update(cache, sequences, mask, responses, record)
        if record is None:
            return responses
        # whether the last token of a response was computed depends on the others
        ends = [width + len(each.token_ids) - 1 for each in responses]
        return [
            replace(each, experts=torch.cat([own[:width][prompt], own[width:end]]))
            for each, own, prompt, end in zip(
                responses, record.experts, mask.bool(), ends, strict=True
            )
        ]

    def _begin(
        self, mode: GenerationMode, prompts: PromptBatch, num_generations: int
    ) -> tuple[Tensor, Tensor, DynamicCache | None]:
        """Return the prompts of each response, their mask, and the cache of their prefill."""
        model = _plain_model(self._policy)
        width = int(prompts.attention_mask.sum(dim=1).max())
        input_ids = prompts.input_ids[:, -width:]
        mask = prompts.attention_mask[:, -width:].long()
        if keeps_states(model):
            # a pass without cache clears the states of RecurrentGemma's layers, which a prompt of
            # one token would else continue
            with recording(None):
                model.base_model(input_ids=input_ids[:, :1], use_cache=False)
        cache = _prefill(
            model,
            input_ids,
            mask,
            prompts.media,
            num_generations=num_generations,
            share=mode.shares_prompts,
        )
        input_ids = input_ids.repeat_interleave(num_generations, dim=0)
        return input_ids, mask.repeat_interleave(num_generations, dim=0), cache


def _check_memory_to_gather(policy: nn.Module) -> None:
    """Raise ``ValueError`` if gathered weights would leave too little memory for generation."""
    needed = gathered_bytes(policy)
    if not needed:
        return
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    memory = memory_of(device_of(policy))
    if memory is not None:
        device, free = "GPU", memory.room()
    else:
        device = "main memory for each process"
        free = psutil.virtual_memory().available // ranks
    free = min(gather_ranks(free))  # the same result on all
    if needed > _SHARE_OF_FREE * free:
        raise ValueError(
            f"TransformersEngine gathers the whole policy on every process to generate, "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the {device} are free: "
            "take engine: VLLMServerEngine, which gets the weights one at a time"
        )


def _batches(
    lengths: Sequence[int],
    *,
    num_generations: int,
    prompts_at_once: Callable[[], int],
    batching: Batching,
) -> Iterator[tuple[list[int], list[int]]]:
    """Divide the responses to prompts of some lengths into batches.

    Yields:
        Indices of prompts and responses of a batch, equally many responses of each prompt.
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
            yield chosen, [prompt * num_generations + copy for prompt in chosen for copy in copies]


def trial_prompts(model: PreTrainedModel) -> PromptBatch:
    """Return a few prompts of unequal lengths, padded on the left."""
    known = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    marks = set(ruled_out_ids(model.config))
    ids = [token for token in range(min(known, 64)) if token not in marks]
    ids *= math.ceil(9 / len(ids))  # for toy vocabularies
    return token_prompts([ids[-6:], ids[-9:-6], ids[-1:]]).to(device_of(model))


class PrefixCache:
    """Keys and values of the last turns of several conversations.

    Without it a turn would compute all turns before it again. Only caches of full attention are
    used, whose rows may have gaps.
    """

    def __init__(self) -> None:
        self._cache: DynamicCache | None = None
        self._ids = torch.zeros(0, 0, dtype=torch.long)
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._prompts: list[int] = []
        """Tokens of each row's prompt."""
        self._record: Record | None = None
        """The experts of the cached tokens."""

    def update(
        self,
        cache: DynamicCache,
        sequences: Int[Tensor, "B W"],
        prompt_mask: Int[Tensor, "B P"],
        responses: Sequence[Response],
        record: Record | None = None,
    ) -> None:
        """Replace the contents by the cache of generated ``sequences``, prompts and responses."""
        self._cache = None
        if not all(type(layer) is DynamicLayer for layer in cache.layers):
            return
        lengths = torch.tensor([len(each.token_ids) for each in responses], device=sequences.device)
        behind = torch.arange(sequences.shape[1] - prompt_mask.shape[1], device=sequences.device)
        mask = torch.cat([prompt_mask.bool(), behind < lengths[:, None]], dim=1)
        columns = cache.get_seq_length()
        self._cache, self._record = cache, record
        self._ids, self._mask = sequences[:, :columns], mask[:, :columns]
        self._prompts = prompt_mask.sum(dim=1).tolist()

    def continued(
        self, prompts: PromptBatch, record: Record | None = None
    ) -> tuple[Tensor, Tensor, DynamicCache] | None:
        """Return ids and mask of prompts, and the cache of their prefixes; None: some have none.

        Ids and mask have gaps where shorter responses ended. Rows that are not continued are
        dropped. ``record`` begins with the experts of the prefixes.
        """
        cache, self._cache = self._cache, None
        if cache is None or (record is None) != (self._record is None):
            return None
        cached = [ids[mask] for ids, mask in zip(self._ids, self._mask, strict=True)]
        rows: list[int] = []
        lengths, new = [], []
        for ids in prompt_token_ids(prompts):
            match = self._match(ids, cached, (rows[-1] + 1) if rows else 0)
            if match is None:
                return None
            row, length = match
            rows.append(row)
            lengths.append(length)
            new.append(ids[length:])
        chosen = torch.tensor(rows, device=self._ids.device)
        cache.batch_select_indices(chosen)
        if record is not None and self._record is not None:
            record.take(self._record, chosen)
        before = self._mask[chosen]
        # not the end of a truncated response
        before &= before.cumsum(dim=1) <= torch.tensor(lengths, device=before.device)[:, None]
        ids, mask = left_padded(new)
        return (
            torch.cat([self._ids[chosen], ids], dim=1),
            torch.cat([before, mask], dim=1).long(),
            cache,
        )

    def _match(self, ids: Tensor, cached: Sequence[Tensor], first: int) -> tuple[int, int] | None:
        """Return the row that a prompt continues, and the number of its tokens."""
        for row in range(first, len(cached)):
            if _common_prefix(ids, cached[row]) == len(cached[row]):
                return row, len(cached[row])
        if first < len(cached):
            length = _common_prefix(ids, cached[first])
            if length >= self._prompts[first]:
                return first, length
        return None


def _common_prefix(ids: Tensor, cached: Tensor) -> int:
    """Return the length of the common prefix, without the last of ``ids``, which is computed."""
    length = min(len(ids) - 1, len(cached))
    different = (ids[:length] != cached[:length]).nonzero()
    return int(different[0]) if len(different) else length


def _prefill(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "B P"],
    mask: Int[Tensor, "B P"],
    media: tuple[Media | None, ...] | None,
    *,
    num_generations: int,
    share: bool,
) -> DynamicCache | None:
    """Compute keys and values of all prompt tokens but the last, for every response.

    Media are encoded here, so that the steps that follow are about text alone.

    With ``share`` each prompt is computed once and copied, else once per response.

    Returns:
        The cache, a row per response; None where a cache would gain nothing.
    """
    forget_offsets(model)
    copies = num_generations if share else 1
    if input_ids.shape[1] < 2 or (copies == 1 and media is None):
        return None
    if not share:
        input_ids = input_ids.repeat_interleave(num_generations, dim=0)
        mask = mask.repeat_interleave(num_generations, dim=0)
        media = repeated_media(media, num_generations)
    check_media(model, input_ids[:, :-1], media)
    inputs = backbone_inputs(model, input_ids[:, :-1], mask[:, :-1].bool(), media)
    if not numbers_media(model, media):
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, :-1]
    cache = DynamicCache(config=model.config)
    model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if copies > 1:
        # as in beam search, which every kind of layer supports, also state spaces
        rows = torch.arange(len(input_ids), device=input_ids.device)
        cache.reorder_cache(rows.repeat_interleave(copies))  # type: ignore[arg-type]
    repeat_offsets(model, copies)
    repeat_record(copies)
    return cache


@contextlib.contextmanager
def plain_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Suspend a checkpoint's generation defaults (repetition penalty, temperature).

    ``generate`` fills unset fields of a config from the model's own.
    """
    before: Any = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = before


@contextlib.contextmanager
def _cached_autocast(device: torch.device) -> Iterator[None]:
    """Cast each weight once per call instead of once per token.

    Lightning runs training steps under an autocast without cache. Casts made here have no gradient,
    so none may be left for the update that follows.
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


def _plain_model(policy: nn.Module) -> PreTrainedModel:
    model = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"TransformersEngine needs a transformers model, got {type(model).__name__}"
        )
    return model
