"""What a step was taken with, and the folder that holds it: files that cannot run code."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor

from lrlhf.guard.anomalies import Anomaly
from lrlhf.rollout.records import plain_json
from lrlhf.run import Collectives
from lrlhf.run.atomic import check_room, naming, place_folder, recover_folder, remove
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.run.seeding import running_step
from lrlhf.types import (
    Experience,
    Media,
    PreferenceBatch,
    PrivilegedRows,
    Rollout,
    SamplingMask,
    SequenceBatch,
    StepBatch,
    TeacherTokens,
    TensorBatch,
    UnpairedRows,
)

_KINDS: dict[str, type[TensorBatch]] = {
    kind.__name__: kind
    for kind in (
        Experience,
        PreferenceBatch,
        PrivilegedRows,
        Rollout,
        SamplingMask,
        SequenceBatch,
        StepBatch,
        TeacherTokens,
        UnpairedRows,
    )
}


class NotADumpError(ValueError):
    """A path leads to no dump, or to a damaged one."""


@dataclass(frozen=True, kw_only=True)
class StepBundle:
    """Inputs of one rank's step: batches, seeds and further values.

    Attributes:
        stage: Which step: iteration, policy, value, joint, reward, supervised, preference, steps or
            unpaired.
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
            values[field.name] = [part and _describe_media(part, shown) for part in value]
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
            "parts": [_describe_media(part, shown) for part in media.parts],
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
            values[name] = tuple(part and _restored_media(part, shown) for part in value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)


def _restored_media(described: Mapping[str, Any], shown: dict[int, Media]) -> Media:
    if id(described) not in shown:
        parts = tuple(_restored_media(part, shown) for part in described.get("parts", ()))
        shown[id(described)] = Media(**{**described, "parts": parts})
    return shown[id(described)]


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"


FORMAT = "lrlhf-dump-4"
ANOMALY_FILE, CONFIG_FILE, RECORDS_FILE = "anomaly.json", "config.yaml", "records.jsonl"
STATE_FILE = "state.pt"

_PACKAGES = ("lrlhf", "torch", "lightning", "transformers")


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A dump that was read.

    Attributes:
        folder: Where.
        step: Its number, see `lrlhf.run.seeding.running_step`.
        anomalies: What was found.
        precision: That the run computed in, as the trainer spells it.
        device: Kind of device that it computed on.
        bundles: What each process's step was taken with.
    """

    folder: Path
    step: int
    anomalies: tuple[Anomaly, ...]
    precision: str
    device: str
    bundles: tuple[StepBundle, ...]


def replay_command(folder: Path) -> str:
    """Return the line that repeats the step of a dump."""
    return f"lrlhf replay {shlex.quote(str(folder))}"


def write_dump(
    module: L.LightningModule, folder: Path, bundle: StepBundle, anomalies: Sequence[Anomaly]
) -> str:
    """Write a dump; all ranks call it, each with its bundle, and it appears when it is whole.

    What is at ``folder``, which all ranks must see, is replaced; the weights are as the step found
    them, the anomalies those of all ranks. Returns why there is no dump; empty: there is.
    """
    trainer, ranks = module.trainer, Collectives(module.trainer)
    first = ranks.rank == 0
    rows = ranks.gather(list(bundle.records))
    state = _state(module)
    fresh = folder.with_name(f".{folder.name}.tmp")

    def prepare() -> None:
        if first:
            recover_folder(folder)
            remove(fresh)
            fresh.mkdir(parents=True)
            # running out of space midway would stop the other ranks
            check_room(fresh, state, "a copy of the weights")

    def finish() -> None:
        if first:
            _write_texts(fresh, folder, module, bundle.stage, anomalies, rows)
            place_folder(fresh, folder)

    for phase in (
        prepare,
        lambda: write_bundle(fresh, ranks.rank, bundle),
        lambda: trainer.strategy.save_checkpoint(state, fresh / STATE_FILE),
        finish,
    ):
        if failure := _agreed_failure(phase, ranks):
            if first:
                shutil.rmtree(fresh, ignore_errors=True)
            return failure
    return ""


def _agreed_failure(phase: Callable[[], None], ranks: Collectives) -> str:
    """Run one phase on all ranks; returns what the first one that failed says of it."""
    failure = ""
    try:
        phase()
    except Exception as error:  # noqa: BLE001  whatever it is, it is told, and training goes on
        failure = f"{type(error).__name__}: {error}"
    return next((failure_of for failure_of in ranks.gather(failure) if failure_of), "")


def _state(module: L.LightningModule) -> dict[str, Any]:
    trainer = module.trainer
    state: dict[str, Any] = {
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "global_step": trainer.global_step,
    }
    module.on_save_checkpoint(state)
    return state


def _write_texts(
    fresh: Path,
    folder: Path,
    module: L.LightningModule,
    stage: str,
    anomalies: Sequence[Anomaly],
    rows: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    trainer = module.trainer
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    savers = [callback for callback in callbacks if isinstance(callback, SaveConfigCallback)]
    config = str(savers[0].parser.dump(savers[0].config, skip_none=False)) if savers else ""
    python = "lrlhf.modules.replay_dump(module, folder), with the module built as for the run"
    about = {
        "format": FORMAT,
        "command": replay_command(folder) if config else python,
        "module": type(module).__name__,
        "stage": stage,
        "step": running_step(trainer),
        "world_size": trainer.world_size,
        "anomalies": [anomaly.plain() for anomaly in anomalies],
        "trainer": {
            "precision": trainer.precision,
            "device": module.device.type,
            "strategy": type(trainer.strategy).__name__,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        },
        "versions": {
            **{name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
    }
    (fresh / ANOMALY_FILE).write_text(json.dumps(about, indent=2) + "\n")
    records = [{"rank": rank, **row} for rank, own in enumerate(rows) for row in own]
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    (fresh / RECORDS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if config:
        (fresh / CONFIG_FILE).write_text(config, encoding="utf-8")


def read_about(folder: Path) -> dict[str, Any]:
    """Read what a dump is about.

    Raises:
        NotADumpError: There is no dump, or it is damaged.
    """
    path = folder / ANOMALY_FILE
    if not path.is_file():
        what = f"it has no {ANOMALY_FILE}" if folder.is_dir() else "there is no such folder"
        raise NotADumpError(
            f"{folder} is no dump: {what}; give a folder like runs/…/dumps/step_000012"
        )
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotADumpError(f"{path} is damaged: it is no JSON ({error})") from error
    format = about.get("format") if isinstance(about, dict) else None
    if format != FORMAT:
        raise NotADumpError(f"{path} is of no dump: its format is {format!r}, not {FORMAT!r}")
    return dict(about)


def read_dump(folder: Path) -> Dump:
    """Read a dump, without its weights.

    Raises:
        NotADumpError: There is none, or it is damaged; names the file.
    """
    about = read_about(folder)
    try:
        return Dump(
            folder=folder,
            step=int(about["step"]),
            anomalies=tuple(Anomaly(**anomaly) for anomaly in about["anomalies"]),
            precision=about["trainer"]["precision"],
            device=about["trainer"]["device"],
            bundles=tuple(read_bundle(folder, rank) for rank in range(int(about["world_size"]))),
        )
    except (KeyError, TypeError) as error:
        raise NotADumpError(f"{folder / ANOMALY_FILE} is damaged: {error!r}") from error


def read_state(folder: Path) -> dict[str, Any]:
    """Read a dump's ``state_dict``, and what the module adds to checkpoints."""
    return read_checkpoint(folder / STATE_FILE)
