"""The policy's weights as an engine wants them: a checkpoint's names, merged, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import CheckpointNames, is_tied, merged_weights, plain_model, skeleton_of
from lrlhf.models.sharding import has_split_weights


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
