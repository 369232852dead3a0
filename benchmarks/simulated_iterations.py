"""Whether the model of an iteration's time that ``lrlhf plan --gpus`` uses agrees with real runs.

    OMP_NUM_THREADS=1 nice -n -15 taskset -c 0 python benchmarks/simulated_iterations.py
    OMP_NUM_THREADS=1 nice -n -15 python benchmarks/simulated_iterations.py --engine vllm

RLOO with Llamas of one to ten million random weights on one CPU core (with vLLM: one for the
trainer and one for the server). The rates of `Rates` are fitted to the phases (``perf/*_s``) of
some settings, by non-negative least squares of relative errors. Then the iteration times of other
settings are predicted: other batch sizes, lengths and model sizes, and with vLLM generation one
iteration ahead. Response lengths are those that the runs had. Each setting runs ``--repeats``
times, all settings by turns; a time is the median over the runs of the median over their
iterations. The sum of the phases is compared. Where several processes compute at once, their common
time is multiplied by how much slower a processor is while another one is busy, which is measured
first with products of matrices: processors of a virtual machine may share a core. With ``--clock
cpu`` phases are measured in CPU time of this process, which other programs disturb less; that needs
``--engine transformers``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from transformers import LlamaConfig, LlamaForCausalLM
from trl_models import byte_tokenizer

from lrlhf.callbacks import RolloutLog, VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.models import CausalLM, packs, plain_model
from lrlhf.models.loading.meta import skeleton
from lrlhf.modules import RLOO
from lrlhf.modules.policy import iteration
from lrlhf.modules.policy.iteration import Quantity
from lrlhf.modules.settings import Reference, Update
from lrlhf.planning.batch_sizes import planned_batches
from lrlhf.planning.simulation.hardware import GPUS, Rates
from lrlhf.planning.simulation.iteration import Layout, Links, Simulation, Workload
from lrlhf.planning.simulation.workload import Question, workload_and_machine
from lrlhf.planning.strategy_shares import Strategy
from lrlhf.rollout import Sampling, TransformersEngine, VLLMServerEngine

VOCABULARY, WARM_UP, ITERATIONS = 1024, 1, 4
FREE = {
    "step_s": 0.0,
    "layer_s": 0.0,
    "sequence_s": 0.0,
    "decode_flops": np.inf,
    "prefill_flops": np.inf,
    "pass_layer_s": 0.0,
    "forward_flops": np.inf,
    "update_flops": np.inf,
    "optimizer_s": 0.0,
}
"""Rates of hardware that takes no time. What reads memory is left out: on one core it computes."""


class Setting(NamedTuple):
    """A run.

    Attributes:
        layers: Of the model.
        hidden: Its width.
        prompts: Per iteration.
        copies: Responses to each.
        prompt_tokens: Of each prompt.
        new_tokens: At most, of a response.
        max_staleness: Iterations that responses are generated ahead.
        replicas: vLLM servers.
    """

    layers: int
    hidden: int
    prompts: int
    copies: int
    prompt_tokens: int
    new_tokens: int
    max_staleness: int = 0
    replicas: int = 1


class Measured(NamedTuple):
    """Seconds of a run's iterations, medians."""

    phases: dict[str, float]
    seconds: float
    cpu_seconds: float


FITTED = (
    Setting(4, 128, 8, 4, 32, 32),
    Setting(4, 128, 16, 4, 32, 32),
    Setting(8, 128, 8, 4, 64, 16),
    Setting(4, 256, 4, 4, 32, 32),
    Setting(8, 256, 4, 4, 24, 48),
    Setting(4, 256, 4, 8, 64, 24),
)
CHECKED = {
    "transformers": (
        Setting(6, 192, 10, 4, 40, 24),
        Setting(4, 256, 6, 8, 16, 20),
        Setting(8, 320, 4, 4, 24, 40),
        Setting(12, 128, 12, 2, 48, 32),
    ),
    "vllm": (
        Setting(6, 192, 10, 4, 40, 24),
        Setting(8, 320, 4, 4, 24, 40),
        Setting(6, 192, 10, 4, 40, 24, max_staleness=1),
        Setting(8, 256, 6, 8, 24, 40, max_staleness=1),
        Setting(6, 192, 10, 4, 40, 24, max_staleness=2),
        Setting(6, 256, 16, 8, 32, 32, replicas=2),
    ),
}


def main() -> None:
    """Measure, fit, predict, and print the tables."""
    options = _parse()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    checked = CHECKED[options.engine]
    settings = (*FITTED, *checked)
    if options.clock == "cpu":
        iteration.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measured = dict(zip(settings, _measure(settings, options, folder), strict=True))
        work = {
            setting: _workload(setting, options.engine, folder / str(number))
            for number, setting in enumerate(settings)
        }
    slowdown = 1.0 if options.engine == "transformers" else _slowdown()
    _say(f"a processor while the other one is busy takes {slowdown:.2f} times as long")
    rates, transfer, reward = _fit({one: (work[one], measured[one]) for one in FITTED})
    _say("\n" + "\n".join(f"{name}: {getattr(rates, name):.4g}" for name in FREE))
    _say(f"push: {transfer:.4g} s; reward: {reward:.4g} s per response\n")
    _say("| setting | run | predicted s | measured s | error | CPU s |")
    _say("|---|---|---:|---:|---:|---:|")
    for one in settings:
        named = replace(work[one], reward_s=reward * one.prompts * one.copies)
        simulation = Simulation(named, rates, Links(push_s=transfer))
        layout = Layout(
            1,
            one.replicas,
            together=one.max_staleness == 0,
            max_staleness=one.max_staleness,
        )
        predicted, found = simulation.seconds(layout), measured[one]
        predicted += (slowdown - 1) * _common_seconds(simulation, layout)
        kind = "fitted" if one in FITTED else "predicted"
        _say(
            f"| {_words(one, work[one])} | {kind} | {predicted:.3f} | {found.seconds:.3f} | "
            f"{predicted / found.seconds - 1:+.0%} | {found.cpu_seconds:.3f} |"
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=list(CHECKED), default="transformers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument(
        "--folder", help="keep the runs there, and fit those that are there already"
    )
    return parser.parse_args()


def _measure(
    settings: Sequence[Setting], options: argparse.Namespace, folder: Path
) -> list[Measured]:
    """Run all settings by turns; what a folder has measured already is read."""
    path = folder / "measured.json"
    if path.exists():
        return [Measured(*one) for one in json.loads(path.read_text())]
    rounds = []
    for number in range(options.repeats):
        rounds.append(list[Measured]())
        for place, setting in enumerate(settings):
            rounds[-1].append(_run(setting, options.engine, folder / str(place)))
            _say(f"round {number + 1}: {setting}: {rounds[-1][-1].seconds:.3f} s")
    medians = [_median(runs) for runs in zip(*rounds, strict=True)]
    path.write_text(json.dumps(medians))
    return medians


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _words(setting: Setting, work: Workload) -> str:
    return (
        f"{work.policy.number / 1e6:.1f} M weights, {setting.prompts} × {setting.copies} responses "
        f"of {work.lengths.mean:.0f} (up to {setting.new_tokens}) tokens after "
        f"{setting.prompt_tokens}, {setting.replicas} replicas, K = {setting.max_staleness}"
    )


# ------------------------------------------------------------------ the runs


class _Clock(L.Callback):
    """Reads what each iteration measured of itself."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._cpu = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin to count CPU time."""
        self._cpu = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Keep the phases of an iteration."""
        row = {
            name.removeprefix("perf/").removesuffix("_s"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("perf/") and name.endswith("_s")
        }
        row.pop("tokens_per", None)
        self.rows.append({**row, "cpu": time.process_time() - self._cpu})


def _scores(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completion) % 7) for completion in completions]


def _source(setting: Setting, folder: Path) -> str:
    """Write the model once, and return where it is."""
    path = folder / "model"
    if not path.exists():
        tokenizer = byte_tokenizer(VOCABULARY)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=setting.hidden,
            intermediate_size=3 * setting.hidden,
            num_hidden_layers=setting.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def _run(setting: Setting, engine: str, folder: Path) -> Measured:
    folder.mkdir(exist_ok=True)
    longest = setting.prompt_tokens + setting.new_tokens + 8
    server = engine == "vllm"
    module = RLOO(
        _source(setting, folder),
        _scores,
        engine=VLLMServerEngine(max_model_len=longest, kv_cache_gib=0.3, replicas=setting.replicas)
        if server
        else TransformersEngine(),
        num_generations=setting.copies,
        sampling=Sampling(max_new_tokens=setting.new_tokens),
        reference=Reference(kl_coef=0.05),
        update=Update(num_minibatches=2),
        max_staleness=setting.max_staleness,
        seed=1,
    )
    steps = WARM_UP + ITERATIONS
    letters = np.random.default_rng(0).integers(97, 123, (setting.prompts * steps, longest))
    rows = [{"prompt": bytes(row[: setting.prompt_tokens].tolist()).decode()} for row in letters]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    log = folder / "rollouts.jsonl"
    log.unlink(missing_ok=True)
    clock = _Clock()
    callbacks = [
        clock,
        RolloutLog(dirpath=folder, print_every=None),
        *([VLLMWeightSync()] if server else []),
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=callbacks,
    )
    data = PromptDataModule(train=str(folder / "prompts.jsonl"), batch_size=setting.prompts)
    trainer.fit(module, datamodule=data)
    kept = clock.rows[WARM_UP:]
    middle = {name: statistics.median(row.get(name, 0.0) for row in kept) for name in kept[0]}
    cpu = middle.pop("cpu")
    whole = statistics.median(sum(row.values()) - row["cpu"] for row in kept)
    return Measured(middle, whole, cpu)


def _median(runs: Sequence[Measured]) -> Measured:
    names = runs[0].phases
    return Measured(
        {name: statistics.median(run.phases[name] for run in runs) for name in names},
        statistics.median(run.seconds for run in runs),
        statistics.median(run.cpu_seconds for run in runs),
    )


# ------------------------------------------------------------------ the machine


def _multiply(rounds: int) -> float:
    """Return the seconds of a fixed number of products, on one thread."""
    torch.set_num_threads(1)
    left, right = torch.ones(512, 512), torch.ones(512, 512)
    begin = time.perf_counter()
    for _ in range(rounds):
        torch.mm(left, right)
    return time.perf_counter() - begin


def _slowdown(rounds: int = 2000) -> float:
    """Return how many times as long a process computes while another one does so too."""
    _multiply(rounds)
    alone = statistics.median(_multiply(rounds) for _ in range(3))
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        pool.map(_multiply, [rounds] * 2, chunksize=1)  # both have imported everything
        both = pool.map(_multiply, [3 * rounds] * 2, chunksize=1)
    return max(1.0, statistics.mean(both) / 3 / alone)


def _common_seconds(simulation: Simulation, layout: Layout) -> float:
    """Return the seconds in which two processes compute: servers, or trainer and server."""
    draws = simulation.draws(layout)
    generation = statistics.mean(one.generate for one in draws)
    if layout.max_staleness == 0:
        return generation if layout.replicas > 1 else 0.0
    training = statistics.mean(one.logprob + one.update for one in draws)
    return min(generation, training)


# ------------------------------------------------------------------ the model


def _workload(setting: Setting, engine: str, folder: Path) -> Workload:
    """Describe a run as ``lrlhf plan`` does, but for what a CPU in 32 bits does differently."""
    name = "VLLMServerEngine" if engine == "vllm" else "TransformersEngine"
    options = {
        "policy": _source(setting, folder),
        "rewards": {},
        "num_generations": setting.copies,
        "engine": {"class_path": f"lrlhf.rollout.{name}"},
        "sampling": {"max_new_tokens": setting.new_tokens},
        "reference": {"kl_coef": 0.05},
        "update": {**asdict(Update()), "num_minibatches": 2},
    }
    model = {"class_path": "lrlhf.modules.RLOO", "init_args": options}
    plan = planned_batches(setting.prompts, model, Quantity("processes", 1, "one"))
    lengths = str(folder / "rollouts.jsonl")
    question = Question(plan, GPUS["h100"], Strategy(), response_lengths=lengths)
    data = {"max_prompt_tokens": setting.prompt_tokens}
    work, _, _ = workload_and_machine(model, data, question)
    plain = plain_model(skeleton(CausalLM(source=_source(setting, folder)), on_gpu=False))
    # in 32 bits the probabilities of TransformersEngine are the policy's own: only the reference
    # is asked
    passes = work.passes[0 if engine == "vllm" else 1 :]
    return replace(work, passes=passes, shares_prompts=packs(plain), micro_batch_tokens=2**31)


def _fit(runs: dict[Setting, tuple[Workload, Measured]]) -> tuple[Rates, float, float]:
    """Fit all rates at once, and take the medians of pushes and of a response's reward."""
    rows: list[NDArray[np.float64]] = []
    for work, found in runs.values():
        for phase in ("generate", "logprob", "update"):
            seconds = found.phases[phase]
            rows.append(np.array([_unit(work, name, phase) / seconds for name in FREE]))
    unknown, _ = nnls(np.array(rows), np.ones(len(rows)))
    fitted = {
        name: value if free == 0 else 1 / max(value, 1e-30)
        for (name, free), value in zip(FREE.items(), unknown.tolist(), strict=True)
    }
    pushes = [found.phases.get("sync", 0.0) for _, found in runs.values()]
    rewards = [
        found.phases["reward"] / (work.prompts * work.copies) for work, found in runs.values()
    ]
    rates = Rates(**fitted, read_bytes=np.inf)
    return rates, statistics.median(pushes), statistics.median(rewards)


def _unit(work: Workload, name: str, phase: str) -> float:
    """Return a phase's seconds where one thing takes a second, or does one FLOP in one."""
    rates = Rates(**{**FREE, name: 1.0}, read_bytes=np.inf)
    draws = Simulation(work, rates).draws(Layout(1, 1))
    return float(np.mean([getattr(one, phase) for one in draws]))


if __name__ == "__main__":
    main()
