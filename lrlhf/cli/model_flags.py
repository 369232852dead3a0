"""Flags below a model that is given as text: ``--model.policy.lora.r 8`` and ``policy: a_name``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from lrlhf.cli.config_files import ConfigFile

_IN_FULL = re.compile(r"^--model\.init_args\.(policy|model)(?=[.=]|$)")
_POLICY = "--model.policy"
_MODELS = ("model.policy", "model.model")
"""Options that take a source, or a group of options with a ``source``."""


def with_sources(arguments: Sequence[str], files: Sequence[ConfigFile]) -> list[str]:
    """Say the text as the ``source`` of a group, where further flags are of that group.

    The parser would take the group of the flags in the place of the text.

    Args:
        arguments: The command and its options.
        files: Its config files.
    """
    changed = [_IN_FULL.sub(r"--model.\1", argument) for argument in arguments]
    for key in _MODELS:
        changed = _with_source(changed, files, f"--{key}")
    return changed


def _with_source(arguments: list[str], files: Sequence[ConfigFile], flag: str) -> list[str]:
    names = [argument.partition("=")[0] for argument in arguments]
    below = [index for index, name in enumerate(names) if name.startswith(f"{flag}.")]
    own = {names[index].removeprefix(f"{flag}.").split(".")[0] for index in below}
    if not below or own & {"source", "class_path", "init_args", "help"}:
        return arguments
    given, rest = _taken_out(arguments, flag)
    source = given[-1] if given else _text_at(files, flag.removeprefix("--").split("."))
    if source is None or source.startswith("{"):
        return arguments
    first = next(index for index, name in enumerate(rest) if name.startswith(f"{flag}."))
    return [*rest[:first], f"{flag}.source={source}", *rest[first:]]


def _taken_out(arguments: Sequence[str], flag: str) -> tuple[list[str], list[str]]:
    """Return the values of a flag, and the other arguments."""
    values: list[str] = []
    rest: list[str] = []
    waiting = False
    for argument in arguments:
        if waiting:
            values.append(argument)
        elif argument.startswith(f"{flag}="):
            values.append(argument.removeprefix(f"{flag}="))
        elif argument != flag:
            rest.append(argument)
        waiting = argument == flag and not waiting
    return values, rest


def without_policy(arguments: Sequence[str]) -> list[str]:
    """Return the arguments but for the flags of ``model.policy`` and of its options."""
    rest = list(arguments)
    names = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    for name in names:
        if name == _POLICY or name.startswith(f"{_POLICY}."):
            rest = _taken_out(rest, name)[1]
    return rest


def names_policy(files: Sequence[ConfigFile]) -> bool:
    """Whether there is a ``model.policy`` in a config file."""
    return _node_at(files, _POLICY.removeprefix("--").split(".")) is not None


def _text_at(files: Sequence[ConfigFile], keys: Sequence[str]) -> str | None:
    """Return the text that the last file with an entry has there; None: it has something else."""
    found = _node_at(files, keys)
    is_text = isinstance(found, yaml.ScalarNode) and found.tag == "tag:yaml.org,2002:str"
    return str(found.value) if is_text and found is not None else None


def _node_at(files: Sequence[ConfigFile], keys: Sequence[str]) -> yaml.Node | None:
    """Return what the last file with an entry has there; None: no file has one."""
    found: yaml.Node | None = None
    for file in files:
        node: yaml.Node | None = file.root
        for key in keys:
            node = _child(node, key)
        found = node or found
    return found


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return what a mapping has under a key, directly or under ``init_args``."""
    if not isinstance(node, yaml.MappingNode):
        return None
    entries = {name.value: value for name, value in node.value}
    return entries.get(key) or _child(entries.get("init_args"), key)
