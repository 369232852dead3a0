"""Methods of vLLM workers, through ``worker_extension_cls``."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from typing import Any

import torch

from lrlhf.vllm_worker.fingerprint import Fingerprinted, as_text
from lrlhf.vllm_worker.model_access import ReceivedAdapter, folder_of, repair

TRANSFER_ENGINES = {
    "lrlhf_gloo": "GlooEngine",
    "lrlhf_nccl": "NCCLEngine",
    "lrlhf_ipc": "IPCEngine",
}
"""Classes of the backends of vLLM's weight transfer."""

LORA_UPDATES = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that allows a server to load adapters."""


def register() -> None:
    """Register the engines that receive weights with vLLM."""
    factory = importlib.import_module("vllm.distributed.weight_transfer")
    for name, engine in TRANSFER_ENGINES.items():
        factory.WeightTransferEngineFactory.register_engine(
            name, "lrlhf.vllm_worker.transfer_engines", engine
        )


if "vllm" in sys.modules:  # in a worker, before vLLM creates an engine
    register()


class WeightReceiver:
    """Describes a worker to the trainer, and loads weights in one process.

    A mixin of vLLM's worker class, which has ``device``, ``model_runner``, ``vllm_config``,
    ``weight_transfer_engine`` and ``reload_weights``.
    """

    device: Any
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    reload_weights: Any
    _weight_update_active: bool
    _lrlhf_adapter: ReceivedAdapter

    def lrlhf_describe(self) -> dict[str, Any]:
        """Return the settings of this engine."""
        model = self.vllm_config.model_config
        served = model.served_model_name
        transfer = self.vllm_config.weight_transfer_config
        lora = self.vllm_config.lora_config
        # inside the training process no permission is needed
        takes_adapters = transfer is None or os.environ.get(LORA_UPDATES) in ("1", "true")
        return {
            "model": served[0] if isinstance(served, list) else served or model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "workers": int(self.vllm_config.parallel_config.world_size),
            "transfer": None if transfer is None else str(transfer.backend),
            "max_lora_rank": int(lora.max_lora_rank) if lora and takes_adapters else 0,
            "vllm": str(importlib.import_module("vllm").__version__),
        }

    def lrlhf_await_trainer(self) -> str | None:
        """Reset an unfinished update, and return the worker's GPU; None: CPU."""
        self._weight_update_active = False
        if self.device.type != "cuda":
            return None
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def lrlhf_arrived(self) -> dict[str, str]:
        """Return the fingerprints of the last weight transfer by name."""
        arrived: dict[str, str] = self.weight_transfer_engine.arrived()
        return arrived

    def lrlhf_load(self, tensors: Fingerprinted) -> dict[str, str]:
        """Load tensors of this process, and store those of an adapter.

        Returns:
            The fingerprint of every tensor by name, as text.
        """
        self._lrlhf_adapter = ReceivedAdapter()
        weights = self._lrlhf_adapter.split(tensors)
        if weights is not None:
            self.reload_weights(weights_iterator=weights)
        arrived = as_text(tensors.seen)
        if weights is not None:
            repair(self.model_runner.get_model(), self.vllm_config, self.device)
        return arrived

    def lrlhf_write_adapter(self, token: str, settings: str) -> str:
        """Write the last adapter to a folder for vLLM, and return its path."""
        engine = getattr(self, "weight_transfer_engine", None)
        received = self._lrlhf_adapter if engine is None else engine.adapter
        return str(received.write(token, settings))

    def lrlhf_remove_adapter(self, token: str) -> None:
        """Remove the folder of `lrlhf_write_adapter`."""
        shutil.rmtree(folder_of(token), ignore_errors=True)
