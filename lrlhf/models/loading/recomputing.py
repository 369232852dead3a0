"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Literal

import torch
from transformers import PreTrainedModel

_LARGE = 3_000_000_000
"""Weights of a model above which activations are what fills a GPU first."""


def recompute(
    model: PreTrainedModel,
    choice: bool | Literal["auto"],
    *,
    offload: bool,
    has_adapters: bool,
    on_gpu: bool | None = None,
) -> None:
    """Have a model's blocks keep what they begin with only, if that is the choice.

    Args:
        model: With or without its weights.
        choice: ``auto``: on a GPU, for models of more than three billion weights that can.
        offload: What they begin with waits in main memory; ``auto`` stands for True then.
        has_adapters: The model's own weights are frozen.
        on_gpu: Where it is going to be trained; None: on a GPU if this machine has one.
    """
    if choice == "auto":
        on_gpu = torch.cuda.is_available() if on_gpu is None else on_gpu
        large = model.num_parameters() > _LARGE  # knows weights that are packed
        choice = offload or (on_gpu and large and model.supports_gradient_checkpointing)
    if not choice:
        return
    # without an accelerator they are in main memory already, which cannot be pinned
    offloads = offload and torch.accelerator.is_available()
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offloads)
    if has_adapters:
        # the inputs of the first block come from frozen embeddings
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]
