"""Seeds, and a language model small enough to build in code for every test that wants one."""

import logging
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
# asked whether there is a GPU, CUDA is not set up: a process that is forked after that could not
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

pytest_plugins = ("tests.lanes",)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    L.seed_everything(1, verbose=False)


@pytest.fixture(autouse=True)
def _no_tracking_left() -> Iterator[None]:
    """End a test's W&B run: the next logger of this process would go on with it, and say so."""
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish()


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Undo what a command that ran in this process has set for all of lrlhf's messages."""
    ours = logging.getLogger("lrlhf")
    level, handlers = ours.level, list(ours.handlers)
    yield
    ours.setLevel(level)
    ours.handlers = handlers


def byte_tokenizer(marks: Sequence[str], eos: str, **options: Any) -> PreTrainedTokenizerFast:
    """One token per byte, and the given marks, of which the first pads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*marks, *alphabet])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(marks))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=marks[0],
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **options,
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Pad, end-of-text and chat marks are all different."""
    marks = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(marks, "<|endoftext|>", additional_special_tokens=marks[2:])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_language_model(
    tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, **options: Any
) -> PreTrainedModel:
    """A two-layer Llama with random weights, so large that its outputs differ between inputs."""
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(bos_token_id=None, **ids, **(sizes | options))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture
def language_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return build_language_model(tokenizer)


@pytest.fixture(scope="session")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> str:
    """The tiny model and its tokenizer, saved as a hub user would have them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    build_language_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
