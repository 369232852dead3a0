"""Inputs of recomputed blocks may wait for the backward pass in main memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.models import CausalLM, LoRA


def gradients(spec: CausalLM) -> dict[str, Tensor]:
    model = spec.load().train()
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids).logits.float().logsumexp(-1).sum().backward()
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.parametrize("lora", [None, LoRA(r=2)])
def test_gradients_are_the_same_and_only_hidden_states_are_copied(
    lora: LoRA | None, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []

    class Copies(torch.autograd.graph.saved_tensors_hooks):
        """Stands in for ``save_on_cpu``, which pins memory for a device."""

        def __init__(self, **_: object) -> None:
            def pack(tensor: Tensor) -> Tensor:
                copied.append(tuple(tensor.shape))
                return tensor.detach().clone()

            super().__init__(pack, Tensor.clone)

    torch.manual_seed(1)
    plain = gradients(CausalLM(source=model_folder, lora=lora))
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Copies)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    torch.manual_seed(1)
    spec = CausalLM(
        source=model_folder, lora=lora, gradient_checkpointing=True, activation_offload=True
    )
    offloaded = gradients(spec)

    config: Any = spec.load().config
    assert set(copied) == {(2, 12, config.hidden_size)}
    assert len(copied) == config.num_hidden_layers
    assert offloaded.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(offloaded[name], gradient)


def test_on_a_cpu_nothing_is_copied(model_folder: str) -> None:
    options: dict[str, Any] = {"source": model_folder, "gradient_checkpointing": True}
    plain = gradients(CausalLM(**options))
    same = gradients(CausalLM(**options, activation_offload=True))
    for name, gradient in plain.items():
        torch.testing.assert_close(same[name], gradient, rtol=0, atol=0)


def test_without_recomputing_there_is_nothing_to_copy() -> None:
    with pytest.raises(ValueError, match="set gradient_checkpointing: true too"):
        CausalLM(source="any", activation_offload=True, gradient_checkpointing=False)
