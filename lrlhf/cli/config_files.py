"""The YAML files of a command: readable, no key twice, no option beside a class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lrlhf.foreign_files import bounded_text, check_expansion
from lrlhf.options.errors import ConfigError, hint
from lrlhf.secrets import is_secret_name, remember

_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}
_MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key ``<<``, which stands for the entries of what it names."""
# the parser knows no dates
_READ_AS_TEXT = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp"}


@dataclass(frozen=True)
class ConfigFile:
    """A config file and its parsed nodes, which know their lines."""

    path: str
    root: yaml.MappingNode


def read_config_files(arguments: Sequence[str]) -> list[ConfigFile]:
    """Read the files given with ``--config``.

    Raises:
        ConfigError: If a file cannot be read, is no YAML mapping, has a key twice, or has
            something beside ``class_path`` and ``init_args``. Names file and line.
    """
    files = [_read(value) for value in config_arguments(arguments) if not is_inline(value)]
    for file in files:
        try:
            check_expansion(file.root)
            for keys, node in walk(file.root):
                if isinstance(node, yaml.ScalarNode):
                    _check_scalar(file.path, node)
                elif isinstance(node, yaml.MappingNode):
                    _check_keys(file.path, node, dotted(keys))
        except RecursionError as error:
            raise ConfigError(
                f"{file.path}: an alias (*name) stands within what it names"
            ) from error
        except yaml.MarkedYAMLError as error:
            raise _not_yaml(file.path, error) from error
    return files


def config_arguments(arguments: Sequence[str]) -> list[str]:
    """Return what is given with ``--config``, in order."""
    values = []
    for position, argument in enumerate(arguments):
        if argument in {"-c", "--config"} and position + 1 < len(arguments):
            values.append(arguments[position + 1])
        elif argument.startswith("--config="):
            values.append(argument.removeprefix("--config="))
    return values


def folders_of_own_code(files: Sequence[ConfigFile]) -> list[str]:
    """Return where code of the user's is importable from: the configs' folders, the working one."""
    folders = [Path(file.path).parent.absolute() for file in files]
    return list(dict.fromkeys(map(str, [*folders, Path.cwd()])))


def is_inline(value: str) -> bool:
    """Whether a config is given in place or comes from a remote file system, not from here."""
    return value.lstrip().startswith("{") or "://" in value


def _read(name: str) -> ConfigFile:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: {_why_unreadable(path)}")
    try:
        root = yaml.compose(bounded_text(path), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(name, error) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: its values are nested too deeply") from error
    except ValueError as error:  # it is too large, or not in UTF-8
        raise ConfigError(str(error)) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: a config is a mapping with model, data and trainer at the top")
    return ConfigFile(name, root)


def _not_yaml(name: str, error: yaml.MarkedYAMLError) -> ConfigError:
    line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
    return ConfigError(f"{name}{line}: not valid YAML: {error.problem}")


def _why_unreadable(path: Path) -> str:
    if path.is_dir():
        return "is a folder; --config wants a YAML file"
    if not path.parent.is_dir():
        return f"no such file; there is no folder {path.parent}"
    siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.suffix == path.suffix]
    return f"no such file{hint(path.name, siblings, listed_as='there')}"


def walk(
    node: yaml.Node, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], yaml.Node]]:
    """Go through a node and all below it, each with the keys that lead there."""
    yield keys, node
    children: list[tuple[str, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        children = [(f"[{index}]", item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        children = [(key.value, value) for key, value in node.value]
    for key, child in children:
        yield from walk(child, (*keys, key))


def dotted(keys: Sequence[str]) -> str:
    """Write keys as one option: ``trainer.callbacks[0].init_args``."""
    return ".".join(keys).replace(".[", "[")


def _check_scalar(file: str, node: yaml.ScalarNode) -> None:
    """Refuse what looks like a number, or is marked as one, and is none."""
    if node.tag in _READ_AS_TEXT:
        return
    try:
        yaml.SafeLoader("").construct_object(node)
    except (ValueError, KeyError, yaml.YAMLError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"{file}:{line_of(node)}: not valid YAML: {problem}") from error


def _check_keys(file: str, node: yaml.MappingNode, path: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{file}:{line_of(key)}: a key is text, not a list or a mapping")
        where = f"{file}:{line_of(key)}: {path}.{key.value}".replace(": .", ": ")
        if key.value in lines:
            raise ConfigError(f"{where}: given twice, first on line {lines[key.value]}")
        lines[str(key.value)] = line_of(key)
    if "class_path" in lines:
        _check_class_entry(file, node, path)


def _check_class_entry(file: str, node: yaml.MappingNode, path: str) -> None:
    for key, value in node.value:
        where = f"{file}:{line_of(key)}: {path}.{key.value}"
        if key.value not in _CLASS_KEYS and key.tag != _MERGE:
            what = "does not belong beside class_path; a class's options go under init_args"
            raise ConfigError(f"{where}: {what}")
        empty = isinstance(value, yaml.ScalarNode) and value.value in {"", "null", "~"}
        if key.value == "init_args" and not isinstance(value, yaml.MappingNode) and not empty:
            raise ConfigError(f"{where}: expected a mapping of option names to values")


def line_of(node: yaml.Node) -> int:
    """Line in the file, counted from 1."""
    return int(node.start_mark.line) + 1


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
    values, rest = _taken_out(arguments, flag)
    source = values[-1] if values else _text_at(files, flag.removeprefix("--").split("."))
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
    node = _node_at(files, keys)
    is_text = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
    return str(node.value) if is_text and node is not None else None


def _node_at(files: Sequence[ConfigFile], keys: Sequence[str]) -> yaml.Node | None:
    """Return what the last file with an entry has there; None: no file has one."""
    deepest: yaml.Node | None = None
    for file in files:
        node: yaml.Node | None = file.root
        for key in keys:
            node = _child(node, key)
        deepest = node or deepest
    return deepest


def _child(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return what a mapping has under a key, directly or under ``init_args``."""
    if not isinstance(node, yaml.MappingNode):
        return None
    entries = {name.value: value for name, value in node.value}
    return entries.get(key) or _child(entries.get("init_args"), key)


def remember_secrets(files: Sequence[ConfigFile], arguments: Sequence[str]) -> None:
    """Have `hide` know the secrets of config files and of a command line."""
    secrets = [*_in_arguments(arguments)]
    for file in files:
        secrets += (
            node.value
            for keys, node in walk(file.root)
            if isinstance(node, yaml.ScalarNode)
            and any(map(is_secret_name, keys))
            and keys[-1] != "class_path"
        )
    remember(secrets)


def _in_arguments(arguments: Sequence[str]) -> Iterator[str]:
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument.removeprefix("--").partition("=")
            name = name.rpartition(".")[2].rstrip("+")
        else:
            value = argument
        if value and is_secret_name(name):
            yield value
