"""How long the parts of an iteration take on given hardware, in a given layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf.planning.simulation.engines import (
    DecodingStep,
    Engine,
    Replica,
    batch_after_batch,
    continuous_batching,
)
from lrlhf.planning.simulation.hardware import GPUS_PER_NODE, LINK_UTILIZATION, Rates
from lrlhf.planning.simulation.lengths import Lengths
from lrlhf.planning.simulation.model_costs import ModelCosts
from lrlhf.planning.simulation.pipeline import (
    Phases,
    Queue,
    seconds_ahead,
    seconds_in_turns,
)
from lrlhf.planning.strategy_shares import Strategy

DRAWS = 3
"""Iterations that are simulated, each with responses of other lengths."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one iteration has to do, of all processes together.

    Args:
        prompts: Prompts.
        copies: Responses to each.
        prompt_tokens: Tokens of each prompt.
        lengths: Of responses, in tokens.
        policy: The model that generates and is trained.
        passes: Models that look at all texts without gradients before the update.
        trained: Models that are updated, the policy among them.
        epochs: Passes of an update over the texts that are trained on.
        steps: Optimizer steps of each trained model.
        trained_share: Of the responses, those that are trained on.
        shares_prompts: Trainers compute a prompt once for all of its responses.
        reward_models: Models that score each text.
        reward_s: Seconds of all other rewards.
        micro_batch_tokens: Tokens that a trainer computes together.
        max_sequences: Responses that a replica computes at the same time.
        continuous: Another response begins when one has ended; False: a batch runs until all of its
            responses have.
        weight_bytes: Of a weight of a replica, and of a number of its keys and values.
    """

    prompts: int
    copies: int
    prompt_tokens: int
    lengths: Lengths
    policy: ModelCosts
    passes: tuple[ModelCosts, ...] = ()
    trained: tuple[ModelCosts, ...] = ()
    epochs: int = 1
    steps: int = 1
    trained_share: float = 1.0
    shares_prompts: bool = True
    reward_models: tuple[ModelCosts, ...] = ()
    reward_s: float = 0.0
    micro_batch_tokens: int = 16384
    max_sequences: int = 256
    continuous: bool = True
    weight_bytes: int = 2

    @property
    def tokens(self) -> float:
        """Tokens of prompts and responses, each response with its prompt, in the mean."""
        return self.prompts * self.copies * (self.prompt_tokens + self.lengths.mean)


class Links(NamedTuple):
    """How trainers and replicas are connected.

    Attributes:
        node: Bytes/s of a GPU to others of its node.
        network: Bytes/s of a GPU to other nodes.
        push_s: Seconds of a push of the weights beside the transfer of their bytes.
    """

    node: float = math.inf
    network: float = math.inf
    push_s: float = 0.0

    def among(self, gpus: int) -> float:
        """Bytes/s of a GPU to others of so many."""
        return LINK_UTILIZATION * (self.node if gpus <= GPUS_PER_NODE else self.network)


class Layout(NamedTuple):
    """Which GPUs do what.

    Attributes:
        trainers: GPUs that train.
        replicas: Engines.
        tensor_parallel: GPUs of each replica.
        together: The replicas are on the trainers' GPUs.
        max_staleness: Updates that responses may be behind; 0: generation and training in turns.
        cache_tokens: Tokens whose keys and values have room in a replica.
    """

    trainers: int
    replicas: int
    tensor_parallel: int = 1
    together: bool = True
    max_staleness: int = 0
    cache_tokens: float = math.inf

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.trainers + (0 if self.together else self.replicas * self.tensor_parallel)


class Simulation(NamedTuple):
    """An iteration on some hardware.

    Attributes:
        work: What is to be done.
        rates: Of a replica and of a trainer.
        links: Between them.
        strategy: Of the trainers; its ranks are replaced by those of the layout.
    """

    work: Workload
    rates: Rates
    links: Links = Links()
    strategy: Strategy = Strategy()

    def lengths(self, draws: int = DRAWS) -> list[NDArray[np.int64]]:
        """Draw the lengths of the responses of some iterations, `[prompts, copies]` each."""
        work = self.work
        return [work.lengths.draw(work.prompts, work.copies, seed) for seed in range(draws)]

    def draws(self, layout: Layout, draws: int = DRAWS) -> list[Phases]:
        """Return the parts of a few iterations, whose responses have other lengths in each."""
        return [self.phases(layout, lengths) for lengths in self.lengths(draws)]

    def seconds(self, layout: Layout, draws: Sequence[Phases] | None = None) -> float:
        """Return the mean seconds of an iteration, whose parts may be known."""
        draws = self.draws(layout) if draws is None else draws
        if layout.max_staleness == 0:
            return seconds_in_turns(draws)
        engine, prompt = self.engine(layout), self.work.prompt_tokens
        replicas = [Replica(engine, prompt) for _ in range(layout.replicas)]
        queue = Queue(replicas, self.lengths(len(draws)))
        return seconds_ahead(queue, draws, max_staleness=layout.max_staleness)

    def phases(self, layout: Layout, lengths: NDArray[np.int64]) -> Phases:
        """Return the parts of an iteration with responses of such lengths, `[prompts, copies]`."""
        seconds = self._generation_seconds(layout, lengths)
        return self.others(layout, lengths)._replace(generate=seconds)

    def others(self, layout: Layout, lengths: NDArray[np.int64]) -> Phases:
        """Return the parts beside generation, which takes no time."""
        work = self.work

        def flops(model: ModelCosts, *, shares_prompts: bool = work.shares_prompts) -> float:
            return model.forward_flops(work.prompt_tokens, lengths, shares_prompts=shares_prompts)

        scored = sum(flops(one, shares_prompts=False) for one in work.reward_models)
        passes = [self._pass_seconds(one, flops(one), layout) for one in work.passes]
        updates = [self._update_seconds(one, flops(one), layout) for one in work.trained]
        return Phases(
            generate=0.0,
            transfer=self._transfer_seconds(layout),
            reward=work.reward_s + self._share(layout) * scored / self.rates.forward_flops,
            logprob=sum(passes),
            update=sum(updates),
        )

    # ------------------------------------------------------------------ parts

    def engine(self, layout: Layout) -> Engine:
        """Return a replica of a layout."""
        work, rates, policy = self.work, self.rates, self.work.policy
        cache = policy.cache_numbers(layout.tensor_parallel)
        step = DecodingStep(
            weights=work.weight_bytes * policy.number / rates.read_bytes,
            context=work.weight_bytes * cache / rates.read_bytes,
            compute=2.0 * policy.multiplied / rates.decode_flops,
            fixed=rates.step_s + rates.layer_s * policy.layers,
            sequence=rates.sequence_s,
        )
        one = policy.forward_flops(work.prompt_tokens, np.zeros((1, 1), int), shares_prompts=True)
        token = one / max(1, work.prompt_tokens) / rates.prefill_flops
        return Engine(step, token, work.max_sequences, layout.cache_tokens)

    def _generation_seconds(self, layout: Layout, lengths: NDArray[np.int64]) -> float:
        """Return when the last replica is done; groups are dealt out in turns."""
        generate = continuous_batching if self.work.continuous else batch_after_batch
        engine, replicas = self.engine(layout), min(layout.replicas, len(lengths))
        return max(
            generate(engine, self.work.prompt_tokens, lengths[replica::replicas])
            for replica in range(replicas)
        )

    def least_generation(
        self, layout: Layout, lengths: NDArray[np.int64], *, batches: int
    ) -> float:
        """Return what generation of a batch takes at least, where replicas are never idle.

        A response may take as long as so many batches that are in the making at the same time.
        """
        engine, prompt = self.engine(layout), self.work.prompt_tokens
        groups, copies = lengths.shape
        prompts = math.ceil(groups / layout.replicas)  # of the replica with the most
        share = prompts / groups
        tokens = share * float(lengths.sum())
        reserved = share * float(((prompt / copies + lengths) * lengths).sum())
        context = share * float(((prompt + (lengths - 1) / 2) * lengths).sum())
        steps = max(
            tokens / engine.max_sequences,
            reserved / engine.cache_tokens,
            int(lengths.max()) / batches,
        )
        prefill = prompts * prompt * engine.prompt_token
        seconds: float = prefill + engine.step.least(steps, tokens, context)
        return seconds

    def _transfer_seconds(self, layout: Layout) -> float:
        """Return the seconds of one push: all replicas receive the weights at the same time.

        Trainers that generate themselves only gather the parts of the weights.
        """
        if not self.work.continuous:
            return self._gathered(self.work.policy, layout, 1)
        size = self.work.weight_bytes * self.work.policy.number
        return self.links.push_s + size / self.links.among(layout.gpus)

    def _share(self, layout: Layout) -> float:
        """Return the share of the prompts that the trainer with the most of them has."""
        return math.ceil(self.work.prompts / layout.trainers) / self.work.prompts

    def _micro_batches(self, layout: Layout) -> int:
        work = self.work
        prompts = 1 if work.shares_prompts else work.copies
        group = prompts * work.prompt_tokens + work.copies * work.lengths.mean
        tokens = work.trained_share * self._share(layout) * work.prompts * group
        return math.ceil(tokens / work.micro_batch_tokens)

    def _pass_seconds(self, model: ModelCosts, flops: float, layout: Layout) -> float:
        """Return the longer of computing and of gathering weights, which goes on beside it."""
        gathered = self._gathered(model, layout, self._micro_batches(layout))
        flops *= self.work.trained_share * self._share(layout)
        computing = flops / self.rates.forward_flops
        return self.rates.pass_layer_s * model.layers + max(computing, gathered)

    def _update_seconds(self, model: ModelCosts, flops: float, layout: Layout) -> float:
        work = self.work
        seen = work.epochs * work.trained_share * self._share(layout)
        micro = max(work.steps, math.ceil(work.epochs * self._micro_batches(layout)))
        reductions = micro if self.strategy.reduces_each(model.weights) else work.steps
        moved = self._gathered(model, layout, 2 * micro) + self._reduced(model, layout, reductions)
        computing = seen * model.update_flops(flops) / self.rates.update_flops
        whole = self.strategy.kind == "replicated"  # ZeRO splits the step in each of its stages
        kept = model.weights.trained.number / (1 if whole else self._group(layout))
        step = self.rates.pass_layer_s * model.layers + kept * self.rates.optimizer_s
        return max(computing, moved) + work.steps * step

    @property
    def _is_whole(self) -> bool:
        """Whether each trainer keeps all weights."""
        return self.strategy.kind == "replicated" or self.strategy.stage in {1, 2}

    def _group(self, layout: Layout) -> int:
        """Trainers that share one copy of the weights."""
        return min(self.strategy.ranks, layout.trainers)

    def _gathered(self, model: ModelCosts, layout: Layout, times: int) -> float:
        """Return the seconds to make split weights whole, in 16 bits, so many times."""
        if self._is_whole or (group := self._group(layout)) == 1:
            return 0.0
        missing = (group - 1) / group
        return times * 2 * missing * model.number / self.links.among(group)

    def _reduced(self, model: ModelCosts, layout: Layout, times: int) -> float:
        """Return the seconds to add up gradients of 4 bytes, so many times.

        Within a group each trainer gets the sum of its part. Groups add up their parts once for
        each optimizer step, there and back on a ring. Whole weights are groups of one.
        """
        group = 1 if self._is_whole else self._group(layout)
        size, groups = 4 * model.weights.trained.number, layout.trainers / group
        within = size * (group - 1) / group / self.links.among(group)
        between = 2 * size / group * (groups - 1) / groups / self.links.among(layout.trainers)
        return times * within + self.work.steps * between
