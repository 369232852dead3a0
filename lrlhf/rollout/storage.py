"""Stored rollouts: one safetensors file per iteration and rank."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lrlhf.types import ROLLOUT_TENSORS, Media, Rollout, SamplingMask, StoredRollout

FORMAT = "lrlhf-rollout-1"

_NAME = re.compile(r"step_(\d+)\.rank_(\d+)\.safetensors")
_MEDIA = "media."
_MASK = ("sampling_mask.sizes", "sampling_mask.ids")
_OPTIONAL = {
    "kept_mass",
    "weight_version",
    "prompt_lengths",
    "turn_rewards",
    "forks",
    "token_versions",
    "routed_experts",
    *_MASK,
}
_REQUIRED = {*ROLLOUT_TENSORS, "scores", "records"} - _OPTIONAL


class RolloutFile(NamedTuple):
    """Iteration, rank and path of a stored rollout, in sorting order."""

    step: int
    rank: int
    path: Path


def rollout_path(folder: Path, step: int, rank: int) -> Path:
    """Return the file of one iteration and rank."""
    return folder / f"step_{step:06d}.rank_{rank}.safetensors"


def rollout_files(folder: Path) -> list[RolloutFile]:
    """List the stored rollouts of a folder, oldest first; other files are ignored."""
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(
        RolloutFile(int(match[1]), int(match[2]), path) for match, path in matches if match
    )


def save_rollout(
    target: Path | IO[bytes],
    rollout: Rollout,
    scores: Tensor,
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Write a rollout.

    Args:
        target: A path, or a binary file.
        rollout: The rollout; further fields of a subclass are not written.
        scores: `[B]`, NaN where no reward could score.
        records: One per row, of JSON types.

    Raises:
        ValueError: There is not one record and one score per row, or a record is not of JSON types.
    """
    if not len(rollout) == len(scores) == len(records):
        raise ValueError(
            f"a rollout of {len(rollout)} rows came with {len(scores)} scores and "
            f"{len(records)} records: give one of each per row"
        )
    fields = {name: getattr(rollout, name) for name in ROLLOUT_TENSORS} | {"scores": scores}
    tensors = {
        # a copy: tensors that share memory are refused
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in {**fields, **mask_tensors(rollout), **media_tensors(rollout)}.items()
        if tensor is not None
    }
    try:
        lines = json.dumps([dict(record) for record in records], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a record of the rollout is not of JSON types: {error}") from error
    # a tensor of bytes and no metadata: readers refuse headers above 100 MB
    tensors["records"] = _bytes(lines)
    data = save(tensors, metadata={"format": FORMAT, "checksum": _checksum(tensors)})
    if isinstance(target, Path):
        target.write_bytes(data)
    else:
        target.write(data)


def load_rollout(path: Path) -> StoredRollout:
    """Read a rollout that `save_rollout` has written, to the CPU.

    Raises:
        ValueError: The file is missing, damaged, or no stored rollout; names it.
    """
    with _opened(path) as (names, file):
        tensors = {name: file.get_tensor(name) for name in names}
        checksum = file.metadata().get("checksum")
    if checksum != _checksum(tensors):
        raise ValueError(
            f"{path} is no complete rollout: its checksum differs; remove it, or restore it from a "
            "copy"
        )
    records = tuple(json.loads(bytes(tensors.pop("records").numpy())))
    media, mask = media_of_tensors(tensors), mask_of_tensors(tensors)
    scores = tensors.pop("scores")
    rollout = Rollout(**tensors, media=media, sampling_mask=mask)
    return StoredRollout(rollout=rollout, scores=scores, records=records)


def load_group_ids(path: Path) -> Tensor:
    """Read the group of each row, `[B]`, of a file with all tensors.

    Raises:
        ValueError: See `load_rollout`.
    """
    with _opened(path) as (_, file):
        group_ids: Tensor = file.get_tensor("group_ids")
    return group_ids


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Any]]:
    """Open a file, and check its format and the names of its tensors."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            stored = (file.metadata() or {}).get("format")
            if stored != FORMAT:
                raise ValueError(
                    f"{path} is no stored rollout: its format is {stored!r}, not {FORMAT!r}; only "
                    "files that RolloutLog(save_tensors=True) wrote can be read"
                )
            own = {name for name in names if not name.startswith(_MEDIA)}
            missing, unknown = sorted(_REQUIRED - own), sorted(own - _REQUIRED - _OPTIONAL)
            if missing or unknown:
                raise ValueError(
                    f"{path} is no complete rollout: tensors {missing} are missing and {unknown} "
                    "are unknown; remove it, or restore it from a copy"
                )
            yield names, file
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged, or no safetensors file ({error}); remove it, or restore it from a "
            "copy"
        ) from error


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def mask_tensors(rollout: Rollout) -> dict[str, Tensor]:
    """Return the sampling mask as tensors of a file."""
    mask = rollout.sampling_mask
    return {} if mask is None else dict(zip(_MASK, (mask.sizes, mask.ids), strict=True))


def mask_of_tensors(tensors: dict[str, Tensor]) -> SamplingMask | None:
    """Remove what `mask_tensors` added from the tensors of a file, and return the mask."""
    sizes, ids = (tensors.pop(name, None) for name in _MASK)
    return None if sizes is None or ids is None else SamplingMask(sizes=sizes, ids=ids)


def media_tensors(rollout: Rollout) -> dict[str, Tensor]:
    """Return the media of rows as tensors, each once; images themselves are not stored."""
    if rollout.media is None:
        return {}
    entries = [entry for entry in rollout.media if entry is not None]
    pieces = [piece for entry in entries for piece in entry.pieces]
    # parts first: a row of several is made of them
    distinct = list({id(entry): entry for entry in (*pieces, *entries)}.values())
    indices = {id(entry): index for index, entry in enumerate(distinct)}
    rows = [-1 if entry is None else indices[id(entry)] for entry in rollout.media]
    described = [
        {
            "tokens": dict(entry.tokens),
            "names": entry.names,
            "prompt_ids": entry.prompt_ids,
            **({"parts": [indices[id(part)] for part in entry.parts]} if entry.parts else {}),
        }
        for entry in distinct
    ]
    tensors = {
        f"{_MEDIA}{index}.{key}": tensor
        for index, entry in enumerate(distinct)
        for key, tensor in entry.tensors.items()
    }
    about = _bytes(json.dumps(described))
    return {**tensors, f"{_MEDIA}rows": torch.tensor(rows), f"{_MEDIA}about": about}


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def media_of_tensors(tensors: dict[str, Tensor]) -> tuple[Media | None, ...] | None:
    """Remove what `media_tensors` added from the tensors of a file, and return the media."""
    parts = {name: tensors.pop(name) for name in [*tensors] if name.startswith(_MEDIA)}
    if not parts:
        return None
    described = json.loads(bytes(parts.pop(f"{_MEDIA}about").numpy()))
    rows: list[int] = parts.pop(f"{_MEDIA}rows").tolist()
    distinct: list[Media] = []
    for index, about in enumerate(described):
        prefix = f"{_MEDIA}{index}."
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in parts.items()
            if name.startswith(prefix)
        }
        distinct.append(
            Media(
                tensors=own,
                tokens=about["tokens"],
                names=tuple(about["names"]),
                prompt_ids=tuple(about["prompt_ids"]),
                parts=tuple(distinct[part] for part in about.get("parts", ())),
            )
        )
    return tuple(None if row < 0 else distinct[row] for row in rows)
