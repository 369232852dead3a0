"""The methods that a vLLM worker gets through ``worker_extension_cls``."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lrlhf.vllm_worker.fingerprint import Fingerprinted
from lrlhf.vllm_worker.stream import receive


class WeightReceiver:
    """Loads the trainer's weights into a running engine, in one call between two steps.

    vLLM mixes it into its worker class, which has ``device``, ``model_runner``, ``vllm_config``
    and ``reload_weights``.
    """

    device: Any
    model_runner: Any
    vllm_config: Any
    reload_weights: Any

    def lrlhf_describe(self) -> dict[str, Any]:
        """Tell the trainer what it needs to know of this engine."""
        model = self.vllm_config.model_config
        served = model.served_model_name
        return {
            "model": served[0] if isinstance(served, list) else served or model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "workers": int(self.vllm_config.parallel_config.world_size),
            "vllm": str(importlib.import_module("vllm").__version__),
        }

    def lrlhf_last_push(self) -> str:
        """Return the token of the push whose weights the engine has; empty: it had none."""
        return getattr(self, "_lrlhf_push", "")

    def lrlhf_receive(self, host: str, port: str, token: str, timeout: str) -> dict[str, str]:
        """Load weights from a `lrlhf.vllm_worker.stream.Sender`; see `lrlhf_load`."""
        self._lrlhf_push = ""
        arrived = self.lrlhf_load(receive(host, int(port), token, timeout=float(timeout)))
        self._lrlhf_push = token
        return arrived

    def lrlhf_load(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Load named tensors.

        Args:
            tensors: Those of this process may come as `Fingerprinted` already: they are the same
                memory, of which a second fingerprint would say nothing new.

        Returns:
            The fingerprint of every tensor as it arrived, by name; as text, which survives JSON.
        """
        noted = tensors if isinstance(tensors, Fingerprinted) else Fingerprinted(tensors)
        self.reload_weights(weights_iterator=noted)
        seen = dict(noted.seen)
        model = self.model_runner.get_model()
        _restore_normalization(model, self.vllm_config)
        if self.device.type == "cpu":
            _repack(model)
        return seen


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
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.numel() > 0 and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
