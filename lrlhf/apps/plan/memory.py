"""What a run will need of each process's memory, phase by phase, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.accelerators import CUDAAccelerator
from rich import box
from rich.table import Table
from rich.text import Text

from lrlhf.apps.plan.dry_run import DryRun, Shape
from lrlhf.apps.plan.memory_phases import (
    PhaseList,
    add_policy_phases,
    add_preference_phases,
    add_supervised_phases,
    note_media,
)
from lrlhf.apps.plan.strategy_shares import strategy_of, weights_of
from lrlhf.cli.config_entries import is_a, options_of, spec_of
from lrlhf.models import HeadedBackbone, RewardNetwork, ScoreModel, plain_model
from lrlhf.models.loading.meta import skeleton
from lrlhf.modules import DPO, SFT
from lrlhf.modules.policy.iteration import BatchPlan, plain_text
from lrlhf.trainer import GPU_PRECISION

_GIB, _MIB = 2**30, 2**20
_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "logits", "KV cache")

_USABLE = 0.9
"""Share of a GPU's memory that tensors can have: the rest is for CUDA's context, the buffers of
NCCL and cuBLAS, and what lies idle between tensors."""


def memory_report(
    sections: Mapping[str, Any], plan: BatchPlan | None, ranks: int, device_size: int | None
) -> str:
    """Say what a run needs, or in one line why that cannot be told.

    Args:
        sections: The config, with its groups ``model``, ``data`` and ``trainer``.
        plan: Sizes of an iteration of a policy; None: it is trained on given texts or pairs.
        ranks: Processes of the run.
        device_size: Bytes of the device of each; None: not known.
    """
    trainer, on_gpu = sections["trainer"], _is_on_gpu(sections["trainer"], device_size)
    if trainer["precision"] is None and on_gpu:
        trainer = {**trainer, "precision": GPU_PRECISION}
    strategy = strategy_of(trainer, ranks, device_size)
    if strategy is None:
        return f"no memory table: it is unknown what {trainer['strategy']!r} keeps on each process"
    phases = PhaseList(
        dry_run=DryRun(trainer["precision"], casts_weights=strategy.kind != "replicated"),
        strategy=strategy,
        on_gpu=on_gpu,
        device_size=device_size,
    )
    try:
        if plan is None:
            _add_configured_phases(phases, sections)
        else:
            add_policy_phases(phases, sections["model"], sections["data"], plan)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        # a source that is not there, or a model whose shapes depend on its numbers
        return f"no memory table: {' '.join(str(error).split())}"
    parts = [
        _table(phases),
        "\n".join(_advice(phases, _smaller(sections, phases))),
        "\n".join(phases.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _is_on_gpu(trainer: Mapping[str, Any], device_size: int | None) -> bool:
    here = trainer["accelerator"] in {"auto", "gpu", "cuda"} and CUDAAccelerator.is_available()
    return here or device_size is not None or trainer["accelerator"] in {"gpu", "cuda"}


def _add_configured_phases(phases: PhaseList, sections: Mapping[str, Any]) -> None:
    """Add the phases of a step on given texts, or on pairs of them."""
    model, data = sections["model"], sections["data"]
    adds_up = sections["trainer"]["accumulate_grad_batches"] > 1
    if is_a(model, SFT):
        add_supervised_phases(phases, model, data)
    elif is_a(model, DPO):
        add_preference_phases(phases, model, data, adds_up=adds_up)
    else:
        _add_reward_model_phases(phases, model, data, adds_up=adds_up)


def _add_reward_model_phases(phases: PhaseList, model: Any, data: Any, *, adds_up: bool) -> None:
    """Add the phases of an optimizer step over pairs, from the config's entries.

    It ``adds_up`` the gradients of several batches of pairs.
    """
    options, pairs = options_of(model), int(options_of(data)["batch_size"])
    spec = spec_of(options["model"], ScoreModel)
    body = skeleton(spec, body=True, on_gpu=phases.on_gpu)
    network, plain = RewardNetwork(HeadedBackbone(body, spec.head_config())), plain_model(body)
    note_media(phases, plain)
    phases.note_recomputing(spec, plain)
    # Lightning frees the gradients of a step after the forward pass of the next
    weights = weights_of(network, plain, quantization=spec.quantization)
    shares = phases.hold(weights, options_of(options["optimizer"]), accumulates=adds_up)
    usage = phases.dry_run.update(
        network,
        lambda batch: network(batch).sum(),
        Shape(2 * pairs, phases.tokens_of(data, "max_tokens", "texts")),
        accumulates=True,
        offloads=spec.activation_offload and phases.on_gpu,
    )
    phases.add_update("reward model", shares, usage, f"data.batch_size (now {pairs})")


def _table(phases: PhaseList) -> str:
    """Render phases as a table of plain text, in GiB, or in MiB where all is small."""
    large = max(phase.usage.total for phase in phases.phases) >= _GIB
    unit, size = (_GIB, phases.device_size) if large else (_MIB, phases.device_size)
    name = f"memory per process, {'GiB' if large else 'MiB'}"
    table = Table(box=box.MARKDOWN)
    for heading in (name, *_COLUMNS, "total", *(["fits"] if size is not None else [])):
        table.add_column(heading, justify="left" if heading == name else "right", no_wrap=True)
    for phase in phases.phases:
        cells = [f"{part / unit:.2f}" for part in (*phase.usage, phase.usage.total)]
        if size is not None:
            cells.append("yes" if phase.usage.total <= _USABLE * size else "NO")
        table.add_row(Text(phase.name), *map(Text, cells))
    return plain_text(table)


def _smaller(sections: Mapping[str, Any], phases: PhaseList) -> list[str]:
    """List what makes training need less, but for what the config has already."""
    model = options_of(sections["model"])
    options = options_of(model.get("policy", model.get("model")))
    recomputes = phases.recomputes
    advice = {
        "gradient_checkpointing": not recomputes,
        "activation_offload": recomputes and not options.get("activation_offload"),
        "lora": options.get("lora") is None,
        "dtype: bfloat16": options.get("dtype", "float32") == "float32",
    }
    shards = phases.strategy.kind == "fsdp2" or phases.strategy.stage == 3
    more = "more GPUs" if shards else "trainer.strategy: fsdp2 on more GPUs"
    return [*(name for name, helps in advice.items() if helps), more]


def _advice(phases: PhaseList, smaller: list[str]) -> list[str]:
    """Say which options would make the phases fit that do not, those with the same together."""
    if phases.device_size is None:
        return []
    usable = _USABLE * phases.device_size
    room = f"{usable / _GIB:.1f} GiB, {_USABLE:.0%} of each GPU"
    failing: dict[str | None, list[str]] = {}
    for phase in phases.phases:
        if phase.usage.total > usable:
            failing.setdefault(phase.option, []).append(phase.name)
    if not failing:
        return [f"every phase fits into {room}"]
    lines = []
    for option, names in failing.items():
        *others, last = [*([] if option is None else [f"a smaller {option}"]), *smaller]
        use = ", ".join([*others, f"or {last}"] if others else [last])
        lines.append(f"does not fit into {room}: {', '.join(names)}; use {use}")
    return lines
