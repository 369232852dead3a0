"""A LoRA adapter on its way into vLLM, which loads adapters from files only."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

PREFIX = "base_model.model."
"""What the names of an adapter's tensors begin with, and those of no other weights."""


class ReceivedAdapter:
    """Keeps the tensors of an adapter that arrive before the weights of a model."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def apart(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]] | None:
        """Keep what is an adapter's, and return the rest; None: there is no more."""
        rest = self._rest(tensors)
        first = next(rest, None)
        return None if first is None else chain([first], rest)

    def _rest(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.startswith(PREFIX):
                # a copy: the buffer that it lies in is used again
                self._tensors[name] = tensor.to("cpu", copy=True)
            else:
                yield name, tensor

    def write(self, token: str, settings: str) -> Path:
        """Write the adapter into a folder as PEFT would, and forget it.

        Workers of one machine may write the same one at the same time.

        Args:
            token: Names the folder.
            settings: What ``adapter_config.json`` says.
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
    """Return where an adapter is written for vLLM to read, which removes nothing of it.

    Raises:
        ValueError: The token could lead elsewhere.
    """
    if not token.isalnum():
        raise ValueError("the token of an adapter has other characters than letters and digits")
    return Path(tempfile.gettempdir()) / f"lrlhf-adapter-{token}"
