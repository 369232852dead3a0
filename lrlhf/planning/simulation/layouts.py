"""Which GPUs train and which generate: all layouts that fit, the fastest, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from lrlhf.planning.live_bytes import Usage
from lrlhf.planning.simulation.hardware import GPU, GPUS_PER_NODE, rates_of
from lrlhf.planning.simulation.iteration import Layout, Links, Simulation, Workload
from lrlhf.planning.simulation.pipeline import Phases, batches_in_the_making
from lrlhf.planning.strategy_shares import OptimizerNeeds, Shares, Strategy, Weights

USABLE = 0.9
"""Share of a GPU's memory that is planned with."""

ACTIVATIONS = 10 * 2**30
"""Bytes assumed for what passes of a trainer allocate; the memory table counts them."""

STALENESS = (0, 1, 2, 4)
_FINALISTS = 16
"""Layouts of a kind that are simulated at most."""
_SMALL = 16
"""Any number of GPUs up to this may train; above only whole nodes."""
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
        shard_group: Trainers come in groups of so many.
    """

    gpu: GPU
    strategy: Strategy
    trained: tuple[tuple[Weights, OptimizerNeeds], ...]
    frozen: tuple[Weights, ...] = ()
    whole: int = 0
    shard_group: int = 1

    def trainer_bytes(self, trainers: int) -> float:
        """Return what one of so many trainers needs at most."""
        models = self._shares(trainers)
        passing = max(one.gathered + one.gradients + one.step for one in models)
        return self._resident(models) + passing + ACTIVATIONS

    def generating_bytes(self, trainers: int) -> float:
        """Return what one of so many trainers needs while it generates, beside the cache."""
        models = self._shares(trainers)
        return self._resident(models) + models[0].gathered_to_generate

    def _resident(self, models: list[Shares]) -> int:
        return Usage().plus(*(one.resident for one in models)).total + self.whole

    def _shares(self, trainers: int) -> list[Shares]:
        """Return what a trainer has of each model, the policy first."""
        strategy = replace(self.strategy, ranks=min(self.strategy.ranks, trainers))
        return [
            *(strategy.shares(weights, needs, accumulates=True) for weights, needs in self.trained),
            *(
                strategy.shares(weights, OptimizerNeeds(), accumulates=False)
                for weights in self.frozen
            ),
        ]


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

    Colocated replicas generate while nobody trains; K stands for ``max_staleness``. Layouts are
    simulated in the order of what an iteration takes at least, until that is more than the best.
    """
    known = [_Candidate(work, machine, layout) for layout in layouts(work, machine, gpus)]
    found = list[Answer]()
    for staleness in STALENESS:
        for together in (True, False) if staleness == 0 else (False,):
            those = [one for one in known if one.layout.together is together]
            those.sort(key=lambda one: (one.least(staleness), one.layout.gpus))
            # what is best with fewer updates behind is good with more of them too
            before = {one.layout._replace(max_staleness=0) for one in found}
            those.sort(key=lambda one: one.layout not in before)
            found += _fastest(those, staleness)
    return found


class _Candidate:
    """A layout that is simulated when its turn comes."""

    def __init__(self, work: Workload, machine: Machine, layout: Layout) -> None:
        self.layout = layout
        self._simulation = simulation_of(work, machine, layout)
        self._lengths = self._simulation.lengths()
        self._others = [self._simulation.others(layout, one) for one in self._lengths]
        self._draws = list[Phases]()

    def least(self, staleness: int) -> float:
        """Return about what an iteration takes at least."""
        seconds = 0.0
        batches = batches_in_the_making(staleness)
        for lengths, others in zip(self._lengths, self._others, strict=True):
            generate = self._simulation.least_generation(self.layout, lengths, batches=batches)
            beside = others.trainer
            both = generate + beside if staleness == 0 else max(generate, beside)
            seconds += others.transfer + both
        return seconds / len(self._others)

    def answer(self, staleness: int) -> Answer:
        """Simulate some iterations."""
        layout = self.layout._replace(max_staleness=staleness)
        draws = self._draws = self._draws or self._simulation.draws(layout)
        mean = Phases(*(sum(parts) / len(draws) for parts in zip(*draws, strict=True)))
        return Answer(layout, self._simulation.seconds(layout, draws), mean, self._simulation)


def _fastest(candidates: list[_Candidate], staleness: int) -> list[Answer]:
    """Return the fastest of candidates, the most promising of which come first; none of none."""
    best: Answer | None = None
    for one in candidates[:_FINALISTS]:
        if best is None or one.least(staleness) < best.seconds:
            answer = one.answer(staleness)
            best = answer if best is None or answer.seconds < best.seconds else best
    return [] if best is None else [best]


def layouts(work: Workload, machine: Machine, gpus: int) -> Iterator[Layout]:
    """Yield the layouts whose trainers and replicas fit into memory; some GPUs may be left.

    A replica stays within a node, and has a prompt or more.
    """
    # trainers that generate themselves do not split the model
    sizes = [one for one in (1, 2, 4, 8) if work.policy.heads % one == 0 and work.continuous] or [1]
    # links are faster within a node
    used = {gpus, min(gpus, GPUS_PER_NODE)} if work.continuous else set()
    for parallel, trainers in product(sizes, trainer_counts(work, machine, gpus)):
        apart = [(False, one - trainers) for one in used if one > trainers]
        for together, free in [(True, trainers), *apart]:
            replicas = min(work.prompts, free // parallel)
            layout = Layout(trainers, replicas, parallel, together)
            if replicas and (room := cache_tokens(work, machine, layout)) is not None:
                yield layout._replace(cache_tokens=room)


def trainer_counts(work: Workload, machine: Machine, gpus: int) -> list[int]:
    """Return how many of the GPUs may train: all, or few, or whole nodes, each with a prompt."""
    group, most = machine.shard_group, min(gpus, work.prompts)
    nodes = math.lcm(group, GPUS_PER_NODE)
    counts = {
        *range(group, min(most, _SMALL) + 1, group),
        *range(nodes, most + 1, nodes),
        most // group * group,
    }
    return sorted(counts - {0})


def cache_tokens(work: Workload, machine: Machine, layout: Layout) -> float | None:
    """Return the tokens of a replica's cache; None: the layout does not fit.

    A replica must have room for one response of full length. Trainers that generate themselves use
    their own weights.
    """
    usable, parallel = USABLE * machine.gpu.memory, layout.tensor_parallel
    trainer = machine.trainer_bytes(layout.trainers)
    if trainer > usable:
        return None
    if work.continuous:
        free = parallel * (usable - (trainer if layout.together else 0))
        free -= work.weight_bytes * work.policy.number
    else:
        free = usable - machine.generating_bytes(layout.trainers)
    tokens = free / (work.weight_bytes * work.policy.cache_numbers(parallel))
    return tokens if tokens >= _longest(work) else None


def _longest(work: Workload) -> int:
    return work.prompt_tokens + int(work.lengths.known.max())


def why_nothing_fits(work: Workload, machine: Machine, gpus: int) -> str:
    """Say why there is no layout on so many GPUs, and what would help."""
    counts = trainer_counts(work, machine, gpus)
    if not counts:
        group = machine.shard_group
        return (
            f"trainers come in groups of strategy.shard_group ({group}), with a prompt each: take "
            f"at least {group} GPUs, and set --prompts to at least {group}"
        )
    most, usable = counts[-1], USABLE * machine.gpu.memory / 1e9
    trainer = machine.trainer_bytes(most) / 1e9
    prompts = f"set --prompts to at least {gpus} for more trainers, " if most < gpus else ""
    if trainer > usable:
        return (
            f"each of {most} trainers needs {trainer:.1f} GB, and {usable:.1f} GB are usable; "
            f"{prompts}take more GPUs, trainer.strategy: fsdp2 or lora"
        )
    cache = _longest(work) * work.weight_bytes * work.policy.cache_numbers(1) / 1e9
    weights = work.weight_bytes * work.policy.number / 1e9 if work.continuous else 0.0
    return (
        f"each of {most} trainers needs {trainer:.1f} GB of {usable:.1f} GB that are usable, and a "
        f"replica {weights:.1f} GB for its weights and {cache:.1f} GB for one response of "
        f"{_longest(work)} tokens, for which no division leaves room; {prompts}take more GPUs, or "
        "lower model.sampling.max_new_tokens and data.max_prompt_tokens"
    )


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
