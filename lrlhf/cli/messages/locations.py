"""On which line of which file, or in which flag, a complaint is at home."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from lrlhf.cli.config_files import ConfigFile, dotted, line_of, walk
from lrlhf.options.complaints import Complaint, InClass


class _Trail(NamedTuple):
    """How far a path could be followed: its keys in the file, where it ended, and what is left."""

    keys: tuple[str, ...]
    node: yaml.Node
    line: int
    left: tuple[str | InClass, ...]

    def below(self, key: str) -> _Trail:
        """Return the same trail seen from further outside."""
        return self._replace(keys=(key, *self.keys))


def locate(
    complaint: Complaint, files: Sequence[ConfigFile], arguments: Sequence[str]
) -> tuple[str, str]:
    """Find where the user wrote what a complaint is about.

    Returns:
        The place (``file:line`` or ``command line``, empty when unknown) and the dotted key.
    """
    keys = [step for step in complaint.path if isinstance(step, str)]
    trails = [(file, _follow(file.root, complaint.path, file.root)) for file in files]
    trails = [(file, trail) for file, trail in trails if trail.keys]
    # the last of equally good files wins, as it does in the merged config
    best = min(reversed(trails), key=lambda pair: len(pair[1].left), default=None)
    in_file = best and _locate_value(complaint.value, *best)
    if keys and (flag := _matching_flag(keys, arguments)):
        # what a flag replaces is read nevertheless, and may be what is wrong
        is_replaced = in_file and not any(
            str(complaint.value) in argument for argument in arguments
        )
        return in_file if in_file and is_replaced else ("command line", flag)
    if best is None:
        return "", ".".join(keys)
    if in_file:
        return in_file
    file, trail = best
    rest = [step for step in trail.left if isinstance(step, str)]
    return f"{file.path}:{trail.line}", dotted((*trail.keys, *rest))


def _locate_value(value: str | None, file: ConfigFile, trail: _Trail) -> tuple[str, str] | None:
    """Find a value at the end of a trail, or below it."""
    if value is None or trail.left:
        return None
    for below, node in walk(trail.node):
        if isinstance(node, yaml.ScalarNode) and node.value == value:
            return f"{file.path}:{line_of(node)}", dotted((*trail.keys, *below))
    return None


def locate_refusal(
    sentence: str,
    classes: Sequence[str],
    files: Sequence[ConfigFile],
    arguments: Sequence[str],
) -> tuple[str, str]:
    """Find the option or the class that a constructor's message is about, as `locate` tells it.

    Args:
        sentence: The message; the option that it starts with or quotes is taken for the culprit.
        classes: Names of the classes under construction, the innermost first.
        files: The config files.
        arguments: The command line, which overrules the files.
    """
    mentioned = _mentioned_options(sentence)
    for argument in reversed(arguments):
        name = argument.partition("=")[0]
        keys = tuple(name.removeprefix("--").split("."))
        if name.startswith("--") and any(keys[-len(path) :] == path for path in mentioned):
            return "command line", name
    for name in classes:
        for file in reversed(files):
            if location := _locate_class(file, name, mentioned):
                return location
    return _locate_only_mention(mentioned, files)


def _locate_class(
    file: ConfigFile, name: str, mentioned: Sequence[tuple[str, ...]]
) -> tuple[str, str] | None:
    """Find the entry of a class, and of its mentioned options the first that is there."""
    for keys, node in walk(file.root):
        entry = {key.value: value for key, value in _entries(node)}
        if "class_path" not in entry or _last_name(entry["class_path"].value) != name:
            continue
        for path in mentioned:
            trail = _follow(node, path, node)
            if not trail.left:
                return f"{file.path}:{trail.line}", dotted((*keys, *trail.keys))
        return f"{file.path}:{line_of(entry['class_path'])}", dotted(keys)
    return None


def _locate_only_mention(
    mentioned: Sequence[tuple[str, ...]], files: Sequence[ConfigFile]
) -> tuple[str, str]:
    """Find the one option of all files that a message mentions; nothing if there are several."""
    mentions = {
        (f"{file.path}:{trail.line}", dotted((*keys, *trail.keys)))
        for file in files
        for keys, node in walk(file.root)
        for path in mentioned
        if path[0] in (key.value for key, _ in _entries(node))
        and not (trail := _follow(node, path, node)).left
    }
    return mentions.pop() if len(mentions) == 1 else ("", "")


def _mentioned_options(sentence: str) -> list[tuple[str, ...]]:
    """Dotted names that a message starts with, quotes, or gives the value of."""
    name = r"[A-Za-z_]\w*(?:\.\w+)*"
    options = re.findall(rf"(?:^|[`'\"])({name})|\b({name})(?==| is\b| must\b)", sentence)
    return [tuple((first or second).split(".")) for first, second in options]


def _entries(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _follow(node: yaml.Node, path: tuple[str | InClass, ...], parent: yaml.Node) -> _Trail:
    """Go along a path as far as the file has it; ``init_args`` may be left out of the path."""
    here = _Trail((), node, line_of(parent), path)
    if not path:
        return here
    if isinstance(node, yaml.SequenceNode):
        items = (
            _follow(item, path, item).below(f"[{index}]") for index, item in enumerate(node.value)
        )
        best = min(items, key=lambda trail: len(trail.left), default=here)
        return best if len(best.left) < len(path) else here
    if not isinstance(node, yaml.MappingNode):
        return here
    entries = {key.value: (key, value) for key, value in node.value}
    step, rest = path[0], path[1:]
    if isinstance(step, InClass):
        # a mapping gives the class's options by class path, or as a plain mapping
        written = entries["class_path"][1].value if "class_path" in entries else step.name
        same = isinstance(written, str) and _last_name(written) == _last_name(step.name)
        return _follow(node, rest, node if rest else parent) if same else here
    if step in entries:
        key, value = entries[step]
        return _follow(value, rest, key).below(step)
    if "init_args" in entries:
        key, value = entries["init_args"]
        return _follow(value, path, key).below("init_args")
    return here.below("init_args") if "class_path" in entries else here


def _last_name(class_path: str) -> str:
    return class_path.rpartition(".")[2]


def _matching_flag(keys: Sequence[str], arguments: Sequence[str]) -> str:
    """The flag that sets the last key below the first; flags may leave ``init_args`` out."""
    for argument in reversed(arguments):
        name = argument.partition("=")[0]
        parts = name.removeprefix("--").rstrip("+").split(".")
        if name.startswith("--") and (parts[0], parts[-1]) == (keys[0], keys[-1]):
            return name
    return ""
