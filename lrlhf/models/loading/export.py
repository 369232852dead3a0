"""Trained models as ordinary folders, adapters merged into the weights."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, MultiheadAttention, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from lrlhf.models.heads import is_tied, plain_model
from lrlhf.models.sharding import class_of, full_tensor, full_weights, has_split_weights, reshard
from lrlhf.models.transformers_internals import set_weight_conversions, weight_conversions


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
    written = plain if weights is None else skeleton_of(plain)
    # what ``from_pretrained`` did to names and shapes, which is undone here
    set_weight_conversions(written, _conversions_of(plain))
    written.save_pretrained(folder, state_dict=weights)
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
    """LoRA merge: return a model's weights under their original names, active adapters added in.

    Quantised weights are restored, and split ones put together in main memory: then all ranks must
    call this, and those that do not ``keep`` only bring their parts. Tensors that none of this
    concerns are shared, not copied.

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


def merged_weights(
    model: nn.Module, *, tied_once: bool = False, adapters: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Go through what `merged_state_dict` returns; merged layers exist one at a time.

    ``tied_once`` leaves out further names of a tensor that came before. Without ``adapters`` the
    layers that have some are as they are without them.
    """
    reshard(model)
    changed: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside_another = any(name.startswith(f"{outer}.") for outer in changed)
        if not inside_another and _differs_when_saved(module):
            changed[name] = module
    seen: set[int] = set()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if owner := next((name for name in _above(key) if name in changed), None):
            # in its place, so that the order is that of the model without adapters
            module = changed[owner]
            if id(module) not in seen:
                seen.add(id(module))
                with torch.no_grad(), full_weights(module):
                    parts = _as_saved(module, adapters=adapters)
                yield from ((f"{owner}.{name}", part) for name, part in parts.items())
        elif not tied_once or id(tensor) not in seen:
            seen.add(id(tensor))
            yield key, full_tensor(tensor).detach()


def _above(name: str) -> Iterator[str]:
    """Yield the names of what something is inside of, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def check_mergeable(model: nn.Module) -> None:
    """Raise `ValueError` for the first adapter that cannot be added to the weights."""
    if isinstance(model, PeftModel):
        _refuse_tied_ends(plain_model(model))
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and (obstacle := unmergeable(layer)):
            raise ValueError(
                f"The adapter of {name} cannot be merged into the model for an export or an "
                f"engine: {obstacle}. Use plain LoRA."
            )


def _refuse_tied_ends(model: PreTrainedModel) -> None:
    """Refuse to adapt an end of a tied pair: an export would lose it, or come untied."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}  # type: ignore[no-untyped-call]
    if not is_tied(model) or None in ends:
        return
    adapted = [
        name
        for name, module in model.named_modules()
        if module in ends and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]
    if adapted:
        raise ValueError(
            f"lora: {', '.join(adapted)} shares its weights with the other end of the model "
            "(tie_word_embeddings). Leave it out of target_modules and modules_to_save."
        )


def unmergeable(layer: BaseTunerLayer) -> str | None:
    """Tell why an adapter is no plain LoRA that could be added to a weight; None: it is."""
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


def _as_saved(module: nn.Module, *, adapters: bool) -> dict[str, Tensor]:
    if isinstance(module, ModulesToSaveWrapper):
        return merged_state_dict(module.modules_to_save[module.active_adapters[0]])
    if not isinstance(module, BaseTunerLayer):
        return _dense(module)
    parts = _dense(module.get_base_layer())
    layer: nn.Module = module
    # adapters of several weights of one module, such as experts, lie one around the other
    while adapters and isinstance(layer, BaseTunerLayer):
        if obstacle := unmergeable(layer):
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


def _conversions_of(model: PreTrainedModel) -> list[Any]:
    """Return what ``from_pretrained`` does to the names and shapes of a model's weights."""
    noted = weight_conversions(model)
    if noted is None:
        # of a model that was built from its config; see `revert_weight_conversion`
        known = get_model_conversion_mapping(model, add_legacy=False)
        noted = [item for item in known if not isinstance(item, PrefixChange)]
    # the body of some families is noted to rename again what the model has renamed: undone twice,
    # it leaves names that no checkpoint has (language_model.model.model of Qwen2-Audio)
    done = [conversion.source_patterns for conversion in noted if conversion.scope_prefix is None]
    return [each for each in noted if each.scope_prefix is None or each.source_patterns not in done]


class CheckpointNames:
    """Renames and reshapes weights as the checkpoints of a family have them, one after another.

    ``from_pretrained`` renames the weights of many families, and stacks those of experts;
    ``save_pretrained`` undoes it for a whole model at once. ``names`` are those that the weights of
    a model, whole, split or with adapters, have in memory without adapters.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        undone = [each.reverse_transform() for each in reversed(_conversions_of(model))]
        self._renamings = [
            conversion for conversion in undone if isinstance(conversion, WeightRenaming)
        ]
        self._converters = [item for item in undone if isinstance(item, WeightConverter)]
        self._sizes = Counter(self._renamed(name)[0] for name in names)

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Go through weights as checkpoints have them.

        Those that become one weight together wait for each other; a weight that becomes several,
        such as a stack of experts, is cut into views of it.
        """
        waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, weight in weights:
            renamed, source = self._renamed(name)
            if source is None:
                yield renamed, weight
                continue
            waiting[renamed][name] = weight
            if len(waiting[renamed]) == self._sizes[renamed]:
                yield from revert_weight_conversion(self._model, waiting.pop(renamed)).items()
        assert not waiting, f"weights that wait for others: {sorted(waiting)}"

    def alone(self, name: str) -> str | None:
        """Return the new name of a weight that nothing else is done to; None: something is."""
        renamed, source = self._renamed(name)
        return renamed if source is None else None

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return a weight's new name, or that of a group, and what in it is converted."""
        return rename_source_key(name, self._renamings, self._converters, reverse=True)
