"""From what a config calls a policy to the model, its tokenizer and its processor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lrlhf.media import MediaProcessor
from lrlhf.models import (
    CausalLM,
    allow_packing,
    check_mergeable,
    check_output_head,
    plain_model,
    save_model,
)
from lrlhf.run.quiet_output import quiet


class LoadedPolicy(NamedTuple):
    """A policy and what reads text and images for it."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None

    def save(self, folder: Path | None) -> None:
        """Write the policy, adapters merged, and what reads for it, as ``transformers`` loads."""
        save_model(self.model, folder, self.tokenizer)
        if self.processor is not None and folder is not None:
            self.processor.save(folder)


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
    media = MediaProcessor.for_model(processor, plain_model(policy).config)
    return LoadedPolicy(policy, tokenizer, media)
