"""What a model costs for each token, from its config and the shapes of its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from lrlhf.models.scorers import blocks_of
from lrlhf.planning.strategy_shares import Weights, weights_of


class ModelCosts(NamedTuple):
    """The sizes of a model that times depend on.

    Attributes:
        weights: All of them, and how many learn.
        multiplied: Weights that every token is multiplied by: all but embeddings.
        layers: Blocks.
        heads: Query heads of a block.
        key_heads: Heads of keys and values.
        attention_width: Query heads times the size of one.
        key_width: Heads of keys times the size of one.
        recomputes: Activations are computed again in the backward pass.
    """

    weights: Weights
    multiplied: int
    layers: int
    heads: int
    key_heads: int
    attention_width: int
    key_width: int
    recomputes: bool = False

    @property
    def number(self) -> int:
        """Weights."""
        return self.weights.whole.number

    def cache_numbers(self, gpus: int) -> float:
        """Numbers in the keys and values of one token, on all of the GPUs of a replica.

        A head is not divided: with more GPUs than heads of keys, several GPUs keep the same ones.
        """
        return 2 * self.layers * self.key_width * max(1, gpus / self.key_heads)

    def forward_flops(
        self, prompt: int, lengths: NDArray[np.int64], *, shares_prompts: bool
    ) -> float:
        """Return the FLOP of a pass over whole texts, `[groups, copies]` responses behind prompts.

        Two for each weight and token; attention is causal, and multiplies each token with those
        before it twice, for scores and for values.
        """
        groups, copies = lengths.shape
        prompts = groups if shares_prompts else groups * copies
        tokens = prompts * prompt + int(lengths.sum())
        whole = prompt + lengths.astype(np.float64)
        pairs = prompts * prompt**2 + float((whole**2 - prompt**2).sum())
        flops: float = 2.0 * (self.multiplied * tokens + self.layers * self.attention_width * pairs)
        return flops

    def update_flops(self, forward: float) -> float:
        """Return the FLOP of forward and backward pass over what a forward pass takes so many of.

        The backward pass multiplies once for the gradients of activations, and for those of the
        weights that learn.
        """
        learning = self.weights.trained.number / max(1, self.number)
        return forward * (2 + learning + self.recomputes)


def costs_of(model: nn.Module, plain: PreTrainedModel) -> ModelCosts:
    """Read the sizes of a model, whose config is that of ``plain``; it may have a head more.

    Raises:
        ValueError: It is a mixture of experts, or its config does not say how it attends.
    """
    config = plain.config.get_text_config()
    options = config.to_dict()
    if any("expert" in name and value for name, value in options.items()):
        raise ValueError("mixtures of experts are not simulated")
    heads = options.get("num_attention_heads")
    if not heads or "hidden_size" not in options:
        raise ValueError(f"the config of {type(plain).__name__} does not name its attention heads")
    size = options.get("head_dim") or options["hidden_size"] // heads
    key_heads = options.get("num_key_value_heads") or heads
    weights = weights_of(model, plain)
    head = plain.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: Any = plain.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    return ModelCosts(
        weights=weights,
        # a token of the embeddings is looked up; as an output head they are multiplied
        multiplied=weights.whole.number - (0 if tied else embeddings.weight.numel()),
        layers=len(blocks_of(plain)),
        heads=heads,
        key_heads=key_heads,
        attention_width=heads * size,
        key_width=key_heads * size,
        recomputes=plain.is_gradient_checkpointing,
    )


def attends_to_less(plain: PreTrainedModel) -> bool:
    """Whether layers of a model attend to a part of the text only, or not at all."""
    options = plain.config.get_text_config().to_dict()
    if (kinds := options.get("layer_types")) is not None:
        return any(kind != "full_attention" for kind in kinds)
    return bool(options.get("sliding_window"))
