"""TRL's trainers for RLOO, reward models, DPO and SFT beside lrlhf's modules, on the same work.

    pip install trl
    python benchmarks/compare_trl.py rloo --data gsm8k.jsonl.gz --engine stored --out rloo.json
    python benchmarks/compare_trl.py reward --data pairs.jsonl.gz --out reward.json
    python benchmarks/compare_trl.py dpo --data pairs.jsonl.gz
    python benchmarks/compare_trl.py sft --data gsm8k.jsonl.gz
    python benchmarks/compare_trl.py rloo --data gsm8k.jsonl.gz --model tiny \
        --sweep generations 2 4 8 16 --plot generations.png

Both load one folder, see the same token ids in the same order, take equally many optimizer steps
(one per step of the table) with the same fused AdamW, KL coefficient, clipping and precision, and
log as little as their losses take. No default of either is left in what they compute. If a loss, a
gradient norm or the weights part nevertheless, the work was not the same: the report names where,
prints no ratio, and the exit status is 1. Each run is a process of its own; the systems take turns,
so that a busy machine slows both alike, and the table has medians over the repeats. Runs where TRL
is installed beside lrlhf, on Linux. A data file has one object a line: ``question`` for `rloo`,
and ``answer`` for `sft`; ``chosen`` and ``rejected`` (and perhaps a ``prompt`` that both continue)
for `reward` and `dpo`.

Activations are kept by both unless ``--trl-checkpointing`` or ``--lrlhf-checkpointing`` is given;
TRL recomputes them by default, lrlhf does not.

Engines of `rloo`:

* stored: both are given the same responses of exactly ``--new-tokens`` tokens, so that losses,
  gradients and weights can be compared; drawing them is no part of the update. lrlhf's engine
  returns log-probabilities of the policy beside them, as an exact engine does (``--inexact``: it
  says that they are not to be relied upon, as vLLM does, and lrlhf computes them again).
* transformers: each system's own use of ``generate``.
* vllm: both draw with lrlhf's `VLLMEngine`. TRL's own colocated mode pushes weights in a way that
  vLLM refuses on a CPU, so it is given lrlhf's engine and push, which is to its advantage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import trl_rloo
import trl_texts
from trl_measure import Run, weight_gap
from trl_report import (
    SYSTEMS,
    TITLES,
    TOLERANCES,
    Comparison,
    agreement_table,
    plot,
    sweep_table,
    tables,
)

PARTS: dict[str, ModuleType] = {
    "rloo": trl_rloo,
    "reward": trl_texts,
    "dpo": trl_texts,
    "sft": trl_texts,
}
_TEXT_SWEEPS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "batch-size": ("batch_size", int),
    "max-length": ("max_length", int),
    "model": ("model", str),
}
SWEEPS: dict[str, dict[str, tuple[str, Callable[[str], Any]]]] = {
    "rloo": {
        "generations": ("generations", int),
        "prompts": ("prompts", int),
        "prompt-length": ("prompt_length", int),
        "response-length": ("new_tokens", int),
        "model": ("model", str),
    },
    "reward": _TEXT_SWEEPS,
    "dpo": _TEXT_SWEEPS,
    "sft": _TEXT_SWEEPS,
}
"""What can be swept: the option that it sets, and its type."""


def main() -> None:
    """Run the comparison, or as a child process one run of it."""
    if sys.argv[1:2] == ["--job"]:
        _child(Path(sys.argv[2]))
        return
    options = _arguments()
    try:
        comparisons = _compare_all(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not _report(options, comparisons):
        sys.exit(1)


# ------------------------------------------------------------------ arguments


def _arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--data", type=Path, required=True, help=".jsonl or .jsonl.gz")
    shared.add_argument(
        "--model",
        default="smollm2",
        help="tiny, small, medium (random Llamas), smollm2, or any source that lrlhf loads",
    )
    shared.add_argument("--repeats", type=int, default=3, help="processes per system")
    shared.add_argument("--warm-up", type=int, default=1, help="steps that are not counted")
    shared.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    shared.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    shared.add_argument(
        "--trl-checkpointing",
        action="store_true",
        help="recompute activations in TRL, as it does by default",
    )
    shared.add_argument(
        "--lrlhf-checkpointing", action="store_true", help="recompute activations in lrlhf"
    )
    shared.add_argument("--seed", type=int, default=0)
    shared.add_argument("--threads", type=int, default=os.cpu_count())
    shared.add_argument("--sweep", nargs="+", metavar=("NAME", "VALUE"), help="see SWEEPS")
    shared.add_argument("--plot", type=Path, help="PNG of a sweep")
    shared.add_argument("--out", type=Path, help="JSON file with every figure")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_rloo(commands.add_parser("rloo", parents=[shared]))
    for name in ("reward", "dpo", "sft"):
        _add_texts(name, commands.add_parser(name, parents=[shared]))
    options = parser.parse_args()
    _check(parser, options)
    return options


def _add_rloo(rloo: argparse.ArgumentParser) -> None:
    rloo.add_argument("--engine", choices=["stored", "transformers", "vllm"], default="stored")
    rloo.add_argument("--inexact", action="store_true", help="see the stored engine above")
    rloo.add_argument("--prompts", type=int, default=8, help="of one step")
    rloo.add_argument("--generations", type=int, default=8, help="responses per prompt")
    rloo.add_argument("--new-tokens", type=int, default=64, help="longest response")
    rloo.add_argument("--prompt-length", type=int, help="tokens of every prompt; else their own")
    rloo.add_argument("--micro-batch", type=int, default=8, help="rows of a TRL forward pass")
    rloo.add_argument(
        "--micro-batch-tokens",
        type=int,
        help="of a lrlhf forward pass; else as many as the longest rows of TRL's have",
    )
    rloo.add_argument("--beta", type=float, default=0.05, help="KL coefficient")
    rloo.add_argument("--lr", type=float, default=1e-6)
    rloo.add_argument("--steps", type=int, default=3, help="that are counted")


def _add_texts(name: str, texts: argparse.ArgumentParser) -> None:
    texts.add_argument("--batch-size", type=int, default=8, help="rows or pairs of one step")
    texts.add_argument("--max-length", type=int, default=512, help="longer ones are left out")
    texts.add_argument("--steps", type=int, default=10, help="that are counted")
    texts.add_argument("--lr", type=float, default=1e-5)
    if name == "reward":
        texts.add_argument("--held-out", type=int, default=0, help="pairs to measure accuracy on")
    else:
        texts.set_defaults(held_out=0)
    if name == "dpo":
        texts.add_argument("--beta", type=float, default=0.1)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    # the first step loads, compiles and allocates, and has no step before it to be measured from
    for name in ("warm_up", "steps", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if options.plot is not None and not options.sweep:
        parser.error("--plot draws a sweep: give --sweep too")
    if not options.sweep:
        return
    known = SWEEPS[options.command]
    if options.sweep[0] not in known or len(options.sweep) < 2:
        parser.error(f"--sweep needs one of {', '.join(known)}, and values for it")
    cast = known[options.sweep[0]][1]
    if cast is int and not all(value.isdigit() for value in options.sweep[1:]):
        parser.error(f"--sweep {options.sweep[0]} needs whole numbers")


# ------------------------------------------------------------------ the parent process


def _compare_all(options: argparse.Namespace) -> dict[str, Comparison]:
    """Compare at every value of the sweep, or once under an empty name."""
    if not options.sweep:
        found = {"": _compare(options)}
        _write(options, found)
        return found
    name, cast = SWEEPS[options.command][options.sweep[0]]
    found = {}
    for value in options.sweep[1:]:
        setting = argparse.Namespace(**{**vars(options), name: cast(value)})
        _say(f"{options.sweep[0]} {value}")
        found[value] = _compare(setting)
        _write(options, found)
    return found


def _compare(options: argparse.Namespace) -> Comparison:
    runs: dict[str, list[Run]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        PARTS[options.command].prepare(options, folder)
        for repeat in range(options.repeats):
            # who goes first changes, as what comes second may find a warmer or a slower machine
            for system in SYSTEMS if repeat % 2 == 0 else reversed(SYSTEMS):
                run = _run_child(options, folder, system)
                runs[system].append(run)
                _say(f"  {TITLES[system]}: {', '.join(f'{s:.3f}' for s in run.seconds)} s")
        rloo = options.command == "rloo"
        given = rloo and options.engine == "stored"
        # of the last round; what is logged is compared in all
        ends = [folder / f"{name}.pt" for name in ("initial", *SYSTEMS)]
        apart = weight_gap(*ends) if given or not rloo else None
    rows = options.prompts * options.generations if rloo else options.batch_size
    return Comparison(runs, apart, rows, given)


def _run_child(options: argparse.Namespace, folder: Path, system: str) -> Run:
    """Run one system in a process of its own.

    Raises:
        SystemExit: It failed; with the end of what it said.
    """
    job = folder / "job.json"
    settings = {name: _plain(value) for name, value in vars(options).items()}
    job.write_text(json.dumps({"system": system, "options": settings}), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if getattr(options, "engine", None) == "vllm":
        # two pools of threads share the cores: those that wait must not keep the others from them
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    command = [sys.executable, str(Path(__file__).resolve()), "--job", str(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        sys.exit(f"{said}\nerror: the {TITLES[system]} process ended with {done.returncode}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def _plain(value: Any) -> Any:
    return str(value.resolve()) if isinstance(value, Path) else value


def _child(job: Path) -> None:
    """Run one system, and print one line of JSON."""
    given = json.loads(job.read_text(encoding="utf-8"))
    options = argparse.Namespace(**given["options"])
    torch.set_num_threads(options.threads)
    part = PARTS[options.command]
    run: Run = (part.run_lrlhf if given["system"] == "lrlhf" else part.run_trl)(options, job.parent)
    sys.stdout.write(f"\n{json.dumps(run.as_json())}\n")


# ------------------------------------------------------------------ the report


def _report(options: argparse.Namespace, comparisons: dict[str, Comparison]) -> bool:
    """Print what was measured, and return whether all of it was of the same work."""
    rloo = options.command == "rloo"
    phases = PARTS[options.command].PHASES
    unit = {"rloo": "responses", "sft": "rows"}.get(options.command, "pairs")
    _say("")
    equal: dict[str, Comparison] = {}
    for value, comparison in comparisons.items():
        if options.sweep:
            _say(f"### {options.sweep[0]} {value}\n")
        if differences := comparison.differences(TOLERANCES[options.dtype]):
            _say("The two did not do the same work, so that no ratio is shown:\n")
            _say("".join(f"- {line}\n" for line in differences))
            _say(agreement_table(comparison))
        else:
            _say(tables(comparison, phases, unit))
            equal[value] = comparison
    if options.sweep and equal:
        name = options.sweep[0]
        _say(sweep_table(name, equal, has_phases=rloo))
        if options.plot is not None:
            plot(name, equal, options.plot, has_phases=rloo, note=_describe(options))
    _say(_describe(options))
    return len(equal) == len(comparisons)


def _describe(options: argparse.Namespace) -> str:
    """Say what ran, in one line; what was swept with all its values."""
    if options.sweep:
        name, _ = SWEEPS[options.command][options.sweep[0]]
        values = "/".join(options.sweep[1:])
        options = argparse.Namespace(**{**vars(options), name: values})
    if options.command == "rloo":
        prompt = f"{options.prompt_length} tokens" if options.prompt_length else "own lengths"
        sizes = (
            f"{options.prompts} prompts ({prompt}) x {options.generations} responses of "
            f"{options.new_tokens} tokens, engine {options.engine}, beta {options.beta}"
        )
    else:
        unit = "rows" if options.command == "sft" else "pairs"
        sizes = f"{options.batch_size} {unit} of at most {options.max_length} tokens"
    return (
        f"{options.command}, {options.model}, {options.dtype}: {sizes}; {options.threads} threads, "
        f"{options.repeats} repeats x {options.steps} steps; TRL {_versions()['trl']}; activations "
        f"recomputed by {_recomputing(options)}; {_processor()}"
    )


def _recomputing(options: argparse.Namespace) -> str:
    names = [TITLES[system] for system in SYSTEMS if getattr(options, f"{system}_checkpointing")]
    return " and ".join(names) or "neither"


def _write(options: argparse.Namespace, comparisons: dict[str, Comparison]) -> None:
    """Write every figure so far, so that a long sweep that breaks off is not lost."""
    if options.out is not None:
        text = json.dumps(_everything(options, comparisons), indent=2)
        options.out.write_text(f"{text}\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    names = ("trl", "torch", "transformers", "lightning", "accelerate")
    return {name: importlib.metadata.version(name) for name in names}


def _everything(options: argparse.Namespace, comparisons: dict[str, Comparison]) -> dict[str, Any]:
    return {
        "options": {name: _plain(value) for name, value in vars(options).items() if name != "data"},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "python": platform.python_version(),
            **_versions(),
        },
        "comparisons": [
            {
                "value": value,
                "weights_apart": one.weights_apart,
                "runs": [run.as_json() for system in SYSTEMS for run in one.runs[system]],
            }
            for value, one in comparisons.items()
        ],
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
