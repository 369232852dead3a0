"""A Trackio run goes on, and each row is in its store once."""

import html
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from lrlhf.loggers import ResumingTrackioLogger
from tests.loggers.runs import (
    KilledAfterSaving,
    KilledError,
    Killer,
    Toy,
    run_stages,
    steps_of,
    train,
)

trackio = pytest.importorskip("trackio")
storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # read when the package is imported, by each of its modules
    folders = {"TRACKIO_DIR": tmp_path / "store", "MEDIA_DIR": tmp_path / "store" / "media"}
    for module in [one for name, one in sys.modules.items() if name.startswith("trackio.")]:
        for name in folders.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, folders[name])


def rows(project: str = "lrlhf") -> dict[str, list[Row]]:
    """What is stored of each run, but for clocks."""
    clocks = ("timestamp", "perf/train_s")
    return {
        run["id"]: [
            {name: value for name, value in row.items() if name not in clocks}
            for row in storage.get_logs(project, run["name"], run_id=run["id"])
        ]
        for run in storage.get_run_records(project)
    }


def go(folder: Path, *callbacks: Any, **options: Any) -> ResumingTrackioLogger:
    module = Toy()
    module.save_hyperparameters({"lr": 0.1, "_class_path": "toy"})
    logger = ResumingTrackioLogger(auto_log_cpu=False)
    train(folder, [logger], *callbacks, module=module, **options)
    return logger


@pytest.mark.parametrize("killed", ["saving", "later"])
def test_a_resumed_run_has_every_row_once(tmp_path: Path, killed: str) -> None:
    saving = {"dirpath": tmp_path / "whole", "every_n_train_steps": 3}
    whole = go(tmp_path, save=saving)
    (expected,) = rows().values()
    assert len(expected) > 10
    storage.delete_run("lrlhf", whole.version)
    saving["dirpath"] = tmp_path / "checkpoints"
    kills = {"saving": KilledAfterSaving(6, **saving), "later": Killer("on_train_batch_start", 8)}
    with pytest.raises(KilledError):
        go(tmp_path, kills[killed])
    ((run_id, before),) = rows().items()
    assert before == expected[: len(before)]
    assert len(before) < len(expected)
    logger = go(tmp_path)
    assert rows() == {run_id: expected}
    config = storage.get_run_config("lrlhf", logger.version)
    assert config["lr"] == 0.1


def test_a_run_from_the_beginning_and_an_evaluation_are_runs_of_their_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        go(tmp_path, max_steps=1, save={"dirpath": tmp_path / name})
    assert len(rows()) == 2
    logger = ResumingTrackioLogger(auto_log_cpu=False)
    assert logger.version == ""
    evaluation = logger.for_stage("test")
    evaluation.log_metrics({"a": torch.tensor(2.0)}, step=7)
    evaluation.finalize("success")
    assert len(rows()) == 3
    assert [{"a": 2.0, "step": 7}] in rows().values()
    config = storage.get_run_config("lrlhf", evaluation.version)
    assert config["_Group"] == "test"
    assert logger.version == ""


def test_stages_of_one_trainer_are_runs_of_their_own(tmp_path: Path) -> None:
    logger = ResumingTrackioLogger(auto_log_cpu=False)
    run_stages(tmp_path, logger)
    trained = [steps_of(run) for run in rows().values()]
    assert sorted(trained) == [[], [], [1, 2, 3, 4]]
    config = storage.get_run_config("lrlhf", logger.version)
    assert (config["_Group"], config["lr"]) == (None, 0.1)


def test_it_goes_on_after_a_fit_has_ended() -> None:
    logger = ResumingTrackioLogger("sums", "first", auto_log_cpu=False)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.finalize("success")
    assert logger.experiment is None
    logger.log_metrics({"a": 2.0}, step=2)
    logger.finalize("success")
    assert list(rows("sums").values()) == [[{"a": 1.0, "step": 1}, {"a": 2.0, "step": 2}]]
    assert (logger.name, logger.version) == ("sums", "first")


def test_a_table_has_its_pictures(tmp_path: Path) -> None:
    logger = ResumingTrackioLogger(auto_log_cpu=False)
    text = html.escape("<b>")
    data = [[1, text, Image.new("RGB", (4, 4), "red")], [2, "b", None]]
    logger.log_table("t", ["step", "text", "images"], data, 3)
    logger.finalize("success")
    ((row,),) = rows().values()
    first, second = row["t"]["_value"]
    assert (first["step"], first["text"]) == (1, text)
    assert first["images"]["_type"] == "trackio.image"
    (stored,) = (tmp_path / "store").rglob("*.png")
    with Image.open(stored) as shown:
        assert shown.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    assert second["images"] is None


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lrlhf\[trackio\]'"):
        ResumingTrackioLogger()
