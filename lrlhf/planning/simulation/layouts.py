"""Which GPUs train and which generate: all layouts that fit, the fastest, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lrlhf.planning.live_bytes import Usage
from lrlhf.planning.simulation.hardware import GPU, GPUS_PER_NODE, rates_of
from lrlhf.planning.simulation.iteration import Layout, Links, Simulation, Workload
from lrlhf.planning.simulation.pipeline import Phases
from lrlhf.planning.strategy_shares import OptimizerNeeds, Strategy, Weights

USABLE = 0.9
"""Share of a GPU's memory that is planned with."""

ACTIVATIONS = 10 * 2**30
"""Bytes assumed for what passes of a trainer allocate; the memory table counts them."""

STALENESS = (0, 1, 2, 4)
_FINALISTS = 2
"""Layouts that are compared by several iterations."""
PUSH_S = 1.0
"""Seconds assumed of a push beside its bytes: pausing, clearing caches, comparing fingerprints."""


class Machine(NamedTuple):
    """What the trainers' memory depends on.

    Attributes:
        gpu: Each of them.
        strategy: Of the trainers.
        trained: Models and what their optimizers keep.
        frozen: Models that trainers hold beside them, split as the strategy has it.
        whole: Bytes of models that each trainer holds whole.
    """

    gpu: GPU
    strategy: Strategy
    trained: tuple[tuple[Weights, OptimizerNeeds], ...]
    frozen: tuple[Weights, ...] = ()
    whole: int = 0

    def trainer_bytes(self, trainers: int) -> float:
        """Return what one of so many trainers needs at most."""
        strategy = replace(self.strategy, ranks=min(self.strategy.ranks, trainers))
        models = [
            *(strategy.shares(weights, needs, accumulates=True) for weights, needs in self.trained),
            *(
                strategy.shares(weights, OptimizerNeeds(), accumulates=False)
                for weights in self.frozen
            ),
        ]
        resident = Usage().plus(*(one.resident for one in models)).total
        passing = max(one.gathered + one.gradients + one.step for one in models)
        return resident + self.whole + passing + ACTIVATIONS


class Answer(NamedTuple):
    """A layout with its times.

    Attributes:
        layout: Who does what.
        seconds: Of an iteration.
        phases: Its parts, the mean of the iterations that were simulated.
        simulation: What it was computed with.
    """

    layout: Layout
    seconds: float
    phases: Phases
    simulation: Simulation


def best_layouts(work: Workload, machine: Machine, gpus: int) -> list[Answer]:
    """Return the fastest layout of each kind, as far as one fits: together, and apart for each K.

    Colocated replicas generate while nobody trains; K stands for ``max_staleness``. All layouts are
    compared by one iteration, and the few that come first there by more.
    """
    rough = []
    for layout in layouts(work, machine, gpus):
        simulation = simulation_of(work, machine, layout)
        rough.append((layout, simulation, simulation.draws(layout, 1)[0]))
    found = []
    for staleness in STALENESS:
        for together in (True, False) if staleness == 0 else (False,):
            those = [one for one in rough if one[0].together is together]
            those.sort(key=lambda one: _bound(one[2], staleness))
            finalists = [
                one[0]._replace(max_staleness=staleness)
                for one in those[: _FINALISTS if staleness < 2 else 1]
            ]
            answers = [_answer(work, machine, layout) for layout in finalists]
            found += [min(answers, key=lambda one: one.seconds)] if answers else []
    return found


def _bound(phases: Phases, staleness: int) -> float:
    if staleness == 0:
        return sum(phases)
    return phases.transfer + max(phases.generate, phases.trainer)


def _answer(work: Workload, machine: Machine, layout: Layout) -> Answer:
    simulation = simulation_of(work, machine, layout)
    draws = simulation.draws(layout)
    mean = Phases(*(sum(parts) / len(draws) for parts in zip(*draws, strict=True)))
    return Answer(layout, simulation.seconds(layout, draws), mean, simulation)


def layouts(work: Workload, machine: Machine, gpus: int) -> Iterator[Layout]:
    """Yield the layouts whose trainers and replicas fit into memory.

    A replica stays within a node. Of several nodes only whole ones are divided, and of many
    several at a time.
    """
    apart = 1 if gpus <= GPUS_PER_NODE else GPUS_PER_NODE * math.ceil(gpus / 256)
    for parallel in (1, 2, 4, 8):
        if work.policy.heads % parallel:
            continue
        for trainers in (*range(apart, gpus, apart), gpus):
            together = trainers == gpus
            if not work.continuous and not (together and parallel == 1):
                continue  # trainers that generate themselves do not split the model
            replicas, left = divmod(gpus if together else gpus - trainers, parallel)
            if left or not replicas or work.prompts < max(trainers, replicas):
                continue
            layout = Layout(trainers, replicas, parallel, together)
            if (room := cache_tokens(work, machine, layout)) is not None:
                yield layout._replace(cache_tokens=room)


def cache_tokens(work: Workload, machine: Machine, layout: Layout) -> float | None:
    """Return the tokens of a replica's cache; None: the layout does not fit.

    A replica must have room for one response of full length.
    """
    usable = USABLE * machine.gpu.memory
    trainer = machine.trainer_bytes(layout.trainers)
    if trainer > usable:
        return None
    each = usable - (trainer if layout.together else 0)
    free = layout.tensor_parallel * each - work.weight_bytes * work.policy.number
    tokens = free / (work.weight_bytes * work.policy.cache_numbers)
    return tokens if tokens >= work.prompt_tokens + int(work.lengths.known.max()) else None


def simulation_of(work: Workload, machine: Machine, layout: Layout) -> Simulation:
    """Return what simulates an iteration in a layout."""
    gpu = machine.gpu
    rates = rates_of(gpu, tensor_parallel=layout.tensor_parallel)
    links = Links(gpu.node_bandwidth, gpu.network_bandwidth, PUSH_S)
    return Simulation(work, rates, links, machine.strategy)


def bottleneck(answer: Answer) -> tuple[str, float]:
    """Name what makes an iteration shortest when it is twice as fast, and the share it saves.

    Of the lengths of responses: when all have their mean.
    """

    def seconds(simulation: Simulation) -> float:
        return simulation.seconds(answer.layout, simulation.draws(answer.layout, 1))

    now = seconds(answer.simulation)
    faster = {name: 1 - seconds(one) / now for name, one in _faster(answer.simulation).items()}
    name = max(faster, key=lambda name: faster[name])
    return name, faster[name]


def _faster(simulation: Simulation) -> dict[str, Simulation]:
    work, rates, links = simulation.work, simulation.rates, simulation.links
    step = {name: getattr(rates, name) / 2 for name in ("step_s", "layer_s", "sequence_s")}
    trainer = {name: getattr(rates, name) * 2 for name in ("forward_flops", "update_flops")}
    engine = {name: getattr(rates, name) * 2 for name in ("decode_flops", "prefill_flops")}
    changed = {
        "generation: memory bandwidth": {"read_bytes": rates.read_bytes * 2},
        "generation: FLOP/s": engine,
        "generation: fixed time of a step": step,
        "trainer: FLOP/s": trainer,
    }
    return {
        **{
            name: simulation._replace(rates=replace(rates, **options))
            for name, options in changed.items()
        },
        "generation: longest responses": simulation._replace(
            work=replace(work, lengths=work.lengths.equal())
        ),
        "links between GPUs": simulation._replace(
            links=Links(2 * links.node, 2 * links.network, links.push_s)
        ),
        "fixed time of a push": simulation._replace(links=links._replace(push_s=links.push_s / 2)),
        "rewards": simulation._replace(work=replace(work, reward_s=work.reward_s / 2)),
    }
