"""From what a config calls a policy to the model, its tokenizer and its processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.datamodules.text import TextDataModule
from lrlhf.media import MediaProcessor
from lrlhf.models import (
    CausalLM,
    allow_packing,
    check_mergeable,
    check_output_head,
    declared_ends,
    fit_padding,
    plain_model,
    save_model,
    stop_at,
)
from lrlhf.modules.base import SingleModelModule
from lrlhf.modules.checks import refuse_idle_encoder
from lrlhf.run.quiet_output import quiet

END_TOKEN_IDS = "end_token_ids"
"""Where a checkpoint says what ends a response."""


class LoadedPolicy(NamedTuple):
    """A policy and what reads text and images for it."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Token ids at which generation stops."""
        model = plain_model(self.model)
        return declared_ends(model.generation_config, model.config, self.tokenizer)

    def learn_ends(self, trainer: L.Trainer) -> None:
        """Have generation stop where what the data teaches ends."""
        data = trainer.datamodule  # type: ignore[attr-defined]  # set outside its class
        if isinstance(data, TextDataModule):
            stop_at(plain_model(self.model), data.learnt_ends)

    def save_ends(self, checkpoint: dict[str, Any]) -> None:
        """Note in a checkpoint what ends a response, which is no weight."""
        generation: Any = plain_model(self.model).generation_config
        checkpoint[END_TOKEN_IDS] = generation and generation.eos_token_id

    def load_ends(self, checkpoint: Mapping[str, Any]) -> None:
        """Have generation stop where `save_ends` noted."""
        stop_at(plain_model(self.model), checkpoint.get(END_TOKEN_IDS))

    def save(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and what reads for it, as ``transformers`` loads."""
        save_model(self.model, folder, self.tokenizer)
        if self.processor is not None and folder is not None:
            self.processor.save(folder)


class LoadedPolicyModule(SingleModelModule):
    """A policy that learns from given texts; a subclass calls `set_model`."""

    def set_model(self, loaded: LoadedPolicy) -> None:
        """Take the policy, and what reads for it."""
        self._loaded = loaded
        self.policy, self.tokenizer, self.processor = loaded

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Token ids at which the policy's generation stops."""
        return self._loaded.end_token_ids

    def on_fit_start(self) -> None:
        self._loaded.learn_ends(self.trainer)
        refuse_idle_encoder(self.trainer, plain_model(self.policy), self.processor)
        super().on_fit_start()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self._loaded.save_ends(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._loaded.load_ends(checkpoint)

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and its tokenizer, as ``transformers`` loads them."""
        self._loaded.save(folder)


@quiet()
def load_policy(
    policy: str | CausalLM | PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: ProcessorMixin | None,
) -> LoadedPolicy:
    """Load a policy, unless it is loaded already.

    Raises:
        ValueError: It is loaded already, and came without a tokenizer, has no output head, or
            adapters that cannot be merged.
    """
    if isinstance(policy, str):
        policy = CausalLM(source=policy)
    if isinstance(policy, CausalLM):
        spec, policy = policy, policy.load()
        tokenizer = tokenizer or spec.load_tokenizer()
        processor = processor or spec.load_processor()
    elif tokenizer is None:
        raise ValueError("policy is a model that is already built: pass its tokenizer too")
    else:
        check_mergeable(policy)
        check_output_head(policy)
        allow_packing(policy)
    fit_padding(tokenizer, policy)
    media = MediaProcessor.for_model(processor, plain_model(policy).config)
    return LoadedPolicy(policy, tokenizer, media)
