"""Responses and evaluations of a run as data frames."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lrlhf.apps.lab import RunFiles


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_nested_values_have_columns_of_their_own(tmp_path: Path) -> None:
    write(
        tmp_path / "rollouts.jsonl",
        {"step": 1, "completion": "a", "rewards": {"short": 1.0}, "token_ids": [3, 4]},
        {"step": 2, "completion": "b", "rewards": {"short": None}, "columns": {"of": {"x": 1}}},
    )
    table = RunFiles(tmp_path).response_table()
    assert list(table["step"]) == [1, 2]
    assert table["rewards/short"][0] == 1.0
    assert table["rewards/short"].isna().tolist() == [False, True]
    assert table["token_ids"][0] == [3, 4]
    assert table["columns/of"][1] == {"x": 1}
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 3')  # is still being written
    assert len(RunFiles(tmp_path).response_table()) == 2


def test_evaluations_follow_each_other_by_step(tmp_path: Path) -> None:
    for step in (10, 0, 9):
        write(tmp_path / f"eval_scores_{step}.jsonl", {"score": step / 2}, {"score": None})
    table = RunFiles(tmp_path).evaluation_table()
    assert list(table["step"]) == [0, 0, 9, 9, 10, 10]
    means = table.groupby("step")["score"].mean()
    assert means.to_dict() == {0: 0.0, 9: 4.5, 10: 5.0}


def test_a_run_without_responses_has_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.5\n")
    run = RunFiles(tmp_path)
    assert run.response_table().empty
    assert run.evaluation_table().empty
    assert run.metrics()["loss"].to_dict() == {1: 2.5}


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n[1]\n')
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2 is no JSON object"):
        RunFiles(tmp_path).response_table()


def test_a_pipe_a_device_or_an_endless_line_in_a_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.csv").write_text("step,score\n1,0.5\n")
    files = RunFiles(run)
    os.mkfifo(run / "rollouts.jsonl")
    with pytest.raises(ValueError, match=r"rollouts.jsonl: not a file but a folder, pipe or dev"):
        list(files.responses())
    (run / "rollouts.jsonl").unlink()
    (run / "rollouts.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a file but"):
        list(files.responses())
    os.mkfifo(run / "config.yaml")
    with pytest.raises(ValueError, match=r"config\.yaml: not a file but"):
        _ = files.config
    (run / "rollouts.jsonl").unlink()
    with (run / "rollouts.jsonl").open("wb") as sparse:
        sparse.truncate(2**33)
    with pytest.raises(ValueError, match="line 1 has more than 268,435,456 bytes"):
        list(files.responses())
