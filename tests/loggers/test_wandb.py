"""A W&B run goes on, and each row has one number."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from lrlhf.loggers import ResumingWandbLogger
from tests.loggers.runs import (
    KilledAfterSaving,
    KilledError,
    Killer,
    Toy,
    run_stages,
    steps_of,
    train,
)

wandb = pytest.importorskip("wandb")


class Server:
    """What W&B keeps of each run: a row under a number that it has is ignored."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.jobs: list[str | None] = []

    def init(self, **options: Any) -> "Run":
        assert options["resume"] == "allow"
        self.jobs.append(options.get("job_type"))
        run = Run(self.rows.setdefault(options["id"], {}), options["id"])
        if options.get("reinit") != "create_new":
            wandb.run = run
        return run


class Run:
    def __init__(self, rows: dict[int, dict[str, Any]], run_id: str) -> None:
        self.rows, self.id, self.offline = rows, run_id, False
        self.starting_step = max(rows, default=-1) + 1
        self.config = self
        self.settings: dict[str, Any] = {}

    def log(self, row: dict[str, Any], step: int | None = None, *, commit: bool = True) -> None:
        number = len(self.rows) if step is None else step
        assert number == len(self.rows)
        assert commit
        self.rows[number] = row

    def finish(self) -> None:
        self.rows = MappingProxyType(self.rows)  # takes no more
        if wandb.run is self:
            wandb.run = None

    def update(self, values: dict[str, Any], **_: Any) -> None:
        self.settings |= values


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    served = Server()
    monkeypatch.setattr(wandb, "init", served.init)
    monkeypatch.setattr(wandb, "run", None)
    return served


def test_a_prefix_which_no_row_would_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no prefix"):
        ResumingWandbLogger(tmp_path, prefix="x")


def go(folder: Path, *callbacks: Any, **options: Any) -> ResumingWandbLogger:
    module = Toy()
    module.save_hyperparameters({"lr": 0.1})
    wandb.run = None  # as in a process of its own
    logger = ResumingWandbLogger(folder)
    train(folder, [logger], *callbacks, module=module, **options)
    return logger


@pytest.mark.parametrize(("killed", "unsent"), [("saving", 0), ("later", 0), ("later", 2)])
def test_a_resumed_run_has_every_row_once(
    tmp_path: Path, server: Server, killed: str, unsent: int
) -> None:
    saving = {"dirpath": tmp_path / "whole", "every_n_train_steps": 3}
    go(tmp_path, save=saving)
    expected = [exact(row) for run in server.rows.values() for row in run.values()]
    server.rows.clear()
    saving["dirpath"] = tmp_path / "checkpoints"
    kills = {"saving": KilledAfterSaving(6, **saving), "later": Killer("on_train_batch_start", 8)}
    with pytest.raises(KilledError):
        go(tmp_path, kills[killed])
    ((run_id, rows),) = server.rows.items()
    for number in sorted(rows)[len(rows) - unsent :]:
        del rows[number]
    logger = go(tmp_path)
    assert list(server.rows) == [run_id] == [logger.version]
    assert [exact(row) for row in rows.values()] == expected
    assert logger.experiment.settings == {"lr": 0.1}


def exact(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "perf/train_s"}


def test_a_run_from_the_beginning_and_an_evaluation_are_runs_of_their_own(
    tmp_path: Path, server: Server
) -> None:
    for name in ("one", "two"):
        go(tmp_path, max_steps=1, save={"dirpath": tmp_path / name})
    assert len(server.rows) == 2
    wandb.run = None
    logger = ResumingWandbLogger(tmp_path)
    assert logger.version == ""
    logger.experiment.log({"ignored": 1})  # which run it is, is not yet known
    evaluation = logger.for_stage("test")
    evaluation.log_metrics({"a": torch.tensor(2.0)}, step=7)
    assert server.jobs == [None, None, "test"]
    assert server.rows[evaluation.version] == {0: {"a": 2.0, "trainer/global_step": 7}}
    assert logger.version == ""


def test_stages_of_one_trainer_are_runs_of_their_own(tmp_path: Path, server: Server) -> None:
    logger = ResumingWandbLogger(tmp_path)
    run_stages(tmp_path, logger)
    assert server.jobs == ["validate", None, "validate"]
    before, training, after = server.rows.values()
    assert [row["trainer/global_step"] for row in before.values()] == [0]
    assert steps_of(training.values(), "trainer/global_step") == [1, 2, 3, 4]
    assert [row["trainer/global_step"] for row in after.values()] == [2]
    assert logger.experiment.settings == {"lr": 0.1}
    assert logger.experiment is wandb.run
