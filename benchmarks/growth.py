"""How the cost of an RLOO update grows with each size, beside how its operations grow.

A random Llama trains on given prompts and responses of exact lengths (the stored engine of
`compare_trl.py`); one size is varied at a time. Of seconds, of memory above the loaded model and of
floating-point operations (`lrlhf.models.flops`) the exponent is the slope of a line through
the logarithms: 1 is proportional. Seconds that grow faster than operations are a defect, or a
processor that leaves its cache.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
BASE = {
    "prompts": 4,
    "generations": 8,
    "prompt_length": 64,
    "new_tokens": 64,
    "vocabulary": 8192,
    "layers": 4,
}
AXES: Mapping[str, Sequence[int]] = {
    "prompts": (2, 4, 8, 16),
    "generations": (2, 4, 8, 16, 32),
    "prompt_length": (64, 128, 256, 512, 1024),
    "new_tokens": (32, 64, 128, 256, 512),
    "vocabulary": (2048, 8192, 32768, 65536),
    "layers": (2, 4, 8, 16),
}


class Point(NamedTuple):
    """What one setting costs."""

    value: int
    seconds: float
    """Of log-probabilities and update, median over the steps."""
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
    models, rloo, report = map(importlib.import_module, ("trl_models", "trl_rloo", "trl_report"))
    models.SIZES["growth"] = {
        "hidden_size": 256,
        "num_hidden_layers": setting["layers"],
        "vocab_size": setting["vocabulary"],
    }
    words = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wanted = setting["prompts"] * setting["prompt_length"] * (steps + 2)
        lines = [
            json.dumps({"question": "".join(words.choices("abcdefgh ", k=400)) + str(index)})
            for index in range(math.ceil(wanted / 380))
        ]
        (folder / "data.jsonl").write_text("\n".join(lines), encoding="utf-8")
        options = argparse.Namespace(
            **{name: setting[name] for name in ("prompts", "generations", "prompt_length")},
            **{"new_tokens": setting["new_tokens"], "data": folder / "data.jsonl"},
            **{"model": "growth", "engine": "stored", "inexact": False, "dtype": "float32"},
            **{"warm_up": 1, "steps": steps, "seed": 0, "clip": 1.0, "lr": 1e-6, "beta": 0.05},
            **{"micro_batch": setting["generations"], "micro_batch_tokens": 4096},
            **{"lrlhf_checkpointing": False},
        )
        rloo.prepare(options, folder)
        run = rloo.run_lrlhf(options, folder)
        policy = rloo.lrlhf_policy(options, folder)
    seconds = statistics.median(report.training_seconds(run))
    return seconds, run.memory["training"], _flops(policy, setting)


def _flops(policy: Any, setting: dict[str, int]) -> float:
    flops = importlib.import_module("lrlhf.models.flops")
    prompt, response = setting["prompt_length"], setting["new_tokens"]
    rows = setting["prompts"] * setting["generations"]
    tokens = setting["prompts"] * prompt + rows * response
    pairs = setting["prompts"] * prompt**2 + rows * ((prompt + response) ** 2 - prompt**2)
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
        figsize=(11, 6.5), layout="constrained"
    )
    panels = figure.subplots(2, 3).flat
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
        axes.set_ylabel("times the first")
        axes.legend(title="exponent", fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
