"""Runs of the command line on a tiny model, with a fault in them, in this process."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
import yaml
from torch import Tensor

from lrlhf.cli import run
from lrlhf.rollout import RolloutListener
from tests.faults.cases import named
from tests.faults.rewards import letters

STEPS = 4


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """What tells the user at the end, without ``error:``."""
        return f"\n{self.err}".rpartition("\nerror: ")[2].strip()


# ---- what a config can name


class Faulty:
    """A reward that goes wrong in its own way, from a given call on."""

    def __init__(self, way: str, first: int = 0, last: int = 10**9) -> None:
        self.way, self.first, self.last = way, first, last
        self.calls = 0
        self.__name__ = "faulty"

    def __call__(self, completions: Sequence[str]) -> list[Any]:
        self.calls += 1
        good: list[Any] = letters(completions)
        if not self.first < self.calls <= self.last:
            return good
        if self.way == "raise":
            raise RuntimeError("the reward is broken")
        if self.way == "hang":
            time.sleep(5)
        if self.way == "exit":
            sys.exit(3)
        return good


class Inject(L.Callback, RolloutListener):
    """Does something at a moment of the run that a test has planned.

    Moments are ``step 2`` (after it), ``phase generate 2`` (in it) and ``validation``.
    """

    plan: ClassVar[dict[str, Callable[[L.Trainer], None]]] = {}
    trainer: L.Trainer

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        Inject.trainer = trainer
        self._now("start", trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._now(f"step {trainer.global_step}", trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._now("validation", trainer)

    def on_phase(self, phase: str) -> None:
        if phase:
            self._now(f"phase {phase} {Inject.trainer.global_step + 1}", Inject.trainer)

    def _now(self, moment: str, trainer: L.Trainer) -> None:
        action = Inject.plan.pop(moment, None)
        if action is not None:
            action(trainer)


def sends(number: int) -> Callable[[L.Trainer], None]:
    return lambda _: os.kill(os.getpid(), number)


# ---- the run


def config(model_folder: str) -> dict[str, Any]:
    rewards = named("lrlhf.rewards.Rewards", functions=["tests.faults.rewards.letters"])
    return {
        "seed_everything": 1,
        "model": named(
            "lrlhf.modules.RLOO",
            policy=model_folder,
            num_generations=2,
            sampling={"max_new_tokens": 3},
            rewards=rewards,
            optimizer={"lr": 0.01},
            guard={"dump": 0},
        ),
        "data": named(
            "lrlhf.datamodules.PromptDataModule", train="prompts.jsonl", batch_size=4, val_size=2
        ),
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": STEPS,
            "max_epochs": -1,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "default_root_dir": "run",
            "logger": named("lrlhf.loggers.ResumingCSVLogger", save_dir="run/metrics"),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {"class_path": f"{__name__}.Inject"},
                named("lrlhf.callbacks.RolloutLog", dirpath="run", print_every=None),
                named("lrlhf.callbacks.EvalJSONL", dirpath="run"),
                named(
                    "lrlhf.callbacks.RLCheckpoint", dirpath="run/checkpoints", every_n_train_steps=1
                ),
                named("lrlhf.callbacks.HFExport", dirpath="run/export"),
            ],
        },
    }


class Run:
    """A folder with a config and data, which is the working directory of commands."""

    def __init__(self, folder: Path, model_folder: str) -> None:
        self.folder = folder
        self.config = config(model_folder)
        self.write_prompts([f"say {word}" for word in "abcdefghijkl"])

    def write_prompts(self, prompts: Sequence[str]) -> None:
        rows = [{"prompt": prompt, "answer": prompt[-1:]} for prompt in prompts]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (self.folder / "prompts.jsonl").write_text(text)

    def fit(self, *flags: str, **plan: Callable[[L.Trainer], None]) -> Ended:
        """Run ``lrlhf fit``; ``plan`` says what to inject: ``step_2=…``, ``phase_update_3=…``."""
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        Inject.plan = {moment.replace("_", " "): action for moment, action in plan.items()}
        kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        out, err = io.StringIO(), io.StringIO()
        try:
            with (
                contextlib.chdir(self.folder),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                status = run(["fit", "--config", "config.yaml", *flags])
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
        assert not Inject.plan, f"never came to pass: {list(Inject.plan)}"
        return Ended(status, out.getvalue(), err.getvalue())

    def set_reward(self, way: str, *, first: int, last: int = 10**9, **options: Any) -> None:
        """Have the reward go wrong; ``options`` are those of ``Rewards``."""
        arguments = {"way": way, "first": first, "last": last}
        function = named(f"{__name__}.Faulty", **arguments)
        rewards = self.config["model"]["init_args"]["rewards"]
        rewards["init_args"] = {"functions": [function], **options}

    def path(self, name: str) -> Path:
        return self.folder / "run" / name

    def last(self) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(
            self.path("checkpoints/last.ckpt"), weights_only=True, map_location="cpu"
        )
        return loaded

    def weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.last()["state_dict"]
        return weights

    def records(self) -> list[dict[str, Any]]:
        lines = self.path("rollouts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def assert_same_end(run: Run, undisturbed: Run) -> None:
    """Weights, rollouts, evaluations and metrics are those of the run without a fault."""
    assert run.last()["global_step"] == STEPS
    expected = undisturbed.weights()
    for name, value in run.weights().items():
        assert torch.equal(value, expected[name]), name
    names = ["rollouts.jsonl", "metrics/metrics.csv"]
    names += sorted(path.name for path in undisturbed.path("").glob("eval_scores_*.jsonl"))
    assert len(names) == 2 + STEPS // 2
    for name in names:
        assert run.path(name).read_bytes() == undisturbed.path(name).read_bytes(), name


def assert_intact(run: Run, steps: int) -> None:
    """What was written up to the fault can be read, and ``last.ckpt`` can be resumed from."""
    if steps:
        assert run.last()["global_step"] == steps
    if run.path("rollouts.jsonl").exists():
        seen = {record["step"] for record in run.records()}
        assert seen <= set(range(1, steps + 2))
        assert seen >= set(range(1, steps + 1))
