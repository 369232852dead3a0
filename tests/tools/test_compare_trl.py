"""The comparison with TRL compares the same work, or prints no ratio."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("trl_report")


def _comparison(report: ModuleType, loss: float, weights_apart: float | None) -> object:
    """Two systems whose second step has a loss of 0.5, and ``loss``."""
    steps = {"lrlhf": [0.7, 0.5], "trl": [0.7, loss]}
    runs = {
        system: [report.Run(system, steps=[{"loss": value, "grad_norm": 2.0} for value in values])]
        for system, values in steps.items()
    }
    return report.Comparison(runs, weights_apart, rows=8)


@pytest.mark.parametrize(
    ("loss", "weights_apart", "named"),
    [
        (0.50001, 0.001, []),
        (0.501, 0.001, ["step 2: loss 0.5 beside 0.501"]),
        (math.nan, 0.001, ["step 2: loss"]),
        (0.5, 0.25, ["apart by 0.25"]),
        (0.5, math.nan, ["weights"]),
        (0.501, 0.25, ["step 2", "weights"]),
        (0.9, None, []),  # responses were drawn, so that nothing has to agree
    ],
)
def test_a_difference_of_rounding_alone_is_equal_work(
    report: ModuleType, loss: float, weights_apart: float | None, named: list[str]
) -> None:
    differences = _comparison(report, loss, weights_apart).differences(  # type: ignore[attr-defined]
        report.TOLERANCES["float32"]
    )
    assert len(differences) == len(named)
    for line, part in zip(differences, named, strict=True):
        assert part in line


@pytest.mark.parametrize("weights_apart", [0.001, None])  # None: responses were drawn
def test_fewer_steps_of_one_are_unequal_work(
    report: ModuleType, weights_apart: float | None
) -> None:
    comparison: Any = _comparison(report, 0.5, weights_apart)
    comparison.runs["trl"][0].steps.pop()
    assert comparison.differences(report.TOLERANCES["float32"]) == [
        "round 1: 2 steps beside 1",
    ]
    assert "| 1 | 0.7 | 0.7 |" in report.agreement_table(comparison)


def test_the_gap_of_weights_is_relative_to_the_way(report: ModuleType, tmp_path: Path) -> None:
    del report
    measure = importlib.import_module("trl_measure")
    paths = [tmp_path / f"{name}.pt" for name in ("initial", "first", "second")]
    for path, values in zip(paths, ([0.0, 0.0], [3.0, 4.0], [3.0, 3.0]), strict=True):
        torch.save({"w": torch.tensor(values)}, path)
    assert measure.weight_gap(*paths) == pytest.approx(1 / 5)


# runs of both systems in one process, whose imports take longer than they do
_DRIVER = """
import argparse, sys
import compare_trl, trl_texts
from lrlhf.modules import OptimizerConfig

def in_process(options, folder, system):
    part = compare_trl.PARTS[options.command]
    return (part.run_lrlhf if system == "lrlhf" else part.run_trl)(options, folder)

compare_trl._run_child = in_process
command = sys.argv
shared = ["--model", "tiny", "--repeats", "1", "--steps", "2"]
texts = [*shared, "--batch-size", "2", "--max-length", "64"]
rloo = [*shared, "--prompts", "2", "--generations", "2", "--micro-batch", "2"]
# enough tokens that scores differ in every step: else gradients are nothing but rounding
rloo += ["--new-tokens", "48"]
for name, options in (("rloo", rloo), ("reward", texts), ("dpo", texts), ("sft", texts)):
    sys.argv = ["compare_trl.py", name, "--data", command[1], *options]
    compare_trl.main()
print("UNEQUAL")
# a warm-up of one of the two: the case that once went unseen
trl_texts.optimizer_config = lambda options: OptimizerConfig(lr=options.lr, warmup_steps=1)
sys.argv = ["compare_trl.py", "reward", "--data", command[1], *texts]
compare_trl.main()
"""


@pytest.mark.slow
def test_both_systems_do_the_same_work(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    data = tmp_path / "rows.jsonl"
    rows = [
        {
            "question": f"{n} + 2",
            "answer": f"{n + 2}",
            "chosen": f"Q A{n}",
            "rejected": f"Q B{n * 7}",
        }
        for n in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(data)],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    equal, _, unequal = done.stdout.partition("UNEQUAL")
    assert equal.count("| whole step, s |") == 4, done.stdout + done.stderr
    assert done.returncode == 1
    assert "step 2: loss" in unequal
    assert "whole step, s" not in unequal
