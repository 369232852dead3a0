"""Environments of other packages, for ``model.episodes.environment``; each is an extra."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrlhf.environments.adapters.gymnasium_environment import GymnasiumEnvironment
    from lrlhf.environments.adapters.mcp_tools import McpTools
    from lrlhf.environments.adapters.openenv_environments import OpenEnvEnvironment, OpenEnvTools
    from lrlhf.environments.adapters.verifiers_agent import VerifiersAgent

__all__ = [
    "GymnasiumEnvironment",
    "McpTools",
    "OpenEnvEnvironment",
    "OpenEnvTools",
    "VerifiersAgent",
]

_HOMES = {
    "GymnasiumEnvironment": ("gymnasium_environment", "gymnasium"),
    "McpTools": ("mcp_tools", "mcp"),
    "OpenEnvEnvironment": ("openenv_environments", "openenv"),
    "OpenEnvTools": ("openenv_environments", "openenv"),
    "VerifiersAgent": ("verifiers_agent", "verifiers"),
}
"""The module of each name, and its package, after which the extra is called too."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _HOMES[name]
    if find_spec(package) is None:
        raise ImportError(f"{name} needs the package {package}: pip install 'lrlhf[{package}]'")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
