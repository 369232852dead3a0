"""What training on this machine's GPUs reaches: tokens per second, MFU, memory, beside the plan.

    python benchmarks/gpu.py --out docs/gpu_measured.md
    python benchmarks/gpu.py --sizes 0.5b 1.5b --trl

Each size is a Qwen2 of random weights that RLOO trains for a few iterations with ``lrlhf fit``:
every response has exactly ``--new-tokens`` tokens, drawn by vLLM where it is installed. Figures are
medians over the iterations but the first two, in which memory is measured and kernels are compiled.
MFU is the run's own metric ``perf/mfu``. Beside the measured peak stands what ``lrlhf plan`` says.
With ``--trl``, and TRL installed, `compare_trl.py` runs too, on equal work. ``--sizes tiny
--accelerator cpu`` shows that the script works.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl_models import byte_tokenizer

HERE = Path(__file__).parent
CONSOLE = Console()
WARM_UP = 2


@dataclass(frozen=True)
class Size:
    """Shapes of a model of the Qwen 2.5 family, and whether only adapters learn."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    lora: bool = False


SIZES = {
    "tiny": Size(64, 2, 2, 1, 128, 512, tied=True),
    "0.5b": Size(896, 24, 14, 2, 4864, 151_936, tied=True),
    "1.5b": Size(1536, 28, 12, 2, 8960, 151_936, tied=True),
    "7b": Size(3584, 28, 28, 4, 18_944, 152_064, tied=False, lora=True),
}


def main() -> None:
    """Measure every size and write the table."""
    options = _arguments()
    rows = []
    with tempfile.TemporaryDirectory(prefix="lrlhf-gpu-") as scratch:
        for name in options.sizes:
            folder = Path(scratch) / name
            weights = _write_model(SIZES[name], folder, options)
            rows.append(_measure(name, weights, folder, options))
            CONSOLE.print(rows[-1])
            if options.trl and rows[-1].generate is not None:
                _beside_trl(folder, options)
            for file in folder.glob("*.safetensors"):
                file.unlink()  # 15 GB of a large one
    text = _table(rows, options)
    CONSOLE.print(text, markup=False, soft_wrap=True)
    if options.out is not None:
        options.out.write_text(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--devices", type=int, help="default: all GPUs of this machine")
    parser.add_argument("--prompts", type=int, default=32, help="per process and iteration")
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--engine", choices=["vllm", "transformers"])
    parser.add_argument("--trl", action="store_true", help="run compare_trl.py too")
    parser.add_argument("--tests", type=Path, help="folder of pytest's JUnit files to sum up")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args()
    if options.iterations <= WARM_UP:
        parser.error(f"--iterations must be above {WARM_UP}")
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --accelerator cpu --sizes tiny shows that this works")
    if options.trl and importlib.util.find_spec("trl") is None:
        parser.error("--trl needs TRL: pip install trl")
    if options.devices is None:
        options.devices = torch.cuda.device_count() if options.accelerator == "gpu" else 1
    if options.engine is None:
        has_vllm = importlib.util.find_spec("vllm") is not None
        options.engine = "vllm" if has_vllm and options.accelerator == "gpu" else "transformers"
    return options


# ------------------------------------------------------------------ one run


def _write_model(size: Size, folder: Path, options: argparse.Namespace) -> int:
    """Write random weights in bfloat16 and a tokenizer; returns how many weights it has."""
    folder.mkdir()
    byte_tokenizer(size.vocabulary).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=max(2048, options.prompt_tokens + options.new_tokens),
        tie_word_embeddings=size.tied,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        dtype="bfloat16",
    )
    device = "cuda" if options.accelerator == "gpu" else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    number = sum(weight.numel() for weight in model.parameters())
    del model
    if device == "cuda":  # the run is another process, which needs all of it
        gc.collect()
        torch.cuda.empty_cache()
    return number


def _config(folder: Path, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    # a token per byte
    rows = [
        {"prompt": f"{row} is ".ljust(options.prompt_tokens, "x")}
        for row in range(options.prompts * options.devices)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    engine: dict[str, Any] = {"class_path": "lrlhf.rollout.TransformersEngine"}
    callbacks = [
        {"class_path": "gpu_probe.PeakMemory", "init_args": {"path": str(folder / "peak.json")}}
    ]
    if options.engine == "vllm":
        arguments = {"max_model_len": options.prompt_tokens + options.new_tokens, "sleep": True}
        engine = {"class_path": "lrlhf.rollout.VLLMEngine", "init_args": arguments}
        callbacks.append({"class_path": "lrlhf.callbacks.VLLMWeightSync"})
    policy: dict[str, Any] = {"source": str(folder), "gradient_checkpointing": True}
    if size.lora:
        policy |= {"dtype": "bfloat16", "lora": {"r": 64, "alpha": 128}}
    length = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}
    functions = ["gpu_probe.first_token"]
    return {
        "seed_everything": 0,
        "model": {
            "class_path": "lrlhf.modules.RLOO",
            "init_args": {
                "policy": policy,
                "rewards": {
                    "class_path": "lrlhf.rewards.Rewards",
                    "init_args": {"functions": functions},
                },
                "num_generations": options.generations,
                "sampling": length,
                "allow_truncated_sampling": True,  # the end token is cut out
                "engine": engine,
                "reference": {"kl_coef": 0.0},
            },
        },
        "data": {
            "class_path": "lrlhf.datamodules.PromptDataModule",
            "init_args": {
                "train": str(folder / "prompts.jsonl"),
                "batch_size": options.prompts,
                "max_prompt_tokens": options.prompt_tokens,
            },
        },
        "trainer": {
            "accelerator": options.accelerator,
            "devices": options.devices,
            "strategy": "fsdp2" if options.devices > 1 else "auto",
            "precision": "bf16-mixed" if options.accelerator == "gpu" else None,
            "max_steps": options.iterations,
            "max_epochs": -1,
            "default_root_dir": str(folder / "run"),
            "enable_checkpointing": False,
            "default_callbacks": False,
            "callbacks": callbacks,
        },
    }


@dataclass
class Row:
    """A line of the table; times in seconds, per iteration."""

    size: str
    weights: int
    planned: str
    left_out: str = ""
    """Why there are no figures."""
    generate: float | None = None
    """Tokens per second."""
    update: float | None = None
    mfu: float | None = None
    peak: float | None = None
    """GiB."""


def _measure(name: str, weights: int, folder: Path, options: argparse.Namespace) -> Row:
    size = SIZES[name]
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(_config(folder, size, options)))
    environment = {**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
    lrlhf, given = [sys.executable, "-m", "lrlhf"], ["--config", str(config)]
    gib = 80.0
    if options.accelerator == "gpu":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    plan = subprocess.run(
        [*lrlhf, "plan", *given, "--gpu-memory", f"{gib:.0f}"],
        check=True,
        env=environment,
        capture_output=True,
        text=True,
    ).stdout
    row = Row(name, weights, _planned(plan))
    if "does not fit" in plan:
        row.left_out = "by the plan it does not fit"
        return row
    if (status := subprocess.run([*lrlhf, "fit", *given], env=environment).returncode) != 0:
        row.left_out = f"the run ended with status {status}"
        return row
    with (folder / "run" / "timings.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row.get("perf/update_s")][WARM_UP:]
    peak = json.loads((folder / "peak.json").read_text())["peak_bytes"]
    row.generate, row.update, row.mfu = (
        statistics.median(float(row[name]) for row in logged) if logged[0].get(name) else None
        for name in ("perf/generate_tokens_per_s", "perf/update_tokens_per_s", "perf/mfu")
    )
    row.peak = None if peak is None else peak / 2**30
    return row


def _planned(plan: str) -> str:
    """Return the largest total of the plan's table of memory, with its unit."""
    header = next(line for line in plan.splitlines() if "memory per process" in line)
    unit = re.search(r"(GiB|MiB)", header)
    column = [cell.strip() for cell in header.split("|")].index("total")
    cells = [line.split("|") for line in plan.splitlines() if line.startswith("|")]
    start = next(index for index, line in enumerate(cells) if "memory per process" in line[1])
    totals = [float(line[column]) for line in cells[start + 2 :]]
    return f"{max(totals):.1f} {unit.group(1) if unit else ''}"


# ------------------------------------------------------------------ beside others, and the table


def _beside_trl(folder: Path, options: argparse.Namespace) -> None:
    data = folder / "questions.jsonl"
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    data.write_text("\n".join(json.dumps({"question": row["prompt"]}) for row in rows))
    subprocess.run(
        [
            *(sys.executable, str(HERE / "compare_trl.py"), "rloo", "--data", str(data)),
            *("--model", str(folder), "--engine", "stored", "--inexact"),
            *("--prompts", "8", "--generations", str(options.generations)),
            *("--new-tokens", str(options.new_tokens)),
        ],
        check=True,
    )


def _table(rows: list[Row], options: argparse.Namespace) -> str:
    gpu = torch.cuda.get_device_name(0) if options.accelerator == "gpu" else platform.processor()
    lines = [
        "# Measured on GPUs",
        "",
        f"`python benchmarks/gpu.py` on {options.devices} × {gpu or 'CPU'}, torch "
        f"{torch.__version__}, {options.engine}: {options.prompts} prompts per process, "
        f"{options.generations} responses each, {options.prompt_tokens} + {options.new_tokens} "
        "tokens.",
        "",
        "| model | weights | generated tokens/s | updated tokens/s | MFU of the update "
        "| peak memory, GiB | `lrlhf plan` |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lora = " (LoRA)" if SIZES[row.size].lora else ""
        lines.append(
            f"| {row.size}{lora} | {row.weights / 1e9:.2f} B | {_shown(row.generate, ',.0f')} "
            f"| {_shown(row.update, ',.0f')} | {_shown(row.mfu, '.0%')} "
            f"| {_shown(row.peak, '.1f')} | {row.planned} |"
        )
    lines += [f"\n{row.size} has no figures: {row.left_out}" for row in rows if row.left_out]
    if options.tests is not None:
        lines += ["", "## Tests", "", *_tests(options.tests)]
    return "\n".join(lines) + "\n"


def _shown(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)


def _tests(folder: Path) -> Iterator[str]:
    """Sum up what pytest has written, and name what was skipped and why."""
    files = sorted(folder.glob("*.xml"))
    cases = [case for file in files for case in ET.parse(file).iter("testcase")]
    broken = ("failure", "error")
    bad = [case for case in cases if any(case.find(kind) is not None for kind in broken)]
    skipped = [(case, why) for case in cases if (why := case.find("skipped")) is not None]
    passed = len(cases) - len(bad) - len(skipped)
    yield f"{passed} passed, {len(bad)} failed, {len(skipped)} skipped."
    yield ""
    yield from (f"- failed: `{case.get('classname')}.{case.get('name')}`" for case in bad)
    reasons: dict[str, int] = {}
    for _, why in skipped:
        reasons[str(why.get("message"))] = reasons.get(str(why.get("message")), 0) + 1
    yield from (f"- {count} skipped: {reason}" for reason, count in sorted(reasons.items()))


if __name__ == "__main__":
    main()
