"""How the cost of an RLOO update grows with each size, beside how its operations grow.

A random Llama trains on given prompts and responses of exact lengths (the stored engine of
`compare_trl.py`); one size is varied at a time. Of seconds, of memory above the loaded model and of
floating-point operations (`lrlhf.models.flops`) the exponent is the slope of a line through
the logarithms: 1 is proportional. Seconds that grow faster than operations are a defect, or a
processor that leaves its cache.

Ranks may share cores, so their seconds are the processor's: each of them trains on prompts of its
own (DDP over gloo), and what it computes should not grow. Turns are those of `trl_turns.py`:
responses of one prompt, each of several turns with text of the environment between them.

    python -m benchmarks.growth [--only prompts ...] [--steps 4] [--out growth.png] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np

HERE = Path(__file__).resolve().parent
BASE = {
    "prompts": 4,
    "generations": 8,
    "prompt_length": 64,
    "new_tokens": 64,
    "vocabulary": 8192,
    "layers": 4,
    "ranks": 1,
    "turns": 0,
}
AXES: Mapping[str, Sequence[int]] = {
    "prompts": (2, 4, 8, 16),
    "generations": (2, 4, 8, 16, 32),
    "prompt_length": (64, 128, 256, 512, 1024),
    "new_tokens": (32, 64, 128, 256, 512),
    "vocabulary": (2048, 8192, 32768, 65536),
    "layers": (2, 4, 8, 16),
    "ranks": (1, 2, 4, 8),
    "turns": (1, 2, 4, 8, 16),
}


class Point(NamedTuple):
    """What one setting costs."""

    value: int
    seconds: float
    """Of a step, median over the steps; of ranks: the processor's, in one of them."""
    memory: float
    """MiB above the loaded model."""
    flops: float
    """Of the update: forward and backward passes, each prompt once."""


def main() -> None:
    """Measure every axis, print the table and draw it."""
    options = _arguments()
    if options.point is not None:
        point = _measure(json.loads(options.point), options.steps)
        sys.stdout.write(f"\n{json.dumps(point)}\n")
        return
    found: dict[str, list[Point]] = {}
    for name in options.only:
        found[name] = []
        for value in AXES[name]:
            found[name].append(_run({**BASE, name: value}, name, options.steps))
            _say(f"{name} {value}: {found[name][-1].seconds:.3f} s")
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    _say("\n" + table(found))
    if options.out is not None:
        draw(found, options.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--steps", type=int, default=4, help="that are counted, after one more")
    parser.add_argument("--out", type=Path, help="PNG")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(setting: dict[str, int], name: str, steps: int) -> Point:
    """Measure in a process of its own, whose memory nothing else has touched."""
    command = [sys.executable, "-m", "benchmarks.growth", "--steps", str(steps)]
    done = subprocess.run(
        [*command, "--point", json.dumps(setting)],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stderr[-3000:]}\nerror: {setting} ended with {done.returncode}")
    return Point(setting[name], *json.loads(done.stdout.splitlines()[-1]))


def _measure(setting: dict[str, int], steps: int) -> tuple[float, float, float]:
    sys.path.insert(0, str(HERE))
    return (_gradients_of_turns if setting["turns"] else _steps_of_rloo)(setting, steps)


def _gradients_of_turns(setting: dict[str, int], steps: int) -> tuple[float, float, float]:
    turns, measure = map(importlib.import_module, ("trl_turns", "trl_measure"))
    ids, sampled = turns.rows(setting["generations"], setting["turns"])
    policy = turns.model().train()
    memory = measure.Memory(policy)
    logprobs = turns.lrlhf_update(policy, ids, sampled)
    clock = _Seconds(time.perf_counter)
    for _ in range(steps + 1):
        policy.zero_grad()
        clock.on_train_batch_start()
        (logprobs() * sampled).sum().backward()
        clock.on_train_batch_end()
    flops = _flops(policy, 1, turns.PROMPT, setting["generations"], ids.shape[1] - turns.PROMPT)
    return clock.point(memory.peak(), flops)


class _Seconds(L.Callback):
    """Notes the seconds of every iteration, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._before = clock, 0.0
        self._found: list[float] = []

    def on_train_batch_start(self, *_: object) -> None:
        """Begin an iteration."""
        self._before = self._clock()

    def on_train_batch_end(self, *_: object) -> None:
        """End it."""
        self._found.append(self._clock() - self._before)

    def point(self, memory: Mapping[str, float], flops: float) -> tuple[float, float, float]:
        """Return what `Point` has beside its value; the first iteration does not count."""
        return statistics.median(self._found[1:]), memory["training"], flops


def _steps_of_rloo(setting: dict[str, int], steps: int) -> tuple[float, float, float]:
    models, rloo = map(importlib.import_module, ("trl_models", "trl_rloo"))
    models.SIZES["growth"] = {
        "hidden_size": 256,
        "num_hidden_layers": setting["layers"],
        "vocab_size": setting["vocabulary"],
    }
    words = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        batches = (steps + 1) * setting["ranks"]
        wanted = setting["prompts"] * setting["prompt_length"] * (batches + 1)
        lines = [
            json.dumps({"question": "".join(words.choices("abcdefgh ", k=400)) + str(index)})
            for index in range(math.ceil(wanted / 380))
        ]
        (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
        options = argparse.Namespace(
            **{name: setting[name] for name in ("prompts", "generations", "prompt_length")},
            **{"new_tokens": setting["new_tokens"], "data": folder / "data.jsonl"},
            **{"model": "growth", "engine": "stored", "inexact": False, "dtype": "float32"},
            **{"warm_up": 1, "steps": batches - 1, "seed": 0, "clip": 1.0, "lr": 1e-6},
            **{"beta": 0.05, "lrlhf_checkpointing": False, "micro_batch_tokens": 4096},
            micro_batch=setting["generations"],
        )
        rloo.prepare(options, folder)
        options.steps = steps
        clock = _Seconds(time.process_time if setting["ranks"] > 1 else time.perf_counter)
        run = rloo.run_lrlhf(options, folder, [clock], ranks=setting["ranks"])
        policy = rloo.lrlhf_policy(options, folder)
    sizes = [setting[name] for name in ("prompts", "prompt_length", "generations", "new_tokens")]
    return clock.point(run.memory, _flops(policy, *sizes))


def _flops(policy: Any, prompts: int, length: int, responses: int, new_tokens: int) -> float:
    flops = importlib.import_module("lrlhf.models.flops")
    rows = prompts * responses
    tokens = prompts * length + rows * new_tokens
    pairs = prompts * length**2 + rows * ((length + new_tokens) ** 2 - length**2)
    return float(flops.training_flops(policy, tokens, pairs))


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """Return the slope of the straight line through the logarithms, by least squares."""
    return float(np.polyfit(np.log(values), np.log(costs), 1)[0])


def table(found: Mapping[str, Sequence[Point]]) -> str:
    """Write the exponents of every axis in Markdown."""
    lines = ["| size | values | seconds | operations | memory |", "|---|---|---:|---:|---:|"]
    for name, points in found.items():
        values = [point.value for point in points]
        slopes = [
            exponent(values, [getattr(point, cost) for point in points])
            for cost in ("seconds", "flops", "memory")
        ]
        shown = " | ".join(f"{slope:.2f}" for slope in slopes)
        lines.append(f"| {name.replace('_', ' ')} | {values[0]} to {values[-1]} | {shown} |")
    return "\n".join(lines)


def draw(found: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draw seconds, memory and operations, each in units of its first point."""
    ticker = importlib.import_module("matplotlib.ticker")
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(14, 6.5), layout="constrained"
    )
    panels = figure.subplots(2, 4).flat
    for axes, (name, points) in zip(panels, found.items(), strict=False):
        values = [point.value for point in points]
        for cost, label, style in (
            ("flops", "operations", "k--"),
            ("seconds", "seconds", "o-"),
            ("memory", "memory", "s-"),
        ):
            costs = [getattr(point, cost) for point in points]
            slope = exponent(values, costs)
            relative = [value / costs[0] for value in costs]
            axes.plot(values, relative, style, label=f"{label}: {slope:.2f}")
        axes.set(xscale="log", yscale="log", xlabel=name.replace("_", " "))
        axes.set_xticks(values, [str(value) for value in values])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.minorticks_off()
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.9), max(high, 2.1))  # a few percent shall not look steep
        axes.set_ylabel("times the first")
        axes.legend(title="exponent", fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
