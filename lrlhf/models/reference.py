"""The fixed policy that training is held close to."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Self

import torch
from jaxtyping import Float
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models.loading.deferred_weights import is_deferred
from lrlhf.models.loading.pretrained import CausalLM
from lrlhf.models.media_inputs import cached_vision_features
from lrlhf.models.modes import evaluating
from lrlhf.models.sharding import (
    full_shape,
    has_split_weights,
    load_state,
    own_part,
    part_of,
    reshard,
    state_of,
)
from lrlhf.models.token_logprobs import sequence_logprobs
from lrlhf.types import SequenceBatch


class ReferencePolicy:
    """The reference model: log-probabilities of a policy that gets no gradient.

    It is deliberately no ``nn.Module``: as an attribute of one it would be trained, sharded and
    saved with it.

    Args:
        model: What its passes go through; frozen.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        self.model = model.eval().requires_grad_(False)
        self._moved = False

    @torch.no_grad()
    def logprobs(
        self, batch: SequenceBatch, *, temperature: float = 1.0, chunk_size: int = 1024
    ) -> Float[Tensor, "B T"]:
        """Compute what :func:`lrlhf.models.sequence_logprobs` does, without gradient."""
        with self.as_reference():
            return sequence_logprobs(
                self.model, batch, temperature=temperature, chunk_size=chunk_size
            )

    def as_reference(self) -> AbstractContextManager[object]:
        """Have the model compute as the reference does."""
        return evaluating(self.model)

    @torch.no_grad()
    def mix(self, policy: PreTrainedModel | PeftModel, alpha: float) -> None:
        """Move the reference towards the policy: ``α·policy + (1 - α)·reference`` (TR-DPO)."""
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"The share of the policy in the reference is {alpha}, not in [0, 1].")
        reshard(policy)
        reshard(self.model)
        policy_weights = dict(policy.named_parameters())
        reference_weights = dict(self.model.named_parameters())
        different = sorted(policy_weights.keys() ^ reference_weights.keys())
        different += [
            name
            for name in reference_weights.keys() & policy_weights
            if full_shape(reference_weights[name]) != full_shape(policy_weights[name])
        ]
        if different:
            raise ValueError(
                "Only a reference with the policy's own architecture can follow it; these weights "
                f"differ: {', '.join(different[:5])}."
            )
        for name, weight in reference_weights.items():
            part = own_part(weight)
            part.lerp_(own_part(policy_weights[name]).to(part), alpha)
        self._moved = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs: the weights if ``mix`` ever changed them, else nothing.

        A reference that never moved is rebuilt from its source when a run resumes.
        """
        return state_of(self.model) if self._moved else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state_dict`` returned; an empty state changes nothing."""
        if state:
            load_state(self.model, state)
            self._moved = True

    def split(self, shard: Callable[[nn.Module], None]) -> None:
        """Split a model of its own over the ranks, with what splits a model in place."""
        shard(self.model)

    def reshard(self, *, offload: bool) -> None:
        """Free what passes over it have gathered, and with ``offload`` its place on the device."""
        reshard(self.model)
        if offload:
            self.to("cpu")

    def to(self, device: torch.device | str) -> Self:
        """Move to ``device``; what is split lies where the strategy has put it."""
        if not has_split_weights(self.model):
            nn.Module.to(self.model, device)
        return self


def frozen_reference(
    model: PreTrainedModel | PeftModel, spec: CausalLM | None = None
) -> ReferencePolicy:
    """Build the reference of a policy, before the policy's first update or restored checkpoint.

    Args:
        model: The policy as it starts.
        spec: Another model as the reference, with the policy's tokenizer. None: the policy as it
            is now, as a frozen copy (where its weights are still to be read, the copy reads the
            same again), or with LoRA the policy itself, asked as it was: with its
            adapters switched off where they are new, which costs no memory, or with a copy of
            those that have learnt something before.
    """
    if spec is not None:
        return ReferencePolicy(spec.load(trainable=False))
    if isinstance(model, PeftModel):
        return WithFirstAdapters(model)
    duplicate = copy.deepcopy(model)
    duplicate.gradient_checkpointing_disable()
    return ReferencePolicy(duplicate)


class WithFirstAdapters(ReferencePolicy):
    """The policy itself, with the adapters that it started with while it is asked."""

    model: PeftModel

    def __init__(self, policy: PeftModel) -> None:
        self.model = policy
        self._first: dict[str, Tensor] | None = None
        """This rank's parts of the weights that learn, as they were; None: they did nothing."""
        if not _adapters_do_nothing(policy):
            self._first = {
                name: weight.detach().clone()
                for name, weight in policy.named_parameters()
                if weight.requires_grad
            }

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        first = self._first
        was = adapters_disabled(self.model) if first is None else replaced(self.model, first)
        # what is seen with the policy's adapters is not what the reference sees
        with cached_vision_features(), was, evaluating(self.model):
            yield

    def mix(self, policy: PreTrainedModel | PeftModel, alpha: float) -> None:
        raise ValueError(
            "With lora the reference stays as the policy started and cannot follow the policy. "
            "Train every weight (drop lora), or switch the syncing of the reference off."
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise ValueError(
                "The checkpoint holds a reference that followed a policy trained without lora; "
                "resume it without lora."
            )

    def split(self, shard: Callable[[nn.Module], None]) -> None:
        """Leave the model to the policy, whose it is, and keep what belongs to this rank."""
        if self._first is not None:
            weights = dict(self.model.named_parameters())
            self._first = {
                name: part_of(weights[name], full).clone() for name, full in self._first.items()
            }

    def reshard(self, *, offload: bool) -> None:
        if offload:
            self.to("cpu")

    def to(self, device: torch.device | str) -> Self:
        if self._first is not None:
            self._first = {name: part.to(device) for name, part in self._first.items()}
        return self


def _adapters_do_nothing(model: PeftModel) -> bool:
    """Tell whether a model computes the same with its adapters switched off.

    That is known of LoRA only, which starts from a product with zeros, and of copies of modules;
    DoRA scales what it adds to as well.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            second = (*layer.lora_B.parameters(), *layer.lora_embedding_B.parameters())
            if layer.lora_magnitude_vector or any(bool(weight.any()) for weight in second):
                return False
        elif isinstance(layer, ModulesToSaveWrapper):
            if is_deferred(layer):  # both are read from one place
                continue
            first = dict(layer.original_module.named_parameters())
            for copied in layer.modules_to_save.values():
                if any(not torch.equal(w, first[name]) for name, w in copied.named_parameters()):
                    return False
        elif isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            return False
    return True


@contextlib.contextmanager
@torch.no_grad()
def replaced(model: nn.Module, parts: Mapping[str, Tensor]) -> Iterator[None]:
    """Have other values in this rank's parts of some weights, and put its own back at the end."""
    reshard(model)
    weights = {name: w for name, w in model.named_parameters() if name in parts}
    own = {name: own_part(weight).clone() for name, weight in weights.items()}

    def write(values: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            # under `data`, a pending backward pass does not take them for changed
            own_part(weight).data.copy_(values[name])

    try:
        write(parts)
        yield
    finally:
        reshard(model)
        write(own)


@contextlib.contextmanager
def adapters_disabled(model: PeftModel) -> Iterator[None]:
    """Switch the adapters off and on again; PEFT itself leaves all of their weights trainable."""
    trainable = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        model.base_model.disable_adapter_layers()
        yield
    finally:
        model.base_model.enable_adapter_layers()
        for weight, was_trainable in trainable:
            weight.requires_grad_(was_trainable)
