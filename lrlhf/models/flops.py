"""Floating-point operations of a model's passes, and how many a GPU can do: what MFU is made of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models.heads import plain_model
from lrlhf.models.scorers import blocks_of

PEAK_FLOPS = {
    "a100": 312e12,
    "h100 pcie": 756e12,
    "h100 nvl": 835e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "l40s": 362e12,
}
"""Dense bfloat16 FLOP/s, half of those with sparsity; by what the driver's name of the GPU has in
it, the first that fits.

Reference:
    NVIDIA's figures as listed by https://glennklockwood.com/garden/processors/A100, …/h100 and
    …/B200, https://acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100 (H200) and
    https://www.mullet.se/product.html?product_id=355414 (L40S); H100 PCIe and NVL: NVIDIA's data
    sheet, https://www.nvidia.com/en-us/data-center/h100
"""


class ModelSize(NamedTuple):
    """Numbers of weights, and of a token's queries and keys in all layers.

    A token is ``multiplied`` by all weights but embeddings; activations may be recomputed.
    """

    number: int
    trained: int
    multiplied: int
    query_width: int
    key_width: int
    recomputes: bool = False

    def forward_flops(self, tokens: float, pairs: float) -> float:
        """Return the operations of a forward pass.

        Two for each weight and token. Attention is causal: it multiplies each token with those
        before it twice, for scores and for values.

        Args:
            tokens: That go through the model.
            pairs: Squares of the lengths of the rows, added up.
        """
        return 2.0 * (self.multiplied * tokens + self.query_width * pairs)

    @property
    def backward_passes(self) -> float:
        """Backward passes in units of forward ones, without what is recomputed.

        One for the gradients of activations, and one for those of the weights that learn. None
        where no weight does.
        """
        return 1 + self.trained / self.number if self.trained else 0.0


def size_of(model: nn.Module, plain: PreTrainedModel) -> ModelSize:
    """Read the sizes of a model whose config is that of ``plain``.

    Raises:
        ValueError: It is a mixture of experts, or its config does not name its attention heads.
    """
    options = plain.config.get_text_config().to_dict()
    if any("expert" in name and value for name, value in options.items()):
        raise ValueError("how long mixtures of experts take is not known")
    if not (heads := options.get("num_attention_heads")) or "hidden_size" not in options:
        raise ValueError(f"the config of {type(plain).__name__} does not name its attention heads")
    size = options.get("head_dim") or options["hidden_size"] // heads
    head = plain.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: Any = plain.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    number = sum(map(_numbers, [*model.parameters(), *model.buffers()]))
    return ModelSize(
        number=number,
        trained=sum(_numbers(weight) for weight in model.parameters() if weight.requires_grad),
        # a token of the embeddings is looked up; as an output head they are multiplied
        multiplied=number - (0 if tied else _numbers(embeddings.weight)),
        query_width=len(blocks_of(plain)) * heads * size,
        key_width=len(blocks_of(plain)) * (options.get("num_key_value_heads") or heads) * size,
        recomputes=plain.is_gradient_checkpointing,
    )


def training_flops(model: PreTrainedModel | PeftModel, tokens: float, pairs: float) -> float:
    """Return the operations of a forward and a backward pass, see `ModelSize.forward_flops`.

    NaN: they cannot be counted, see `size_of`. What is recomputed does not count.
    """
    try:
        size = size_of(model, plain_model(model))
    except ValueError:
        return math.nan
    return (1 + size.backward_passes) * size.forward_flops(tokens, pairs)


def _numbers(tensor: Tensor) -> int:
    """Count the numbers of a tensor that ZeRO-3 may have split, or 4-bit weights have packed."""
    if hasattr(tensor, "ds_numel"):
        return int(tensor.ds_numel)
    return tensor.numel() * (2 if type(tensor).__name__ == "Params4bit" else 1)


def peak_flops(device: torch.device) -> float | None:
    """Return what products in bfloat16 reach on a GPU at most; None: that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    if " mig " in name:  # a slice, named as the whole GPU is
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
