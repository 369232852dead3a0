"""Weights that may have sampled a response, and the probabilities that they give its tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.models import eos_token_ids, ruled_out_ids
from lrlhf.models.heads import output_head, plain_model
from lrlhf.models.text_limits import context_length
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


class Candidate:
    """A model by name, computed with in float32 or more.

    Args:
        name: What reports call it.
        model: In float32.
        tokenizer: Of the model.
        dtype: That the engine computed in; None: not known, float32 or bfloat16.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype | None,
    ) -> None:
        self.name, self.model, self.tokenizer, self.dtype = name, model, tokenizer, dtype
        # with the ids, whose address may be that of others once they are gone
        self._facts: dict[tuple[int, float], tuple[Tensor | None, TokenFacts]] = {}

    @property
    def plain(self) -> PreTrainedModel:
        """The model inside of adapters, which stay in effect."""
        return plain_model(self.model)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        return eos_token_ids(self.plain, self.tokenizer)

    def reads(self, row: Row) -> bool:
        """Tell whether all that the row shows is there: a file has no images.

        Raises:
            ValueError: The row has tokens that the model lacks, or more than it reads.
        """
        assert row.ids is not None, "of rows with token ids"
        size = cast("Tensor", self.plain.get_input_embeddings().weight).shape[0]
        least, most = (int(end(row.ids.tolist(), default=0)) for end in (min, max))
        if least < 0 or most >= size:
            raise ValueError(
                f"{row.place} has the token id {least if least < 0 else most}, and {self.name} has "
                f"{size:,} tokens: these are no weights of the model that sampled it"
            )
        if len(row.ids) > (longest := context_length(self.model) or len(row.ids)):
            raise ValueError(
                f"{row.place} has {len(row.ids):,} tokens, and {self.name} reads {longest:,}"
            )
        shown = torch.isin(row.ids, torch.tensor(ruled_out_ids(self.plain.config)))
        return row.media is not None or not bool(shown.any())

    @torch.no_grad()
    def facts(self, row: Row, temperature: float) -> TokenFacts:
        """Return the probabilities of the tokens of a row; remembered."""
        key = (id(row.ids), temperature)
        if key not in self._facts:
            parts = []
            for _, logits, targets in self.logits(row):
                logprobs = (logits / temperature).log_softmax(-1)
                own = logprobs.gather(-1, targets[:, None])
                better = logprobs > own
                above = torch.where(better, logprobs.exp(), 0.0).sum(-1, dtype=torch.float64)
                parts.append((own.squeeze(-1), above, better.sum(-1)))
            self._facts[key] = row.ids, TokenFacts(*_columns(parts))
        return self._facts[key][1]

    @torch.no_grad()
    def logits(self, row: Row) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Iterate over places ``[N]``, logits ``[N, V]`` in float32, and the tokens there."""
        batch, head = self._batch(row), output_head(self.plain)
        states = predicting_states(self.plain, batch)
        size = max(1, _LOGITS // self.plain.config.get_text_config().vocab_size)
        for places in torch.split(torch.arange(1, batch.input_ids.shape[1]), size):
            rows = (places - 1).to(self.plain.device)
            yield places, head(states.predicting[rows]).float(), states.targets[rows]

    @torch.no_grad()
    def kept_sets(self, row: Row, temperature: float, mass: Tensor) -> Tensor:
        """Find the smallest sets of most probable tokens that have about a mass, `[T]`.

        Returns:
            `[5, T]`: the number of tokens; their mass; their mass without the least probable one;
            the probability of that one, and of the next outside, divided by that of the first.
        """
        parts = []
        for places, logits, _ in self.logits(row):
            ordered = (logits / temperature).softmax(-1).double().sort(-1, descending=True).values
            total = ordered.cumsum(-1)
            at = (total - mass[places, None].to(total)).abs().argmin(-1, keepdim=True)
            own, whole = ordered.gather(-1, at), total.gather(-1, at)
            behind = ordered.gather(-1, (at + 1).clamp(max=ordered.shape[-1] - 1))
            columns = (at + 1, whole, whole - own, own / ordered[:, :1], behind / ordered[:, :1])
            parts.append(tuple(column.squeeze(-1) for column in columns))
        return torch.stack([*_columns(parts)])

    @torch.no_grad()
    def rounding(self, rows: Sequence[Row], temperature: float) -> float:
        """Measure the error of log-probabilities, in units of a type's machine epsilon.

        It is measured with weights in bfloat16, and is proportional to epsilon in other types.

        Returns:
            The largest root mean square difference of a row, divided by bfloat16's epsilon.
        """
        rough: dict[int, object] = {  # deepcopy takes these in place of the weights
            id(weight): nn.Parameter(weight.bfloat16(), requires_grad=False)
            for weight in self.model.parameters()
            if weight.is_floating_point()
        }
        other = copy.deepcopy(self.model, rough)
        sizes = [0.0]
        for row in rows[:: -(-len(rows) // _MEASURED)]:
            batch = self._batch(row)
            gap = sequence_logprobs(self.model, batch, temperature=temperature)
            gap = gap - sequence_logprobs(other, batch, temperature=temperature)
            sizes.append(float(gap[:, 1:].double().square().mean().sqrt()))
        return max(sizes) / torch.finfo(torch.bfloat16).eps

    @torch.no_grad()
    def continued(self, first: Candidate, row: Row, change: int, temperature: float) -> Tensor:
        """Return log-probabilities `[T]` from position ``change`` on, with another one's cache."""
        assert row.ids is not None, "of rows with token ids"
        ids = row.ids[None].to(self.plain.device)
        # the token before the change is the first that goes through the new weights
        cache = first.plain(ids[:, : change - 1], use_cache=True).past_key_values
        result = torch.full((len(row.ids),), torch.nan, dtype=torch.float64)
        size = max(1, _LOGITS // self.plain.config.get_text_config().vocab_size)
        for places in torch.split(torch.arange(change, len(row.ids)), size):
            out = self.plain(ids[:, places - 1], past_key_values=cache, use_cache=True)
            scaled = (out.logits[0].float() / temperature).log_softmax(-1)
            result[places] = scaled.gather(-1, ids[0, places, None]).squeeze(-1).double().cpu()
            cache = out.past_key_values
        return result

    def _batch(self, row: Row) -> SequenceBatch:
        assert row.ids is not None, "of rows with token ids"
        ids = row.ids[None].to(self.plain.device)
        seen = torch.ones_like(ids, dtype=torch.bool)
        media = None if row.media is None else (row.media,)
        return SequenceBatch(input_ids=ids, attention_mask=seen, response_mask=seen, media=media)


def _columns(parts: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
    """Join the columns of chunks, with NaN for the first token, which nothing predicts."""
    for column in zip(*parts, strict=True):
        yield torch.cat([torch.full((1,), torch.nan), *(part.cpu() for part in column)]).double()
