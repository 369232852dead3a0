"""What a step was taken with: in memory, and as two files of each process.

``rank_<r>.safetensors`` holds the tensors, ``rank_<r>.json`` all else. Neither can run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from lrlhf.rollout.records import plain_json
from lrlhf.types import Experience, Media, PreferenceBatch, Rollout, SequenceBatch, TensorBatch

_KINDS: dict[str, type[TensorBatch]] = {
    kind.__name__: kind for kind in (Experience, PreferenceBatch, Rollout, SequenceBatch)
}


class NotADumpError(ValueError):
    """A path leads to no dump, or to a damaged one."""


@dataclass(frozen=True, kw_only=True)
class StepBundle:
    """What one rank's step was taken with.

    Attributes:
        stage: Which step: iteration, policy, value, joint or reward.
        batches: By name.
        seeds: Arguments of `seed_everything_for` that the step, or each of its micro-batches, was
            seeded with.
        context: Further tensors, and values of JSON types.
        records: The rows in JSON types, for people; not read again.
    """

    stage: str
    batches: Mapping[str, TensorBatch]
    seeds: Sequence[tuple[int, ...]]
    context: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]] = ()


def write_bundle(folder: Path, rank: int, bundle: StepBundle) -> None:
    """Write a rank's two files.

    Images and videos themselves are left out: a model computes with their tensors.

    Raises:
        OSError: They cannot be written.
    """
    writer = _Writer()
    described = {
        "stage": bundle.stage,
        "seeds": list(bundle.seeds),
        "context": writer.plain(bundle.context, "context"),
        "batches": {
            name: writer.batch(batch, f"batches.{name}") for name, batch in bundle.batches.items()
        },
        "media": writer.media(),
    }
    tensors, rest = _paths(folder, rank)
    # in memory first: what a full disk does to safetensors is no error of the system's own
    tensors.write_bytes(save(writer.tensors))
    rest.write_text(json.dumps(described), encoding="utf-8")


def read_bundle(folder: Path, rank: int) -> StepBundle:
    """Read what `write_bundle` wrote; ``records`` stay empty.

    Raises:
        NotADumpError: A file is missing or damaged; names it.
    """
    tensors, rest = _paths(folder, rank)
    for path in (tensors, rest):
        if not path.is_file():
            raise NotADumpError(f"{path} is missing: the dump is not whole")
    path = rest
    try:
        described = json.loads(rest.read_text(encoding="utf-8"))
        path = tensors
        reader = _Reader(load_file(tensors), described["media"])
        return StepBundle(
            stage=described["stage"],
            seeds=[tuple(seed) for seed in described["seeds"]],
            context=described["context"] | reader.below("context"),
            batches={
                name: reader.batch(batch, f"batches.{name}")
                for name, batch in described["batches"].items()
            },
        )
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise NotADumpError(f"{path} cannot be read: {reason}") from error


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank_{rank}.safetensors", folder / f"rank_{rank}.json"


class _Writer:
    """Takes the tensors out of what is described in JSON; their names say where they were."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._media: dict[int, tuple[int, Media]] = {}

    def plain(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return what is no tensor."""
        found = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        for name, value in found.items():
            # a copy: safetensors refuses tensors that share memory
            copied = value.detach().to("cpu", copy=True).contiguous()
            self.tensors[f"{where}.{name}"] = copied
        return {name: value for name, value in values.items() if name not in found}

    def batch(self, batch: TensorBatch, where: str) -> dict[str, Any]:
        """Describe a batch; rows that show the same share it in the file too."""
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        nested = {k: v for k, v in values.items() if isinstance(v, TensorBatch)}
        described: dict[str, Any] = {
            "kind": type(batch).__name__,
            "batches": {name: self.batch(one, f"{where}.{name}") for name, one in nested.items()},
        }
        rest = {name: value for name, value in values.items() if name not in nested}
        if (media := rest.pop("media", None)) is not None:
            described["media"] = [None if entry is None else self._place(entry) for entry in media]
        return described | {"values": plain_json(self.plain(rest, where))}

    def _place(self, entry: Media) -> int:
        return self._media.setdefault(id(entry), (len(self._media), entry))[0]

    def media(self) -> list[dict[str, Any]]:
        """Describe what rows show, each once."""
        for place, entry in self._media.values():
            self.plain(entry.tensors, f"media.{place}")
        return [
            {
                "tokens": dict(entry.tokens),
                "prompt_ids": list(entry.prompt_ids),
                "names": list(entry.names),
            }
            for _, entry in self._media.values()
        ]


class _Reader:
    """Puts tensors back where `_Writer` took them from."""

    def __init__(self, tensors: Mapping[str, Tensor], media: Sequence[Mapping[str, Any]]) -> None:
        self._tensors = tensors
        self._media = [
            Media(
                tensors=self.below(f"media.{place}"),
                tokens=entry["tokens"],
                prompt_ids=tuple(entry["prompt_ids"]),
                names=tuple(entry["names"]),
            )
            for place, entry in enumerate(media)
        ]

    def below(self, where: str) -> dict[str, Tensor]:
        """Return the tensors directly inside a place, by name."""
        prefix = f"{where}."
        found = {
            k.removeprefix(prefix): v for k, v in self._tensors.items() if k.startswith(prefix)
        }
        return {name: value for name, value in found.items() if "." not in name}

    def batch(self, described: Mapping[str, Any], where: str) -> TensorBatch:
        """Return the batch of a description."""
        kind = _KINDS.get(described["kind"])
        if kind is None:
            known = ", ".join(_KINDS)
            raise ValueError(f"it holds a batch of kind {described['kind']!r}; known are {known}")
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in described["values"].items()
        }
        if "media" in described:
            rows = described["media"]
            values["media"] = tuple(None if row is None else self._media[row] for row in rows)
        for name, nested in described["batches"].items():
            values[name] = self.batch(nested, f"{where}.{name}")
        return kind(**values, **self.below(where))
