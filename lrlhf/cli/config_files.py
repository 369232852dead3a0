"""The YAML files of a command: readable, no key twice, and on which line a complaint is at home."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lrlhf.cli.complaints import Complaint, InClass
from lrlhf.cli.errors import ConfigError, hint

_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}


@dataclass(frozen=True)
class ConfigFile:
    """A config file and its parsed nodes, which know their lines."""

    path: str
    root: yaml.MappingNode


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


def read_config_files(arguments: Sequence[str]) -> list[ConfigFile]:
    """Read the files given with ``--config``.

    Raises:
        ConfigError: If a file cannot be read, is no YAML mapping, has a key twice, or has
            something beside ``class_path`` and ``init_args``. Names file and line.
    """
    files = [_read(value) for value in _config_arguments(arguments) if not _is_inline(value)]
    for file in files:
        _check_node(file.path, file.root, "")
    return files


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
    for argument in reversed(arguments):
        name = argument.partition("=")[0]
        if name.startswith("--") and _mentions(sentence, name.rpartition(".")[2]):
            return "command line", name
    for name in classes:
        for file in reversed(files):
            if found := _locate_class(file, name, sentence):
                return found
    return _locate_only_mention(sentence, files)


def _locate_class(file: ConfigFile, name: str, sentence: str) -> tuple[str, str] | None:
    for keys, node in _entries(file.root, ()):
        entry = {key.value: value for key, value in node.value}
        if "class_path" not in entry or entry["class_path"].value.rpartition(".")[2] != name:
            continue
        options = entry.get("init_args")
        given = options.value if isinstance(options, yaml.MappingNode) else []
        for key, _ in given:
            if _mentions(sentence, key.value):
                return f"{file.path}:{_line(key)}", _join((*keys, "init_args", key.value))
        return f"{file.path}:{_line(entry['class_path'])}", _join(keys)
    return None


def _locate_only_mention(sentence: str, files: Sequence[ConfigFile]) -> tuple[str, str]:
    """Find the one key of all files that a sentence mentions; nothing if there are several."""
    found = [
        (f"{file.path}:{_line(key)}", _join((*keys, key.value)))
        for file in files
        for keys, node in _entries(file.root, ())
        for key, _ in node.value
        if _mentions(sentence, key.value)
    ]
    return found[0] if len(found) == 1 else ("", "")


def _mentions(sentence: str, option: str) -> bool:
    """Whether a message starts with the option's name or quotes it."""
    word = re.escape(option)
    return bool(option) and re.search(rf"^{word}\b|[`'\"]{word}\b", sentence) is not None


def _join(keys: Sequence[str]) -> str:
    return ".".join(keys).replace(".[", "[")


def _entries(
    node: yaml.Node, keys: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], yaml.MappingNode]]:
    if isinstance(node, yaml.MappingNode):
        yield keys, node
    for key, child in _children(node):
        yield from _entries(child, (*keys, key))


def _config_arguments(arguments: Sequence[str]) -> list[str]:
    values = []
    for position, argument in enumerate(arguments):
        if argument in {"-c", "--config"} and position + 1 < len(arguments):
            values.append(arguments[position + 1])
        elif argument.startswith("--config="):
            values.append(argument.removeprefix("--config="))
    return values


def _is_inline(value: str) -> bool:
    """Whether a config is given in place or comes from a remote file system, not from here."""
    return value.lstrip().startswith("{") or "://" in value


def _read(name: str) -> ConfigFile:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: {_why_unreadable(path)}")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file in UTF-8 ({error.reason})") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: a config is a mapping with model, data and trainer at the top")
    return ConfigFile(name, root)


def _why_unreadable(path: Path) -> str:
    if path.is_dir():
        return "is a folder; --config wants a YAML file"
    if not path.parent.is_dir():
        return f"no such file; there is no folder {path.parent}"
    siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.suffix == path.suffix]
    return f"no such file{hint(path.name, siblings, listed_as='there')}"


def _check_node(file: str, node: yaml.Node, dotted: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check_node(file, item, f"{dotted}[{index}]")
    if isinstance(node, yaml.MappingNode):
        _check_keys(file, node, dotted)
        for key, value in node.value:
            _check_node(file, value, f"{dotted}.{key.value}".removeprefix("."))


def _check_keys(file: str, node: yaml.MappingNode, dotted: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        where = f"{file}:{_line(key)}: {dotted}.{key.value}".replace(": .", ": ")
        if key.value in lines:
            raise ConfigError(f"{where}: given twice, first on line {lines[key.value]}")
        lines[str(key.value)] = _line(key)
    if "class_path" in lines:
        _check_class_entry(file, node, dotted)


def _check_class_entry(file: str, node: yaml.MappingNode, dotted: str) -> None:
    for key, value in node.value:
        where = f"{file}:{_line(key)}: {dotted}.{key.value}"
        if key.value not in _CLASS_KEYS:
            what = "does not belong beside class_path; a class's options go under init_args"
            raise ConfigError(f"{where}: {what}")
        empty = isinstance(value, yaml.ScalarNode) and value.value in {"", "null", "~"}
        if key.value == "init_args" and not isinstance(value, yaml.MappingNode) and not empty:
            raise ConfigError(f"{where}: expected a mapping of option names to values")


def _follow(node: yaml.Node, path: tuple[str | InClass, ...], parent: yaml.Node) -> _Trail:
    here = _Trail((), node, _line(parent), path)
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
            return _Trail((*trail.keys, *keys), node, _line(node), ())
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


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
