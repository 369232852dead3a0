"""What vLLM leaves behind when the weights of a running model are replaced."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn


def repair(model: nn.Module, vllm_config: Any, device: torch.device) -> None:
    """Make a model whole whose weights have been replaced."""
    _restore_normalization(model, vllm_config)
    if device.type == "cpu":
        _repack(model)


def forget_broken_update(model: nn.Module) -> None:
    """Forget what an update that broke off had loaded of a layer.

    vLLM counts the numbers that a layer was given, and takes it for whole too early if those of an
    update before are among them (0.29 to 0.32).
    """
    source = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        info = source.get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()


def _restore_normalization(model: nn.Module, vllm_config: Any) -> None:
    """Give the model back the mean and deviation by which it normalises pixels.

    They come from the processor, and a start without weights overwrites them with random numbers,
    as it does with all that a checkpoint would bring (vLLM 0.32).
    """
    name = "vllm.model_executor.layers.fusion.mm_input_norm"
    try:
        source = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return  # an older version, whose processor normalises
    for module in model.modules():
        if isinstance(module, source.FusedMMInputNorm):
            with importlib.import_module("vllm.config").set_current_vllm_config(vllm_config):
                fresh = source.build_mm_input_norm(vllm_config.model_config)
            for buffer, value in fresh.named_buffers():
                module.get_buffer(buffer).copy_(value)


def _repack(model: nn.Module) -> None:
    """Build the CPU kernels' own copy of weights that a reload left behind.

    vLLM keeps Linear weights packed for its CPU kernels. Reloading packs them anew, except those
    of an output layer that is tied to the embedding, which would go on computing with the old ones
    (vLLM 0.27 to 0.32).
    """
    module: Any
    for module in model.modules():
        # its own: a layer that adapters are added to shows those of the one inside it too
        weight = module._parameters.get("weight")
        if isinstance(weight, Tensor) and weight.numel() > 0 and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
