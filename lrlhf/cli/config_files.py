"""The YAML files of a command: readable, no key twice, no option beside a class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lrlhf.cli.messages.errors import ConfigError, hint
from lrlhf.foreign_files import check_expansion

_CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}
MERGE = "tag:yaml.org,2002:merge"
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
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file in UTF-8 ({error.reason})") from error
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(name, error) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: its values are nested too deeply") from error
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
        if key.value not in _CLASS_KEYS and key.tag != MERGE:
            what = "does not belong beside class_path; a class's options go under init_args"
            raise ConfigError(f"{where}: {what}")
        empty = isinstance(value, yaml.ScalarNode) and value.value in {"", "null", "~"}
        if key.value == "init_args" and not isinstance(value, yaml.MappingNode) and not empty:
            raise ConfigError(f"{where}: expected a mapping of option names to values")


def line_of(node: yaml.Node) -> int:
    """Line in the file, counted from 1."""
    return int(node.start_mark.line) + 1
