"""Batches as plain dictionaries, which ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from lrlhf.rollout.records import plain_json
from lrlhf.types import Experience, Media, PreferenceBatch, SequenceBatch, TensorBatch

_KINDS: dict[str, type[TensorBatch]] = {
    kind.__name__: kind for kind in (Experience, PreferenceBatch, SequenceBatch)
}


def pack(batch: TensorBatch) -> dict[str, Any]:
    """Turn a batch into dictionaries, lists, numbers and tensors on the CPU.

    Images and videos themselves are left out: a model computes with their tensors.
    """
    return {
        "kind": type(batch).__name__,
        "fields": {
            field.name: _packed(field.name, getattr(batch, field.name)) for field in fields(batch)
        },
    }


def unpack(stored: Mapping[str, Any]) -> TensorBatch:
    """Restore what `pack` returned.

    Raises:
        ValueError: It is no batch of a known kind.
    """
    kind = _KINDS.get(stored.get("kind", ""))
    if kind is None:
        raise ValueError(
            f"it holds a batch of kind {stored.get('kind')!r}; known are {', '.join(_KINDS)}"
        )
    return kind(**{name: _unpacked(name, value) for name, value in stored["fields"].items()})


def _packed(name: str, value: Any) -> Any:
    if isinstance(value, TensorBatch):
        return pack(value)
    if isinstance(value, Tensor):
        # a copy: a view would be written with all of what it is a view of
        return value.detach().to("cpu", copy=True).contiguous()
    if name == "media" and value is not None:
        return _packed_media(value)
    return plain_json(value)


def _unpacked(name: str, value: Any) -> Any:
    if name == "media" and value is not None:
        return _unpacked_media(value)
    if isinstance(value, dict) and "kind" in value:
        return unpack(value)
    return tuple(value) if isinstance(value, list) else value


def _packed_media(media: tuple[Media | None, ...]) -> dict[str, Any]:
    """Rows that show the same share it in the file too."""
    different = list({id(entry): entry for entry in media if entry is not None}.values())
    places = {id(entry): index for index, entry in enumerate(different)}
    return {
        "rows": [-1 if entry is None else places[id(entry)] for entry in media],
        "entries": [
            {
                "tensors": {name: _packed(name, value) for name, value in entry.tensors.items()},
                "tokens": dict(entry.tokens),
                "prompt_ids": list(entry.prompt_ids),
                "names": list(entry.names),
            }
            for entry in different
        ],
    }


def _unpacked_media(stored: Mapping[str, Any]) -> tuple[Media | None, ...]:
    entries = [
        Media(
            tensors=entry["tensors"],
            tokens=entry["tokens"],
            prompt_ids=tuple(entry["prompt_ids"]),
            names=tuple(entry["names"]),
        )
        for entry in stored["entries"]
    ]
    return tuple(None if row < 0 else entries[row] for row in stored["rows"])
