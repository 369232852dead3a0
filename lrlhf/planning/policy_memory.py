"""Memory of a policy that is trained on its own responses, with or without a critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.models import (
    CausalLM,
    ValueHead,
    ValueModel,
    ValueNetwork,
    context_length,
    new_value_head,
    packs,
    plain_model,
    sequence_outputs,
)
from lrlhf.models.loading.meta import skeleton
from lrlhf.models.media_inputs import placeholder_ids
from lrlhf.models.token_budget import FIRST_TOKENS
from lrlhf.modules.policy.iteration import BatchPlan
from lrlhf.planning.config_entries import is_a, options_of, spec_of
from lrlhf.planning.dry_run import Shape
from lrlhf.planning.live_bytes import Usage
from lrlhf.planning.memory_phases import PhaseList
from lrlhf.planning.policy_models import reference_spec, reward_models, teacher_spec
from lrlhf.planning.strategy_shares import Shares, weights_of
from lrlhf.rollout import TransformersEngine
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine
from lrlhf.types import SequenceBatch

_GIB = 2**30


def add_policy_phases(phases: PhaseList, model: Any, data: Any, plan: BatchPlan) -> None:
    """Add the phases of an iteration, from the config's entries of the module and the data."""
    prompt_tokens = phases.tokens_of(data, "max_prompt_tokens", "prompts")
    _PolicyMemory(phases, options_of(model), plan, prompt_tokens).add_phases()


def note_media(phases: PhaseList, plain: PreTrainedModel) -> None:
    """Say of a model that sees images that they are not counted."""
    if placeholder_ids(plain.config):
        phases.note("not counted: what looks at images, videos and audio, and their tokens")


class _PolicyMemory:
    """Goes through an iteration, in its order."""

    def __init__(
        self, phases: PhaseList, options: Mapping[str, Any], plan: BatchPlan, prompt_tokens: int
    ) -> None:
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
        for spec in (reference_spec(self._options, self._spec), teacher_spec(self._options)):
            if spec is None:
                continue
            model = skeleton(spec, trainable=False)
            weights = weights_of(model, plain_model(model), quantization=spec.quantization)
            self._phases.hold(weights)

    def _reward_models(
        self,
    ) -> Iterator[tuple[str, tuple[PreTrainedModel | PeftModel, Mapping[str, Any]]]]:
        """Hold trained reward models, which every process has whole."""
        for name, model, options in reward_models(self._options, self._phases.note):
            self._hold_outside(weights_of(model).whole.size)
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
            tokens = self._first_tokens("engine.max_batch_size")
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

    def _first_tokens(self, option: str) -> int | None:
        """Return with how many tokens a run begins that finds out itself how many fit."""
        if not self._phases.on_gpu:
            return None
        self._phases.note(
            f"{option} is auto: it begins with {FIRST_TOKENS} tokens, as counted here, or one row, "
            "and grows into what is free"
        )
        return FIRST_TOKENS

    def _lent_to_vllm(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of this process's part of vLLM's weights, and of its keys and values."""
        on_gpu, size = self._phases.on_gpu, self._phases.device_size
        automatic = "bfloat16" if on_gpu else "float32"
        dtype = options.get("dtype", "auto").replace("auto", automatic)
        weights = weights_of(self._policy).whole.number * getattr(torch, dtype).itemsize
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
            budget = self._first_tokens("update.micro_batch_tokens")
        if budget is not None:
            whole = prompt + self._shared * new
            if budget >= whole:
                rows = min(rows, budget // whole * self._shared)
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


def _micro_batch_option(shape: Shape) -> str:
    tokens = sum(tree.tokens for tree in shape.trees())
    return f"update.micro_batch_tokens (now {tokens})"
