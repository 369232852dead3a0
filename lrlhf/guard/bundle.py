"""What a step was taken with: in memory, and as a file of each process that cannot run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrlhf.rollout.records import plain_json
from lrlhf.run.atomic import naming
from lrlhf.types import (
    Experience,
    Media,
    PreferenceBatch,
    Rollout,
    SequenceBatch,
    StepBatch,
    TeacherTokens,
    TensorBatch,
)

_KINDS: dict[str, type[TensorBatch]] = {
    kind.__name__: kind
    for kind in (Experience, PreferenceBatch, Rollout, SequenceBatch, StepBatch, TeacherTokens)
}


class NotADumpError(ValueError):
    """A path leads to no dump, or to a damaged one."""


@dataclass(frozen=True, kw_only=True)
class StepBundle:
    """Inputs of one rank's step: batches, seeds and further values.

    Attributes:
        stage: Which step: iteration, policy, value, joint, reward, supervised, preference or
            steps.
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
    """Write ``rank_<rank>.pt``.

    Images and videos themselves are left out: a model computes with their tensors.

    Raises:
        OSError: It cannot be written.
    """
    shown: dict[int, dict[str, Any]] = {}
    described = {
        "stage": bundle.stage,
        "seeds": list(bundle.seeds),
        "context": {
            name: _copied(value) if isinstance(value, Tensor) else _plain(value)
            for name, value in bundle.context.items()
        },
        "batches": {name: _describe(batch, shown) for name, batch in bundle.batches.items()},
    }
    path = _path(folder, rank)
    with naming(path), path.open("wb") as handle:
        torch.save(described, handle)


def _describe(batch: TensorBatch, shown: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Describe a batch; rows that show the same share its description in ``shown``."""
    values: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, TensorBatch):
            values[field.name] = _describe(value, shown)
        elif isinstance(value, Tensor):
            values[field.name] = _copied(value)
        elif isinstance(value, Mapping):
            values[field.name] = {name: _copied(column) for name, column in value.items()}
        elif field.name == "media" and value is not None:
            values[field.name] = [one and _describe_media(one, shown) for one in value]
        else:
            values[field.name] = _plain(plain_json(value))
    return {"kind": type(batch).__name__, "values": values}


def _describe_media(media: Media, shown: dict[int, dict[str, Any]]) -> dict[str, Any]:
    if id(media) not in shown:
        shown[id(media)] = {
            "tensors": {name: _copied(tensor) for name, tensor in media.tensors.items()},
            "tokens": dict(media.tokens),
            "prompt_ids": tuple(media.prompt_ids),
            "names": tuple(media.names),
        }
    return shown[id(media)]


def _plain(value: Any) -> Any:
    # numbers of NumPy become Python's, which reading knows
    return json.loads(json.dumps(value))


def _copied(value: Tensor) -> Tensor:
    # of a view the whole memory would be written
    return value.detach().to("cpu", copy=True).contiguous()


def read_bundle(folder: Path, rank: int) -> StepBundle:
    """Read what `write_bundle` wrote; ``records`` stay empty.

    Raises:
        NotADumpError: The file is missing or damaged; names it.
    """
    path = _path(folder, rank)
    if not path.is_file():
        raise NotADumpError(f"{path} is missing: the dump is not whole")
    try:
        described = torch.load(path, map_location="cpu", weights_only=True)
        shown: dict[int, Media] = {}
        return StepBundle(
            stage=described["stage"],
            seeds=[tuple(seed) for seed in described["seeds"]],
            context=described["context"],
            batches={name: _restored(one, shown) for name, one in described["batches"].items()},
        )
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise NotADumpError(f"{path} cannot be read: {reason}") from error


def _restored(described: Mapping[str, Any], shown: dict[int, Media]) -> TensorBatch:
    """Return the batch of a description; rows that showed the same share it again."""
    kind = _KINDS.get(described["kind"])
    if kind is None:
        known = ", ".join(_KINDS)
        raise ValueError(f"it holds a batch of kind {described['kind']!r}; known are {known}")
    values = dict(described["values"])
    for name, value in values.items():
        if isinstance(value, dict) and "kind" in value:
            values[name] = _restored(value, shown)
        elif name == "media" and value is not None:
            values[name] = tuple(one and shown.setdefault(id(one), Media(**one)) for one in value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"
