"""The policy's weights for engines: under the names of checkpoints, merged, one at a time."""

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
from lrlhf.models.sharding import full_shape, full_tensor, has_split_weights, reshard
from lrlhf.vllm_worker.model_access import PREFIX


class WeightSyncError(RuntimeError):
    """The engine's weights differ from the policy's."""


class PolicyWeights:
    """Iterates over the current weights of a policy.

    Args:
        policy: A model with or without LoRA adapters, quantised or not.

    Raises:
        TypeError: It is no transformers model.
        ValueError: Its output layer is tied to the embedding and only one of them has an adapter.
    """

    def __init__(self, policy: nn.Module) -> None:
        if not isinstance(policy, PreTrainedModel | PeftModel):
            raise TypeError(f"the policy is no transformers model but {type(policy).__name__}")
        self.model = plain_model(policy)
        if is_tied(self.model):
            head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
            embedding = self.model.get_input_embeddings()
            for name, layer in (("output layer", head), ("embedding", embedding)):
                if layer is not None and len(list(layer.children())) > 0:
                    raise ValueError(
                        "the policy's output layer is tied to its embedding, and the "
                        f"{name} has a LoRA adapter or copy of its own, so merged they are tied no "
                        "more: leave it out of policy.lora.target_modules and modules_to_save"
                    )
        self._skeleton = skeleton_of(self.model)
        self.names = CheckpointNames(self.model, self._skeleton.state_dict())

    def tensors(
        self, dtype: torch.dtype | None = None, *, adapters: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under the names of the family's checkpoints.

        If they are sharded, all ranks must iterate over all of them.

        Args:
            dtype: Type that floating-point weights are cast to; None: no cast.
            adapters: Whether LoRA adapters are merged into the weights.
        """
        weights = merged_weights(self.model, tied_once=True, adapters=adapters)
        for name, tensor in self.names.convert(weights):
            floating = dtype is not None and tensor.is_floating_point()
            yield name, tensor.to(dtype) if floating else tensor

    def layout(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the result of `tensors` on the meta device, without other ranks."""
        for name, tensor in self.names.convert(merged_weights(self._skeleton, tied_once=True)):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    @property
    def are_split(self) -> bool:
        """Whether they are sharded over ranks."""
        return has_split_weights(self.model)


def compare_fingerprints(expected: dict[str, str], arrived: dict[str, str]) -> None:
    """Compare fingerprints of the policy's weights with those that an engine received.

    Raises:
        WeightSyncError: They differ; names the first wrong weight.
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
"""Limit of vLLM (0.29 to 0.33)."""


class AdapterWeights:
    """Iterates over the active LoRA adapter of a policy under the names of PEFT's files.

    Args:
        weights: The policy's weights.

    Raises:
        ValueError: The policy is not fixed weights with one plain LoRA adapter on linear layers of
            its decoder; the message names the reason.
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
            base: nn.Module = layer.get_base_layer()
            linear = isinstance(base, nn.Linear)
            other = f"it is on a layer of the kind {type(base).__name__}"
            if reason := unmergeable(layer) if linear else other:
                raise ValueError(f"of the adapter of {name}, {reason}")
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
        self.rank = max(full_shape(weight)[0] for weight in firsts)
        if self.rank > LARGEST_RANK:
            raise ValueError(f"its rank is {self.rank}, and vLLM's limit is {LARGEST_RANK}")
        self._check_other_weights()

    def _check_other_weights(self) -> None:
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
        """Contents of PEFT's ``adapter_config.json``."""
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
        """Yield the adapter's weights; all ranks must iterate, if they are sharded."""
        reshard(self._model)
        for name, weight in self._parameters():
            yield name, full_tensor(weight).detach().to(dtype)

    def layout(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the result of `tensors` on the meta device, without other ranks."""
        for name, weight in self._parameters():
            yield name, torch.empty(full_shape(weight), dtype=dtype, device="meta")

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, pair in self._layers.items():
            for letter, part in zip("AB", pair, strict=True):
                yield f"{PREFIX}{name}.lora_{letter}.weight", part.get_parameter("weight")
