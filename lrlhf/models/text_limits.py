"""What texts a model can read, known without its weights: their length, and their token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models.heads import plain_model
from lrlhf.models.loading.tokenization import pad_within
from lrlhf.models.sharding import full_shape

_AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "ibert",
    "longformer",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Families whose first position is the one behind the number of the padding token."""


@dataclass(frozen=True, kw_only=True)
class TextLimits:
    """What one of a run's models can read."""

    source: str
    context: int | None
    """Tokens of a text with its response; None: it has no limit, or none that its config tells."""
    vocabulary: int | None = None
    """Rows of its embedding; None: not known."""
    response: int = 0
    """Tokens that may be sampled behind a text."""
    option: str = ""
    """What sets that number."""

    @classmethod
    def of(cls, model: nn.Module) -> TextLimits | None:
        """Return those of the pretrained model inside a module; None: there is none."""
        plain = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
        if plain is None:
            return None
        shapes = [full_shape(weight) for weight in plain.get_input_embeddings().parameters()]
        return cls(
            source=plain.name_or_path or type(plain).__name__,
            context=context_of(plain.config),
            vocabulary=max((shape[0] for shape in shapes if len(shape) == 2), default=None),
        )

    def refuse_texts(
        self,
        texts: Iterable[tuple[str, Sequence[int]]],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Refuse texts that the model cannot read.

        Args:
            texts: Token ids, each with where the text stands.
            tokenizer: That they were made with.

        Raises:
            ValueError: One is too long, or has a token that the model has no embedding of.
        """
        known = self.vocabulary
        if known is not None and tokenizer is not None and len(tokenizer) <= known:
            known = None  # no id is too large
        longest, where = 0, ""
        for place, ids in texts:
            if known is not None and len(ids) and (largest := int(np.max(ids))) >= known:
                self._refuse_id(largest, place, known, tokenizer)
            if len(ids) > longest:
                longest, where = len(ids), place
        what = "prompt" if self.response else "answer with its prompt"
        self.refuse_length(longest, f"the longest {what} ({where})")

    def refuse_length(self, tokens: int, origin: str) -> None:
        """Refuse a number of tokens, and where it comes from, with which a text is too long."""
        total = tokens + self.response
        if self.context is None or total <= self.context:
            return
        added = f" and {self.option} is {self.response}, {total} together" if self.response else ""
        shorter = f"lower {self.option}, or set max_prompt_tokens" if added else "set max_tokens"
        raise ValueError(
            f"{self.source} reads at most {self.context} tokens (max_position_embeddings); "
            f"{origin} is {tokens}{added}: {shorter} of the data, which leaves longer rows out"
        )

    def _refuse_id(
        self, token: int, place: str, known: int, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        name, size = f"{token}", ""
        if tokenizer is not None:
            name = f"{token} ({tokenizer.convert_ids_to_tokens(token)!r})"
            size = f", and the tokenizer has {len(tokenizer)} tokens"
        raise ValueError(
            f"{place} has the token {name}, but the embedding of {self.source} has {known} "
            f"rows{size}: resize the model before (model.resize_token_embeddings(len(tokenizer)) "
            "in transformers, and save it), or take the tokenizer that belongs to it"
        )


def limits_of(models: Iterable[nn.Module]) -> list[TextLimits]:
    """Return what each of some models can read, as far as that is known."""
    return [limits for limits in map(TextLimits.of, models) if limits is not None]


def fit_padding(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
    """Pad with the end token where a model has no embedding of the padding token."""
    for limits in limits_of([model]):
        pad_within(tokenizer, limits.vocabulary, limits.source)


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the tokens that a model was made for; None: no limit, or its config tells none."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    if text.model_type in _AFTER_PADDING:
        return positions - int(text.pad_token_id) - 1
    if not isinstance(rope, Mapping) or not isinstance(rope.get("factor"), int | float):
        return positions
    # the config gives the length before or after stretching, depending on the model
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(original * rope["factor"]))


def context_length(model: PreTrainedModel | PeftModel) -> int | None:
    """Return how many tokens a model reads; None: its config does not say."""
    return context_of(plain_model(model).config)
