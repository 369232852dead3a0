"""Trained models as ordinary folders, adapters merged into the weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models.loading.checkpoint_names import conversions_of
from lrlhf.models.output_head import plain_model
from lrlhf.models.sharding import class_of, has_split_weights, settle, whole, whole_weights


def save_model(
    model: PreTrainedModel | PeftModel,
    folder: str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write a model into a folder that ``from_pretrained`` loads without this library or PEFT.

    Adapters are merged, quantised weights restored and split ones put together in what is written;
    the model in memory stays as it is, to the bit.

    Args:
        model: With or without LoRA adapters. If its weights are split, all ranks must call this.
        folder: Created where it does not exist. None: on the ranks that only bring their parts.
        tokenizer: Written beside the model.
    """
    plain = plain_model(model)
    differs = isinstance(model, PeftModel) or any(map(_is_quantised, plain.modules()))
    weights = None
    if differs or has_split_weights(plain):
        weights = merged_state_dict(plain, keep=folder is not None)
    if folder is None:
        return
    if weights is None:
        plain.save_pretrained(folder)
    else:
        skeleton = skeleton_of(plain)
        # what ``from_pretrained`` did to names and shapes, which is undone here
        vars(skeleton).update(conversions_of(plain))
        skeleton.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """Build the same architecture without adapters, quantisation or memory for its weights."""
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # ``save_pretrained`` leaves its name there, which some cannot read
    if "quantization_config" in vars(config):
        del config.quantization_config
    with torch.device("meta"):
        skeleton = class_of(model)(config)
    if skeleton.can_generate():
        skeleton.generation_config = model.generation_config
    return cast(nn.Module, skeleton).to(model.dtype)  # type: ignore[return-value]


@torch.no_grad()
def merged_state_dict(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Return a model's weights under their original names, its active LoRA adapters added in.

    Quantised weights are restored, and split ones put together in main memory. Tensors that none
    of this concerns are shared, not copied.

    Args:
        model: A model that PEFT has put LoRA layers into, or any other. If its weights are split,
            all ranks must call this.
        keep: Off, this rank only brings its parts, and gets nothing.

    Raises:
        ValueError: It has adapters of another kind than LoRA.
    """
    if not has_split_weights(model):
        return dict(merged_weights(model)) if keep else {}
    weights = {}
    for name, weight in merged_weights(model, tied_once=True):
        if keep:
            weights[name] = weight.cpu()
    # further names of a tensor share its memory, by which it is known to be tied
    first: dict[int, str] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        known = weights.get(first.setdefault(id(weight), name))
        if known is not None:
            weights.setdefault(name, known)
    return weights


def merged_weights(model: nn.Module, *, tied_once: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Go through what `merged_state_dict` returns; merged layers exist one at a time.

    Args:
        model: See there.
        tied_once: Leave out further names of a tensor that came before.
    """
    settle(model)
    changed: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside_another = any(name.startswith(f"{outer}.") for outer in changed)
        if not inside_another and _differs_when_saved(module):
            changed[name] = module
    prefixes = tuple(f"{name}." for name in changed)
    seen: set[int] = set()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key.startswith(prefixes) or (tied_once and id(tensor) in seen):
            continue
        seen.add(id(tensor))
        yield key, whole(tensor).detach()
    for name, module in changed.items():
        with torch.no_grad(), whole_weights(module):
            parts = _as_saved(module)
        yield from ((f"{name}.{key}", tensor) for key, tensor in parts.items())


def check_mergeable(model: nn.Module) -> None:
    """Check that every adapter of a model can be added to the weights, before it is trained.

    Raises:
        ValueError: Some cannot; names the first.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and (obstacle := _unmergeable(layer)):
            raise ValueError(
                f"The adapter of {name} cannot be merged into the model for an export or an "
                f"engine: {obstacle}. Use plain LoRA."
            )


def _unmergeable(layer: BaseTunerLayer) -> str | None:
    if not isinstance(layer, LoraLayer):
        return f"it is of the kind {type(layer).__name__}"
    if layer.lora_variant:
        return f"it is a variant of LoRA ({type(next(iter(layer.lora_variant.values()))).__name__})"
    if any(layer.lora_bias.values()):
        return "it has a bias"
    if isinstance(layer, MultiheadAttention) or not hasattr(layer, "get_delta_weight"):
        return f"it is on a layer of the kind {type(layer).__name__}"
    return None


def _differs_when_saved(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer | ModulesToSaveWrapper) or _is_quantised(module)


def _is_quantised(module: nn.Module) -> bool:
    # by name, as PEFT does it: bitsandbytes may not be installed
    kinds = {type(weight).__name__ for weight in module.parameters(recurse=False)}
    return bool(kinds & {"Params4bit", "Int8Params"})


def _as_saved(module: nn.Module) -> dict[str, Tensor]:
    if isinstance(module, ModulesToSaveWrapper):
        return merged_state_dict(module.modules_to_save[module.active_adapters[0]])
    if not isinstance(module, BaseTunerLayer):
        return _dense(module)
    parts = _dense(module.get_base_layer())
    layer: nn.Module = module
    # adapters of several weights of one module, such as experts, lie one around the other
    while isinstance(layer, BaseTunerLayer):
        if obstacle := _unmergeable(layer):
            raise ValueError(f"An adapter cannot be merged: {obstacle}. Use plain LoRA.")
        name = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter)
            parts[name] = parts[name] + delta.to(parts[name].dtype)
        layer = layer.base_layer
    return parts


def _dense(layer: nn.Module) -> dict[str, Tensor]:
    if not _is_quantised(layer):
        # buffers too, and modules inside, which may have adapters of their own
        return dict(merged_weights(layer))
    parts = {name: weight.detach() for name, weight in layer.named_parameters(recurse=False)}
    # not PEFT's dequantize_module_weight: it replaces the layer's weight, and int8 then fails
    quantised = layer.get_parameter("weight")
    state = layer.state if type(quantised).__name__ == "Int8Params" else None
    return {**parts, "weight": dequantize_bnb_weight(quantised, state).detach()}
