"""Layers whose arithmetic beside the matrix products is fused by ``torch.compile``."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, Cache, PreTrainedModel

from lrlhf.models.experts import has_experts
from lrlhf.models.modes import in_trial
from lrlhf.models.packed.packed_attention import FUNCTIONS
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
        ValueError: This machine has no C++ compiler; the model has experts, whose routers are
            listened to in ways that compiled code leaves out; or its blocks are not found.
    """
    _check_compiler()
    name, blocks = type(model).__name__, blocks_of(model)
    if has_experts(model):
        raise ValueError(f"compile: {name} has experts, whose layers are not compiled; drop it.")
    if not blocks:
        raise ValueError(f"compile: the blocks of {name} were not found; drop it.")
    # it looks at lengths and writes down what layers say of themselves
    for attention, function in FUNCTIONS.items():
        uncompiled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        AttentionInterface.register(attention, uncompiled)
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
        functools.update_wrapper(self, forward)  # its signature is asked for
        self._plain = forward
        # sizes are symbols from the beginning: the code should not depend on which came first
        known = inspect.signature(torch.compile).parameters  # older ones stop at 8 variants
        limit: Any = {"recompile_limit": _VARIANTS} if "recompile_limit" in known else {}
        self._fused: Callable[..., Any] = torch.compile(forward, dynamic=True, **limit)

    def __call__(self, block: nn.Module, *inputs: Any, **options: Any) -> Any:
        cached = any(isinstance(one, Cache) for one in (*inputs, *options.values()))
        forward = self._plain if cached or in_trial() else self._fused
        return forward(block, *inputs, **options)


def _check_compiler() -> None:
    # the one that torch.compile takes
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [] if shutil.which(name) else [f"a C++ compiler ({name})"]
    missing += [] if header.is_file() else [f"Python's headers ({header})"]
    if missing:
        raise ValueError(
            f"compile: torch.compile needs {' and '.join(missing)}, not found here. Install what "
            "is missing (Debian and Ubuntu: apt install g++ python3-dev), name another compiler "
            "in CXX, or set compile: false."
        )
