"""The token guard of the server, received adapters, and repairs of reloaded models."""

from __future__ import annotations

import importlib
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TOKEN_VARIABLE = "VLLM_API_KEY"
_OPEN = ("/health", "/ping")


class TokenGuard:
    """ASGI middleware that requires the token on every route but the health check.

    vLLM's own check covers the OpenAI routes only, not those that change weights.

    Raises:
        RuntimeError: The environment has no token.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"set {TOKEN_VARIABLE} to the token that the trainer will show")
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        # the third type, lifespan, is internal
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN:
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(shown, self._expected):
                if scope["type"] == "websocket":
                    reason = "a token is needed"
                    await send({"type": "websocket.close", "code": 1008, "reason": reason})
                else:
                    await send({"type": "http.response.start", "status": 401, "headers": []})
                    await send({"type": "http.response.body", "body": b"a token is needed\n"})
                return
        await self._app(scope, receive, send)


PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors."""


class ReceivedAdapter:
    """Stores the tensors of an adapter that arrive before the weights of a model."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def split(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]] | None:
        """Store the tensors of an adapter, and return the others; None: there are none."""

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if name.startswith(PREFIX):
                    # a copy, as its buffer is used again
                    self._tensors[name] = tensor.to("cpu", copy=True)
                else:
                    yield name, tensor

        remaining = others()
        first = next(remaining, None)
        return None if first is None else chain([first], remaining)

    def write(self, token: str, settings: str) -> Path:
        """Write the adapter into a folder in PEFT's format, and drop it.

        Workers of one machine may write the same one at the same time.
        """
        folder = folder_of(token)
        folder.mkdir(mode=0o700, exist_ok=True)
        save: Any = importlib.import_module("safetensors.torch").save
        for name, data in (
            ("adapter_config.json", settings.encode()),
            ("adapter_model.safetensors", save(self._tensors)),
        ):
            own = folder / f"{name}.{os.getpid()}"
            own.write_bytes(data)
            own.replace(folder / name)
        self._tensors = {}
        return folder


def folder_of(token: str) -> Path:
    """Return the folder of an adapter.

    Raises:
        ValueError: The token is not alphanumeric, so the path could leave the temporary folder.
    """
    if not token.isalnum():
        raise ValueError("the token of an adapter has other characters than letters and digits")
    return Path(tempfile.gettempdir()) / f"lrlhf-adapter-{token}"


def repair(model: nn.Module, vllm_config: Any, device: torch.device) -> None:
    """Restore the state of a model that vLLM does not restore when weights are replaced."""
    _restore_normalization(model, vllm_config)
    if device.type == "cpu":
        _repack(model)


def forget_broken_update(model: nn.Module) -> None:
    """Clear the state of an aborted update.

    vLLM counts the loaded numbers of a layer, and completes it too early if those of an aborted
    update are among them (0.29 to 0.32).
    """
    source = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
    for layer in model.modules():
        info = source.get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()


def _restore_normalization(model: nn.Module, vllm_config: Any) -> None:
    """Restore mean and deviation of the pixel normalisation.

    They come from the processor, and a start without weights overwrites them with random numbers,
    like all weights of a checkpoint (vLLM 0.32).
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
    """Pack the weights for CPU kernels that a reload does not pack.

    vLLM packs Linear weights for its CPU kernels. A reload packs them again, except those of an
    output layer that is tied to the embedding, which would compute with the old ones (vLLM 0.27 to
    0.32).
    """
    module: Any
    for module in model.modules():
        # not `module.weight`: a layer with adapters returns those of its base layer
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if isinstance(weight, Tensor) and weight.numel() > 0 and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
