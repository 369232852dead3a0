"""Which parameters of a backbone do not learn."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze_modules(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch the gradient of all matching modules off, with everything inside them.

    Args:
        model: Module names are relative to it.
        patterns: Shell patterns over module names: ``embed_tokens``, ``layers.[0-5]``, ``*``.

    Raises:
        ValueError: A pattern matches no module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        matching = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)
            raise ValueError(
                f"freeze: {pattern!r} matches no module of {type(model).__name__}. "
                f"Near matches: {', '.join(near) or ', '.join(list(modules)[:3])}."
            )
        for module in matching:
            module.requires_grad_(False)
