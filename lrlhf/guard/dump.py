"""All that is needed to repeat a step that was left out, in one folder.

A dump holds ``anomaly.json`` (what, where, versions), ``records.jsonl`` (the rows, readable),
``rank_<r>.pt`` (each process's batch and random state), ``state.pt`` (weights, optimizers and the
module's own state) and, where ``lrlhf fit`` made the run, its ``config.yaml``.
"""

from __future__ import annotations

import io
import json
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor

from lrlhf.guard.anomalies import Anomaly
from lrlhf.guard.batch_files import pack, unpack
from lrlhf.run import Collectives
from lrlhf.run.atomic import open_folder, place_folder, recover_folder
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.types import TensorBatch

FORMAT = "lrlhf-dump-1"
ANOMALY_FILE, CONFIG_FILE, RECORDS_FILE = "anomaly.json", "config.yaml", "records.jsonl"
STATE_FILE, README_FILE = "state.pt", "README.md"

_PACKAGES = ("lrlhf", "torch", "lightning", "transformers")


class NotADumpError(ValueError):
    """A path leads to no dump, or to a damaged one."""


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What one rank's step was taken with.

    Attributes:
        stage: Which step: iteration, policy, value, joint or reward.
        batches: By name.
        random: State of the random number generators before the step, see `random_state`; of
            every micro-batch where each is seeded by itself.
        extra: Further plain values and tensors.
        records: The rows in JSON types; not read again.
    """

    stage: str
    batches: Mapping[str, TensorBatch]
    random: Sequence[Mapping[str, Any]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A dump that was read.

    Attributes:
        folder: Where.
        step: Steps that the run had finished.
        world_size: Processes of the run.
        anomalies: What was found.
        trainer: Options of the trainer that a step depends on.
        ranks: What each process's step was taken with; ``records`` stay empty.
    """

    folder: Path
    step: int
    world_size: int
    anomalies: tuple[Anomaly, ...]
    trainer: Mapping[str, Any]
    ranks: tuple[StepInputs, ...]


def dump_path(parent: Path, step: int) -> Path:
    """Return the folder of the dump of one step."""
    return parent / f"step_{step:06d}"


def replay_command(folder: Path) -> str:
    """Return the line that repeats the step of a dump."""
    return f"lrlhf replay {shlex.quote(str(folder))}"


def gathered(value: Any, collectives: Collectives) -> list[Any]:
    """Return the value of every rank, on every rank."""
    values = [value]
    if collectives.world_size > 1:
        values = [None] * collectives.world_size
        torch.distributed.all_gather_object(values, value)
    return values


def write_dump(
    module: L.LightningModule,
    folder: Path,
    inputs: StepInputs,
    anomalies: Sequence[Anomaly],
) -> str:
    """Write a dump; all ranks call it, and it appears when it is whole.

    Args:
        module: Its weights and optimizer states are as the step found them.
        folder: Its name; what is there is replaced. All ranks must see it.
        inputs: Of this rank.
        anomalies: Of all ranks.

    Returns:
        Why there is no dump; empty: there is.
    """
    trainer = module.trainer
    collectives = Collectives(trainer)
    first = collectives.rank == 0
    records = [
        {"rank": rank, **row}
        for rank, rows in enumerate(gathered(list(inputs.records), collectives))
        for row in rows
    ]
    state = _state(module)
    fresh = folder.with_name(f".{folder.name}.tmp")

    def prepare() -> None:
        if first:
            recover_folder(folder)
            open_folder(fresh)
            _check_space(fresh, state)

    def write_own() -> None:
        buffer = io.BytesIO()  # of what torch writes to, a full disk would come back as any error
        torch.save(_plain(inputs), buffer)
        (fresh / f"rank_{collectives.rank}.pt").write_bytes(buffer.getvalue())

    def write_state() -> None:
        trainer.strategy.save_checkpoint(state, fresh / STATE_FILE)

    def finish() -> None:
        if first:
            _write_texts(fresh, folder, module, inputs.stage, anomalies, records)
            place_folder(fresh, folder)

    for phase in (prepare, write_own, write_state, finish):
        if failure := _agreed_failure(phase, collectives):
            if first:
                shutil.rmtree(fresh, ignore_errors=True)
            return failure
    return ""


def _agreed_failure(phase: Callable[[], None], collectives: Collectives) -> str:
    """Run one phase on all ranks; returns what the first one that failed says of it."""
    failure = ""
    try:
        phase()
    except Exception as error:  # noqa: BLE001  whatever it is, it is told, and training goes on
        failure = f"{type(error).__name__}: {error}"
    return next((said for said in gathered(failure, collectives) if said), "")


def _state(module: L.LightningModule) -> dict[str, Any]:
    trainer, strategy = module.trainer, module.trainer.strategy
    state: dict[str, Any] = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [strategy.optimizer_state(one) for one in trainer.optimizers],
        "global_step": trainer.global_step,
    }
    module.on_save_checkpoint(state)
    return state


def _check_space(folder: Path, state: Mapping[str, Any]) -> None:
    """Refuse to begin what will not fit: running out of space midway stops the other ranks."""
    needed, free = _bytes(state), shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"weights and optimizer states take {needed / 2**20:.0f} MiB, and {folder.parent} has "
            f"{free / 2**20:.0f} MiB left"
        )


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_bytes(part) for part in value.values())
    return sum(_bytes(part) for part in value) if isinstance(value, list | tuple) else 0


def _plain(inputs: StepInputs) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "stage": inputs.stage,
        "batches": {name: pack(batch) for name, batch in inputs.batches.items()},
        "random": [dict(state) for state in inputs.random],
        "extra": {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in inputs.extra.items()
        },
    }


def _write_texts(
    fresh: Path,
    folder: Path,
    module: L.LightningModule,
    stage: str,
    anomalies: Sequence[Anomaly],
    records: Sequence[Mapping[str, Any]],
) -> None:
    trainer = module.trainer
    about = {
        "format": FORMAT,
        "command": replay_command(folder),
        "module": type(module).__name__,
        "stage": stage,
        "step": trainer.global_step,
        "world_size": trainer.world_size,
        "anomalies": [anomaly.plain() for anomaly in anomalies],
        "trainer": {
            "precision": trainer.precision,
            "device": module.device.type,
            "strategy": type(trainer.strategy).__name__,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        },
        "versions": {
            **{name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
    }
    (fresh / ANOMALY_FILE).write_text(json.dumps(about, indent=2) + "\n")
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    (fresh / RECORDS_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    config = _config_text(trainer)
    if config:
        (fresh / CONFIG_FILE).write_text(config, encoding="utf-8")
    (fresh / README_FILE).write_text(_readme(folder, anomalies, has_config=bool(config)))


def _config_text(trainer: L.Trainer) -> str:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    savers = [callback for callback in callbacks if isinstance(callback, SaveConfigCallback)]
    return str(savers[0].parser.dump(savers[0].config, skip_none=False)) if savers else ""


def _readme(folder: Path, anomalies: Sequence[Anomaly], *, has_config: bool) -> str:
    how = (
        f"    {replay_command(folder)}"
        if has_config
        else "    lrlhf.modules.replay_dump(module, folder)    # module as the run built it"
    )
    what = "\n".join(f"- {anomaly.kind}: {anomaly.text}" for anomaly in anomalies)
    again = "To take it again and see where it goes wrong"
    return f"A step was left out:\n\n{what}\n\n{again}:\n\n{how}\n"


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
    found = about.get("format") if isinstance(about, dict) else None
    if found != FORMAT:
        raise NotADumpError(f"{path} is of no dump: its format is {found!r}, not {FORMAT!r}")
    return dict(about)


def read_dump(folder: Path) -> Dump:
    """Read a dump.

    Raises:
        NotADumpError: There is none, or it is damaged; names the file.
    """
    about = read_about(folder)
    try:
        world_size, step = int(about["world_size"]), int(about["step"])
        anomalies = tuple(Anomaly(**one) for one in about["anomalies"])
        trainer = dict(about["trainer"])
    except (KeyError, TypeError, ValueError) as error:
        raise NotADumpError(f"{folder / ANOMALY_FILE} is damaged: {error!r}") from error
    return Dump(
        folder=folder,
        step=step,
        world_size=world_size,
        anomalies=anomalies,
        trainer=trainer,
        ranks=tuple(_read_inputs(folder / f"rank_{rank}.pt") for rank in range(world_size)),
    )


def read_state(folder: Path) -> dict[str, Any]:
    """Read a dump's ``state_dict``, ``optimizer_states``, and what the module adds to checkpoints.

    Raises:
        NotACheckpointError: It is missing or damaged.
    """
    return read_checkpoint(folder / STATE_FILE)


def _read_inputs(path: Path) -> StepInputs:
    if not path.is_file():
        raise NotADumpError(f"{path} is missing: the dump is not whole")
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return StepInputs(
            stage=stored["stage"],
            batches={name: unpack(batch) for name, batch in stored["batches"].items()},
            random=stored["random"],
            extra=stored["extra"],
        )
    except Exception as error:
        raise NotADumpError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
