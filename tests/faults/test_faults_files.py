"""Faults of disks, checkpoints and written files: see faults_table.csv."""

import builtins
import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml

from tests.conftest import build_language_model, build_tokenizer
from tests.faults.faults_table_runs import (
    Ended,
    Run,
    Table,
    assert_same_end,
    case,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_own_log"),
    pytest.mark.filterwarnings("ignore:.*"),
]

ROOT = Path(__file__).parents[2]
FLAG = "--ckpt_path=last"


class FullFile(io.FileIO):
    """A file whose device has no space left."""

    def write(self, data: Any) -> int:
        del data
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fills(monkeypatch: pytest.MonkeyPatch, part: str) -> Callable[[L.Trainer], None]:
    """From then on, nothing can be written into files whose path holds ``part``."""
    original = builtins.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if part not in str(file) or not set(mode) & set("wax+"):
            return original(file, mode, *arguments, **options)
        raw = FullFile(str(file), mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, write_through=True)

    def fill(_: L.Trainer) -> None:
        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(Path, "open", opened)

    return fill


FULL = os.strerror(errno.ENOSPC)


DISKS = [
    case(
        "disk_full_while_a_checkpoint_is_written",
        ("phase_update_3", "checkpoints"),
        "step=000003.ckpt",
    ),
    case(
        "disk_full_while_rollouts_are_written", ("step_2", "rollouts.jsonl"), "run/rollouts.jsonl"
    ),
    case(
        "disk_full_while_an_evaluation_is_written",
        ("step_1", "eval_scores"),
        "run/eval_scores_2.jsonl",
        exhaustive=True,
    ),
    case(
        "disk_full_while_metrics_are_written", ("step_2", "metrics.csv"), "run/metrics/metrics.csv"
    ),
]


@pytest.mark.parametrize(("filling", "culprits"), DISKS)
def test_a_disk_is_full(
    run: Run,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Run,
    filling: tuple[str, str],
    culprits: tuple[str, ...],
) -> None:
    moment, part = filling
    with monkeypatch.context() as patch:
        plan: dict[str, Any] = {moment: fills(patch, part)}
        ended = run.fit(**plan)
    assert run.fit(FLAG).status == 0
    assert_same_end(run, undisturbed)
    table.stopped(ended, FULL, *culprits)


@pytest.mark.exhaustive
def test_disk_full_while_the_model_is_exported(
    run: Run, table: Table, monkeypatch: pytest.MonkeyPatch, undisturbed: Run
) -> None:
    with monkeypatch.context() as patch:
        ended = run.fit(step_3=fills(patch, "export"))
    assert not run.path("export/final").exists()
    assert_same_end(run, undisturbed)
    table.stopped(ended, FULL, "run/export/final")


@pytest.mark.exhaustive
def test_file_size_limit_reached_by_a_real_process(run: Run, table: Table) -> None:
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config))
    process = subprocess.run(
        [sys.executable, "-m", "lrlhf", "fit", "--config", "config.yaml"],
        cwd=run.folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONWARNINGS": "ignore",
        },
        # the tiny model's checkpoint is larger; python turns the signal into an error
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not [p for p in run.path("checkpoints").glob("*.ckpt") if p.exists()]
    ended = Ended(process.returncode, process.stdout, process.stderr)
    table.stopped(ended, os.strerror(errno.EFBIG))


IN_THE_WAY = [
    case("folder_of_checkpoints_cannot_be_made", "checkpoints"),
    case("folder_of_the_log_cannot_be_made", "metrics"),
]


@pytest.mark.parametrize(("name", "_"), IN_THE_WAY)
def test_a_folder_cannot_be_made(run: Run, table: Table, name: str, _: object) -> None:
    run.path("").mkdir()
    run.path(name).write_text("in the way")
    ended = run.fit()
    assert run.path(name).read_text() == "in the way"
    table.stopped(ended, f"run/{name}")


# ---- checkpoints


def stop_after_two(run: Run) -> None:
    ended = run.fit("--trainer.max_steps=2")
    assert ended.status == 0, ended.err


def spoil_bytes(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """Change one bit in the middle of the largest part; between parts nobody misses one."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        largest = archive.read(max(archive.infolist(), key=lambda part: part.file_size))
    place = data.index(largest) + len(largest) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


DAMAGES = [
    case("checkpoint_cut_short", half, exhaustive=True),
    case("checkpoint_byte_flipped", flipped),
    case("checkpoint_empty", lambda _: b"", exhaustive=True),
    case("checkpoint_of_another_kind", lambda _: b"weights: 1\n" * 99, exhaustive=True),
]


@pytest.mark.parametrize(("damage", "_"), DAMAGES)
def test_a_checkpoint_that_is_named_is_damaged(
    run: Run, table: Table, damage: Callable[[bytes], bytes], _: object
) -> None:
    stop_after_two(run)
    path = run.path("checkpoints/last.ckpt")
    spoil_bytes(path, damage)
    before = {p.name: p.read_bytes() for p in run.path("").glob("*.jsonl")}
    ended = run.fit(f"--ckpt_path={path}")
    assert {p.name: p.read_bytes() for p in run.path("").glob("*.jsonl")} == before
    table.stopped(ended, "last.ckpt")


def test_newest_checkpoint_damaged(run: Run, table: Table, undisturbed: Run) -> None:
    stop_after_two(run)
    assert len(run.checkpoints) == 2
    spoil_bytes(run.path("checkpoints/last.ckpt"), flipped)
    ended = run.fit(FLAG)
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered(
        "the one before was taken, and the end is byte for byte that of an undisturbed run"
    )


@pytest.mark.exhaustive
def test_all_checkpoints_damaged(run: Run, table: Table) -> None:
    stop_after_two(run)
    for path in {p.resolve() for p in run.path("checkpoints").glob("*.ckpt")}:
        spoil_bytes(path, flipped)
    table.stopped(run.fit(FLAG), "checkpoints")


@pytest.mark.exhaustive
def test_last_is_a_dangling_link(run: Run, table: Table, undisturbed: Run) -> None:
    stop_after_two(run)
    last = run.path("checkpoints/last.ckpt")
    last.unlink()
    last.symlink_to("gone.ckpt")
    ended = run.fit(FLAG)
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered("the newest whole checkpoint was taken; the end is that of an undisturbed run")


@pytest.mark.exhaustive
def test_leftovers_of_a_kill(run: Run, table: Table, undisturbed: Run) -> None:
    stop_after_two(run)
    whole = run.path("checkpoints/last.ckpt").read_bytes()
    for name in (".last.ckpt.tmp", "last.ckpt.tmp", "step=000003.ckpt.tmp", "x.old"):
        run.path(f"checkpoints/{name}").write_bytes(half(whole))
    ended = run.fit(FLAG)
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered("they are passed over; the end is that of an undisturbed run")


@pytest.mark.exhaustive
def test_nothing_to_resume(run: Run, table: Table, undisturbed: Run) -> None:
    ended = run.fit(FLAG)
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered("the run starts from the beginning")


def test_checkpoint_of_another_shape(run: Run, table: Table, tmp_path: Path) -> None:
    stop_after_two(run)
    folder = tmp_path / "wider"
    tokenizer = build_tokenizer()
    build_language_model(tokenizer, hidden_size=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run.config["model"]["init_args"]["policy"] = str(folder)
    table.stopped(run.fit(FLAG), "embed_tokens.weight: [260, 32] there, [260, 64] in this model")


@pytest.mark.exhaustive
def test_checkpoint_of_another_class(run: Run, table: Table) -> None:
    stop_after_two(run)
    last = str(run.path("checkpoints/last.ckpt"))
    pairs = [{"prompt": "p ", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(8)]
    text = "".join(f"{json.dumps(pair)}\n" for pair in pairs)
    (run.folder / "pairs.jsonl").write_text(text)
    policy = run.config["model"]["init_args"]["policy"]
    run.config["model"] = {
        "class_path": "lrlhf.modules.RewardModel",
        "init_args": {"model": {"source": policy}},
    }
    run.config["data"] = {
        "class_path": "lrlhf.datamodules.PreferenceDataModule",
        "init_args": {"train": "pairs.jsonl", "batch_size": 4},
    }
    run.config["trainer"].pop("val_check_interval")
    kept = {"Inject", "RLCheckpoint"}
    run.config["trainer"]["callbacks"] = [
        one
        for one in run.config["trainer"]["callbacks"]
        if one["class_path"].rpartition(".")[2] in kept
    ]
    table.stopped(run.fit(f"--ckpt_path={last}"), "names differ")


@pytest.mark.exhaustive
def test_checkpoint_of_weights_only(run: Run, table: Table) -> None:
    saving = run.config["trainer"]["callbacks"][3]["init_args"]
    saving["save_weights_only"] = True
    stop_after_two(run)
    table.stopped(run.fit(FLAG), "save_weights_only")


# ---- what callbacks have written


def test_rollouts_line_torn(run: Run, table: Table, undisturbed: Run) -> None:
    stop_after_two(run)
    path = run.path("rollouts.jsonl")
    with path.open("ab") as file:
        file.write(path.read_bytes()[:50])
    ended = run.fit(FLAG)
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered("the half line is removed; the end is that of an undisturbed run")


@pytest.mark.exhaustive
def test_rollouts_line_is_rubbish(run: Run, table: Table) -> None:
    stop_after_two(run)
    path = run.path("rollouts.jsonl")
    text = path.read_text() + "rubbish\n"
    path.write_text(text)
    ended = run.fit(FLAG)
    assert path.read_text() == text
    table.stopped(ended, "rollouts.jsonl, line 17")


@pytest.mark.exhaustive
def test_stored_rollout_damaged(run: Run, table: Table) -> None:
    log = run.config["trainer"]["callbacks"][1]["init_args"]
    log["save_tensors"] = True
    stop_after_two(run)
    shutil.move(run.path("rollouts"), run.folder / "kept")
    (first, *_) = sorted((run.folder / "kept").iterdir())
    spoil_bytes(first, half)
    run.config["data"] = {
        "class_path": "lrlhf.datamodules.ReplayDataModule",
        "init_args": {"folder": "kept"},
    }
    run.config["trainer"].pop("val_check_interval")
    table.stopped(run.fit(), first.name, "damaged")


@pytest.mark.exhaustive
def test_fresh_start_in_a_used_folder(run: Run, table: Table, undisturbed: Run) -> None:
    stop_after_two(run)
    written = run.path("rollouts.jsonl").read_bytes()
    ended = run.fit()
    assert ended.status == 0, ended.err
    assert run.path("rollouts.1.jsonl").read_bytes() == written
    # the earlier run's stays as it was, and that of this run is the one that a resume finds
    assert run.last()["global_step"] == 2
    run.path("checkpoints/last-v1.ckpt").rename(run.path("checkpoints/last.ckpt"))
    assert_same_end(run, undisturbed)
    table.recovered("what the earlier run wrote is kept under other names")


@pytest.mark.exhaustive
def test_folder_of_the_run_removed_in_mid_run(run: Run, table: Table) -> None:
    ended = run.fit(step_2=lambda _: shutil.rmtree(run.path("")))
    table.stopped(ended, "No such file or directory: 'run/metrics/metrics.csv'")
