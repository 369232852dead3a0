"""Models without weights: every shape and precision, and nothing in memory."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from lrlhf.models.backbone import allow_packing
from lrlhf.models.loading.model_sources import load_config, locate
from lrlhf.models.loading.pretrained import (
    PretrainedSpec,
    clear_dropout,
    finish_for_training,
    language_model_class,
    silence_dropout,
)


def skeleton(
    spec: PretrainedSpec,
    *,
    body: bool = False,
    trainable: bool = True,
    on_gpu: bool | None = None,
) -> PreTrainedModel | PeftModel:
    """Build what ``spec`` describes on torch's "meta" device, from the model's config alone.

    Args:
        spec: Its quantisation is left out: the weights have the shapes that they are computed with.
        body: Without an output head, as reward models and critics need it.
        trainable: False: every parameter is frozen, and adapters are those of ``lora.source``.
        on_gpu: Where it is going to be trained; None: on a GPU if this machine has one.

    Raises:
        ValueError: The source leads to no config, or an option does not fit the model.
    """
    config = model_config(spec)
    attention = spec.attn_implementation
    if attention is not None and attention.startswith(("flash", "flex")):
        attention = "sdpa"  # keeps the same tensors for the backward pass, and is always there
    stored = config.dtype or torch.float32
    auto_class: Any = AutoModel if body else language_model_class(config)
    with torch.device("meta"):
        model = auto_class.from_config(
            config,
            dtype=stored if spec.dtype == "auto" else getattr(torch, spec.dtype),
            attn_implementation=attention,
            trust_remote_code=spec.trust_remote_code,
        )
        if not spec.dropout:
            silence_dropout(model)
        if not body:
            allow_packing(model)
        task = "FEATURE_EXTRACTION" if body else "CAUSAL_LM"
        return finish_for_training(model, spec, trainable=trainable, task_type=task, on_gpu=on_gpu)


def model_config(spec: PretrainedSpec) -> PreTrainedConfig:
    """Load the config of a model; a GGUF file is not converted for it."""
    location = locate(spec.source)
    config: PreTrainedConfig
    if isinstance(location, str) or location.suffix != ".gguf":
        config = load_config(spec.source, **spec.of_hub)
    else:
        config = AutoConfig.from_pretrained(
            location.parent, gguf_file=location.name, trust_remote_code=False
        )
        config.dtype = torch.bfloat16  # of what the file is converted to
    if not spec.dropout:
        clear_dropout(config)
    return config
