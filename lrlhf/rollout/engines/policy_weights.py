"""The policy's weights as an engine wants them: a checkpoint's names, merged, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import (
    CheckpointNames,
    is_tied,
    merged_weights,
    plain_model,
    skeleton_of,
    unmergeable,
)
from lrlhf.models.sharding import has_split_weights, settle, whole, whole_shape
from lrlhf.vllm_worker.model_access import PREFIX


class WeightSyncError(RuntimeError):
    """The engine does not have the policy's weights."""


class PolicyWeights:
    """Reads the weights of a policy, as they are at the time of reading.

    Args:
        policy: With or without LoRA adapters, quantised or not.

    Raises:
        TypeError: It is no transformers model.
        ValueError: Its output layer is tied to the embedding and one of them has an adapter of its
            own, which no engine that ties them could take.
    """

    def __init__(self, policy: nn.Module) -> None:
        if not isinstance(policy, PreTrainedModel | PeftModel):
            raise TypeError(f"the policy is no transformers model but {type(policy).__name__}")
        self.model = plain_model(policy)
        self._check_tied_head()
        self._skeleton = skeleton_of(self.model)
        self.names = CheckpointNames(self.model, self._skeleton.state_dict())

    def tensors(
        self, dtype: torch.dtype | None = None, *, adapters: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Go through the weights under the names that checkpoints of the family have.

        If they are split over ranks, all ranks must go through all of them.

        Args:
            dtype: Cast floating-point weights to it; None: as they are.
            adapters: Merge LoRA adapters into the weights; else these are as they are without.
        """
        weights = merged_weights(self.model, tied_once=True, adapters=adapters)
        for name, tensor in self.names.convert(weights):
            floating = dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(dtype) if floating else tensor

    def layout(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Go through what `tensors` yields, without memory behind it and without other ranks."""
        for name, tensor in self.names.convert(merged_weights(self._skeleton, tied_once=True)):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    @property
    def are_split(self) -> bool:
        """Whether reading them takes all ranks."""
        return has_split_weights(self.model)

    def _check_tied_head(self) -> None:
        if not is_tied(self.model):
            return
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        embedding = self.model.get_input_embeddings()
        for name, layer in (("output layer", head), ("embedding", embedding)):
            if layer is not None and len(list(layer.children())) > 0:
                raise ValueError(
                    "the policy's output layer is tied to its embedding, and the "
                    f"{name} has a LoRA adapter or copy of its own, so merged they are tied no "
                    "more: leave it out of policy.lora.target_modules and modules_to_save"
                )


def compare_fingerprints(expected: dict[str, str], arrived: dict[str, str]) -> None:
    """Check that an engine was given exactly these weights.

    Raises:
        WeightSyncError: It was not; names the first wrong weight.
    """
    for name, number in expected.items():
        if name not in arrived:
            raise WeightSyncError(f"the engine was not given the weight {name}")
        if arrived[name] != number:
            raise WeightSyncError(f"the engine was given other values of the weight {name}")
    surplus = [name for name in arrived if name not in expected]
    if surplus:
        raise WeightSyncError(f"the engine was given a weight {surplus[0]}, which the policy lacks")


LARGEST_RANK = 512
"""What vLLM takes (0.29 to 0.33)."""


class AdapterWeights:
    """Reads the active LoRA adapter of a policy under the names that PEFT's files have.

    Args:
        weights: Of the policy.

    Raises:
        ValueError: The policy has no adapter, or is more than fixed weights and one plain LoRA
            adapter on linear layers of its decoder; says what it has.
    """

    def __init__(self, weights: PolicyWeights) -> None:
        self._model = weights.model
        self._layers: dict[str, tuple[nn.Module, nn.Module]] = {}
        active, scalings = set(), set()
        for name, layer in self._model.named_modules():
            if isinstance(layer, ModulesToSaveWrapper):
                raise ValueError(f"{name} is trained as a whole (modules_to_save)")
            if not isinstance(layer, BaseTunerLayer):
                continue
            if obstacle := _obstacle(layer):
                raise ValueError(f"of the adapter of {name}, {obstacle}")
            assert isinstance(layer, LoraLayer)
            active.update(layer.active_adapters)
            stored = weights.names.alone(f"{name}.weight")
            if stored is None:
                raise ValueError(f"checkpoints have {name} together with other weights")
            for adapter in set(layer.active_adapters) & layer.lora_A.keys():
                key = stored.removesuffix(".weight")
                self._layers[key] = layer.lora_A[adapter], layer.lora_B[adapter]
                scalings.add(layer.scaling[adapter])
        if len(active) != 1 or not self._layers:
            raise ValueError(f"{len(active)} adapters are active, not one")
        if len(scalings) > 1:
            raise ValueError("the adapter is scaled by other factors in some layers than in others")
        (self._scaling,) = scalings
        firsts = (first.get_parameter("weight") for first, _ in self._layers.values())
        self.rank = max(whole_shape(weight)[0] for weight in firsts)
        if self.rank > LARGEST_RANK:
            raise ValueError(f"its rank is {self.rank}, and vLLM's limit is {LARGEST_RANK}")
        self._check_what_else_is_trained()

    def _check_what_else_is_trained(self) -> None:
        decoder: nn.Module = self._model.get_decoder()  # type: ignore[no-untyped-call]
        inside = {id(weight) for weight in decoder.parameters()}
        own = {id(weight) for _, weight in self._parameters()}
        if not own <= inside:
            raise ValueError("a part of the adapter is outside of the decoder")
        for name, weight in self._model.named_parameters():
            if weight.requires_grad and id(weight) not in own:
                raise ValueError(f"{name}, which is not the adapter's, is trained too")

    @property
    def settings(self) -> str:
        """What PEFT's ``adapter_config.json`` says of it."""
        ends = {name.rpartition(".")[2] for name in self._layers}
        return json.dumps(
            {
                "peft_type": "LORA",
                "r": self.rank,
                "lora_alpha": self._scaling * self.rank,
                "target_modules": sorted(ends),
            }
        )

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Go through the adapter; all ranks must, if the weights are split over them."""
        settle(self._model)
        for name, weight in self._parameters():
            yield name, whole(weight).detach().to(dtype)

    def layout(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Go through what `tensors` yields, without memory behind it and without other ranks."""
        for name, weight in self._parameters():
            yield name, torch.empty(whole_shape(weight), dtype=dtype, device="meta")

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, pair in self._layers.items():
            for letter, part in zip("AB", pair, strict=True):
                yield f"{PREFIX}{name}.lora_{letter}.weight", part.get_parameter("weight")


def _obstacle(layer: BaseTunerLayer) -> str | None:
    """Tell why vLLM could not compute with the adapter of a layer."""
    base: nn.Module = layer.get_base_layer()
    if not isinstance(base, nn.Linear):
        return f"it is on a layer of the kind {type(base).__name__}"
    return unmergeable(layer)
