"""Models without weights: every shape and precision, and nothing in memory.

They are built on torch's "meta" device from a config alone, so a model of any size costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from lrlhf.models.backbone import assume_packing
from lrlhf.models.heads import ValueHead
from lrlhf.models.loading.gguf import folder_of
from lrlhf.models.loading.model_sources import cache_dir, load_config, locate
from lrlhf.models.loading.pretrained import (
    CausalLM,
    PretrainedSpec,
    clear_dropout,
    finish_for_training,
    keep_no_cache,
    silence_dropout,
)
from lrlhf.models.loading.score_model import ScoreModel
from lrlhf.models.reward_network import RewardNetwork
from lrlhf.models.scorers import HeadedBackbone, blocks_of
from lrlhf.models.token_logprobs import sequence_values
from lrlhf.models.value_network import ValueModel, new_value_head
from lrlhf.types import SequenceBatch


class ValueSkeleton(nn.Module):
    """The shapes of a `ValueNetwork`, which probes its backbone with real numbers."""

    def __init__(self, backbone: PreTrainedModel | PeftModel, head: ValueHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, batch: SequenceBatch) -> Float[Tensor, "B T"]:
        """Compute values aligned with the tokens, see :func:`lrlhf.models.sequence_values`."""
        return sequence_values(self.backbone, self.head, batch)


def policy_skeleton(spec: CausalLM, *, trainable: bool = True) -> PreTrainedModel | PeftModel:
    """Build what ``spec.load`` loads, on the meta device.

    Args:
        spec: Its quantisation is left out: the weights have the shapes that they are computed with.
        trainable: False: every parameter is frozen, and there are no adapters.

    Raises:
        ValueError: The source leads to no config, or an option does not fit the model.
    """
    config = config_without_weights(spec)
    seeing = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto_class = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model = _from_config(spec, config, auto_class)
    assume_packing(model)
    with torch.device("meta"):
        return finish_for_training(model, spec, trainable=trainable, task_type="CAUSAL_LM")


def body_skeleton(spec: PretrainedSpec, *, trainable: bool) -> PreTrainedModel | PeftModel:
    """Build a model without any head on the meta device; arguments as of `policy_skeleton`."""
    body = _from_config(spec, config_without_weights(spec), AutoModel)
    keep_no_cache(body)
    assume_packing(body)
    with torch.device("meta"):
        return finish_for_training(body, spec, trainable=trainable, task_type="FEATURE_EXTRACTION")


def value_skeleton(spec: ValueModel) -> ValueSkeleton:
    """Build what ``spec.load`` loads, on the meta device."""
    body = body_skeleton(spec, trainable=True)
    return ValueSkeleton(body, new_value_head(body, spec.head))


def reward_skeleton(spec: ScoreModel) -> RewardNetwork:
    """Build what ``spec.load`` loads, on the meta device."""
    body = body_skeleton(spec, trainable=True)
    return RewardNetwork(_UnprobedBackbone(body, spec.head_config()))


class _UnprobedBackbone(HeadedBackbone):
    """Finds by structure what the layer of the heads does not depend on: nothing can be run."""

    def _freeze_unused(self) -> None:
        plain = self.plain
        unused = [part for name, part in plain.named_modules() if name.endswith("pooler")]
        if self.config.layer != -1:
            blocks = blocks_of(plain)
            unused += list(blocks[self.config.layer :])
            inside = {id(weight) for weight in blocks.parameters()}
            inside |= {id(weight) for weight in plain.get_input_embeddings().parameters()}
            for weight in plain.parameters():
                if id(weight) not in inside:
                    weight.requires_grad_(False)
        for part in unused:
            part.requires_grad_(False)


def config_without_weights(spec: PretrainedSpec) -> PreTrainedConfig:
    """Load the config of a model that is about to be built; a GGUF file is not converted for it.

    Raises:
        ValueError: The source leads to no config.
    """
    found = locate(spec.source)
    if isinstance(found, str) or found.suffix != ".gguf":
        config = load_config(
            spec.source, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    elif (converted := folder_of(found, cache_dir() / "models")).is_dir():
        config = AutoConfig.from_pretrained(converted)
    else:
        config = AutoConfig.from_pretrained(found.parent, gguf_file=found.name)
    if not spec.dropout:
        clear_dropout(config)
    return config


def _from_config(spec: PretrainedSpec, config: PreTrainedConfig, auto_class: Any) -> Any:
    attention = spec.attn_implementation
    if attention is not None and attention.startswith("flash"):
        attention = "sdpa"  # keeps the same tensors for the backward pass, and is always there
    stored = config.dtype or torch.float32
    dtype = stored if spec.dtype == "auto" else getattr(torch, spec.dtype)
    with torch.device("meta"):
        model = auto_class.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=spec.trust_remote_code,
        )
    if not spec.dropout:
        silence_dropout(model)
    return model
