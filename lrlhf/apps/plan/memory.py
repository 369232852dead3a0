"""What a run will need of each process's memory, phase by phase, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from peft import PeftModel
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.apps.plan.dry_run import DryRun, Shape, Usage
from lrlhf.apps.plan.strategy_shares import (
    OptimizerNeeds,
    Shares,
    Strategy,
    Weights,
    optimizer_needs,
    strategy_of,
    weights_of,
)
from lrlhf.callbacks import EntropyControl
from lrlhf.cli.config_entries import is_a, options_of, reward_entries, spec_of
from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.algorithms import ALGORITHMS, ALIASES, distillation, resolve_algorithm
from lrlhf.models import (
    CausalLM,
    HeadedBackbone,
    PretrainedSpec,
    RewardNetwork,
    ScoreModel,
    SourceError,
    ValueHead,
    ValueModel,
    ValueNetwork,
    context_length,
    new_value_head,
    packs,
    plain_model,
    sequence_logprobs,
    sequence_outputs,
)
from lrlhf.models.loading.meta import skeleton
from lrlhf.models.media_inputs import placeholder_ids
from lrlhf.models.token_budget import FIRST_TOKENS
from lrlhf.modules import DPO, KTO, SFT
from lrlhf.modules.dpo import resolve_preference_loss
from lrlhf.modules.policy.iteration import BatchPlan, plain_text
from lrlhf.rewards import LearnedReward, ProcessReward
from lrlhf.rollout import GenerativeReward, TransformersEngine
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine
from lrlhf.trainer import GPU_PRECISION
from lrlhf.types import SequenceBatch


def kl_penalty(options: Mapping[str, Any]) -> str | None:
    """Say where a module's KL penalty goes, reward or loss; None: there is none."""
    reference, algorithm = options_of(options.get("reference")), options.get("algorithm")
    if isinstance(algorithm, Mapping):
        own = options_of(algorithm)
        strength = own.get("kl_coef", Algorithm.kl_coef)
        kl_in = own.get("kl_in", Algorithm.kl_in)
    else:
        estimator = options_of(options.get("advantage")).get("estimator")
        default = "rloo" if options.get("rewards") is not None else distillation.ALGORITHM
        named = estimator if estimator in {*ALGORITHMS, *ALIASES} else default
        known = resolve_algorithm(algorithm or named)
        strength, kl_in = known.kl_coef, known.kl_in
    if (kl_coef := reference.get("kl_coef")) is not None:
        strength = kl_coef
    return str(reference.get("placement") or kl_in) if strength else None


def reference_spec(options: Mapping[str, Any], policy: CausalLM) -> CausalLM | None:
    """Return what a reference model of its own is loaded from; None: there is no such model."""
    if kl_penalty(options) is None:
        return None
    if (entry := options_of(options.get("reference")).get("model")) is not None:
        return spec_of(entry, CausalLM)
    return policy if policy.lora is None else None  # the policy without its adapters


def teacher_spec(options: Mapping[str, Any], policy: CausalLM) -> CausalLM | None:
    """Return what a teacher model of its own is loaded from; None: there is no such model."""
    teacher = options_of(options.get("teacher"))
    if (entry := teacher.get("model")) is not None:
        return spec_of(entry, CausalLM, dtype="auto")
    own = teacher.get("context") and not teacher.get("server") and policy.lora is None
    return policy if own and teacher.get("update_rate", 0) != 1 else None


def reward_models(
    options: Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[tuple[str, PreTrainedModel | PeftModel, Mapping[str, Any]]]:
    """Yield the name, skeleton and options of each reward model; what cannot be read is noted."""
    for name, entry in reward_entries(options.get("rewards")).items():
        own = options_of(entry)
        if own.get("device") == "cpu":
            continue
        if is_a(entry, GenerativeReward):
            note(f"not counted: the model of reward {name!r}, which generates")
        if not (is_a(entry, LearnedReward) or is_a(entry, ProcessReward)):
            continue
        keys = ("source", "dtype", "attn_implementation", "trust_remote_code")
        model_options = {"dtype": "auto"} | {key: own[key] for key in keys if key in own}
        try:
            model = skeleton(PretrainedSpec(**model_options), body=True, trainable=False)
        except SourceError as error:
            note(f"not counted: the model of reward {name!r}, which cannot be read: {error}")
            continue
        yield str(name), model, own


_ASSUMED_TOKENS = 512


class Phase(NamedTuple):
    """A line of the memory table.

    Attributes:
        name: What happens.
        usage: Bytes at the moment when most is used.
        option: What it grows with, and its value; None: the model and the strategy alone.
    """

    name: str
    usage: Usage
    option: str | None = None


@dataclass(kw_only=True)
class PhaseList:
    """Collects the phases of a run on one process.

    Args:
        dry_run: Counts what passes allocate.
        strategy: Of the trainer.
        on_gpu: Where the run will be.
        device_size: Bytes of a GPU; None: not known.
        resident: What stays in memory all the time.
        phases: The lines of the table.
        notes: What was assumed, and what is not counted.
        recomputes: Activations of what is trained first are computed again.
    """

    dry_run: DryRun
    strategy: Strategy
    on_gpu: bool
    device_size: int | None
    resident: Usage = field(default=Usage())
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recomputes: bool = False

    def hold(self, weights: Weights, optimizer: Any = None, *, accumulates: bool = False) -> Shares:
        """Keep a model in memory from now on, and its ``optimizer``, where its options are given.

        It ``accumulates`` where a step adds up the gradients of several micro-batches.
        """
        needs = OptimizerNeeds()
        if optimizer is not None:
            needs = optimizer_needs(optimizer, on_gpu=self.on_gpu)
        shares = self.strategy.shares(weights, needs, accumulates=accumulates)
        if accumulates and self.strategy.kind == "fsdp2":
            self._note_reduction(weights)
        self.resident = self.resident.plus(shares.resident)
        return shares

    def _note_reduction(self, weights: Weights) -> None:
        at_once = self.strategy.reduces_each(weights)
        when = "with each micro-batch" if at_once else "once a step"
        size = weights.trained.size / 2**30
        unknown = self.strategy.reduces == "auto" and self.device_size is None
        assumed = ", on devices of unknown size (--gpu-memory)" if unknown and self.on_gpu else ""
        self.note(f"fsdp2 reduces gradients of {size:.3g} GiB, if whole, {when}{assumed}")

    def add(self, name: str, *usages: Usage, option: str | None = None) -> None:
        """Add a phase that needs ``usages`` beside what stays, see `Phase`."""
        self.phases.append(Phase(name, self.resident.plus(*usages), option))

    def add_update(self, model: str, shares: Shares, usage: Usage, option: str) -> None:
        """Add the phases of an optimizer step, of whose passes ``usage`` is known."""
        gradients = Usage(gradients=shares.gradients)
        # those that come up in the pass are counted by it
        gradient_usage = gradients if not usage.gradients else Usage()
        self.add(f"update {model}", usage, Usage(shares.gathered), gradient_usage, option=option)
        self.add(f"optimizer step of {model}", gradients, Usage(optimizer=shares.step))

    def note(self, line: str) -> None:
        """Add a note, once."""
        if line not in self.notes:
            self.notes.append(line)

    def hold_frozen(self, spec: PretrainedSpec) -> None:
        """Keep a model that does not learn in memory from now on."""
        model = skeleton(spec, trainable=False)
        self.hold(weights_of(model, plain_model(model), quantization=spec.quantization))

    def first_tokens(self, option: str) -> int | None:
        """Return with how many tokens a run begins that finds out itself how many fit."""
        if not self.on_gpu:
            return None
        self.note(
            f"{option} is auto: it begins with {FIRST_TOKENS} tokens, as counted here, or one row, "
            "and grows into what is free"
        )
        return FIRST_TOKENS

    def note_recomputing(self, spec: PretrainedSpec, plain: PreTrainedModel) -> None:
        """See whether a model that is trained recomputes its activations, and say who chose it."""
        self.recomputes = plain.is_gradient_checkpointing
        if self.recomputes and spec.gradient_checkpointing == "auto":
            self.note("gradient_checkpointing is auto: on, for a model of this size on a GPU")

    def tokens_of(self, data: Any, option: str, what: str) -> int:
        """Return an option of the data module that limits lengths, or assume it, and say so."""
        limit = options_of(data).get(option)
        if limit is None:
            self.note(
                f"assumed: {what} of up to {_ASSUMED_TOKENS} tokens; data.{option} would say how "
                "long they are"
            )
        return _ASSUMED_TOKENS if limit is None else int(limit)


_GIB = 2**30


def add_policy_phases(phases: PhaseList, sections: Mapping[str, Any], plan: BatchPlan) -> None:
    """Add the phases of an iteration, from the config's groups."""
    prompt_tokens = phases.tokens_of(sections["data"], "max_prompt_tokens", "prompts")
    options = options_of(sections["model"])
    # the callback raises a coefficient of 0 too
    callbacks = sections["trainer"].get("callbacks") or []
    listed = callbacks if isinstance(callbacks, list) else [callbacks]
    steered = any(is_a(callback, EntropyControl) for callback in listed)
    entropy = steered or options_of(options["update"]).get("entropy_coef", 0.0) > 0
    _PolicyMemory(phases, options, plan, prompt_tokens, entropy=entropy).add_phases()


def note_media(phases: PhaseList, plain: PreTrainedModel) -> None:
    """Say of a model that sees images that they are not counted."""
    if placeholder_ids(plain.config):
        phases.note(
            "not counted: what looks at images, videos and audio, and their tokens, those of "
            "episodes included"
        )


class _PolicyMemory:
    """Goes through an iteration, in its order."""

    def __init__(
        self,
        phases: PhaseList,
        options: Mapping[str, Any],
        plan: BatchPlan,
        prompt_tokens: int,
        *,
        entropy: bool,
    ) -> None:
        self._entropy = entropy
        self._phases, self._options, self._plan = phases, options, plan
        self._update = options_of(options["update"])
        self._copies = int(options["num_generations"])
        self._prompt_tokens = prompt_tokens
        self._new_tokens = int(options_of(options["sampling"])["max_new_tokens"])
        self._spec = spec_of(options["policy"], CausalLM)
        self._policy = skeleton(self._spec, on_gpu=phases.on_gpu)
        self._plain = plain_model(self._policy)
        phases.note_recomputing(self._spec, self._plain)
        self._vocabulary = int(self._plain.config.get_text_config().vocab_size)
        critic = self._critic_options = options_of(options.get("critic"))
        self._critic: ValueNetwork | None = None
        self._head: ValueHead | None = None
        kind = critic.get("head", "linear")
        if critic.get("model") is not None:
            self._critic_spec = spec_of(critic["model"], ValueModel, head=kind)
            body = skeleton(self._critic_spec, body=True, on_gpu=phases.on_gpu)
            self._critic = ValueNetwork(body, new_value_head(body, kind))
        elif critic:
            self._head = new_value_head(self._policy, kind)
        note_media(phases, self._plain)

    def add_phases(self) -> None:
        """Hold all models, then measure phase by phase."""
        phases = self._phases
        update = self._micro_batch(self._plan.minibatch_rows)
        adds_up = update.rows < self._plan.minibatch_rows
        accumulates = adds_up or bool(self._update.get("pretraining_coef"))
        policy, critic = self._hold_trained(accumulates=accumulates)
        self._hold_frozen()
        rewards = dict(self._reward_models())
        self._add_generation(policy)
        for name, (model, options) in rewards.items():
            self._add_scoring(name, model, options)
        before = self._micro_batch(self._plan.responses_per_rank)
        option = _micro_batch_option(before)
        usage = phases.dry_run.forward(self._trained_with_policy, self._loss, before)
        phases.add("log-probabilities", usage, Usage(policy.gathered), option=option)
        if self._critic is not None:
            usage = phases.dry_run.forward(self._critic, self._critic, before)
            phases.add("values", usage, Usage(critic.gathered), option=option)
        # strategies that cast weights keep gradients of their own in full precision
        exist = accumulates or phases.dry_run.casts_weights
        option, measure = _micro_batch_option(update), phases.dry_run.update
        usage = measure(
            self._trained_with_policy,
            self._loss,
            update,
            accumulates=exist,
            offloads=self._spec.activation_offload and phases.on_gpu,
        )
        phases.add_update("policy", policy, usage, option)
        if (network := self._critic) is not None:
            usage = measure(
                network,
                lambda batch: network(batch).sum(),
                update,
                accumulates=exist,
                offloads=self._critic_spec.activation_offload and phases.on_gpu,
            )
            phases.add_update("critic", critic, usage, option)

    def _hold_trained(self, *, accumulates: bool) -> tuple[Shares, Shares]:
        phases, critic = self._phases, self._critic_options
        weights = weights_of(self._policy, self._plain, quantization=self._spec.quantization)
        optimizer = options_of(self._options["optimizer"])
        policy = phases.hold(weights, optimizer, accumulates=accumulates)
        if self._head is not None:
            weights = weights_of(self._head)
        elif self._critic is not None:
            quantization = options_of(critic["model"]).get("quantization")
            backbone = plain_model(self._critic.backbone)
            weights = weights_of(self._critic, backbone, quantization=quantization)
        else:
            return policy, policy
        optimizer = options_of(critic.get("optimizer"))
        return policy, phases.hold(weights, optimizer, accumulates=accumulates)

    def _hold_frozen(self) -> None:
        reference = reference_spec(self._options, self._spec)
        for spec in (reference, teacher_spec(self._options, self._spec)):
            if spec is not None:
                self._phases.hold_frozen(spec)

    def _reward_models(
        self,
    ) -> Iterator[tuple[str, tuple[PreTrainedModel | PeftModel, Mapping[str, Any]]]]:
        """Hold trained reward models, which every process has whole."""
        for name, model, options in reward_models(self._options, self._phases.note):
            self._hold_outside(weights_of(model).total.size)
            yield name, (model, options)

    def _hold_outside(self, parameters: int, cache: int = 0) -> None:
        """Keep in memory what the strategy does not know of."""
        outside = Usage(parameters, cache=cache)
        self._phases.resident = self._phases.resident.plus(outside)

    # ------------------------------------------------------------------ phases

    def _add_generation(self, policy: Shares) -> None:
        engine, phases = self._options.get("engine"), self._phases
        options = options_of(engine)
        if engine is None or is_a(engine, TransformersEngine):
            self._add_own_generation(policy, options.get("max_batch_size", "auto"))
        elif is_a(engine, VLLMEngine):
            resident = phases.resident
            self._hold_outside(*self._lent_to_vllm(options))
            phases.add("generate (vLLM)")
            if options.get("sleep"):
                phases.resident = resident
        else:
            server = is_a(engine, VLLMServerEngine)
            what = "the vLLM server" if server else engine["class_path"]
            phases.note(f"not counted: what {what} needs, in a process of its own or unknown here")

    def _add_own_generation(self, policy: Shares, limit: Any) -> None:
        prompts, copies = self._plan.prompts_per_rank, self._copies
        if limit == "auto":
            tokens = self._phases.first_tokens("engine.max_batch_size")
            if tokens is not None:
                longest = self._prompt_tokens + self._new_tokens
                prompts = min(prompts, max(1, tokens // (copies * longest)))
        elif limit is not None:
            prompts = min(prompts, max(1, limit // copies))
        ends = self._phases.dry_run.generation(
            self._plain,
            Shape(prompts, self._prompt_tokens, vocabulary=self._vocabulary),
            copies=copies,
            new_tokens=self._new_tokens,
        )
        option = f"engine.max_batch_size (now {prompts * copies})"
        gathered = Usage(policy.gathered_to_generate)
        for name, usage in zip(("prompts", "last token"), ends, strict=True):
            self._phases.add(f"generate: {name}", usage, gathered, option=option)

    def _lent_to_vllm(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of this process's part of vLLM's weights, and of its keys and values."""
        on_gpu, size = self._phases.on_gpu, self._phases.device_size
        automatic = "bfloat16" if on_gpu else "float32"
        dtype = options.get("dtype", "auto").replace("auto", automatic)
        weights = weights_of(self._policy).total.number * getattr(torch, dtype).itemsize
        weights //= options.get("tensor_parallel_size", 1)
        cache_gib = options.get("kv_cache_gib") or (None if on_gpu else 1.0)
        if cache_gib is not None:
            return weights, round(cache_gib * _GIB)
        share = options.get("gpu_memory_utilization") or VLLMEngine.default_gpu_memory_utilization
        if size is None:
            self._phases.note(
                f"not counted: keys and values of vLLM, which takes {share:.0%} of the GPU with "
                "its weights; give --gpu-memory"
            )
            return weights, 0
        return weights, max(0, round(share * size) - weights)

    def _add_scoring(
        self, name: str, model: PreTrainedModel | PeftModel, options: Mapping[str, Any]
    ) -> None:
        rows = min(int(options.get("batch_size", 8)), self._plan.responses_sampled)
        longest = self._prompt_tokens + self._new_tokens
        limits = (options.get("max_tokens"), context_length(model))
        tokens = min([longest, *(limit for limit in limits if limit is not None)])
        if tokens < longest:
            self._phases.note(
                f"reward {name!r} reads at most {tokens} tokens: a prompt and response may have "
                f"{longest}, and those that are longer get no score"
            )
        usage = self._phases.dry_run.forward(
            model,
            lambda batch: model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
            ),
            Shape(rows, tokens),
        )
        option = f"model.rewards.functions.{name}.batch_size (now {rows})"
        self._phases.add(f"score responses: {name}", usage, option=option)

    # ------------------------------------------------------------------ micro-batches

    @cached_property
    def _shared(self) -> int:
        """Responses whose prompt is computed once, in a micro-batch that holds all of them."""
        critic = [] if self._critic is None else [plain_model(self._critic.backbone)]
        return self._copies if all(map(packs, [self._plain, *critic])) else 1

    def _micro_batch(self, rows: int) -> Shape:
        """The longest texts that go through a model at the same time, of so many."""
        prompt, new = self._prompt_tokens, self._new_tokens
        budget = self._update["micro_batch_tokens"]
        if budget == "auto":
            budget = self._phases.first_tokens("update.micro_batch_tokens")
        if budget is not None:
            sequence = prompt + self._shared * new
            if budget >= sequence:
                rows = min(rows, budget // sequence * self._shared)
            else:  # a part of the responses to one prompt
                rows = min(rows, max(1, (budget - prompt) // new))
        return Shape(rows, prompt + new, new, self._shared, self._vocabulary)

    @cached_property
    def _trained_with_policy(self) -> nn.Module:
        """The policy, and the value head that reads its hidden states if there is one."""
        return nn.ModuleList([self._policy, *([] if self._head is None else [self._head])])

    def _loss(self, batch: SequenceBatch) -> Tensor:
        out = sequence_outputs(
            self._policy,
            batch,
            chunk_size=int(self._update.get("logprob_chunk", 1024)),
            entropy=self._entropy,
            value_head=None if self._head is None else self._values,
        )
        parts = [part for part in (out.logprobs, out.entropy, out.values) if part is not None]
        return torch.stack([part.sum() for part in parts]).sum()

    def _values(self, hidden: Tensor) -> Tensor:
        assert self._head is not None
        moved = self._critic_options.get("backbone_coef", 0.0) > 0
        values: Tensor = self._head(hidden if moved else hidden.detach())
        return values


def _micro_batch_option(shape: Shape) -> str:
    tokens = sum(tree.tokens for tree in shape.trees())
    return f"update.micro_batch_tokens (now {tokens})"


def add_supervised_phases(phases: PhaseList, model: Any, data: Any) -> None:
    """Add the phases of an optimizer step of `SFT` or `KTO`, from the config's entries.

    The loss is taken to be on every token.
    """
    policy = _Policy(phases, options_of(model), data)
    rows, budget = int(options_of(data)["batch_size"]), policy.options["micro_batch_tokens"]
    if budget == "auto":
        budget = phases.first_tokens("micro_batch_tokens")
    at_once = rows if budget is None else min(rows, max(1, budget // policy.tokens))
    adds_up = at_once < rows
    shares = policy.hold(accumulates=adds_up)
    option = f"micro_batch_tokens (now {at_once * policy.tokens})"
    if is_a(model, KTO):
        policy.add_reference(shares, policy.shape(at_once), option)

    def loss(batch: SequenceBatch) -> Tensor:
        entropy = bool(policy.options.get("log_entropy"))
        out = sequence_outputs(policy.model, batch, chunk_size=policy.chunk, entropy=entropy)
        return out.logprobs.sum()

    usage = phases.dry_run.update(
        policy.model,
        loss,
        policy.shape(at_once),
        # strategies that cast weights keep gradients of their own in full precision
        accumulates=adds_up or phases.dry_run.casts_weights,
        offloads=policy.offloads,
    )
    phases.add_update("policy", shares, usage, option)


def add_preference_phases(phases: PhaseList, model: Any, data: Any, *, adds_up: bool) -> None:
    """Add the phases of an optimizer step of `DPO`, from the config's entries.

    It ``adds_up`` the gradients of several batches of pairs, whose prompts are taken to be short.
    """
    policy = _Policy(phases, options_of(model), data)
    pairs = int(options_of(data)["batch_size"])
    # Lightning frees the gradients of a step after the forward pass of the next
    shares = policy.hold(accumulates=adds_up)
    option, shape = f"data.batch_size (now {pairs})", policy.shape(2 * pairs)

    if policy.has_reference:
        policy.add_reference(shares, shape, option)
    usage = phases.dry_run.update(
        policy.model,
        lambda batch: policy.logprobs(batch).sum(),
        shape,
        accumulates=True,
        offloads=policy.offloads,
    )
    phases.add_update("policy", shares, usage, option)


class _Policy:
    """The model that is trained, and what the config says of it."""

    def __init__(self, phases: PhaseList, options: Mapping[str, Any], data: Any) -> None:
        self._phases, self.options = phases, options
        self._spec = spec_of(options["policy"], CausalLM)
        self.model = skeleton(self._spec, on_gpu=phases.on_gpu)
        self._plain = plain_model(self.model)
        note_media(phases, self._plain)
        phases.note_recomputing(self._spec, self._plain)
        self.tokens = phases.tokens_of(data, "max_tokens", "texts")
        self.chunk = int(options.get("logprob_chunk", 1024))
        self.offloads = self._spec.activation_offload and phases.on_gpu

    def shape(self, rows: int) -> Shape:
        vocabulary = int(self._plain.config.get_text_config().vocab_size)
        # nothing predicts the first token
        return Shape(rows, self.tokens, max(1, self.tokens - 1), vocabulary=vocabulary)

    def hold(self, *, accumulates: bool) -> Shares:
        weights = weights_of(self.model, self._plain, quantization=self._spec.quantization)
        optimizer = options_of(self.options["optimizer"])
        return self._phases.hold(weights, optimizer, accumulates=accumulates)

    def logprobs(self, batch: SequenceBatch) -> Tensor:
        return sequence_logprobs(self.model, batch, chunk_size=self.chunk)

    def add_reference(self, shares: Shares, shape: Shape, option: str) -> None:
        """Add its pass, before or between the policy's."""
        alone, reference = self._phases.resident, self.options.get("reference")
        if reference is not None:
            self._phases.hold_frozen(spec_of(reference, CausalLM))
        elif self._spec.lora is None:  # with LoRA it is the policy
            self._phases.hold_frozen(self._spec)
        usage = self._phases.dry_run.forward(self.model, self.logprobs, shape)
        self._phases.add("reference", usage, Usage(shares.gathered), option=option)
        if self.options.get("precompute_reference"):
            self._phases.resident = alone

    @property
    def has_reference(self) -> bool:
        loss = self.options.get("loss", "sigmoid")
        if isinstance(loss, str):
            return resolve_preference_loss(loss).reference
        return bool(options_of(loss).get("reference", True))


_MIB = 2**20
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
            add_policy_phases(phases, sections, plan)
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
    if is_a(model, SFT) or is_a(model, KTO):
        add_supervised_phases(phases, model, data)
    elif is_a(model, DPO):
        add_preference_phases(phases, model, data, adds_up=adds_up)
    else:
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
    unit, size = _GIB if large else _MIB, phases.device_size
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
