"""One training run on this machine's GPUs: tokens per second, MFU, memory, beside the plan.

    python benchmarks/gpu_run.py rloo --size 7b --lora
    python benchmarks/gpu_run.py vision --tiny

`gpu.py` calls it for its parts. ``rloo``, ``reward`` and ``vision`` (RLOO on images) train a model
of random weights with the shape of Qwen2.5, for ``vision`` of Qwen2-VL; ``--model`` trains another
in its place. Responses have ``--new-tokens`` tokens, as random weights hardly ever draw the end,
and come from vLLM where it is installed. ``quickstart`` is ``configs/quickstart.yaml``. Speeds are
medians of the run's metrics ``perf/*`` over the steps but the first two, in which memory is
measured and kernels are compiled. Beside the measured peak stands what ``lrlhf plan`` says.
``--tiny`` shows on a CPU that this works.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2Config,
)
from trl_models import byte_tokenizer

from lrlhf.examples import tiny_vlm

HERE = Path(__file__).resolve().parent
WARM_UP = 2
TINY = {"size": "tiny", "accelerator": "cpu", "prompts": 2, "generations": 2, "iterations": 4}
TINY |= {"prompt_tokens": 48, "new_tokens": 8, "image": 64}
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPE += ("intermediate_size", "vocab_size", "tie_word_embeddings")
SIZES = {
    "tiny": (64, 2, 2, 1, 128, 512, True),
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True),
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False),
}
"""Values of `SHAPE` of the Qwen 2.5 family."""


def main() -> None:
    """Train, and print or write the figures."""
    options = parse(sys.argv[1:])
    if options.accelerator == "gpu" and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; --tiny shows on a CPU that this works")
    with tempfile.TemporaryDirectory(prefix="lrlhf-gpu-", dir=options.work) as scratch:
        folder = Path(scratch)
        model = "SmolLM2-135M, transformers"
        if options.kind != "quickstart":
            weights = _write_model(folder, options)
            model = f"{options.model or options.size}, {weights / 1e9:.2f} B weights"
            model += ", LoRA" * options.lora + f", {options.engine}" * (options.kind != "reward")
        figures = {"model": model, **_measure(arguments_of(folder, options), folder, options)}
    text = json.dumps(figures, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text)
    sys.stdout.write(text)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["quickstart", "rloo", "reward", "vision"])
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--model", help="a hub id or folder, in place of random weights")
    parser.add_argument("--lora", action="store_true", help="only adapters learn")
    parser.add_argument("--accelerator", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--devices", type=int, help="default: all GPUs of this machine")
    parser.add_argument("--prompts", type=int, default=32, help="or pairs, per process and step")
    parser.add_argument("--generations", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="those of images too")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--image", type=int, default=256, help="pixels along each side")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--engine", choices=["vllm", "transformers"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--work", type=Path, help="where weights are written; default: /tmp")
    options = parser.parse_args(arguments)
    if options.tiny:
        vars(options).update(TINY)
    if options.iterations <= WARM_UP:
        parser.error(f"--iterations must be above {WARM_UP}")
    if options.kind == "quickstart" and options.model:
        parser.error("quickstart has a model of its own: drop --model")
    on_gpu = options.accelerator == "gpu"
    if options.devices is None:
        one = not on_gpu or options.kind == "quickstart"
        options.devices = 1 if one else torch.cuda.device_count()
    if options.engine is None:
        has_vllm = on_gpu and importlib.util.find_spec("vllm") is not None
        options.engine = "vllm" if has_vllm else "transformers"
    return options


# ------------------------------------------------------------------ the model


def model_config(folder: Path, options: argparse.Namespace) -> Any:
    """Return the model's config, and write the tokenizer and processor that it needs."""
    shape = dict(zip(SHAPE, SIZES[options.size], strict=True))
    if options.model:
        return AutoConfig.from_pretrained(options.model)
    if options.kind != "vision":
        byte_tokenizer(shape["vocab_size"]).save_pretrained(folder)
        return Qwen2Config(**shape, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    tiny_vlm.build(folder)
    config = AutoConfig.from_pretrained(folder)
    if not options.tiny:
        layers = ["full_attention"] * shape["num_hidden_layers"]
        config.text_config.update(shape | {"layer_types": layers, "max_position_embeddings": 4096})
        config.text_config.rope_parameters["mrope_section"] = [16, 24, 24]
        vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
        config.vision_config.update(vision | {"hidden_size": shape["hidden_size"]})
        processor = AutoProcessor.from_pretrained(folder)
        processor.image_processor.size["longest_edge"] = options.image**2
        processor.save_pretrained(folder)
    return config


def build(config: Any, device: str) -> Any:
    """Build a model in bfloat16, with random weights or, on ``meta``, without."""
    sees = getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        return kind.from_config(config, dtype=torch.bfloat16)


def _write_model(folder: Path, options: argparse.Namespace) -> int:
    """Write random weights; return how many the model has."""
    config = model_config(folder, options)
    number = sum(weight.numel() for weight in build(config, "meta").parameters())
    if not options.model:
        build(config, "cuda" if options.accelerator == "gpu" else "cpu").save_pretrained(folder)
        gc.collect()
        if options.accelerator == "gpu":  # the run is another process, which needs all of it
            torch.cuda.empty_cache()
    return number


# ------------------------------------------------------------------ the run


def arguments_of(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the arguments of ``lrlhf fit``, and write the rows that it reads."""
    if options.kind == "quickstart":
        run = {"config": HERE.parent / "configs" / "quickstart.yaml"}
        run |= {"trainer.max_steps": options.iterations} if options.tiny else {}
    else:
        run = (_reward if options.kind == "reward" else _rloo)(folder, options)
        run |= {"trainer.max_steps": options.iterations, "trainer.max_epochs": -1}
        run |= {"trainer.default_callbacks": False, "seed_everything": 0}
    run |= {"trainer.accelerator": options.accelerator, "trainer.devices": options.devices}
    run |= {"trainer.default_root_dir": folder / "run", "trainer.enable_checkpointing": False}
    run |= {"trainer.strategy": "fsdp2"} if options.devices > 1 else {}
    return [f"--{name}={value}" for name, value in run.items()]


def _rloo(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = range(options.prompts * options.devices)
    if options.kind == "vision":
        prompts = [_question(row, folder, options.image) for row in rows]
    else:
        prompts = [{"prompt": _text(row, options.prompt_tokens, options)} for row in rows]
    run = {
        "model": "lrlhf.modules.RLOO",
        "model.policy.source": options.model or folder,
        "model.policy.gradient_checkpointing": True,
        "model.rewards": "lrlhf.rewards.Rewards",
        "model.rewards.functions": "[gpu_probe.first_token]",
        "model.num_generations": options.generations,
        "model.sampling.max_new_tokens": options.new_tokens,
        "model.reference.kl_coef": 0.0,
        "model.engine": "lrlhf.rollout.TransformersEngine",
        "data": "lrlhf.datamodules.PromptDataModule",
        "data.train": _write_rows(folder, prompts),
        "data.batch_size": options.prompts,
        "data.max_prompt_tokens": options.prompt_tokens,
    }
    if options.kind == "vision":
        run |= {"data.as_chat": True, "model.policy.freeze_vision": True}
    if options.lora:
        run |= {"model.policy.dtype": "bfloat16", "model.policy.lora": '{"r": 64, "alpha": 128}'}
    if options.engine == "vllm":
        run["model.engine"] = "lrlhf.rollout.VLLMEngine"
        run["model.engine.max_model_len"] = options.prompt_tokens + options.new_tokens
        run["model.engine.sleep"] = options.accelerator == "gpu"
        run["trainer.callbacks+"] = "lrlhf.callbacks.VLLMWeightSync"
    return run


def _reward(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    length = options.prompt_tokens + options.new_tokens
    pairs = [
        {"prompt": "?", **{s: _text(row, length, options, s[0]) for s in ("chosen", "rejected")}}
        for row in range(options.prompts * options.devices)
    ]
    return {
        "model": "lrlhf.modules.RewardModel",
        "model.model.source": options.model or folder,
        "model.model.gradient_checkpointing": True,
        "data": "lrlhf.datamodules.PreferenceDataModule",
        "data.train": _write_rows(folder, pairs),
        "data.batch_size": options.prompts,
        "data.max_tokens": length + 16,  # the prompt, an end, and what a tokenizer puts in front
    }


def _write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def _text(row: int, tokens: int, options: argparse.Namespace, unit: str = "x") -> str:
    """Return a text of so many tokens: bytes, or words where the tokenizer is a real one."""
    return f"{row:04d} is " + (f" {unit}" if options.model else unit) * (tokens - 8)


def _question(row: int, folder: Path, side: int) -> dict[str, Any]:
    pixels = np.random.default_rng(row).integers(0, 256, (side, side, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{row}.png")
    return {"prompt": "<image>what digit?", "images": [str(folder / f"{row}.png")]}


def _measure(given: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Plan and run; return the figures.

    Raises:
        SystemExit: It does not fit, or ended with an error.
    """
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    lrlhf = [sys.executable, "-m", "lrlhf"]
    gib = 80.0
    if options.accelerator == "gpu":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    command = [*lrlhf, "plan", *given, "--gpu-memory", f"{gib:.0f}"]
    plan = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    if "does not fit" in plan.stdout:
        sys.exit(f"by the plan it does not fit into {gib:.0f} GiB\n{plan.stdout}")
    if (status := subprocess.run([*lrlhf, "fit", *given], env=environment).returncode) != 0:
        sys.exit(f"the run ended with status {status}")
    figures: dict[str, Any] = {"planned": _planned(plan.stdout)}
    for name in ("generate_tokens_per_s", "update_tokens_per_s", "mfu"):
        if column := _column(folder / "run" / "timings.csv", f"perf/{name}")[WARM_UP:]:
            figures[name] = statistics.median(column)
    figures["peak_gib"] = max(_column(folder / "run" / "timings.csv", "perf/memory_gib"))
    if scores := _column(folder / "run" / "metrics.csv", "eval/score"):
        figures["score"] = f"{scores[0]:.2f} → {scores[-1]:.2f}"
    return figures


def _column(path: Path, name: str) -> list[float]:
    with path.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def _planned(plan: str) -> str:
    """Return the largest total of the plan's table of memory, with its unit."""
    header = next(line for line in plan.splitlines() if "memory per process" in line)
    unit = re.search(r"(GiB|MiB)", header)
    column = [cell.strip() for cell in header.split("|")].index("total")
    cells = [line.split("|") for line in plan.splitlines() if line.startswith("|")]
    start = next(index for index, line in enumerate(cells) if "memory per process" in line[1])
    totals = [float(line[column]) for line in cells[start + 2 :]]
    return f"{max(totals):.1f} {unit.group(1) if unit else ''}"


if __name__ == "__main__":
    main()
