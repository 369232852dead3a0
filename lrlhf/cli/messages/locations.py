"""On which line of which file, or in which flag, a complaint is at home."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from lrlhf.cli.config_files import ConfigFile, line_of
from lrlhf.cli.messages.complaints import Complaint, InClass


@dataclass(frozen=True)
class _Trail:
    """How far a path could be followed: its keys in the file, where it ended, and what is left."""

    keys: tuple[str, ...]
    node: yaml.Node
    line: int
    left: tuple[str | InClass, ...]

    def dotted(self) -> str:
        rest = [step for step in self.left if isinstance(step, str)]
        return _join([*self.keys, *rest])


def locate(
    complaint: Complaint, files: Sequence[ConfigFile], arguments: Sequence[str]
) -> tuple[str, str]:
    """Find where the user wrote what a complaint is about.

    Returns:
        The place (``file:line`` or ``command line``, empty when unknown) and the dotted key.
    """
    keys = [step for step in complaint.path if isinstance(step, str)]
    if keys and (flag := _matching_flag(keys, arguments)):
        return "command line", flag
    trails = [(file, _follow(file.root, complaint.path, file.root)) for file in files]
    trails = [(file, trail) for file, trail in trails if trail.keys]
    if not trails:
        return "", ".".join(keys)
    # the last of equally good files wins, as it does in the merged config
    file, trail = min(reversed(trails), key=lambda pair: len(pair[1].left))
    if complaint.value is not None and not trail.left:
        trail = _find_value(trail, complaint.value) or trail
    return f"{file.path}:{trail.line}", trail.dotted()


def locate_refusal(
    sentence: str,
    classes: Sequence[str],
    files: Sequence[ConfigFile],
    arguments: Sequence[str],
) -> tuple[str, str]:
    """Find the option or the class that a constructor's message is about.

    Args:
        sentence: The message; the option that it starts with or quotes is taken for the culprit.
        classes: Names of the classes under construction, the innermost first.
        files: The config files.
        arguments: The command line, which overrules the files.

    Returns:
        As `locate`.
    """
    mentioned = _mentioned_options(sentence)
    for argument in reversed(arguments):
        name = argument.partition("=")[0]
        given = tuple(name.removeprefix("--").split("."))
        if name.startswith("--") and any(given[-len(path) :] == path for path in mentioned):
            return "command line", name
    for name in classes:
        for file in reversed(files):
            if found := _locate_class(file, name, mentioned):
                return found
    return _locate_only_mention(mentioned, files)


def _locate_class(
    file: ConfigFile, name: str, mentioned: Sequence[tuple[str, ...]]
) -> tuple[str, str] | None:
    for keys, node in _entries(file.root, ()):
        entry = {key.value: value for key, value in node.value}
        if "class_path" not in entry or entry["class_path"].value.rpartition(".")[2] != name:
            continue
        for path in mentioned:
            trail = _follow(node, path, node)
            if not trail.left:
                return f"{file.path}:{trail.line}", _join((*keys, *trail.keys))
        return f"{file.path}:{line_of(entry['class_path'])}", _join(keys)
    return None


def _locate_only_mention(
    mentioned: Sequence[tuple[str, ...]], files: Sequence[ConfigFile]
) -> tuple[str, str]:
    """Find the one option of all files that a message mentions; nothing if there are several."""
    found = {
        (f"{file.path}:{trail.line}", _join((*keys, *trail.keys)))
        for file in files
        for keys, node in _entries(file.root, ())
        for path in mentioned
        if path[0] in (key.value for key, _ in node.value)
        and not (trail := _follow(node, path, node)).left
    }
    return found.pop() if len(found) == 1 else ("", "")


def _mentioned_options(sentence: str) -> list[tuple[str, ...]]:
    """Dotted names that a message starts with, quotes, or gives the value of."""
    name = r"[A-Za-z_]\w*(?:\.\w+)*"
    found = re.findall(rf"(?:^|[`'\"])({name})|\b({name})(?==| is\b| must\b)", sentence)
    return [tuple((first or second).split(".")) for first, second in found]


def _join(keys: Sequence[str]) -> str:
    return ".".join(keys).replace(".[", "[")


def _entries(
    node: yaml.Node, keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], yaml.MappingNode]]:
    if isinstance(node, yaml.MappingNode):
        yield keys, node
    for key, child in _children(node):
        yield from _entries(child, (*keys, key))


def _follow(node: yaml.Node, path: tuple[str | InClass, ...], parent: yaml.Node) -> _Trail:
    here = _Trail((), node, line_of(parent), path)
    if not path:
        return here
    if isinstance(node, yaml.SequenceNode):
        items = (
            _prefixed(f"[{index}]", _follow(item, path, item))
            for index, item in enumerate(node.value)
        )
        best = min(items, key=lambda trail: len(trail.left), default=here)
        return best if len(best.left) < len(path) else here
    if not isinstance(node, yaml.MappingNode):
        return here
    entries = {key.value: (key, value) for key, value in node.value}
    step, *rest = path
    if isinstance(step, InClass):
        return _follow_class(entries, step, tuple(rest), here)
    if step in entries:
        key, value = entries[step]
        return _prefixed(step, _follow(value, tuple(rest), key))
    if "init_args" in entries:
        key, value = entries["init_args"]
        return _prefixed("init_args", _follow(value, path, key))
    return _Trail(("init_args",), node, here.line, path) if "class_path" in entries else here


def _follow_class(
    entries: dict[str, tuple[yaml.Node, yaml.Node]],
    step: InClass,
    rest: tuple[str | InClass, ...],
    here: _Trail,
) -> _Trail:
    """Enter a mapping that gives the class's options, by class path or as a plain mapping."""
    if "class_path" in entries:
        written = entries["class_path"][1].value.rpartition(".")[2]
        if written != step.name.rpartition(".")[2]:
            return here
    return _follow(here.node, rest, here.node) if rest else _Trail((), here.node, here.line, ())


def _prefixed(key: str, trail: _Trail) -> _Trail:
    return _Trail((key, *trail.keys), trail.node, trail.line, trail.left)


def _find_value(trail: _Trail, value: str) -> _Trail | None:
    """Go on to the scalar that holds ``value``, when one does."""
    for keys, node in _scalars(trail.node, ()):
        if node.value == value:
            return _Trail((*trail.keys, *keys), node, line_of(node), ())
    return None


def _scalars(
    node: yaml.Node, keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        yield keys, node
    for key, child in _children(node):
        yield from _scalars(child, (*keys, key))


def _children(node: yaml.Node) -> list[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.SequenceNode):
        return [(f"[{index}]", item) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return [(key.value, value) for key, value in node.value]
    return []


def _matching_flag(keys: Sequence[str], arguments: Sequence[str]) -> str:
    """The flag that sets the last key below the first; flags may leave ``init_args`` out."""
    for argument in reversed(arguments):
        name = argument.partition("=")[0]
        parts = name.removeprefix("--").rstrip("+").split(".")
        if name.startswith("--") and (parts[0], parts[-1]) == (keys[0], keys[-1]):
            return name
    return ""
