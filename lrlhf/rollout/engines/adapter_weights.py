"""The policy's LoRA adapter, for engines that compute with adapters themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from lrlhf.models import unmergeable
from lrlhf.models.sharding import settle, whole, whole_shape
from lrlhf.rollout.engines.policy_weights import PolicyWeights
from lrlhf.vllm_worker.adapter import PREFIX

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
