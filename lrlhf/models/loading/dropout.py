"""Dropout that a model brings along, switched off."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

_WORDS = ("dropout", "pdrop", "layerdrop", "drop_path")


def clear_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout probability of a config, and of the configs inside it, to 0."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            clear_dropout(value)
        elif isinstance(value, float) and any(word in name for word in _WORDS):
            setattr(config, name, 0.0)


def silence_dropout(model: nn.Module) -> None:
    """Set the probability of every dropout layer to 0."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
