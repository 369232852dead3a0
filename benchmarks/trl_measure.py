"""What is measured in the process of one run, whichever system it runs."""

from __future__ import annotations

import ctypes
import gc
import importlib
import platform
import resource
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20


@dataclass
class Run:
    """What one process reports; times and sizes are of the steps after the warm-up."""

    system: str
    seconds: list[float] = field(default_factory=list)
    """Of whole steps, from the end of one to the end of the next."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each part of the same steps; together they are the whole."""
    tokens: list[int] = field(default_factory=list)
    """Trained on, prompts counted once per response, padding not at all."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """What the system itself logs of every step, warm-up included."""
    memory: dict[str, float] = field(default_factory=dict)
    """MiB."""
    accuracy: float | None = None
    pairs: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return what the parent process is told."""
        return asdict(self)


class Laps:
    """Notes the steps of a run.

    Args:
        run: Where to.
        warm_up: Steps whose times and tokens do not count.
    """

    def __init__(self, run: Run, warm_up: int) -> None:
        self._run = run
        self._warm_up = warm_up
        self._ended = time.perf_counter()

    def end(self, logged: dict[str, float], phases: dict[str, float], tokens: int) -> None:
        """Note a step that has just ended.

        Args:
            logged: What the system says of it.
            phases: Seconds of its parts; what they leave is the ``rest``.
            tokens: It trained on.
        """
        now = time.perf_counter()
        seconds, self._ended = now - self._ended, now
        self._run.steps.append(logged)
        if len(self._run.steps) <= self._warm_up:
            return
        self._run.seconds.append(seconds)
        self._run.phases.append({**phases, "rest": seconds - sum(phases.values())})
        self._run.tokens.append(tokens)


class Memory:
    """The most memory that a process holds after its model has been loaded.

    Main memory, and that of the GPU where there is one. The peak is reset here, so that what
    imports and loading needed for a moment does not hide what training needs.

    Args:
        model: What has been loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        for weight in model.parameters():
            weight.detach().sum()  # weights are mapped from their file, and read when first used
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            # what loading freed would else hide as much of what training takes
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._loaded = _status("VmRSS")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._loaded_on_gpu = torch.cuda.memory_allocated() / MIB

    def peak(self) -> dict[str, float]:
        """Return MiB: with the model loaded, the peak since, the difference, and of all time."""
        peak = _status("VmHWM")
        found = {
            "loaded": self._loaded,
            "peak": peak,
            "training": peak - self._loaded,
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        if torch.cuda.is_available():
            gpu = torch.cuda.max_memory_allocated() / MIB
            found |= {"gpu_peak": gpu, "gpu_training": gpu - self._loaded_on_gpu}
        return found


def _status(name: str) -> float:
    """Read a line of ``/proc/self/status``, in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return float(value.split()[0]) / 1024
    raise ValueError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def import_trl() -> Any:
    """Import TRL, which lrlhf does not depend on."""
    try:
        return importlib.import_module("trl")
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise SystemExit(
            "error: this comparison needs TRL beside lrlhf, of which it is no dependency: run "
            "`pip install trl` in an environment of your own"
        ) from error


def save_weights(model: nn.Module, path: Path, prefix: str = "") -> None:
    """Write the trained parameters, by name without ``prefix``, for `weight_gap`."""
    weights = {name.removeprefix(prefix): tensor for name, tensor in model.named_parameters()}
    torch.save({name: tensor.detach().cpu() for name, tensor in weights.items()}, path)


def weight_gap(initial: Path, first: Path, second: Path) -> float:
    """Compare where two runs from the same weights have come to.

    Returns:
        Distance between the two, as a fraction of the way that the first has come: 0 is the same
        place, about 1.4 two runs that have nothing to do with each other.

    Raises:
        ValueError: They trained different parameters, or the first did not move.
    """
    start, one, other = (torch.load(path, mmap=True) for path in (initial, first, second))
    if not start.keys() == one.keys() == other.keys():
        odd = sorted(one.keys() ^ other.keys() | one.keys() ^ start.keys())
        raise ValueError(f"not the same parameters were trained: {', '.join(odd[:5])}")
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in start)
    moved = sum(float((one[name] - start[name]).double().square().sum()) for name in start)
    if moved == 0:
        raise ValueError("training moved no weight: the runs cannot be compared")
    return float((apart / moved) ** 0.5)
