"""Memory and time of `token_logprobs` beside the plain ways to get log-probabilities.

    python benchmarks/logprob_memory.py --vocabularies 50000 100000 152000 260000 --out results

Forward and backward pass for 8192 tokens, with the gradients of the hidden states and the weight:

- ``naive``: all logits, a float32 log-softmax over them, the chosen entry;
- ``rows``: all logits, then log-sum-exp for one text of 512 tokens after the other, as TRL does it;
- ``torch``: ``torch.nn.functional.linear_cross_entropy`` in the chunks that it chooses itself;
- ``lrlhf``: `lrlhf.functional.token_logprobs`.

Every measurement has a process of its own; the methods take turns, and medians are shown. Memory is
the most that the process ever held above what it held when the inputs existed. A method that needs
more than is free is not run, and the table says so. All methods must agree, or the script fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lrlhf.functional import token_logprobs

TEXT_TOKENS = 512
"""Tokens in a text of the method ``rows``."""
COPIES_OF_LOGITS = {"naive": 3, "rows": 5, "torch": 1, "lrlhf": 1}
"""In float32, that are alive at the same time in the backward pass; ours are of a chunk only."""
IN_CHUNKS = ("torch", "lrlhf")
LogprobFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measurement:
    """One forward and backward pass."""

    seconds: float
    forward_seconds: float
    cpu_seconds: float
    """Of all threads; what other programs do changes it least."""
    peak_gib: float
    """Above what was held before."""
    checks: list[float]
    """Mean log-probability, norms of the gradients."""


@dataclass(frozen=True)
class Row:
    """One line of the table: medians, or why there are none."""

    vocabulary: int
    method: str
    seconds: float | None
    forward_seconds: float | None
    cpu_seconds: float | None
    peak_gib: float | None
    needs_gib: float
    runs: list[Measurement]


def main() -> None:
    """Measure in child processes and report."""
    options = _arguments()
    if options.child is not None:
        sys.stdout.write(json.dumps(asdict(measure(options, options.child))) + "\n")
        return
    rows = [row for size in options.vocabularies for row in compare(options, size)]
    sys.stdout.write(table(rows))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(options), "rows": [asdict(row) for row in rows]}
        path = options.out / "logprob_memory.json"
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        plot(rows, options.out / "logprob_memory.png")


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute all logits and normalize all of them."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0]


def by_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute all logits and normalize one text after the other."""
    logits = hidden @ weight.T
    chosen = logits.gather(1, targets[:, None])[:, 0]
    normalizer = torch.cat([part.logsumexp(dim=-1) for part in logits.split(TEXT_TOKENS)])
    return chosen - normalizer


def in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute no more logits at once than torch thinks fit."""
    options = torch.nn.LinearCrossEntropyOptions()
    losses: Tensor = torch.nn.functional.linear_cross_entropy(
        hidden, weight, targets, reduction="none", options=options
    )
    return -losses


def measure(options: argparse.Namespace, method: str) -> Measurement:
    """Run one method once, in this process."""
    (vocabulary,) = options.vocabularies
    compute = functions(options)[method]
    compute(*inputs(options, vocabulary=64, tokens=8)).sum().backward()  # type: ignore[no-untyped-call]
    hidden, weight, targets = inputs(options, vocabulary, options.tokens)
    upstream = torch.randn(options.tokens, device=options.device)
    before = held(options.device)
    start, used = clock(options.device), time.process_time()
    logprobs = compute(hidden, weight, targets)
    middle = clock(options.device)
    logprobs.backward(upstream)  # type: ignore[no-untyped-call]
    end, used = clock(options.device), time.process_time() - used
    peak = most_held(options.device) - before
    gradients = [each.grad for each in (hidden, weight) if each.grad is not None]
    checks = [logprobs.mean().item(), *(each.float().norm().item() for each in gradients)]
    return Measurement(end - start, middle - start, used, peak / 2**30, checks)


def functions(options: argparse.Namespace) -> dict[str, LogprobFunction]:
    """Return the methods by name."""

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, targets, chunk_size=options.chunk_size)

    return {"naive": naive, "rows": by_rows, "torch": in_chunks, "lrlhf": ours}


def inputs(options: argparse.Namespace, vocabulary: int, tokens: int) -> tuple[Tensor, ...]:
    """Draw hidden states ``[N, H]``, a weight ``[V, H]`` and targets ``[N]``, always the same."""
    torch.manual_seed(0)
    factory = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    hidden = torch.randn(tokens, options.hidden, **factory)
    weight = torch.randn(vocabulary, options.hidden, **factory).mul_(options.hidden**-0.5)
    targets = torch.randint(vocabulary, (tokens,), device=options.device)
    return hidden.requires_grad_(), weight.requires_grad_(not options.frozen_head), targets


def clock(device: str) -> float:
    """Return the time once the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def held(device: str) -> int:
    """Return the bytes held now, and begin to look for the most."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(psutil.Process().memory_info().rss)


def most_held(device: str) -> int:
    """Return the most bytes held."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compare(options: argparse.Namespace, vocabulary: int) -> list[Row]:
    """Run all methods at one size, in turns."""
    runs: dict[str, list[Measurement]] = {method: [] for method in options.methods}
    for _ in range(options.repeats):
        for method, done in runs.items():
            if needed(options, vocabulary, method) <= free(options.device):
                done.append(in_child(options, vocabulary, method))
                _say(f"V={vocabulary} {method}: {done[-1].seconds:.1f} s, {done[-1].peak_gib:.2f}")
    _must_agree([run for done in runs.values() for run in done])
    return [
        Row(
            vocabulary,
            method,
            *(
                statistics.median(getattr(run, name) for run in done) if done else None
                for name in ("seconds", "forward_seconds", "cpu_seconds", "peak_gib")
            ),
            needs_gib=needed(options, vocabulary, method) / 2**30,
            runs=done,
        )
        for method, done in runs.items()
    ]


def in_child(options: argparse.Namespace, vocabulary: int, method: str) -> Measurement:
    """Measure in a process that has held nothing before."""
    command = [sys.executable, __file__, "--child", method, "--vocabularies", str(vocabulary)]
    for name in ("tokens", "hidden", "chunk_size", "dtype", "device", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--frozen-head"] if options.frozen_head else []
    threads = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, env=os.environ | threads
    )
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def needed(options: argparse.Namespace, vocabulary: int, method: str) -> int:
    """Estimate the bytes of a run: inputs, gradients, and the logits that are alive together."""
    size = getattr(torch, options.dtype).itemsize
    weights = vocabulary * options.hidden * size * (1 if options.frozen_head else 2)
    copies = COPIES_OF_LOGITS[method]
    rows = min(options.chunk_size, options.tokens) if method in IN_CHUNKS else options.tokens
    return weights + 2 * options.tokens * options.hidden * size + copies * rows * vocabulary * 4


def free(device: str) -> int:
    """Return the bytes that can be had, but for what the interpreter itself takes."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return int(psutil.virtual_memory().available) - 2**29


def table(rows: list[Row]) -> str:
    """Format a Markdown table; ratios are to ``naive`` at the same vocabulary."""
    lines = [
        "| vocabulary | method | forward s | both passes s | × naive "
        "| CPU s | × naive | peak GiB | × naive |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next(each for each in [*rows, row] if _is_base(each, row) or each is row)
        if row.runs:
            cells = [f"{row.forward_seconds:.1f}"]
            for name in ("seconds", "cpu_seconds", "peak_gib"):
                value, reference = getattr(row, name), getattr(base, name)
                known = base.runs and base.method == "naive"
                cells += [f"{value:.2f}", f"{value / reference:.2f}" if known else "–"]
        else:
            cells = [*["–"] * 5, f"not run: needs {row.needs_gib:.0f}", "–"]
        lines.append("| " + " | ".join([str(row.vocabulary), row.method, *cells]) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Draw memory and time over the vocabulary."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    names = {"peak_gib": "peak memory, GiB", "seconds": "forward + backward, s"}
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for method in dict.fromkeys(row.method for row in rows):
            run = [row for row in rows if row.method == method and row.runs]
            sizes = [row.vocabulary / 1000 for row in run]
            axis.plot(sizes, [getattr(row, name) for row in run], "o-", label=method)
        axis.set(xlabel="vocabulary, thousands", ylabel=label, ylim=(0, None))
    axes[0].legend()
    figure.savefig(path, dpi=120)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Describe what the figures depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        **{name: str(value) for name, value in vars(options).items() if name != "out"},
    }


def _is_base(row: Row, other: Row) -> bool:
    return row.method == "naive" and row.vocabulary == other.vocabulary


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _must_agree(runs: list[Measurement]) -> None:
    for run in runs:
        for actual, expected in zip(run.checks, runs[0].checks, strict=True):
            if not math.isclose(actual, expected, rel_tol=2e-3):
                raise SystemExit(f"the methods disagree: {run.checks} and {runs[0].checks}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [50_000, 100_000, 152_000, 260_000]
    parser.add_argument("--vocabularies", type=int, nargs="+", default=sizes)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--chunk-size", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    methods = ["naive", "rows", "torch", "lrlhf"]
    parser.add_argument("--methods", nargs="+", default=["naive", "lrlhf"], choices=methods)
    parser.add_argument("--frozen-head", action="store_true", help="as under LoRA")
    parser.add_argument("--out", type=Path, help="folder for the JSON file and the plot")
    parser.add_argument("--child", choices=methods, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
