"""Tokens sampled one step at a time, within ``transformers.generate``."""

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

_MOST = 80.0
"""Nats between two probabilities of a token, the exponential of which float32 still holds."""


class TokenSampler(LogitsProcessor):
    """Samples each row's token from its own random stream and remembers its log-probability."""

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
        steps = sampling.max_new_tokens
        self._uniform = torch.from_numpy(
            np.stack([np.random.Generator(np.random.Philox(seed)).random(steps) for seed in seeds])
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

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._prompt_width
        greedy = self._sampling.temperature == 0
        if len(self._ruled_out):  # of a text model there are none, and this copies all scores
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
        own, drawn = (one.gather(1, chosen[:, None])[:, 0] for one in (full, logprobs))
        self._logprobs.append(drawn)
        if self._warpers or self._sampling.first_temperature is not None:
            # of a token that the policy would hardly draw, no 0, whose logarithm is no number
            self._kept_mass.append((own - drawn).clamp(-_MOST, _MOST).exp())
        # generate takes the argmax of what is returned: leave it one token to take
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    def _hot(self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]) -> Tensor:
        """Return log-probabilities of what the first token is drawn from."""
        scores = scores.float() / (self._sampling.first_temperature or 1.0)
        if self._sampling.first_top_k:
            keep: LogitsProcessor = TopKLogitsWarper(self._sampling.first_top_k)
            scores = keep(input_ids, scores)
        return scores.log_softmax(-1)

    def _penalized(
        self, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]
    ) -> Float[Tensor, "B V"]:
        """Apply the penalties of `Sampling`; padding is no token that was said."""
        sampling, width = self._sampling, self._prompt_width
        asked, said = (
            torch.zeros_like(scores).scatter_add_(1, ids, counted.to(scores))
            for ids, counted in (
                (input_ids[:, :width], self._prompt_mask),
                (input_ids[:, width:], torch.ones_like(input_ids[:, width:])),
            )
        )
        factor = torch.where(
            scores > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty
        )
        scores = torch.where(asked + said > 0, scores * factor, scores)
        presence = sampling.presence_penalty * (said > 0)
        return scores - presence - sampling.frequency_penalty * said

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
                Response.sampled(
                    token_ids[row, :length],
                    logprobs[row, :length],
                    truncated=end == 0,
                    kept_mass=None if masses is None else masses[row, :length],
                )
            )
        return responses


class Ending(StoppingCriteria):
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
    cumulated = _cumulated(logprobs.double().exp())
    target = uniform[:, None] * cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return chosen.clamp(max=logprobs.shape[1] - 1)


class _TopP(TopPLogitsWarper):
    """Keeps what its parent keeps, with sums that CUDA computes in the same order every time."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not torch.are_deterministic_algorithms_enabled():
            kept: Tensor = super().__call__(input_ids, scores)
            return kept
        ordered, order = scores.sort(dim=-1)
        cut = _cumulated(ordered.double().softmax(dim=-1)) <= 1 - self.top_p
        cut[:, -self.min_tokens_to_keep :] = False
        return scores.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), self.filter_value)


def _cumulated(probabilities: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Cumulate float64 numbers whose sum is about 1.

    CUDA adds them up in any order, and refuses to where algorithms are to be deterministic. Then
    they are rounded to multiples of 2⁻⁵², and whole numbers are added up.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return probabilities.cumsum(dim=-1)
    return (probabilities * 2.0**52).round().long().cumsum(dim=-1).double() / 2.0**52
