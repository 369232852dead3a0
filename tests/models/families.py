"""Tiny models of several families, each with another way from hidden states to logits."""

from collections.abc import Callable

import torch
from transformers import (
    BertConfig,
    BertModel,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lrlhf.types import SequenceBatch

VOCABULARY = 50
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(**_SIZES))


def gemma2() -> PreTrainedModel:
    # a cap of ½ bends every logit of this model: without it the log-probabilities are far off
    options = {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 0.5}
    return Gemma2ForCausalLM(Gemma2Config(**_SIZES, **options))


def cohere() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**_SIZES, logit_scale=0.25))


def cohere2() -> PreTrainedModel:
    return Cohere2ForCausalLM(Cohere2Config(**_SIZES, logit_scale=0.5, sliding_window=4))


def granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(**_SIZES, logits_scaling=3.0))


CAUSAL_FAMILIES = [llama, gpt2, gemma2, cohere, cohere2, granite]


def bert() -> PreTrainedModel:
    sizes = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
    return BertModel(BertConfig(**sizes))


def seeded(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build().eval()


def right_padded(lengths: list[int], prompt: int = 2, width: int = 9) -> SequenceBatch:
    """Random tokens from 3 up, the first ``prompt`` of each row no response, 0 as padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator)
    columns = torch.arange(width)
    mask = columns < torch.tensor(lengths).unsqueeze(1)
    return SequenceBatch(
        input_ids=ids.masked_fill(~mask, 0),
        attention_mask=mask,
        response_mask=mask & (columns >= prompt),
    )


def left_padded(batch: SequenceBatch, extra: int = 0) -> SequenceBatch:
    """The same rows with their padding, and ``extra`` more of it, in front."""

    def move(rows: torch.Tensor) -> torch.Tensor:
        moved = [
            row.roll(int(len(row) - length))
            for row, length in zip(rows, batch.lengths, strict=True)
        ]
        return torch.nn.functional.pad(torch.stack(moved), (extra, 0))

    return batch.map(move)
