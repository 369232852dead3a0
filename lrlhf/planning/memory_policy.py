"""Memory of a policy that is trained on its own responses, with or without a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pydoc import locate as import_by_path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import (
    CausalLM,
    PretrainedSpec,
    SourceError,
    ValueModel,
    new_value_head,
    packs,
    plain_model,
    sequence_outputs,
)
from lrlhf.models.loading.meta import (
    ValueSkeleton,
    body_skeleton,
    policy_skeleton,
    runnable,
    shapes_only,
    value_skeleton,
)
from lrlhf.models.media_inputs import placeholder_ids
from lrlhf.modules.policy.batch_plan import BatchPlan
from lrlhf.planning.memory_phases import (
    Dial,
    Held,
    Memory,
    Notes,
    Phase,
    frozen,
    head_weights,
    options_of,
    spec_of,
)
from lrlhf.planning.memory_ranks import Weights, optimizer_needs, weights_of
from lrlhf.planning.memory_trace import (
    Shape,
    forward_needs,
    generation_needs,
    update_needs,
)
from lrlhf.rewards import LearnedReward
from lrlhf.rollout import TransformersEngine
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine
from lrlhf.types import SequenceBatch

_ASSUMED_PROMPT = 512
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PolicySizes:
    """How long and how many the texts of one process are.

    Args:
        plan: Responses and optimizer steps.
        prompt_tokens: Of the longest prompt.
        new_tokens: Of the longest response.
        micro_batch_tokens: Of one forward pass; None: a minibatch at once.
        shared: Responses whose prompt is computed once, in a pass that holds all of them.
    """

    plan: BatchPlan
    prompt_tokens: int
    new_tokens: int
    micro_batch_tokens: int | None
    shared: int = 1

    def micro_batch(self, rows: int) -> Shape:
        """The longest texts that go through a model at the same time, of so many."""
        budget, tokens = self.micro_batch_tokens, self.prompt_tokens + self.new_tokens
        if budget is not None:
            whole = self.prompt_tokens + self.shared * self.new_tokens
            if budget >= whole:
                rows = min(rows, budget // whole * self.shared)
            else:  # a part of the responses to one prompt
                rows = min(rows, max(1, (budget - self.prompt_tokens) // self.new_tokens))
        return Shape(rows, tokens, self.new_tokens, group=self.shared)

    @property
    def update(self) -> Shape:
        """A micro-batch of an optimizer step."""
        return self.micro_batch(self.plan.minibatch_rows)

    @property
    def look(self) -> Shape:
        """A micro-batch of a pass over the whole rollout."""
        return self.micro_batch(self.plan.responses_per_rank)

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer step adds up several micro-batches."""
        return self.update.rows < self.plan.minibatch_rows


class PolicyMemory:
    """Works the phases of an iteration out.

    Args:
        options: Of the module.
        sizes: Of its texts.
        memory: The device, nothing on it yet.
        notes: Told what was assumed.
        device_size: Bytes of the device; None: not known.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        sizes: PolicySizes,
        memory: Memory,
        notes: Notes,
        device_size: int | None,
    ) -> None:
        self._options = options
        self._notes = notes
        self._device_size = device_size
        self._memory = memory
        self._update = options_of(options["update"])
        self._spec = spec_of(options["policy"], CausalLM)
        self._policy = policy_skeleton(self._spec)
        self._critic_options = options_of(options.get("critic"))
        self._critic = self._own_critic()
        backbones = [self._policy, *([] if self._critic is None else [self._critic.backbone])]
        packed = all(packs(plain_model(backbone)) for backbone in backbones)
        self._sizes = replace(sizes, shared=int(options["num_generations"]) if packed else 1)
        self._head = (
            new_value_head(self._policy, self._critic_options.get("head", "linear"))
            if self._critic_options and self._critic is None
            else None
        )
        self._rewards = self._reward_models()
        if placeholder_ids(plain_model(self._policy).config):
            notes.add("not counted: what looks at images and videos, and their tokens")

    def phases(self) -> list[Phase]:
        """Return the phases of an iteration in their order."""
        held = self._held()
        self._notes.add_smaller("policy", self._options["policy"], self._memory)
        if self._critic is not None:
            self._notes.add_smaller("critic.model", self._critic_options["model"], self._memory)
        memory = replace(self._memory, held=tuple(held.values()))
        dtype = memory.pass_dtype()
        with shapes_only():
            for model in (self._policy, self._critic, self._head):
                if model is not None:
                    runnable(model, dtype=dtype)
            drawing, memory = self._generation(memory, held["policy"].weights)
            return [
                *drawing,
                *self._scoring(memory),
                *self._looking(memory, held),
                *self._updating(memory, held),
            ]

    # ------------------------------------------------------------------ models

    def _own_critic(self) -> ValueSkeleton | None:
        entry = self._critic_options.get("model")
        if entry is None:
            return None
        head = self._critic_options.get("head", "linear")
        return value_skeleton(spec_of(entry, ValueModel, head=head))

    def _held(self) -> dict[str, Held]:
        on_gpu = self._memory.sharing.on_gpu
        plain = plain_model(self._policy)
        weights = weights_of(self._policy, plain, quantization=self._spec.quantization)
        optimizer = optimizer_needs(options_of(self._options["optimizer"]), on_gpu=on_gpu)
        held = {"policy": Held(weights, optimizer)}
        if self._critic_options:
            needs = optimizer_needs(
                options_of(self._critic_options.get("optimizer")), on_gpu=on_gpu
            )
            held["critic"] = Held(self._critic_weights(), needs)
        reference = options_of(self._options.get("reference"))
        if reference.get("kl_coef", 0.05):
            held |= self._reference(reference.get("model"), weights)
        for name, (model, _) in self._rewards.items():
            held[name] = Held(weights_of(model, plain_model(model)), shared=False)
        return held

    def _critic_weights(self) -> Weights:
        if self._critic is None:
            assert self._head is not None
            return head_weights(self._head)
        entry = self._critic_options["model"]
        quantization = None if isinstance(entry, str) else options_of(entry).get("quantization")
        plain = plain_model(self._critic.backbone)
        return weights_of(self._critic, plain, quantization=quantization)

    def _reference(self, entry: Any, policy: Weights) -> dict[str, Held]:
        if entry is not None:
            spec = spec_of(entry, CausalLM)
            model = policy_skeleton(spec, trainable=False)
            weights = weights_of(model, plain_model(model), quantization=spec.quantization)
            return {"reference": Held(weights)}
        return {} if self._spec.lora is not None else {"reference": Held(frozen(policy))}

    def _reward_models(self) -> dict[str, tuple[PreTrainedModel | PeftModel, Mapping[str, Any]]]:
        """Trained reward models, which every rank has whole, and how they are used."""
        functions = options_of(self._options["rewards"]).get("functions") or []
        entries = functions.items() if isinstance(functions, Mapping) else enumerate(functions)
        found: dict[str, tuple[PreTrainedModel | PeftModel, Mapping[str, Any]]] = {}
        for name, entry in entries:
            options = options_of(entry) if isinstance(entry, Mapping) else {}
            if not _is_a(entry, LearnedReward) or options.get("device") == "cpu":
                continue
            keys = ("source", "dtype", "attn_implementation", "trust_remote_code")
            given = {"dtype": "auto"} | {key: options[key] for key in keys if key in options}
            try:
                found[f"reward {name}"] = (
                    body_skeleton(PretrainedSpec(**given), trainable=False),
                    options,
                )
            except SourceError as error:
                self._notes.add(f"not counted: the reward model {name}: {error}")
        return found

    # ------------------------------------------------------------------ phases

    def _generation(self, memory: Memory, policy: Weights) -> tuple[list[Phase], Memory]:
        """The phases of drawing responses, and the memory that the engine leaves to the others."""
        engine = self._options.get("engine")
        options = options_of(engine)
        if engine is None or _is_a(engine, TransformersEngine):
            return self._own_generation(memory, policy, options), memory
        if _is_a(engine, VLLMEngine):
            lent = self._lent_to_vllm(options, policy)
            if options.get("sleep"):
                drawing = memory.with_fixed(parameters=lent[0], cache=lent[1])
                return [drawing.phase("draw responses (vLLM)")], memory
            memory = memory.with_fixed(parameters=lent[0], cache=lent[1])
            return [memory.phase("draw responses (vLLM)")], memory
        what = "the vLLM server" if _is_a(engine, VLLMServerEngine) else engine["class_path"]
        self._notes.add(f"not counted: what {what} needs, in a process of its own or unknown here")
        return [], memory

    def _own_generation(
        self, memory: Memory, policy: Weights, options: Mapping[str, Any]
    ) -> list[Phase]:
        sizes, copies = self._sizes, int(self._options["num_generations"])
        prompts = sizes.plan.prompts_per_rank
        limit = options.get("max_batch_size")
        if limit is not None:
            prompts = min(prompts, max(1, limit // copies))
        needs = generation_needs(
            self._policy,
            Shape(prompts, sizes.prompt_tokens),
            copies=copies,
            new_tokens=sizes.new_tokens,
            precision=memory.precision,
        )
        dial = Dial("engine.max_batch_size", prompts * copies, copies)
        gathered = memory.sharing.gathered(policy, generates=True)
        return [
            memory.phase("draw responses: prompts", needs.prompts, gathered=gathered, dial=dial),
            memory.phase(
                "draw responses: last token", needs.last_token, gathered=gathered, dial=dial
            ),
        ]

    def _lent_to_vllm(self, options: Mapping[str, Any], policy: Weights) -> tuple[int, int]:
        """Bytes of vLLM's weights, and of its keys and values."""
        on_gpu = self._memory.sharing.on_gpu
        dtype = options.get("dtype", "auto")
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        weights = policy.whole.number * torch.empty(0, dtype=getattr(torch, dtype)).itemsize
        cache_gib = options.get("kv_cache_gib") or (None if on_gpu else 1.0)
        if cache_gib is not None:
            return weights, round(cache_gib * _GIB)
        share = options.get("gpu_memory_utilization") or VLLMEngine.default_gpu_memory_utilization
        if self._device_size is None:
            self._notes.add(
                f"not counted: keys and values of vLLM, which takes {share:.0%} of the GPU with "
                "its weights; give --gpu-memory"
            )
            return weights, 0
        return weights, max(0, round(share * self._device_size) - weights)

    def _scoring(self, memory: Memory) -> list[Phase]:
        phases = []
        tokens = self._sizes.prompt_tokens + self._sizes.new_tokens
        for name, (model, options) in self._rewards.items():
            rows = min(int(options.get("batch_size", 8)), self._sizes.plan.responses_drawn)
            runnable(model)
            needed = forward_needs(model, _body(model), Shape(rows, tokens), memory.precision)
            what = name.removeprefix("reward ")
            dial = Dial(f"model.rewards.functions.{what}.batch_size", rows, 1)
            phases.append(memory.phase(f"score responses: {what}", needed, dial=dial))
        return phases

    def _looking(self, memory: Memory, held: Mapping[str, Held]) -> list[Phase]:
        """Log-probabilities and values before the update, without gradients."""
        share, shape = memory.sharing, self._sizes.look
        dial = _micro_batches(shape)
        needed = forward_needs(self._policy, self._loss, shape, memory.precision)
        gathered = share.gathered(held["policy"].weights)
        phases = [memory.phase("log-probabilities", needed, gathered=gathered, dial=dial)]
        if self._critic is not None:
            needed = forward_needs(self._critic, self._critic, shape, memory.precision)
            gathered = share.gathered(held["critic"].weights)
            phases.append(memory.phase("values", needed, gathered=gathered, dial=dial))
        return phases

    def _updating(self, memory: Memory, held: Mapping[str, Held]) -> list[Phase]:
        phases = self._update_of(memory, "policy", held["policy"], self._policy)
        if self._critic is not None:
            phases += self._update_of(memory, "critic", held["critic"], self._critic)
        return phases

    def _update_of(self, memory: Memory, role: str, held: Held, model: nn.Module) -> list[Phase]:
        sizes = self._sizes
        accumulates = sizes.accumulates or bool(self._update.get("pretraining_coef"))
        compute = self._loss if role == "policy" else lambda batch: model(batch).sum()
        needed = update_needs(
            model,
            compute,
            sizes.update,
            memory.precision,
            accumulates=accumulates or memory.sharing.casts,
        )
        return memory.updates(
            role, held, needed, accumulates=accumulates, dial=_micro_batches(sizes.update)
        )

    def _loss(self, batch: SequenceBatch) -> Tensor:
        out = sequence_outputs(
            self._policy,
            batch,
            chunk_size=int(self._update.get("logprob_chunk", 1024)),
            entropy=self._update.get("entropy_coef", 0.0) > 0,
            value_head=None if self._head is None else self._values,
        )
        parts = [part for part in (out.logprobs, out.entropy, out.values) if part is not None]
        return torch.stack([part.sum() for part in parts]).sum()

    def _values(self, hidden: Tensor) -> Tensor:
        assert self._head is not None
        moved = self._critic_options.get("backbone_coef", 0.0) > 0
        values: Tensor = self._head(hidden if moved else hidden.detach())
        return values


def prompt_tokens_of(data: Mapping[str, Any], notes: Notes) -> int:
    """Read how long prompts can be, or assume it."""
    given = data.get("max_prompt_tokens")
    if given is None:
        notes.add(
            f"assumed: prompts of up to {_ASSUMED_PROMPT} tokens; data.max_prompt_tokens would say "
            "how long they are"
        )
        return _ASSUMED_PROMPT
    return int(given)


def _micro_batches(shape: Shape) -> Dial:
    tokens = sum(tree.tokens for tree in shape.trees())
    return Dial("update.micro_batch_tokens", tokens, shape.tokens, chunked=True)


def _body(model: nn.Module) -> Any:
    return lambda batch: model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
    )


def _is_a(entry: Any, cls: type) -> bool:
    if not isinstance(entry, Mapping) or "class_path" not in entry:
        return False
    found = import_by_path(entry["class_path"])
    return isinstance(found, type) and issubclass(found, cls)
