"""A language model of a few thousand random parameters that reads letter by letter."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def build_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter, and one for the end, which pads too."""
    vocabulary = {token: number for number, token in enumerate(["<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<end>", eos_token="<end>", padding_side="left"
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, width: int = 64, layers: int = 2, seed: int = 0
) -> LlamaForCausalLM:
    """Return a Llama that is one in all but size; the same for the same seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()
