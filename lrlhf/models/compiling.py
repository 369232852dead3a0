"""Layers whose arithmetic beside the matrix products is fused by ``torch.compile``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from lrlhf.models.packed_attention import PACKED_ATTENTION, packed_attention
from lrlhf.models.scorers import blocks_of

_VARIANTS = 64
"""How often one layer's code is compiled at most: with and without gradients, in another precision,
with another window, for the policy, its reference and a critic, which may share it."""


def compile_layers(model: PreTrainedModel) -> None:
    """Have the layers of a language model compiled the first time that a batch goes through them.

    All layers share what is compiled, for any number of tokens, so that a run compiles a few
    times, in its first step. The names of weights and modules stay as they are. Generation, which
    fills a cache, and encoders of images and videos run as they did.

    Args:
        model: On any device; changed in place.

    Raises:
        ValueError: This machine has no C++ compiler, or the blocks of the model are not found.
    """
    _check_compiler()
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(f"compile: the blocks of {type(model).__name__} were not found.")
    # it looks at lengths and writes down what layers say of themselves
    attention = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED_ATTENTION, attention)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    fused: dict[type[nn.Module], _Compiled] = {}
    for block in blocks:
        kind = type(block)
        if kind not in fused:
            fused[kind] = _Compiled(kind.forward)
        block.forward = MethodType(fused[kind], block)


def is_compiled(model: nn.Module) -> bool:
    """Tell whether `compile_layers` was called on a model or a part of it."""
    forwards = (getattr(module.forward, "__func__", None) for module in model.modules())
    return any(isinstance(forward, _Compiled) for forward in forwards)


class _Compiled:
    """The forward pass of a kind of block, as it is written where a cache is filled."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._plain = forward
        # sizes are symbols from the beginning: a run that is resumed gets the code of one that
        # was not
        self._fused = torch.compile(forward, dynamic=True)

    def __call__(self, block: nn.Module, *inputs: Any, **options: Any) -> Any:
        cached = any(isinstance(one, Cache) for one in (*inputs, *options.values()))
        return (self._plain if cached else self._fused)(block, *inputs, **options)


def _check_compiler() -> None:
    named = os.environ.get("CXX")
    if not any(map(shutil.which, [named] if named else ["g++", "clang++", "c++"])):
        raise ValueError(
            f"compile: there is no C++ compiler ({named or 'g++ or clang++'}), which torch.compile "
            "needs. Install one (Debian and Ubuntu: apt install g++), or set compile: false."
        )
