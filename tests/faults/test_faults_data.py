"""Faults of the data and of settings: see faults_table.csv."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lrlhf.datamodules import PromptDataModule
from lrlhf.media import MediaOptions
from tests.conftest import build_language_model, build_tokenizer
from tests.faults.faults_table_runs import STEPS, Run, Table, assert_intact, assert_same_end
from tests.vlms import picture, save_vlm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_own_log"),
    pytest.mark.filterwarnings("ignore:.*"),
]

FLAG = "--ckpt_path=last"


def stop_after_two(run: Run) -> None:
    ended = run.fit("--trainer.max_steps=2")
    assert ended.status == 0, ended.err


def replace_data(run: Run) -> None:
    run.write_prompts([f"tell {word}" for word in "abcdefghijkl"])


def test_data_replaced_before_resume(run: Run, table: Table) -> None:
    stop_after_two(run)
    replace_data(run)
    ended = run.fit(FLAG)
    assert_intact(run, 2)
    table.stopped(ended, "train data has changed", "--data.accept_changed_data true")


@pytest.mark.exhaustive
def test_data_replaced_and_accepted(run: Run, table: Table) -> None:
    stop_after_two(run)
    replace_data(run)
    ended = run.fit(FLAG, "--data.accept_changed_data=true")
    assert ended.status == 0, ended.err
    assert "accepted" in ended.err
    asked = {record["step"]: record["prompt"].split()[0] for record in run.records()}
    assert asked == {0: "say", 1: "say", 2: "tell", 3: "tell"}
    table.recovered("said; the run goes on with the new rows")


@pytest.mark.exhaustive
def test_tokenizer_replaced_before_resume(run: Run, table: Table, tmp_path: Path) -> None:
    stop_after_two(run)
    folder = tmp_path / "other"
    tokenizer = build_tokenizer()
    # of the same size, so that the weights fit: two letters have each other's ids
    path = folder / "tokenizer.json"
    build_language_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["s"] = vocabulary["s"], vocabulary["a"]
    path.write_text(json.dumps(spec))
    run.config["model"]["init_args"]["policy"] = str(folder)
    table.stopped(run.fit(FLAG), "other tokens", "tokenizer")


@pytest.mark.exhaustive
def test_data_deleted_in_mid_run(run: Run, table: Table, undisturbed: Run) -> None:
    ended = run.fit(step_1=lambda _: (run.folder / "prompts.jsonl").unlink())
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered("no difference: rows are read once, at the start")


def test_data_missing(run: Run, table: Table) -> None:
    (run.folder / "prompts.jsonl").rename(run.folder / "promts.jsonl")
    table.stopped(run.fit(), "prompts.jsonl", "did you mean 'promts.jsonl'?")


@pytest.mark.exhaustive
def test_data_emptied(run: Run, table: Table) -> None:
    (run.folder / "prompts.jsonl").write_text("")
    table.stopped(run.fit(), "empty", "prompts.jsonl")


@pytest.mark.exhaustive
def test_some_rows_are_broken(run: Run, table: Table) -> None:
    run.write_prompts([f"say {number}" for number in range(19)])
    with (run.folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "cut\n')
    ended = run.fit("--data.max_bad_fraction=0.1")
    assert ended.status == 0, ended.err
    assert "prompts.jsonl:20" in ended.err
    table.recovered("the row is left out, counted, and told with its number")


def pictures(folder: Path, **options: Any) -> PromptDataModule:
    """Six rows, each with a picture of its own."""
    save_vlm("qwen2_vl", folder / "vlm")
    rows = []
    for number in range(6):
        picture(number).save(folder / f"{number}.png")
        parts = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "what?"}]
        rows.append({"prompt": [{"role": "user", "content": parts}], "number": number})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = PromptDataModule(
        str(folder / "rows.jsonl"),
        tokenizer=str(folder / "vlm"),
        batch_size=1,
        media=MediaOptions(check="files"),
        **options,
    )
    data.setup("fit")
    return data


def test_picture_removed_in_mid_run(
    table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = pictures(tmp_path)
    batches = iter(data.train_dataloader())
    seen = [next(batches).columns[0]["number"]]
    lost = next(number for number in range(6) if number not in seen)
    (tmp_path / f"{lost}.png").unlink()
    seen += [batch.columns[0]["number"] for batch in batches]
    assert len(seen) == 6
    assert lost not in seen
    assert f"{lost}.png" in caplog.text
    table.recovered("the next row takes its place, which is told with the file's name")


def killed(_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_loader_worker_killed(run: Run, table: Table) -> None:
    run.config["data"]["init_args"]["num_workers"] = 2

    def kill(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        object.__setattr__(loader._fetching, "collate", killed)

    ended = run.fit(start=kill)
    assert not run.path("checkpoints/last.ckpt").exists()
    table.stopped(ended, "DataLoader worker", "data.num_workers (it is 2)")


# ---- settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(run: Run, table: Table) -> None:
    ended = run.fit("--trainer.accelerator=gpu")
    table.stopped(ended, "trainer.accelerator: gpu is asked for", status=2)


@pytest.mark.exhaustive
def test_tracking_service_unreachable(
    run: Run, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run.config["trainer"]["logger"] = {
        "class_path": "lrlhf.loggers.ResumingWandbLogger",
        "init_args": {"save_dir": str(run.folder / "run"), "offline": True},
    }
    ended = run.fit()
    assert ended.status == 0, ended.err
    assert_intact(run, STEPS)
    table.recovered("in offline mode rows are kept in the run's folder, to be sent later")
