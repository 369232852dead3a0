"""What an iteration has to do, from the config of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.models import (
    CausalLM,
    ValueModel,
    ValueNetwork,
    new_value_head,
    packs,
    plain_model,
)
from lrlhf.models.loading.meta import skeleton
from lrlhf.modules.policy.iteration import BatchPlan
from lrlhf.planning.config_entries import is_a, options_of, spec_of
from lrlhf.planning.policy_models import kl_penalty, reference_spec, reward_models, teacher_spec
from lrlhf.planning.simulation.hardware import GPU
from lrlhf.planning.simulation.iteration import Workload
from lrlhf.planning.simulation.layouts import Machine
from lrlhf.planning.simulation.lengths import Lengths, lognormal_lengths, recorded_lengths
from lrlhf.planning.simulation.model_costs import ModelCosts, attends_to_less, costs_of
from lrlhf.planning.strategy_shares import (
    OptimizerNeeds,
    Strategy,
    Weights,
    optimizer_needs,
    weights_of,
)
from lrlhf.rollout import TransformersEngine

_PROMPT_TOKENS = 512
_MICRO_BATCH_TOKENS = 16384


class Question(NamedTuple):
    """What a config leaves open.

    Attributes:
        plan: Sizes of the iteration; its processes do not matter.
        gpu: The hardware.
        strategy: Of the trainers.
        shard_group: Trainers come in groups of so many.
        response_lengths: The mean, or a run's ``rollouts.jsonl``; None: half of the limit.
        reward_s: Seconds of all rewards of an iteration that no model gives.
    """

    plan: BatchPlan
    gpu: GPU
    strategy: Strategy
    shard_group: int = 1
    response_lengths: str | None = None
    reward_s: float = 0.0


class _Models:
    """The models of a policy's run, with what they cost and what they keep in memory."""

    def __init__(self, options: Mapping[str, Any], notes: list[str]) -> None:
        self._options = options
        spec = spec_of(options["policy"], CausalLM)
        model = skeleton(spec, on_gpu=True)
        self.plain = plain_model(model)
        self.policy = costs_of(model, self.plain)
        self.updated, self.values = [self.policy], list[ModelCosts]()
        self.trained = [self._trained(self.policy.weights, options)]
        self.frozen: list[Weights] = []
        self.passes: list[ModelCosts] = []
        self.packs = packs(self.plain)
        self._add_critic(options_of(options.get("critic")))
        reference = reference_spec(options, spec)
        if reference is None and kl_penalty(options) is not None:
            self.passes.append(self.policy)
        for own in (reference, teacher_spec(options)):
            if own is not None:
                frozen = skeleton(own, trainable=False)
                self.passes.append(costs_of(frozen, plain_model(frozen)))
                self.frozen.append(self.passes[-1].weights)
        rewards = [model for _, model, _ in reward_models(options, notes.append)]
        self.rewards = tuple(costs_of(model, plain_model(model)) for model in rewards)
        self.whole = sum(weights_of(model).whole.size for model in rewards)

    def _add_critic(self, critic: Mapping[str, Any]) -> None:
        if critic.get("model") is None:  # a head on the policy is not worth counting
            return
        kind = critic.get("head", "linear")
        spec = spec_of(critic["model"], ValueModel, head=kind)
        body = skeleton(spec, body=True, on_gpu=True)
        network = ValueNetwork(body, new_value_head(body, kind))
        costs = costs_of(network, plain_model(body))
        self.updated.append(costs)
        self.passes.append(costs)
        self.trained.append(self._trained(costs.weights, critic))
        self.packs = self.packs and packs(plain_model(body))

    def _trained(
        self, weights: Weights, owner: Mapping[str, Any]
    ) -> tuple[Weights, OptimizerNeeds]:
        return weights, optimizer_needs(options_of(owner.get("optimizer")), on_gpu=True)


def workload_and_machine(
    model: Any, data: Any, question: Question
) -> tuple[Workload, Machine, list[str]]:
    """Read a config's entries; returns also what was assumed, a line each.

    Raises:
        ValueError: The model cannot be simulated, or the lengths of responses are impossible.
    """
    options, plan, notes = options_of(model), question.plan, list[str]()
    models, engine = _Models(options, notes), options.get("engine")
    update, settings = options_of(options["update"]), options_of(engine)
    if plan.steps_per_iteration > 1 or kl_penalty(options) == "reward":
        models.passes.insert(0, models.policy)
    prompt = options_of(data).get("max_prompt_tokens")
    micro = update["micro_batch_tokens"]
    own = engine is None or is_a(engine, TransformersEngine)
    work = Workload(
        prompts=plan.prompts,
        copies=plan.num_generations,
        prompt_tokens=_PROMPT_TOKENS if prompt is None else int(prompt),
        lengths=_lengths(question.response_lengths, options),
        policy=models.policy,
        passes=tuple(models.passes),
        trained=tuple(models.updated),
        epochs=plan.num_iterations,
        steps=plan.steps_per_iteration,
        trained_share=plan.kept_prompts / plan.prompts_per_rank,
        shares_prompts=models.packs,
        reward_models=models.rewards,
        reward_s=question.reward_s,
        micro_batch_tokens=micro if isinstance(micro, int) else _MICRO_BATCH_TOKENS,
        max_sequences=_max_sequences(settings, own=own),
        continuous=not own,
    )
    machine = Machine(
        question.gpu,
        question.strategy,
        tuple(models.trained),
        tuple(models.frozen),
        models.whole,
        question.shard_group,
    )
    if attends_to_less(models.plain):
        notes.append(
            "attention: each layer is counted as if it attended to the whole text; this model has "
            "others, and needs less time and room for keys and values"
        )
    notes += [
        f"prompts: {work.prompt_tokens} tokens each, the limit or what is assumed without one",
        f"responses: {work.lengths.origin}",
        f"trainers: micro-batches of {work.micro_batch_tokens} tokens",
    ]
    return work, machine, notes


def _lengths(given: str | None, options: Mapping[str, Any]) -> Lengths:
    limit = int(options_of(options["sampling"])["max_new_tokens"])
    if given is None:
        return lognormal_lengths(max(1, limit / 2), limit)
    try:
        mean = float(given)
    except ValueError:
        path = Path(given)
        if not path.is_file():
            raise ValueError(
                f"--response-lengths is {given!r}, neither a mean nor a file of this machine"
            ) from None
        return recorded_lengths(path)
    return lognormal_lengths(mean, limit)


def _max_sequences(engine: Mapping[str, Any], *, own: bool) -> int:
    if not own:
        return int(engine.get("max_num_seqs", 256))
    limit = engine.get("max_batch_size", "auto")
    return limit if isinstance(limit, int) else 2**31  # as many as have room
