"""A model in one line."""

from __future__ import annotations

from torch import nn


def in_brief(model: nn.Module) -> str:
    """Name a model, and count its parameters; those that are shared or frozen count once."""
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    config = getattr(model, "config", None)
    source = getattr(config, "_name_or_path", "")
    name = f"{type(model).__name__} of {source}" if source else type(model).__name__
    kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    devices = sorted({str(weight.device) for weight in weights})
    places = f"{', '.join(kinds)} on {', '.join(devices)}"
    return f"{name}, {total:,} parameters, {trained:,} of them trained, {places}"
