"""How much memory a process takes to load its share of a model, and whether it is the right share.

    python benchmarks/loading_memory.py [--layers 29] [--whole]

Writes a random Llama in bfloat16 into several safetensors files (29 layers: 3.0 billion parameters,
6 GB; never more than one file of it is in memory), loads it under ``fsdp2`` in two processes, and
removes it. Each process samples its own memory, ``RssAnon + RssShmem`` of ``/proc/self/status``,
every 5 ms: file pages that the system caches are not its own. ``VmHWM`` counts those that are
mapped too. Two peaks are shown: until the shards are read, and with the trial passes that follow,
which gather blocks as any forward pass does (on GPUs, in their memory). Then some shards are
compared with the files. ``--whole`` loads all of the model in each process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import lightning as L
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lrlhf.models import CausalLM
from lrlhf.models.loading.deferred_weights import CHECKS, reading
from lrlhf.models.sharding import own_part
from lrlhf.strategies import FSDP2

_RANKS = 2
_PER_FILE = 5
"""Layers."""
_FOLDER = "LRLHF_LOADING_MEMORY"
"""Tells the second process where the model is."""


class Policy(L.LightningModule):
    """A model to be split."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.policy = CausalLM(source=str(folder), dtype="bfloat16").load()

    def trainable_models(self) -> dict[str, nn.Module]:
        """What the strategy splits."""
        return {"policy": self.policy}

    def predict_step(self, batch: Tensor) -> float:
        """Return a logit, which all processes compute alike."""
        return float(self.policy(input_ids=batch).logits[0, -1, 0])


class Peak:
    """The most memory that this process had since it began to look, in bytes."""

    def __init__(self) -> None:
        self.start, self.start_mapped = _own(), _status("VmHWM")
        self.most = self.start
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, _own())

    def so_far(self, share_of: int) -> str:
        """Say how far its own memory, and ``VmHWM``, rose."""
        own, mapped = self.most - self.start, _status("VmHWM") - self.start_mapped
        return (
            f"{own / 1e9:.2f} GB ({own / share_of:.0%}), "
            f"VmHWM {mapped / 1e9:.2f} GB ({mapped / share_of:.0%})"
        )

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self._thread.join()


def _own() -> int:
    return _status("RssAnon") + _status("RssShmem")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


class Report(L.Callback):
    """Says what loading took, once the strategy has split and read the model."""

    def __init__(self, folder: Path, peak: Peak) -> None:
        self._folder = folder
        self._peak = peak

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._peak.stop()
        assert isinstance(pl_module, Policy)
        right = _compare(pl_module.policy, self._folder)
        _write(
            f"rank {trainer.global_rank}: with the trial passes "
            f"{self._peak.so_far(_size(self._folder))}; {right} weights are as stored"
        )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _compare(policy: nn.Module, folder: Path) -> int:
    """Count weights of three layers and the embedding whose shard is the part in the file."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    weights = dict(policy.named_parameters())
    last = max(int(name.split(".")[2]) for name in weight_map if ".layers." in name)
    chosen = (".layers.0.", f".layers.{last // 2}.", f".layers.{last}.", "embed_tokens", "el.norm")
    right = 0
    for name, file in weight_map.items():
        if any(part in name for part in chosen):
            [chunk] = weights[name].__create_chunk_list__()
            with safe_open(folder / file, framework="pt", backend="pread") as opened:
                start, size = chunk.offsets[0], chunk.sizes[0]
                stored = opened.get_slice(name)[start : start + size]
            assert torch.equal(own_part(weights[name]), stored), name
            right += 1
    return right


def tiny() -> LlamaConfig:
    """Describe a model of the same kind that takes no memory."""
    return LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )


def write(folder: Path, layers: int) -> None:
    """Write a random model, one file after another."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            k: w.shape for k, w in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    generator = torch.Generator().manual_seed(0)
    files: dict[str, list[str]] = {}
    for name in shapes:
        number = int(name.split(".")[2]) // _PER_FILE if ".layers." in name else "rest"
        files.setdefault(f"model-{number}.safetensors", []).append(name)
    for file, names in files.items():
        weights = {}
        for name in names:
            noise = torch.empty(shapes[name], dtype=torch.bfloat16).normal_(generator=generator)
            weights[name] = noise.mul_(0.02).add_(1.0 if "norm" in name else 0.0)
        save_file(weights, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {one: file for file in files for one in files[file]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(folder: Path, *, whole: bool) -> None:
    """Load the model in this process and, started by the trainer, in another."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"use_distributed_sampler": False}
    trainer = L.Trainer(accelerator="cpu", devices=_RANKS, strategy=FSDP2(), **options)
    model, size = AutoModelForCausalLM.from_config(tiny()), _size(folder)  # imports its code
    del model
    peak, started = Peak(), time.monotonic()
    with trainer.init_module(), reading(later=not whole):
        module = Policy(folder)
    if not whole:
        said = partial(_say, trainer, f"model {size / 1e9:.2f} GB, read with", peak, size)
        vars(module.policy)[CHECKS].insert(0, said)  # the trial passes are behind it
    trainer.callbacks.append(Report(folder, peak))
    tokens = torch.arange(16).view(1, 16)
    (logit,) = trainer.predict(module, DataLoader(tokens[None], batch_size=None))
    seconds = time.monotonic() - started
    _write(f"rank {trainer.global_rank}: a logit is {logit:.6f}; {seconds:.0f} s")


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _say(trainer: L.Trainer, text: str, peak: Peak, size: int, _: object) -> None:
    _write(f"rank {trainer.global_rank}: {text} {peak.so_far(size)}")


def main() -> None:
    """Write, measure, remove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=29)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write, arguments.layers)
        return
    if _FOLDER in os.environ:
        measure(Path(os.environ[_FOLDER]), whole=arguments.whole)
        return
    folder = Path(tempfile.mkdtemp(prefix="loading_memory"))
    os.environ[_FOLDER] = str(folder)
    try:
        # in a process of its own: what it took would hide what loading takes
        layers = f"--layers={arguments.layers}"
        subprocess.run([sys.executable, __file__, f"--write={folder}", layers], check=True)
        measure(folder, whole=arguments.whole)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
