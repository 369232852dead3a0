"""The methods that a vLLM worker gets through ``worker_extension_cls``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lrlhf.vllm_worker.fingerprint import Fingerprinted, as_text
from lrlhf.vllm_worker.model_repair import repair

TRANSFER_ENGINES = {
    "lrlhf_gloo": "GlooEngine",
    "lrlhf_nccl": "NCCLEngine",
    "lrlhf_ipc": "IPCEngine",
}
"""Backends of vLLM's weight transfer, and the classes behind them."""


def register() -> None:
    """Let vLLM know of the engines that receive weights."""
    factory = importlib.import_module("vllm.distributed.weight_transfer")
    for name, engine in TRANSFER_ENGINES.items():
        factory.WeightTransferEngineFactory.register_engine(
            name, "lrlhf.vllm_worker.transfer_engines", engine
        )


if "vllm" in sys.modules:  # which imports this in its workers, before it looks for an engine
    register()


class WeightReceiver:
    """Tells of a worker what the trainer has to know, and loads weights inside one process.

    vLLM mixes it into its worker class, which has ``device``, ``model_runner``, ``vllm_config``,
    ``weight_transfer_engine`` and ``reload_weights``.
    """

    device: Any
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    reload_weights: Any

    def lrlhf_describe(self) -> dict[str, Any]:
        """Tell the trainer what it needs to know of this engine."""
        model = self.vllm_config.model_config
        served = model.served_model_name
        transfer = self.vllm_config.weight_transfer_config
        return {
            "model": served[0] if isinstance(served, list) else served or model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "workers": int(self.vllm_config.parallel_config.world_size),
            "transfer": None if transfer is None else str(transfer.backend),
            "vllm": str(importlib.import_module("vllm").__version__),
        }

    def lrlhf_arrived(self) -> dict[str, str]:
        """Return the fingerprints of what the last weight transfer brought, by name."""
        arrived: dict[str, str] = self.weight_transfer_engine.arrived()
        return arrived

    def lrlhf_load(self, tensors: Fingerprinted) -> dict[str, str]:
        """Load tensors of this process, of which the fingerprints are taken on the way.

        Returns:
            The fingerprint of every tensor as it arrived, by name; as text.
        """
        self.reload_weights(weights_iterator=tensors)
        arrived = as_text(tensors.seen)
        repair(self.model_runner.get_model(), self.vllm_config, self.device)
        return arrived
