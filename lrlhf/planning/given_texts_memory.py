"""Memory of a policy that is trained on given texts or pairs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lrlhf.models import CausalLM, plain_model, sequence_logprobs, sequence_outputs
from lrlhf.models.loading.meta import skeleton
from lrlhf.models.token_budget import FIRST_TOKENS
from lrlhf.modules.dpo import resolve_preference_loss
from lrlhf.planning.config_entries import options_of, spec_of
from lrlhf.planning.dry_run import Shape
from lrlhf.planning.live_bytes import Usage
from lrlhf.planning.memory_phases import PhaseList
from lrlhf.planning.policy_memory import note_media
from lrlhf.planning.strategy_shares import Shares, weights_of
from lrlhf.types import SequenceBatch


def add_supervised_phases(phases: PhaseList, model: Any, data: Any) -> None:
    """Add the phases of an optimizer step of `SFT`, from the config's entries.

    The loss is taken to be on every token.
    """
    policy = _Policy(phases, options_of(model), data)
    rows, budget = int(options_of(data)["batch_size"]), policy.options["micro_batch_tokens"]
    if budget == "auto":
        budget = FIRST_TOKENS if phases.on_gpu else None
        if budget is not None:
            phases.note(
                f"micro_batch_tokens is auto: it begins with {FIRST_TOKENS} tokens, as counted "
                "here, or one row, and grows into what is free"
            )
    at_once = rows if budget is None else min(rows, max(1, budget // policy.tokens))
    adds_up = at_once < rows
    shares = policy.hold(accumulates=adds_up)

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
    option = f"micro_batch_tokens (now {at_once * policy.tokens})"
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

    def logprobs(batch: SequenceBatch) -> Tensor:
        return sequence_logprobs(policy.model, batch, chunk_size=policy.chunk)

    if policy.has_reference:
        alone = phases.resident
        policy.hold_reference()
        usage = phases.dry_run.forward(policy.model, logprobs, shape)
        phases.add("reference", usage, Usage(shares.gathered), option=option)
        if policy.options.get("precompute_reference"):
            phases.resident = alone
    usage = phases.dry_run.update(
        policy.model,
        lambda batch: logprobs(batch).sum(),
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

    @property
    def has_reference(self) -> bool:
        loss = self.options.get("loss", "sigmoid")
        if isinstance(loss, str):
            return resolve_preference_loss(loss).reference
        return bool(options_of(loss).get("reference", True))

    def hold_reference(self) -> None:
        """Hold it where it is a model of its own: with LoRA it is the policy."""
        given = self.options.get("reference")
        if given is None and self._spec.lora is not None:
            return
        spec = self._spec if given is None else spec_of(given, CausalLM)
        model = skeleton(spec, trainable=False)
        self._phases.hold(weights_of(model, plain_model(model), quantization=spec.quantization))
