"""Sampling of tokens and stopping within ``transformers.generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StopStringCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lrlhf.rollout.responses import Response
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import SamplingMask

_MOST = 80.0
"""Largest difference of log-probabilities in nats whose exponential fits in float32."""


class TokenSampler(LogitsProcessor):
    """Samples each row's token from its own random stream and records its log-probability."""

    def __init__(
        self,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        prompt_mask: Bool[Tensor, "B P"],
        ruled_out: Sequence[int] = (),
    ) -> None:
        self._sampling = sampling
        self._prompt_mask = prompt_mask
        self._ruled_out = torch.tensor(ruled_out, dtype=torch.long)
        self._prompt_width = prompt_mask.shape[1]
        streams = [np.random.Generator(np.random.Philox(seed)) for seed in seeds]
        self._uniform = torch.from_numpy(
            np.stack([stream.random(sampling.max_new_tokens) for stream in streams])
        )
        self._warpers: list[LogitsProcessor] = []
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(_TopP(sampling.top_p))
        if sampling.min_p > 0:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))
        self._logprobs: list[Tensor] = []
        self._kept_mass: list[Tensor] = []
        self._keeps_mask = sampling.keep_mask and sampling.truncates
        self._left: list[tuple[Tensor, Tensor]] = []
        """Of each step how many ids were left in each row, and which, row by row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._prompt_width
        greedy = self._sampling.temperature == 0
        if len(self._ruled_out):  # empty for text models, as this copies all scores
            scores = scores.index_fill(1, self._ruled_out.to(scores.device), -torch.inf)
        if self._sampling.penalizes:
            scores = self._penalized(input_ids, scores.float())
        full = (
            scores.float() if greedy else scores.float() / self._sampling.temperature
        ).log_softmax(-1)
        hot = step == 0 and self._sampling.first_temperature is not None
        logprobs = self._hot(input_ids, scores) if hot else full
        for warper in () if hot else self._warpers:
            logprobs = warper(input_ids, logprobs)
        if self._warpers and not hot:
            mass = full.exp().masked_fill(logprobs.isinf(), 0.0).sum(dim=-1)
            logprobs = logprobs - mass.log()[:, None]
        if greedy and not hot:
            chosen = logprobs.argmax(dim=-1)
        else:
            chosen = _inverse_cdf(logprobs, self._uniform[:, step].to(scores.device))
        own, drawn = (values.gather(1, chosen[:, None])[:, 0] for values in (full, logprobs))
        self._logprobs.append(drawn)
        if self._warpers or self._sampling.first_temperature is not None:
            # never 0, whose logarithm is infinite
            self._kept_mass.append((own - drawn).clamp(-_MOST, _MOST).exp())
        if self._keeps_mask:
            self._left.append(self._ids_left(logprobs))
        # `generate` takes the argmax
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def _ids_left(self, logprobs: Float[Tensor, "B V"]) -> tuple[Tensor, Tensor]:
        """Return `[B]`, how many ids can be drawn, 0 where all can, and `[E]`, which."""
        left = ~logprobs.isneginf()
        sizes = left.sum(dim=1)
        restricted = sizes < logprobs.shape[1] - len(self._ruled_out)
        ids = (left & restricted[:, None]).nonzero()[:, 1]
        return (sizes * restricted).int(), ids.int()

    def _mask(self) -> SamplingMask | None:
        if not self._left:
            return None
        sizes, ids = zip(*self._left, strict=True)
        by_step = SamplingMask(sizes=torch.stack(sizes), ids=torch.cat(ids))
        rows = by_step.sizes.T.contiguous()
        return SamplingMask(sizes=rows, ids=by_step.ids_at(by_step.starts.T, rows))

    def _hot(self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]) -> Tensor:
        """Return log-probabilities of the first token's sampling distribution (FIRE)."""
        scores = scores.float() / (self._sampling.first_temperature or 1.0)
        if self._sampling.first_top_k:
            top_k: LogitsProcessor = TopKLogitsWarper(self._sampling.first_top_k)
            scores = top_k(input_ids, scores)
        return scores.log_softmax(-1)

    def _penalized(
        self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]
    ) -> Float[Tensor, "B V"]:
        """Apply the penalties of `Sampling`; padding does not count."""
        sampling, (prompt, response) = (
            self._sampling,
            input_ids.tensor_split([self._prompt_width], dim=1),
        )
        in_prompt, count = (
            torch.zeros_like(scores).scatter_add_(1, ids, mask.to(scores))
            for ids, mask in ((prompt, self._prompt_mask), (response, torch.ones_like(response)))
        )
        factor = torch.where(
            scores > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty
        )
        scores = torch.where(in_prompt + count > 0, scores * factor, scores)
        presence = sampling.presence_penalty * (count > 0)
        return scores - presence - sampling.frequency_penalty * count

    def responses(self, token_ids: Tensor, ends: Tensor) -> list[Response]:
        """Return the responses.

        Args:
            token_ids: `[B, L]`, padded behind the end.
            ends: `[B]`, tokens of each response, 0 where it was truncated.
        """
        logprobs = torch.stack(self._logprobs, dim=1)
        masses = torch.stack(self._kept_mass, dim=1) if self._kept_mass else None
        mask = self._mask()
        masks = mask and mask.rows()
        responses = []
        for row, end in enumerate(ends.tolist()):
            length = end or token_ids.shape[1]
            responses.append(
                Response.sampled(
                    token_ids[row, :length],
                    logprobs[row, :length],
                    truncated=end == 0,
                    kept_mass=None if masses is None else masses[row, :length],
                    mask=masks[row].columns(0, length) if masks else None,
                )
            )
        return responses


class RecordedStop(StoppingCriteria):
    """Stops a row at any end-of-sequence token or stop string, and records the length.

    Padding does not show the length: the pad token often is an end-of-sequence token.
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
            # only the response: a stop string in the prompt does not count
            done |= self._strings(input_ids[:, self._prompt_width :], scores)
        length = input_ids.shape[1] - self._prompt_width
        self.ends = torch.where((self.ends == 0) & done, length, self.ends)
        return self.ends > 0


def _inverse_cdf(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the cumulative probability passes ``uniform``."""
    # float32 sums over a large vocabulary would drift by more than a rare token's probability
    cumulative = _cumsum(logprobs.double().exp())
    target = uniform[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return chosen.clamp(max=logprobs.shape[1] - 1)


class _TopP(TopPLogitsWarper):
    """Top-p as in its parent, with deterministic sums on CUDA."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not torch.are_deterministic_algorithms_enabled():
            result: Tensor = super().__call__(input_ids, scores)
            return result
        ordered, order = scores.sort(dim=-1)
        cut = _cumsum(ordered.double().softmax(dim=-1)) <= 1 - self.top_p
        cut[:, -self.min_tokens_to_keep :] = False
        return scores.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), self.filter_value)


def _cumsum(probabilities: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Cumulative sum of float64 numbers whose total is about 1.

    CUDA adds floats in any order, and refuses to with deterministic algorithms. Then they are
    rounded to multiples of 2⁻⁵² and added as integers.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return probabilities.cumsum(dim=-1)
    return (probabilities * 2.0**52).round().long().cumsum(dim=-1).double() / 2.0**52
