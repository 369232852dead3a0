"""How recipes differ, and what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lrlhf.apps.lab.compare import compare_runs
from lrlhf.apps.lab.compare.report import Change, cost_of, same_seeds
from tests.apps.lab.compare.runs import scored, write_run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, seed: int, **options: Any) -> Path:
    config = {
        "seed_everything": seed,
        "model": {"class_path": "RLOO", "init_args": {"lr": 1e-5, **options}},
        "trainer": {
            "default_root_dir": name,
            "logger": [{"class_path": "CSVLogger"}, {"init_args": {"project": name}}],
            "callbacks": [{"class_path": "EMA"}],
        },
    }
    return write_run(name, scored([0.0, 1.0]), config=config)


def test_only_what_differs_is_shown_and_seeds_folders_and_loggers_apart() -> None:
    report = compare_runs({"a": [run("a", 1)], "b": [run("b", 2, lr=2e-5, clip=0.1)]})
    (diff,) = report.configs
    assert diff.changes == [
        Change("model.init_args.lr", "1e-05", "2e-05"),
        Change("model.init_args.clip", "(not set)", "0.1"),
    ]
    logger = "trainer.logger[1].init_args.project"
    assert diff.apart == ["seed_everything", "trainer.default_root_dir", logger]
    assert (diff.within, diff.missing) == ([], [])


def test_seeds_of_a_side_that_are_none_are_said() -> None:
    sides = {"a": [run("a1", 1), run("a2", 1)], "b": [run("b1", 1), run("b2", 2, lr=3e-5)]}
    report = compare_runs(sides)
    assert report.configs[0].within == ["model.init_args.lr"]
    assert same_seeds(report.comparisons[0].a) == ["a2 and a1 (seed 1)"]
    assert same_seeds(report.comparisons[0].b) == []


def test_a_run_without_a_config_is_named() -> None:
    sides = {"a": [run("a", 1)], "b": [write_run("b", scored([0.0, 1.0]))]}
    assert compare_runs(sides).configs[0].missing == ["b"]


def test_costs_are_added_up() -> None:
    folder = run("a", 1)
    (folder / "metrics.csv").write_text(
        "step,rollout/score,on_train_batch_end/allocated_bytes.all.peak\n"
        "2,0.5,1073741824\n4,0.5,3221225472\n4,,\n"
    )
    # logged in every other of 4 steps; tokens_per_s is no time
    (folder / "timings.csv").write_text(
        "step,perf/generate_s,perf/tokens_per_s\n2,1.0,900\n4,2.0,800\n5,1"
    )
    lines = [{"step": 1, "length": 3}, {"step": 1, "length": 5}]
    (folder / "rollouts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    cost = cost_of(folder)
    assert (cost.steps, cost.responses, cost.tokens) == (4, 2, 8)
    assert cost.seconds == {"generate": pytest.approx(6.0)}
    assert cost.total_seconds == pytest.approx(6.0)
    assert cost.peak_gib == 3.0
    # what the run itself has logged counts too
    (folder / "timings.csv").write_text("step,perf/memory_gib\n2,1.5\n4,3.5\n")
    assert cost_of(folder).peak_gib == 3.5
    (folder / "metrics.csv").write_text("step,rollout/score\n4,0.5\n")
    assert cost_of(folder).peak_gib == 3.5
    (folder / "timings.csv").write_text("step,perf/generate_s\n2,soon\n")
    with pytest.raises(ValueError, match="generate_s is 'soon', no number"):
        cost_of(folder)


def test_what_no_file_tells_is_unknown() -> None:
    assert cost_of(run("a", 1)) == (None, None, None, {}, None)
