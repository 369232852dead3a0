"""Whether a process that trains for long keeps more and more: memory, objects, files, threads.

python -m tests.faults.soak --kind PPO --iterations 500
"""

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil

from lrlhf.callbacks import EMA, EvalJSONL, KLControl, RLCheckpoint, RolloutLog, RunReport
from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.modules import PPO, RLOO, Advantage, RewardModel, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model, build_tokenizer
from tests.faults.rewards import letters

KINDS = ("RLOO", "PPO", "RewardModel")
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

    def __init__(self, leak: Callable[[], object] | None = None) -> None:
        self.samples: list[Sample] = []
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


def train(kind: str, folder: Path, *, iterations: int) -> list[Sample]:
    """Train a tiny model with all that a run usually has, and return the samples."""
    measure = Measure()
    module, data, callbacks = _parts(kind, folder)
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_steps=iterations,
        max_epochs=-1,
        log_every_n_steps=1,
        check_val_every_n_epoch=None,
        val_check_interval=VALIDATE_EVERY,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=ResumingCSVLogger(folder / "metrics"),
        callbacks=[
            *callbacks,
            EMA(decay=0.9),
            EvalJSONL(folder),
            RunReport(folder),
            measure,
            RLCheckpoint(folder / "checkpoints", every_n_train_steps=VALIDATE_EVERY),
        ],
    )
    trainer.fit(module, data)
    return measure.samples


def _parts(
    kind: str, folder: Path
) -> tuple[L.LightningModule, L.LightningDataModule, list[L.Callback]]:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_language_model(tokenizer, hidden_size=16, intermediate_size=16)
    rows = [
        {"prompt": f"say {word}", "chosen": word, "rejected": word.upper()}
        for word in "abcdefghijklmnop"
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "RewardModel":
        for part in (model, tokenizer):
            part.save_pretrained(folder / "model")
        pairs = PreferenceDataModule(train=str(path), val=str(path), batch_size=2)
        return RewardModel(str(folder / "model")), pairs, []
    prompts = PromptDataModule(
        train=str(path), val=str(path), batch_size=2, val_batch_size=16, prompt_column="prompt"
    )
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=3),
    }
    callbacks = [KLControl(target=0.5), RolloutLog(folder, print_every=None)]
    if kind == "RLOO":
        return RLOO(model, Rewards([letters]), **options), prompts, callbacks
    gae = Advantage(estimator="gae", scale_rewards="std")
    ppo = PPO(model, Rewards([letters]), advantage=gae, update=Update(loss="token_clip"), **options)
    return ppo, prompts, callbacks


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="RLOO", help="what is trained")
    parser.add_argument("--iterations", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        L.seed_everything(1, verbose=False)
        samples = train(options.kind, Path(folder), iterations=options.iterations)
    grown = growth(samples)
    found = excesses(grown)
    told = {"kind": options.kind, "iterations": options.iterations, "growth": grown}
    print(json.dumps(told | {"excesses": found}))  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
