"""metrics.csv of a killed run is that of one that was not."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lrlhf import Trainer
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.loggers.csv import CSVTable
from tests.loggers.runs import (
    KilledAfterSaving,
    KilledError,
    Killer,
    Toy,
    run_stages,
    steps_of,
    train,
)

FILES = ("metrics.csv", "timings.csv")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def go(folder: Path, *callbacks: L.Callback, **options: Any) -> None:
    train(folder, [ResumingCSVLogger(folder)], *callbacks, **options)


def uninterrupted(tmp_path: Path, **options: Any) -> bytes:
    go(tmp_path / "whole", **options)
    return (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_a_run_writes_every_row_once(tmp_path: Path) -> None:
    uninterrupted(tmp_path)
    rows = rows_of(tmp_path / "whole" / "metrics.csv")
    trained = [int(row["step"]) for row in rows if row["train/loss"]]
    validated = [int(row["step"]) for row in rows if row["eval/loss"]]
    # validation after 4 and 8 steps and at the end, epochs of 5
    assert trained == list(range(1, 11))
    assert validated == [4, 8, 10]
    assert [int(row["step"]) for row in rows if row["epoch/weight"]] == [5, 10]
    assert not any(name.startswith("perf/") for name in rows[0])
    timings = rows_of(tmp_path / "whole" / "timings.csv")
    assert list(timings[0]) == ["step", "epoch", "perf/train_s"]
    assert [int(row["step"]) for row in timings] == list(range(1, 11))


@pytest.mark.parametrize(
    "killer",
    [
        # before the row of the step whose checkpoint was just saved
        lambda folder: KilledAfterSaving(6, dirpath=folder / "checkpoints", every_n_train_steps=3),
        lambda _: Killer("on_train_batch_start", 8),  # two rows after it
        lambda _: Killer("on_validation_end", 4),
        lambda _: Killer("on_train_epoch_end", 5),
        lambda _: Killer("on_train_end", 10),
    ],
)
def test_the_file_of_a_killed_run_is_that_of_a_whole_one(tmp_path: Path, killer: Any) -> None:
    # a metric that comes late is a column that the checkpoint does not know
    expected = uninterrupted(tmp_path, module=Toy(rare=7))
    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        go(folder, killer(folder), module=Toy(rare=7))
    for name in FILES:
        with (folder / name).open("ab") as handle:
            handle.write(b"6,1,0.0")  # a row that was cut short
    go(folder, module=Toy(rare=7))
    assert (folder / "metrics.csv").read_bytes() == expected
    assert [int(row["step"]) for row in rows_of(folder / "timings.csv")] == list(range(1, 11))
    assert not list(folder.glob("*.1.csv"))


@pytest.mark.parametrize(
    ("automatic", "save", "killer", "options"),
    [
        # saved at the end of an epoch, whose own row is written after that
        (True, {}, lambda o: KilledAfterSaving(5, **o), {"limit_val_batches": 0}),
        # a row that is not due is not made up
        (True, {"every_n_train_steps": 2}, lambda o: KilledAfterSaving(6, **o), {"every": 3}),
        # the batches of an optimizer step have one row, or none
        (
            True,
            {"every_n_train_steps": 2},
            lambda o: KilledAfterSaving(4, **o),
            {"accumulate_grad_batches": 2, "max_steps": 5, "val_check_interval": 3, "every": 2},
        ),
        # validation was to follow, and was begun; the epoch was to end
        (False, {"every_n_train_steps": 4}, lambda o: KilledAfterSaving(4, **o), {}),
        # finished, and asked for once more
        (False, {"every_n_train_steps": 100}, lambda _: Killer("on_fit_end", 10), {}),
    ],
)
def test_it_does_not_matter_what_made_the_checkpoint(
    tmp_path: Path, automatic: bool, save: dict[str, Any], killer: Any, options: dict[str, Any]
) -> None:
    options = dict(options)
    options["log_every_n_steps"] = options.pop("every", 1)

    def run(folder: Path, *callbacks: L.Callback) -> None:
        saving = {"dirpath": folder / "checkpoints", **save}
        go(folder, *callbacks, module=Toy(automatic=automatic), save=saving, **options)

    run(tmp_path / "whole")
    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        run(folder, killer({"dirpath": folder / "checkpoints", **save}))
    run(folder)
    whole = (tmp_path / "whole" / "metrics.csv").read_bytes()
    assert (folder / "metrics.csv").read_bytes() == whole
    assert len(whole.splitlines()) > 2


def test_a_new_run_keeps_the_files_of_an_earlier_one(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        go(tmp_path, max_steps=count, save={"dirpath": tmp_path / str(count)})
    # one row a step
    for number, count in (("", 3), (".1", 1), (".2", 2)):
        assert len(rows_of(tmp_path / f"timings{number}.csv")) == count
        # and one each of the validation at the end and of the end of the epoch
        assert len(rows_of(tmp_path / f"metrics{number}.csv")) == count + 2


def test_rows_that_someone_removed_are_missed_aloud(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        go(tmp_path, Killer("on_train_batch_start", 6))
    lines = (tmp_path / "metrics.csv").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.csv").write_bytes(b"".join(lines[:3]))
    with pytest.warns(UserWarning, match="metrics.csv has 2 rows, and the checkpoint"):
        go(tmp_path)
    assert [int(row["step"]) for row in rows_of(tmp_path / "metrics.csv")][:3] == [1, 2, 6]


def test_an_evaluation_by_itself_leaves_the_rows_of_training(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path)
    for _ in range(2):
        trainer = L.Trainer(
            accelerator="cpu",
            logger=ResumingCSVLogger(tmp_path / "whole"),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.test(Toy(), DataLoader(torch.zeros(4, 4), batch_size=2), verbose=False)
    assert (tmp_path / "whole" / "metrics.csv").read_bytes() == expected
    # a weight of 0 on data of 0
    assert [row["test/loss"] for row in rows_of(tmp_path / "whole" / "test.csv")] == ["0.0", "0.0"]


def test_training_after_an_evaluation_by_itself_goes_on_in_its_own_file(tmp_path: Path) -> None:
    run_stages(tmp_path, ResumingCSVLogger())
    assert steps_of(rows_of(tmp_path / "metrics.csv")) == [1, 2, 3, 4]
    # before the first step, and after the first epoch of two
    assert [row["step"] for row in rows_of(tmp_path / "validate.csv")] == ["0", "2"]


def test_a_logger_of_another_module_starts_with_its_first_row(tmp_path: Path) -> None:
    logger = ResumingCSVLogger(tmp_path, name="logs", timings=["slow/"])
    logger.log_hyperparams({"lr": 0.5})
    logger.log_metrics({"a": torch.tensor(0.1), "slow/b": 2}, step=7)
    logger.log_metrics({"a": float("nan")})
    logger.finalize("success")
    text = "step,a\n7,0.10000000149011612\n1,nan\n"
    assert (tmp_path / "logs" / "metrics.csv").read_text() == text
    assert (tmp_path / "logs" / "timings.csv").read_text() == "step,slow/b\n7,2\n"
    assert (tmp_path / "logs" / "hparams.yaml").read_text() == "lr: 0.5\n"


def test_the_seconds_of_one_of_two_remote_rewards_are_timings(tmp_path: Path) -> None:
    logger = ResumingCSVLogger(tmp_path)
    logger.log_metrics({"rewards/one/remote/latency_s": 2, "rewards/one/remote": 3}, step=7)
    logger.finalize("success")
    assert (tmp_path / "timings.csv").read_text() == "step,rewards/one/remote/latency_s\n7,2\n"
    assert (tmp_path / "metrics.csv").read_text() == "step,rewards/one/remote\n7,3\n"


def test_a_folder_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="it needs a folder of this machine"):
        ResumingCSVLogger("s3://bucket/run")


@pytest.fixture
def table(tmp_path: Path) -> CSVTable:
    return CSVTable(tmp_path / "t.csv")


def test_new_columns_are_put_in_their_place_and_forgotten_with_their_rows(table: CSVTable) -> None:
    table.append({"step": 0, "b": 0.25})
    table.append({"a": 1e-300, "epoch": 0, "step": 1})
    assert table.path.read_text() == "step,epoch,a,b\n0,,,0.25\n1,0,1e-300,\n"
    again = CSVTable(table.path)
    assert again.truncate(1) == 2
    assert again.path.read_text() == "step,b\n0,0.25\n"
    again.append({"step": 1, "b": 3})
    assert again.path.read_text() == "step,b\n0,0.25\n1,3\n"


def test_text_stays_in_its_cell_and_its_line(table: CSVTable) -> None:
    table.append({"step": 0, "note": 'one, "two"\nthree'})
    assert CSVTable(table.path).truncate() == 1
    assert table.path.read_text() == 'step,note\n0,"one, ""two"" three"\n'


def test_a_row_that_did_not_fit_on_the_disk_is_overwritten(table: CSVTable) -> None:
    table.append({"step": 0})
    with table.path.open("ab") as handle:
        handle.write(b"1")
    table.append({"step": 1})
    assert table.path.read_text() == "step\n0\n1\n"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\xff\xfe\n", "is no table of metrics"),
        (b"step,epoch\n1\n", "line 2: more or fewer cells than the header"),
        (b"step,epoch\n1,2,3\n", "line 2: more or fewer cells"),
    ],
)
def test_a_file_that_is_no_table_is_named(table: CSVTable, content: bytes, what: str) -> None:
    table.path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"t\.csv.*{what}"):
        table.truncate()


class PlainModule(L.LightningModule):
    """A module of the user's own, which knows nothing of lrlhf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.weight.square().sum()
        self.log("train/loss", loss)
        if batch_idx == 1:
            self.log("rare", 5.0)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("eval/loss", self.weight.square().sum())


def test_a_step_of_any_module_has_only_what_it_measured(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer = Trainer(default_root_dir=folder, max_steps=4, accelerator="cpu")
    trainer.fit(PlainModule(), DataLoader(torch.zeros(4, 1)))
    rows = rows_of(folder / "metrics.csv")
    assert [(row["step"], row["rare"]) for row in rows] == [
        ("1", ""),
        ("2", "5.0"),
        ("3", ""),
        ("4", ""),
    ]
    # an evaluation by itself keeps away from the rows of the training
    before = (folder / "metrics.csv").read_bytes()
    trainer.validate(PlainModule(), DataLoader(torch.zeros(1, 1)))
    assert (folder / "metrics.csv").read_bytes() == before
