"""What a run will need of each process's memory, phase by phase, as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.accelerators import CUDAAccelerator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lrlhf.modules.policy.batch_plan import BatchPlan
from lrlhf.planning.memory_phases import Memory, Notes, Phase, options_of
from lrlhf.planning.memory_policy import PolicyMemory, PolicySizes, prompt_tokens_of
from lrlhf.planning.memory_ranks import sharing_of
from lrlhf.planning.memory_reward_model import reward_model_phases
from lrlhf.planning.memory_trace import Precision

_GIB, _MIB = 2**30, 2**20

USABLE = 0.9
"""Share of a GPU's memory that tensors can have: the rest is for CUDA's context, the buffers of
NCCL and cuBLAS, and what lies idle between tensors."""


class Device(NamedTuple):
    """What the processes run on.

    Attributes:
        ranks: Number of processes, one on each device.
        size: Bytes of a device's memory; None: not known.
    """

    ranks: int
    size: int | None


def policy_memory(sections: Mapping[str, Any], plan: BatchPlan, device: Device) -> str:
    """Say what training a policy needs, or in one line why that cannot be told.

    Args:
        sections: The config, with its groups ``model``, ``data`` and ``trainer``.
        plan: Sizes of an iteration.
        device: What it runs on.
    """
    options, data = options_of(sections["model"]), options_of(sections["data"])

    def phases(memory: Memory, notes: Notes) -> list[Phase]:
        sizes = PolicySizes(
            plan=plan,
            prompt_tokens=prompt_tokens_of(data, notes),
            new_tokens=options_of(options["sampling"])["max_new_tokens"],
            micro_batch_tokens=options_of(options["update"])["micro_batch_tokens"],
        )
        return PolicyMemory(options, sizes, memory, notes, device.size).phases()

    return _report(sections["trainer"], device, phases)


def reward_model_memory(sections: Mapping[str, Any], device: Device) -> str:
    """Say what training a reward model needs, or in one line why that cannot be told.

    Args:
        sections: The config, with its groups ``model``, ``data`` and ``trainer``.
        device: What it runs on.
    """
    options, data = options_of(sections["model"]), options_of(sections["data"])
    return _report(
        sections["trainer"],
        device,
        lambda memory, notes: reward_model_phases(options, data, memory, notes),
    )


def _report(trainer: Mapping[str, Any], device: Device, phases_of: Any) -> str:
    on_gpu = _on_gpu(trainer, device)
    sharing = sharing_of(trainer, device.ranks, on_gpu=on_gpu)
    if sharing is None:
        return f"no memory table: it is unknown what {trainer['strategy']!r} keeps on each process"
    memory = Memory(sharing=sharing, precision=Precision.of(trainer["precision"]), held=())
    notes = Notes()
    try:
        phases = phases_of(memory, notes)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        # a source that is not there, or a model whose shapes depend on its numbers
        return f"no memory table: {' '.join(str(error).split())}"
    return "\n\n".join(
        part
        for part in (
            memory_table(phases, device.size),
            "\n".join(_advice(phases, notes.smaller, device)),
            "\n".join(notes.lines),
        )
        if part
    )


def _on_gpu(trainer: Mapping[str, Any], device: Device) -> bool:
    if device.size is not None or trainer["accelerator"] in {"gpu", "cuda"}:
        return True
    return trainer["accelerator"] == "auto" and CUDAAccelerator.is_available()


def memory_table(phases: Sequence[Phase], device_size: int | None) -> str:
    """Render phases as a table of plain text, in GiB, or in MiB where all is small.

    Args:
        phases: The lines.
        device_size: Bytes of a device, to compare with; None: not known.
    """
    large = max(phase.total for phase in phases) >= _GIB
    unit = _GIB if large else _MIB
    table = Table(box=box.MARKDOWN)
    headings = ["parameters", "gradients", "optimizer", "activations", "logits", "KV cache"]
    name = f"memory per process, {'GiB' if large else 'MiB'}"
    fits = ["fits"] if device_size is not None else []
    for heading in (name, *headings, "total", *fits):
        table.add_column(heading, justify="left" if heading == name else "right", no_wrap=True)
    for phase in phases:
        cells = [f"{size / unit:.2f}" for size in (*_columns(phase), phase.total)]
        if device_size is not None:
            cells.append("yes" if _fits(phase, device_size) else "NO")
        table.add_row(Text(phase.name), *map(Text, cells))
    buffer = io.StringIO()
    # wider than any line: a table that wraps cannot be searched
    Console(file=buffer, width=4096, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())


def _columns(phase: Phase) -> tuple[int, ...]:
    return (
        phase.parameters,
        phase.gradients,
        phase.optimizer,
        phase.activations,
        phase.logits,
        phase.cache,
    )


def _fits(phase: Phase, device_size: int) -> bool:
    return phase.total <= USABLE * device_size


def _advice(phases: Sequence[Phase], smaller: Sequence[str], device: Device) -> list[str]:
    """Say what would make the phases fit that do not, those with the same remedy together."""
    if device.size is None:
        return []
    usable = USABLE * device.size
    room = f"{usable / _GIB:.1f} GiB, {USABLE:.0%} of each GPU"
    failing: dict[str, list[str]] = {}
    for phase in phases:
        if not _fits(phase, device.size):
            turned = phase.turned_down(round(usable))
            remedy = " or ".join([*([turned] if turned else []), *smaller])
            failing.setdefault(remedy, []).append(phase.name)
    if not failing:
        return [f"every phase fits into {room}"]
    return [
        f"does not fit into {room}: {', '.join(names)}; change {remedy}"
        for remedy, names in failing.items()
    ]
