"""What a checkpoint knows of the logs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor

from tests.loggers.runs import KilledAfterSaving, KilledError, Killer, Toy, train


class Notebook(Logger):
    """Keeps rows in a list that outlives it, as a file does."""

    def __init__(self, rows: list[tuple[int | None, dict[str, Any]]]) -> None:
        super().__init__()
        self.rows = rows
        self.told: list[Any] = []

    @property
    def name(self) -> str:
        return "notebook"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Keep none."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_position(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def rewind(self, position: Mapping[str, Any]) -> None:
        self.told.append(dict(position))
        del self.rows[position["rows"] :]

    def start_run(self) -> None:
        self.told.append("start")

    def for_stage(self, stage: str) -> "Notebook":
        self.told.append(stage)
        return Notebook([])


def saved(folder: Path) -> Any:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["log_rows"]


def test_a_checkpoint_holds_the_row_that_is_written_after_it(tmp_path: Path) -> None:
    rows: list[Any] = []
    saving = KilledAfterSaving(3, dirpath=tmp_path / "checkpoints", every_n_train_steps=3)
    with pytest.raises(KilledError):
        train(tmp_path, [Notebook(rows)], saving)
    state = saved(tmp_path)
    assert [step for step, _ in rows] == [1, 2]
    assert state["logs"] == [("Notebook", {"rows": 2})]
    assert state["row"]["step"] == 3
    assert set(state["row"]["metrics"]) == {"train/loss", "perf/train_s", "epoch"}
    assert state["row"]["metrics"]["epoch"] == 0
    again = Notebook(rows)
    train(tmp_path, [again], max_steps=4)
    assert again.told == [{"rows": 2}]
    assert rows[2] == (3, state["row"]["metrics"])


def test_a_row_that_has_been_written_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    # saved after validation, and at the end
    train(tmp_path, [Notebook([])], save={"dirpath": tmp_path / "checkpoints"}, max_steps=4)
    # four training rows, one of the validation, one at the end of the unfinished epoch
    assert saved(tmp_path)["row"] is None
    assert saved(tmp_path)["logs"][0][1]["rows"] in (5, 6)


def test_a_step_that_the_module_chooses_is_kept(tmp_path: Path) -> None:
    class Chooses(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("step", 100.0 * (self.trainer.global_step + 1))
            return super().training_step(batch, batch_idx)

    saving = KilledAfterSaving(3, dirpath=tmp_path / "checkpoints", every_n_train_steps=3)
    with pytest.raises(KilledError):
        train(tmp_path, [Notebook([])], saving, module=Chooses())
    row = saved(tmp_path)["row"]
    assert row["step"] == 300
    # as Lightning does: a row with a step of its own has no epoch
    assert "epoch" not in row["metrics"]


def test_each_of_several_loggers_goes_back_to_its_own_position(tmp_path: Path) -> None:
    first, second = [], [(7, {"of another run": 1.0})]
    with pytest.raises(KilledError):
        train(tmp_path, [Notebook(first), Notebook(second)], Killer("on_train_batch_start", 5))
    again = [Notebook(first), CSVLogger(tmp_path, name="plain"), Notebook(second), Notebook([])]
    train(tmp_path, again)
    assert [log.told for log in again if isinstance(log, Notebook)] == [
        [{"rows": 2}],
        [{"rows": 3}],
        # the checkpoint knows of two
        ["start"],
    ]
    assert [step for step, metrics in first if "train/loss" in metrics] == list(range(1, 11))


def test_a_run_that_begins_says_so_and_an_evaluation_stands_apart(tmp_path: Path) -> None:
    log = Notebook([])
    train(tmp_path, [log], max_steps=1)
    trainer = L.Trainer(
        accelerator="cpu", logger=log, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.test(Toy(), torch.utils.data.DataLoader(torch.zeros(2, 4)), verbose=False)
    assert log.told == ["start", "test"]
    log = Notebook([])
    train(tmp_path, [log], fast_dev_run=True)
    assert (log.told, log.rows) == ([], [])


def test_it_stands_before_the_callbacks_that_log(tmp_path: Path) -> None:
    class Greets(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.loggers[0].log_metrics({"hello": 1.0}, step=trainer.global_step)

    rows: list[Any] = []
    with pytest.raises(KilledError):
        train(tmp_path, [Notebook(rows)], Greets(), Killer("on_train_batch_start", 5))
    train(tmp_path, [Notebook(rows)], Greets())
    # the second greeting is of the second process, and follows what was gone back to
    assert [step for step, metrics in rows if "hello" in metrics] == [0, 3]


class Seldom(Toy):
    """Measures something in the first micro-batch of each third step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step % 3 == 0:
            first = not self.automatic_optimization or batch_idx % 2 == 0
            if first:
                self.log("a/seldom", float(self.trainer.global_step), batch_size=1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize(
    ("every", "steps", "measured"),
    [
        # rows are numbered by the steps that are done, values are those before
        (1, [1, 2, 3, 4, 5], {1: 0.0, 4: 3.0}),
        # what was measured in steps 1, 4 and 7 is in the next row
        (2, [2, 4, 6, 8], {2: 0.0, 4: 3.0, 8: 6.0}),
    ],
)
def test_a_row_holds_what_was_measured_since_the_row_before_and_no_earlier_value(
    tmp_path: Path, automatic: bool, every: int, steps: list[int], measured: dict[int, float]
) -> None:
    options = {"accumulate_grad_batches": 2} if automatic else {}
    options |= {"max_steps": steps[-1], "log_every_n_steps": every}
    rows: list[Any] = []
    module = Seldom(automatic=automatic)
    train(tmp_path, [Notebook(rows)], module=module, ckpt_path=None, **options)
    of_steps = {step: row for step, row in rows if "train/loss" in row}
    assert sorted(of_steps) == steps
    found = {step: row["a/seldom"] for step, row in of_steps.items() if "a/seldom" in row}
    assert found == measured
