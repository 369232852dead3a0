"""Entries of a config whose class is not installed, and which a flag replaces."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import yaml

from lrlhf.cli.config_files import is_inline, read_config_files
from lrlhf.cli.model_flags import taken_out


def without_replaced(arguments: Sequence[str]) -> list[str]:
    """Give a config in place and without such entries, where it has any.

    The parser would import the class of every entry, though it does not count in the end.

    Args:
        arguments: The command and its options; of a config only the flags after it replace entries.
    """
    changed = list(arguments)
    for position, argument in enumerate(arguments):
        flag = "--config=" if argument.startswith("--config=") else ""
        name = argument.removeprefix(flag)
        is_config = flag or arguments[max(0, position - 1)] in {"-c", "--config"}
        if not is_config or is_inline(name):
            continue
        (file,) = read_config_files([f"--config={name}"])
        later = [one.replace(".init_args", "") for one in arguments[position + 1 :]]
        if _drop(file.root, (), later):
            file.root.flow_style = True  # `{...}`, as a config in place is written
            changed[position] = flag + yaml.serialize(file.root, Dumper=yaml.SafeDumper)
    return changed


def _drop(node: yaml.Node, keys: tuple[str, ...], later: Sequence[str]) -> bool:
    """Remove what is replaced below a node, and tell whether there was any."""
    if not isinstance(node, yaml.MappingNode):
        return False
    entries = [(key, value, _below(keys, key.value)) for key, value in node.value]
    kept = [entry for entry in entries if not _is_replaced(entry[1], entry[2], later)]
    node.value = [(key, value) for key, value, _ in kept]
    return any([len(kept) < len(entries), *(_drop(value, at, later) for _, value, at in kept)])


def _below(keys: tuple[str, ...], key: str) -> tuple[str, ...]:
    return keys if key == "init_args" else (*keys, key)


def _is_replaced(node: yaml.Node, keys: tuple[str, ...], later: Sequence[str]) -> bool:
    # a class in the place of a model may take over the options that stand here
    if len(keys) < 2 or not isinstance(node, yaml.MappingNode):
        return False
    class_path = {key.value: value.value for key, value in node.value}.get("class_path")
    if not isinstance(class_path, str) or "." not in class_path:
        return False
    values, _ = taken_out(later, f"--{'.'.join(keys)}")
    new_class = bool(values) and not values[-1].lstrip().startswith("{")
    return new_class and find_spec(class_path.partition(".")[0]) is None
