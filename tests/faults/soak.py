"""Whether a process that trains for long keeps more and more: memory, objects, files, threads.

python -m tests.faults.soak --case ppo --iterations 500
"""

import argparse
import contextlib
import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import psutil
import yaml

from lrlhf.cli import run
from tests.faults.cases import CASES, Stage

WARM_UP = 100
"""Iterations until caches are filled and the allocator has found its size."""
EVERY = 10
"""Iterations between two samples."""
VALIDATE_EVERY = 50
LIMITS = {"rss": 2048.0, "objects": 0.25, "descriptors": 0.01, "threads": 0.01}
"""Largest growth per iteration: bytes, Python objects, open files, threads."""


@dataclass(frozen=True)
class Sample:
    """What the process holds after some iterations."""

    iteration: int
    rss: int
    """Bytes of memory that are its own."""
    objects: int
    """Python objects that can refer to others."""
    descriptors: int
    threads: int


class Measure(L.Callback):
    """Takes samples of the process.

    Args:
        leak: Makes what is kept for ever, once per iteration; None: nothing is.
    """

    taken: ClassVar[list[Sample]] = []
    """Of the last one that was made."""

    def __init__(self, leak: Callable[[], object] | None = None) -> None:
        Measure.taken = self.samples = []
        self._leak = leak
        self._kept: list[object] = []
        self._process = psutil.Process()
        self._libc = ctypes.CDLL(None)

    def on_train_start(self, *_: Any) -> None:
        # what is there already need not be gone through each time
        gc.collect()
        gc.freeze()

    def on_train_end(self, *_: Any) -> None:
        gc.unfreeze()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._leak is not None:
            self._kept.append(self._leak())
        if trainer.global_step % EVERY:
            return
        gc.collect()
        # what the allocator keeps for later looks like a leak, and is none
        self._libc.malloc_trim(0)
        self.samples.append(
            Sample(
                iteration=trainer.global_step,
                rss=self._process.memory_info().rss,
                # the samples themselves grow by one each time
                objects=len(gc.get_objects()) - len(self.samples),
                descriptors=self._process.num_fds(),
                threads=self._process.num_threads(),
            )
        )


def growth(samples: Sequence[Sample], *, warm_up: int = WARM_UP) -> dict[str, float]:
    """Fit a line to each quantity, warm-up left out; returns what it grows by per iteration."""
    late = [sample for sample in samples if sample.iteration > warm_up]
    iterations = [sample.iteration for sample in late]
    rows = [asdict(sample) for sample in late]
    return {
        name: float(np.polyfit(iterations, [row[name] for row in rows], 1)[0]) for name in LIMITS
    }


def excesses(grown: dict[str, float]) -> list[str]:
    """Name what grows by more than its limit."""
    return [
        f"{name} grows by {grown[name]:.3g} per iteration, and {limit:g} is the limit"
        for name, limit in LIMITS.items()
        if grown[name] > limit
    ]


def train(case: str, folder: Path, iterations: int) -> list[Sample]:
    """Train a case with all that its runs have, and return the samples."""
    stage = Stage(folder / "stage")
    stage.build()
    config = stage.config(CASES[case])
    config["data"]["init_args"]["num_workers"] = 0  # their pipes come and go
    trainer = config["trainer"]
    trainer |= {"max_steps": iterations, "val_check_interval": VALIDATE_EVERY}
    for callback in trainer["callbacks"]:
        if "KillPoint" in callback["class_path"]:
            callback |= {"class_path": "tests.faults.soak.Measure"}
        if "RLCheckpoint" in callback["class_path"]:
            callback["init_args"]["every_n_train_steps"] = VALIDATE_EVERY
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with contextlib.chdir(folder):
        status = run(["fit", "--config", "config.yaml"])
    if status:
        raise SystemExit(status)
    return sys.modules["tests.faults.soak"].Measure.taken


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="rloo", help="what is trained")
    parser.add_argument("--iterations", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        grown = growth(train(options.case, Path(folder), options.iterations))
    found = excesses(grown)
    told = {"case": options.case, "iterations": options.iterations, "growth": grown}
    print(json.dumps(told | {"excesses": found}))  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
