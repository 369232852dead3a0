"""Flash attention for rows that are not packed, under names that packed rows can be told from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class FlashAttention:
    """What ``transformers`` computes under the name of a flash kernel.

    Args:
        kernel: The name: ``flash_attention_2``, ...
    """

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def __call__(
        self,
        module: nn.Module,
        query: Float[Tensor, "B Q N D"],
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T D"],
        attention_mask: Int[Tensor, "B T"] | None,
        **options: Any,
    ) -> tuple[Float[Tensor, "B N Q D"], None]:
        """Compute attention; on CPUs, where a model is checked before it moves, with ``sdpa``."""
        if query.device.type == "cpu":
            window = options.get("sliding_window")
            mask = _whole_mask(attention_mask, query.shape[2], key.shape[2], window)
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        settings = {**vars(module.config), "_attn_implementation": self._kernel}
        # it looks the kernel up by the name in the layer's config
        layer = SimpleNamespace(
            config=SimpleNamespace(**settings),
            is_causal=getattr(module, "is_causal", True),
            layer_idx=getattr(module, "layer_idx", None),
            modules=module.modules,
        )
        function = ALL_ATTENTION_FUNCTIONS[self._kernel]
        result: Tensor = function(layer, query, key, value, attention_mask, **options)[0]
        return result, None


def _whole_mask(
    attended: Int[Tensor, "B T"] | None, queries: int, keys: int, window: int | None
) -> Bool[Tensor, "*B Q T"]:
    """Return which keys each query sees; ``attended`` is all that flash kernels are told."""
    behind = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(behind)
    if window is not None:
        seen = seen.triu(behind - window + 1)
    return seen[None, None] if attended is None else seen & attended.bool()[:, None, None]
