"""Weights that may have sampled a response, and what they say of its tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import eos_token_ids
from lrlhf.models.heads import output_head, plain_model
from lrlhf.models.token_logprobs import predicting_states, sequence_logprobs
from lrlhf.types import SequenceBatch

_LOGITS = 2**24
"""Logits that exist at the same time, 64 MiB in float32."""
_MEASURED = 8
"""Rows whose rounding error is measured."""


class TokenFacts(NamedTuple):
    """Of each token, `[T]` float64; NaN for the first of a row, which nothing predicts."""

    logprobs: Tensor
    above: Tensor
    """Probability of all tokens that are more probable."""
    rank: Tensor
    """Number of tokens that are more probable."""


class KeptSets(NamedTuple):
    """Smallest sets of most probable tokens that have a mass, `[T]` each."""

    size: Tensor
    """Number of tokens."""
    mass: Tensor
    """Probability of the set."""
    mass_before: Tensor
    """Without its least probable token."""
    least: Tensor
    """Probability of that token, divided by that of the most probable one."""
    next: Tensor
    """The same of the most probable token outside."""


class Candidate:
    """A model by name, computed with in float32 or more.

    Args:
        name: What reports call it.
        model: In float32.
        tokenizer: Of the model.
        dtype: That the engine computed in; its rounding error is measured with this model.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.model, self.tokenizer, self.dtype = name, model, tokenizer, dtype
        self._facts: dict[tuple[int, float], TokenFacts] = {}

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        return eos_token_ids(plain_model(self.model), self.tokenizer)

    @torch.no_grad()
    def facts(self, ids: Tensor, temperature: float) -> TokenFacts:
        """Return what the model says of the tokens of a row; remembered."""
        key = (id(ids), temperature)
        if key not in self._facts:
            parts = []
            for _, logits, targets in self.logits(ids):
                logprobs = (logits / temperature).log_softmax(-1)
                own = logprobs.gather(-1, targets[:, None])
                better = logprobs > own
                above = torch.where(better, logprobs.exp(), 0.0).sum(-1, dtype=torch.float64)
                parts.append((own.squeeze(-1), above, better.sum(-1)))
            self._facts[key] = TokenFacts(*_columns(parts))
        return self._facts[key]

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Iterate over places ``[N]``, logits ``[N, V]`` in float32, and the tokens there."""
        plain = plain_model(self.model)
        states, head = predicting_states(plain, _batch(ids, plain.device)), output_head(plain)
        size = max(1, _LOGITS // plain.config.get_text_config().vocab_size)
        for places in torch.split(torch.arange(1, len(ids)), size):
            rows = (places - 1).to(plain.device)
            yield places, head(states.predicting[rows]).float(), states.targets[rows]

    @torch.no_grad()
    def kept_sets(self, ids: Tensor, temperature: float, mass: Tensor) -> KeptSets:
        """Return the sets of most probable tokens whose mass is nearest to that given, `[T]`."""
        parts = []
        for places, logits, _ in self.logits(ids):
            ordered = (logits / temperature).softmax(-1).double().sort(-1, descending=True).values
            total = ordered.cumsum(-1)
            at = (total - mass[places, None].to(total)).abs().argmin(-1, keepdim=True)
            own, whole = ordered.gather(-1, at), total.gather(-1, at)
            behind = ordered.gather(-1, (at + 1).clamp(max=ordered.shape[-1] - 1))
            columns = (at + 1, whole, whole - own, own / ordered[:, :1], behind / ordered[:, :1])
            parts.append(tuple(column.squeeze(-1) for column in columns))
        return KeptSets(*_columns(parts))

    @torch.no_grad()
    def rounding(self, rows: Sequence[Tensor], temperature: float) -> float:
        """Measure the rounding error of log-probabilities in the engine's data type.

        Returns:
            The largest root mean square difference of a row between this type and a wider one.
        """
        plain = plain_model(self.model)
        chosen = [_batch(ids, plain.device) for ids in rows[:: max(1, len(rows) // _MEASURED)]]
        exact = self.dtype == torch.float32  # the model itself is the rough one
        other = copy.deepcopy(self.model).to(torch.float64 if exact else self.dtype)  # type: ignore[arg-type]
        sizes = []
        for row in chosen:
            gap = sequence_logprobs(self.model, row, temperature=temperature).double()
            gap -= sequence_logprobs(other, row, temperature=temperature).double()
            sizes.append(float(gap[:, 1:].square().mean().sqrt()))
        return max(sizes, default=0.0)


@torch.no_grad()
def continued_logprobs(
    first: Candidate, second: Candidate, ids: Tensor, change: int, temperature: float
) -> Tensor:
    """Return `[T]`: those of ``second`` from position ``change`` on, with the first one's cache."""
    models = [plain_model(first.model), plain_model(second.model)]
    row = ids[None].to(models[0].device)
    # the token before the change is the first that goes through the new weights
    cache = models[0](row[:, : change - 1], use_cache=True).past_key_values
    logits = models[1](row[:, change - 1 : -1], past_key_values=cache, use_cache=True).logits
    found = torch.full((len(ids),), torch.nan, dtype=torch.float64)
    scaled = (logits[0].float() / temperature).log_softmax(-1)
    found[change:] = scaled.gather(-1, row[0, change:, None]).squeeze(-1).double().cpu()
    return found


def _batch(ids: Tensor, device: torch.device) -> SequenceBatch:
    everything = torch.ones(1, len(ids), dtype=torch.bool, device=device)
    return SequenceBatch(
        input_ids=ids[None].to(device), attention_mask=everything, response_mask=everything
    )


def _columns(parts: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
    """Join the columns of chunks, with NaN for the first token, which nothing predicts."""
    for column in zip(*parts, strict=True):
        yield torch.cat([torch.full((1,), torch.nan), *(part.cpu() for part in column)]).double()
