"""The answer to how long an iteration takes on so many GPUs, as a table with its assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from lrlhf.planning.plain_table import plain_text
from lrlhf.planning.simulation import hardware
from lrlhf.planning.simulation.hardware import GPU
from lrlhf.planning.simulation.iteration import Workload
from lrlhf.planning.simulation.layouts import (
    ACTIVATIONS,
    PUSH_S,
    USABLE,
    Answer,
    best_layouts,
    bottleneck,
    why_nothing_fits,
)
from lrlhf.planning.simulation.workload import Question, workload_and_machine

_AS_FAST = 1.01
"""Layouts so near to the fastest count as fast as it."""

_COLUMNS = (
    "trainers",
    "replicas × GPUs",
    "staleness",
    "generate",
    "transfer",
    "reward",
    "log-probs",
    "update",
    "iteration",
    "tokens/s",
)


def time_report(
    sections: Mapping[str, Any], question: Question, gpus: Sequence[int], name: str
) -> Iterator[str]:
    """Say how long an iteration takes on each number of GPUs, or in one line why that is unknown.

    Args:
        sections: The config, with its groups ``model`` and ``data``.
        question: What the config leaves open.
        gpus: Numbers of GPUs.
        name: Of the GPU.

    Yields:
        A table, a line for each number of GPUs, and the assumptions.
    """
    try:
        work, machine, notes = workload_and_machine(
            sections["model"], sections.get("data"), question
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        # a source that is not there, or a model that is not known to the simulation
        yield f"no table of times: {' '.join(str(error).split())}"
        return
    answers = {number: best_layouts(work, machine, number) for number in gpus}
    if any(answers.values()):
        yield _table(answers, work)
    yield "\n".join(
        _conclusion(number, found, work)
        if found
        else f"{number} GPUs: no layout fits: {why_nothing_fits(work, machine, number)}"
        for number, found in answers.items()
    )
    yield "\n".join([*_assumptions(name, question.gpu, work), *notes])


def _table(answers: Mapping[int, list[Answer]], work: Workload) -> str:
    """Render the fastest layouts as a table of plain text, in seconds."""
    table = Table(box=box.MARKDOWN)
    table.add_column("seconds of one iteration", no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, found in answers.items():
        for one in found:
            layout, parts = one.layout, one.phases
            times = (parts.generate, parts.transfer, parts.reward, parts.logprob, parts.update)
            idle = f", {number - layout.gpus} idle" if number > layout.gpus else ""
            cells = [
                f"{number} GPUs, {'in turns on all' if layout.together else 'apart'}{idle}",
                f"{layout.trainers}",
                f"{layout.replicas} × {layout.tensor_parallel}",
                f"{layout.max_staleness}",
                *(f"{seconds:.1f}" for seconds in (*times, one.seconds)),
                f"{work.tokens / one.seconds:,.0f}",
            ]
            table.add_row(*map(Text, cells))
    return plain_text(table)


def _conclusion(gpus: int, found: list[Answer], work: Workload) -> str:
    fastest = min(one.seconds for one in found)
    # what is less stale first
    best = next(one for one in found if one.seconds <= _AS_FAST * fastest)
    layout, (limit, saved) = best.layout, bottleneck(best)
    where = "on the same GPUs, in turns" if layout.together else "apart"
    if idle := gpus - layout.gpus:
        where += f", {idle} idle"
        if work.prompts < gpus:
            where += f" (set --prompts to at least {gpus}: each trainer needs one)"
    measure = "equally long" if limit.endswith("responses") else "twice as fast"
    return (
        f"{gpus} GPUs: {best.seconds:.0f} s with {layout.trainers} trainers and {layout.replicas} "
        f"replicas of {layout.tensor_parallel} GPU(s) {where}, max_staleness "
        f"{layout.max_staleness}; bottleneck: {limit} "
        f"({measure}: {saved:.0%} less time); generation takes "
        f"{best.phases.generate / best.seconds:.0%} of the time, training "
        f"{best.phases.trainer / best.seconds:.0%}"
    )


def _assumptions(name: str, gpu: GPU, work: Workload) -> list[str]:
    return [
        "a simulation: no GPU was measured, and these shares of the data sheets are assumed",
        f"{name}: {gpu.flops / 1e12:g} TFLOP/s in bfloat16 ({hardware.TRAINING_UTILIZATION:.0%} in "
        f"training, {hardware.PREFILL_UTILIZATION:.0%} in generation), {gpu.memory / 1e9:g} GB "
        f"({USABLE:.0%}), {gpu.memory_bandwidth / 1e12:g} TB/s ({hardware.DECODE_BANDWIDTH:.0%})",
        f"links: {gpu.node_bandwidth / 1e9:g} GB/s per GPU within a node of "
        f"{hardware.GPUS_PER_NODE}, {gpu.network_bandwidth / 1e9:g} GB/s between nodes "
        f"({hardware.LINK_UTILIZATION:.0%}), beside computing; a push takes {PUSH_S:g} s more",
        f"decoding: a step takes {1e3 * hardware.STEP_S:g} ms, {1e6 * hardware.LAYER_S:g} µs per "
        f"layer of a split model and {1e6 * hardware.SEQUENCE_S:g} µs per response more; up to "
        f"{work.max_sequences} responses of a replica at once",
        f"trainers: {ACTIVATIONS / 2**30:g} GiB of activations",
        f"one iteration: {work.prompts} prompts × {work.copies} responses, {work.tokens:,.0f} "
        f"tokens, {work.steps} optimizer step(s)",
        "staleness: the updates that responses may be behind (max_staleness); above 0 generation "
        "goes on beside training, so that the parts do not add up; gains of less than a third are "
        "within the error of what was measured",
    ]
