"""What this library does with private parts of transformers; nothing else may touch them.

When transformers changes, this is the file to look at; `tests/test_layers.py` keeps it so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import utils as generation
from transformers.initialization import guard_torch_init_functions

# ---------------------------------------------------------------- attention


def attention_of(config: Any) -> str:
    """Return the name of the attention function that layers with this config call."""
    name: str = config._attn_implementation
    return name


def set_attention(config: Any, name: str) -> None:
    """Have the layers with this config call another attention function, without any check."""
    config._attn_implementation = name


# ---------------------------------------------------------------- models

CACHE_ARGUMENT: str = getattr(generation, "ALL_CACHE_NAMES", ["cache"])[0]
"""What ``generate`` takes its cache as: ``past_key_values``, and in newer versions ``cache``."""


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers from printing which weights a model lacks or has not asked for."""

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def block_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the classes of a model's repeated blocks."""
    return set(model._no_split_modules or ())


def keeps_states(model: PreTrainedModel) -> bool:
    """Tell whether layers keep states of their own between passes, beside any cache."""
    return bool(model._is_stateful)


def mark_initialized(weight: nn.Parameter) -> None:
    """Have `compute_buffers` leave a weight as it is."""
    weight._is_hf_initialized = True  # type: ignore[attr-defined]


def compute_buffers(model: PreTrainedModel, module: nn.Module) -> None:
    """Compute the buffers of a model's module that no file holds."""
    with guard_torch_init_functions():
        model._init_weights(module)  # type: ignore[no-untyped-call]


def weight_conversions(model: PreTrainedModel) -> list[Any] | None:
    """Return what ``from_pretrained`` did to names and shapes; None: the model was not loaded."""
    conversions: list[Any] | None = vars(model).get("_weight_conversions")
    return conversions


def set_weight_conversions(model: PreTrainedModel, conversions: list[Any]) -> None:
    """Set what ``save_pretrained`` undoes of names and shapes."""
    vars(model)["_weight_conversions"] = conversions


# ---------------------------------------------------------------- tokenizers


def set_backend(tokenizer: Any, backend: Tokenizer) -> None:
    """Have a fast tokenizer split texts with another backend."""
    tokenizer._tokenizer = backend


def before_splitting(tokenizer: Any, change: Callable[[str], str]) -> None:
    """Have a slow tokenizer change each text between special tokens before it splits it."""
    split = tokenizer._tokenize
    tokenizer._tokenize = lambda text, **options: split(change(text), **options)
