"""Rollouts with the model that is being trained, through ``transformers.generate``."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lrlhf.media import MediaProcessor
from lrlhf.models import (
    eos_token_ids,
    evaluating,
    ruled_out_ids,
    sequence_logprobs,
)
from lrlhf.models.modes import trial
from lrlhf.models.sharding import gathered, has_split_weights
from lrlhf.rollout.engines.engine import (
    Response,
    assemble_rollout,
    check_seeds,
    pad_token_id,
)
from lrlhf.rollout.engines.generation_batches import Batching, parts, trial_prompts
from lrlhf.rollout.engines.prompt_sharing import continued, prefill
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import PromptBatch, Rollout

logger = logging.getLogger(__name__)

_EXACT_GAP = 1e-4
_ROUNDED_GAP = 0.08
"""Mean distances in nats up to which generation computes what a forward pass does."""

_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What a cache does that cannot be filled or copied from outside."""


class TransformersEngine:
    """Generates with the policy itself, so its weights are never stale.

    Before the first responses it compares what it gives a few tokens with a forward pass, as they
    are trained in. Where a model reads the padding of shorter prompts, or mixes the rows of a
    batch, prompts of equal length go together or every response by itself, see `Batching`; if
    that does not help either, the engine is not ``exact``, and its log-probabilities are treated
    as another model's.

    The prompt is computed once per group. Every response has a random stream of its own: the
    token at step ``t`` is where the cumulated probabilities pass the ``t``-th uniform number
    drawn from the response's seed.

    Args:
        max_batch_size: Responses computed at the same time; None: all of them. Smaller values
            save memory for keys and values and change nothing else.
        share_prompts: Compute the prompt once per group, if a trial before the first responses
            gives the same probabilities; the log says why it does not. Off, every response
            computes its own.
    """

    def __init__(self, max_batch_size: int | None = None, share_prompts: bool = True) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"engine.max_batch_size is {max_batch_size}; it must be 1 or more")
        self.max_batch_size = max_batch_size
        self.share_prompts = share_prompts
        self.exact = True
        self._batching = Batching.TOGETHER
        self._tried: nn.Module | None = None
        self._sharing = False
        self._policy: nn.Module | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def attach(
        self,
        policy: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None = None,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer

    @torch.no_grad()
    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        if self._policy is None or self._tokenizer is None:
            raise RuntimeError("TransformersEngine.attach has not been called")
        check_seeds(seeds, prompts, num_generations)
        prompts_at_once = len(prompts)
        if self.max_batch_size is not None:
            prompts_at_once = self.max_batch_size // num_generations
            if prompts_at_once < 1:
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
                self._find_batching()
                self._tried = self._policy
            responses = self._draw(prompts, sampling, num_generations, seeds, prompts_at_once)
        return assemble_rollout(
            prompts,
            responses,
            num_generations=num_generations,
            pad_id=pad_token_id(self._tokenizer),
        )

    @property
    def shares_prompts(self) -> bool:
        """Whether the last responses were drawn from prompts that were computed once."""
        return self._sharing

    def close(self) -> None:
        """Hold nothing, so give nothing back."""

    def _draw(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        num_generations: int,
        seeds: Sequence[int],
        prompts_at_once: int,
    ) -> list[Response]:
        drawn: dict[int, Response] = {}
        for part in parts(
            prompts.attention_mask.sum(dim=1).tolist(),
            num_generations=num_generations,
            prompts_at_once=prompts_at_once,
            batching=self._batching,
        ):
            answers = self._respond(
                prompts.select(torch.tensor(part.prompts)),
                sampling,
                len(part.responses) // len(part.prompts),
                [seeds[response] for response in part.responses],
            )
            drawn.update(zip(part.responses, answers, strict=True))
        return [drawn[response] for response in range(len(seeds))]

    def _find_batching(self) -> None:
        """Find out what may be generated together, and whether that is exact."""
        assert self._policy is not None
        limit = self._allowed_gap()
        ways = [(self.share_prompts, Batching.TOGETHER), *((False, one) for one in Batching)]
        gaps: dict[tuple[bool, Batching], float] = {}
        reasons: list[str] = []
        for way in dict.fromkeys(ways):
            self._sharing, self._batching = way
            try:
                gap = self._gap()
            except _REFUSALS as error:
                if not self._sharing or isinstance(error, torch.OutOfMemoryError):
                    raise
                reasons.append(f"it refuses a copied cache ({type(error).__name__}: {error})")
                continue
            # what is not finite is the guard's to report, and no way is better than another
            gaps[way] = gap if math.isfinite(gap) else math.inf
            if gap <= limit:
                break
            reasons.append(f"log-probabilities were {gap:.2g} nats off on average")
        best = min(gaps.values())
        # what helps little need not slow it down
        way, gap = next((way, gap) for way, gap in gaps.items() if gap <= 2 * best)
        self._sharing, self._batching = way
        if gap > limit:
            self.exact = False
        if reasons:
            self._tell(reasons[0])

    def _tell(self, reason: str) -> None:
        """Say why responses are not generated in the fastest way, and how they are."""
        assert self._policy is not None
        remedy = "Its responses are weighed, see model.importance_sampling"
        if self.exact:
            remedy = (
                f"A prompt is computed once for each of its responses, in {self._batching.value}"
            )
        logger.warning(
            "%s does not generate as a forward pass computes it: %s. %s.",
            type(_generator(self._policy)).__name__,
            reason,
            remedy,
        )

    def _allowed_gap(self) -> float:
        assert self._policy is not None
        whole = all(weight.dtype == torch.float32 for weight in self._policy.parameters())
        # weights that are split are gathered in 16 bits, also where autocast is off
        whole = whole and not has_split_weights(self._policy)
        exact = whole and torch.get_float32_matmul_precision() == "highest"
        return _EXACT_GAP if exact else _ROUNDED_GAP

    @trial()
    def _gap(self) -> float:
        """Return how far log-probabilities of generation are from those of a forward pass."""
        assert self._policy is not None
        prompts, seeds = trial_prompts(_generator(self._policy)), list(range(6))
        with torch.autocast(prompts.input_ids.device.type, enabled=False):
            responses = self._draw(prompts, Sampling(max_new_tokens=4), 2, seeds, 3)
            rollout = assemble_rollout(prompts, responses, num_generations=2, pad_id=0)
            own = sequence_logprobs(self._policy, rollout)
        return float((own - rollout.sampling_logprobs).abs()[rollout.response_mask].mean())

    def _respond(
        self, prompts: PromptBatch, sampling: Sampling, num_generations: int, seeds: Sequence[int]
    ) -> list[Response]:
        assert self._policy is not None
        assert self._tokenizer is not None
        model = _generator(self._policy)
        eos = sorted(eos_token_ids(model, self._tokenizer))
        width = int(prompts.attention_mask.sum(dim=1).max())
        input_ids = prompts.input_ids[:, -width:]
        mask = prompts.attention_mask[:, -width:].long()
        drawer = _Drawer(sampling, seeds, prompt_width=width, ruled_out=ruled_out_ids(model.config))
        ending = _Ending(eos, sampling.stop, self._tokenizer, prompt_width=width)
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
            share=self._sharing,
        )
        sequences = continued(
            model,
            input_ids,
            mask,
            cache,
            num_generations=num_generations,
            config=_plain_config(sampling, eos, pad_token_id(self._tokenizer)),
            processor=drawer,
            ending=StoppingCriteriaList([ending]),
        )
        return drawer.responses(sequences[:, width:], ending.ends)


class _Drawer(LogitsProcessor):
    """Draws each row's token from its own random stream and remembers its log-probability."""

    def __init__(
        self,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        prompt_width: int,
        ruled_out: Sequence[int] = (),
    ) -> None:
        self._sampling = sampling
        self._ruled_out = torch.tensor(ruled_out, dtype=torch.long)
        self._prompt_width = prompt_width
        steps = sampling.max_new_tokens
        self._uniform = torch.from_numpy(
            np.stack([np.random.Generator(np.random.Philox(seed)).random(steps) for seed in seeds])
        )
        self._warpers = _warpers(sampling)
        self._logprobs: list[Tensor] = []
        self._kept_mass: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._prompt_width
        greedy = self._sampling.temperature == 0
        if len(self._ruled_out):  # of a text model there are none, and this copies all scores
            scores = scores.index_fill(1, self._ruled_out.to(scores.device), -torch.inf)
        full = (
            scores.float() if greedy else scores.float() / self._sampling.temperature
        ).log_softmax(-1)
        logprobs = full
        for warper in self._warpers:
            logprobs = warper(input_ids, logprobs)
        if self._warpers:
            mass = full.exp().masked_fill(logprobs.isinf(), 0.0).sum(dim=-1)
            self._kept_mass.append(mass)
            logprobs = logprobs - mass.log()[:, None]
        if greedy:
            chosen = logprobs.argmax(dim=-1)
        else:
            chosen = _inverse_cdf(logprobs, self._uniform[:, step].to(scores.device))
        self._logprobs.append(logprobs.gather(1, chosen[:, None])[:, 0])
        # generate takes the argmax of what is returned: leave it one token to take
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def responses(self, token_ids: Tensor, ends: Tensor) -> list[Response]:
        """Cut the rows where they ended.

        Args:
            token_ids: `[B, L]`, padded behind the end.
            ends: `[B]`, tokens of each response, 0 where it ran into the length limit.
        """
        logprobs = torch.stack(self._logprobs, dim=1)
        masses = torch.stack(self._kept_mass, dim=1) if self._kept_mass else None
        responses = []
        for row, end in enumerate(ends.tolist()):
            length = end or token_ids.shape[1]
            responses.append(
                Response(
                    token_ids=token_ids[row, :length],
                    logprobs=logprobs[row, :length],
                    truncated=end == 0,
                    kept_mass=None if masses is None else masses[row, :length],
                )
            )
        return responses


class _Ending(StoppingCriteria):
    """Ends a row at any end-of-sequence token or stop string, and remembers where.

    Looking for padding afterwards would not do: the pad token often is an end-of-sequence token.
    """

    def __init__(
        self,
        eos: Sequence[int],
        stop: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_width: int,
    ) -> None:
        self._eos = torch.tensor(list(eos))
        self._strings = StopStringCriteria(tokenizer, list(stop)) if stop else None
        self._prompt_width = prompt_width
        self.ends = torch.zeros(0, dtype=torch.long)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if len(self.ends) == 0:
            self.ends = torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
        done = torch.isin(input_ids[:, -1], self._eos.to(input_ids.device))
        if self._strings is not None:
            # only the response: a stop string inside the prompt must not end it at once
            done |= self._strings(input_ids[:, self._prompt_width :], scores)
        length = input_ids.shape[1] - self._prompt_width
        self.ends = torch.where((self.ends == 0) & done, length, self.ends)
        return self.ends > 0


def _inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Pick the token at which the cumulated probability passes ``uniform``."""
    # float32 sums over a large vocabulary would drift by more than a rare token's probability
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    target = uniform[:, None] * cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return chosen.clamp(max=logprobs.shape[1] - 1)


def _warpers(sampling: Sampling) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


def _plain_config(sampling: Sampling, eos: list[int], pad_id: int) -> GenerationConfig:
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,  # the drawer samples
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        eos_token_id=eos,
        pad_token_id=pad_id,
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
