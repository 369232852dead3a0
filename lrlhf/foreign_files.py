"""What files that others wrote may cost to read, and which of their code would run.

The config of a run lies beside its checkpoints and goes wherever they go. Whoever loads a model
has not read it, so it decides neither that code is run nor which; the person at the keyboard does.
"""

from __future__ import annotations

import pkgutil
import re
import stat
import sys
from collections.abc import Container, Iterator, Mapping
from importlib import import_module
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any, Final

import yaml

from lrlhf.options.conversion import plain

TRUST_FLAG: Final = "--trust_remote_code"
_MAX_BYTES: Final = 2**20
"""Of a YAML file, which takes seconds to parse."""
_MAX_NODES: Final = 100_000
"""Values of a YAML document, those that an alias stands for counted once more for each alias."""
_OWN: Final = ("lrlhf.", "lightning.", "torch.optim.")
"""Packages whose classes a config may name; strangers write no files there."""
_EXAMPLES: Final = "lrlhf.examples."
"""Programs, which write files and start others."""
_ADAPTERS: Final = "lrlhf.environments.adapters"
"""Classes that start programs, and import packages, which their options name."""
_DOTTED: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?::[^\W\d][\w.]*)?")


# ---------------------------------------------------------------- what they cost


def read_yaml(path: Path) -> Any:
    """Read a YAML file of bounded size and content.

    Raises:
        ValueError: It is larger, or no YAML; names the file.
        OSError: It cannot be read.
    """
    text = bounded_text(path)
    try:
        check_expansion(yaml.compose(text, Loader=yaml.SafeLoader))
        return _loaded(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except (TypeError, LookupError, ArithmeticError, ValueError) as error:
        # of a constructor of YAML, such as that of a date in month 13
        raise ValueError(f"{path}: has a value that cannot be read: {error}") from error


def bounded_text(path: Path) -> str:
    """Read the text of a config.

    Raises:
        ValueError: It is larger than any config, a pipe or a device, or not in UTF-8.
        OSError: It cannot be read.
    """
    check_regular(path)
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path}: has more than {_MAX_BYTES:,} bytes, which no config needs")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 ({error.reason})") from error


def _loaded(text: str) -> Any:
    """Read YAML as jsonargparse does, so that what is checked here is what is used there."""
    return plain(import_module("jsonargparse").get_loader("yaml")(text))


def check_regular(path: Path) -> None:
    """Refuse pipes and devices, which may never end, in the place of a file.

    Raises:
        ValueError: It is one.
        OSError: There is no such file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: not a file but a folder, pipe or device")


def check_expansion(root: yaml.Node | None) -> None:
    """Refuse a document whose aliases stand for more values than anybody writes.

    An alias costs nothing until something goes through the values: ten lines of ten aliases to the
    line before them are ten thousand million values then.

    Raises:
        yaml.MarkedYAMLError: It is one.
        RecursionError: An alias stands within what it names.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known is None:
            children: list[yaml.Node] = []
            if isinstance(node, yaml.SequenceNode):
                children = node.value
            elif isinstance(node, yaml.MappingNode):
                children = [part for entry in node.value for part in entry]
            known = sizes[id(node)] = 1 + sum(map(size, children))
        if known > _MAX_NODES:
            problem = f"its aliases (*name) stand for more than {_MAX_NODES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return known

    if root is not None:
        size(root)


def check_text(text: str) -> None:
    """Refuse YAML as `check_expansion` does, where it has aliases at all.

    Raises:
        yaml.YAMLError: It is refused, or no YAML.
    """
    if "*" in text and "&" in text:
        check_expansion(yaml.compose(text, Loader=yaml.SafeLoader))


# ---------------------------------------------------------------- what they run


def refuse_foreign_code(config: Any, where: Path, *, trusted: bool) -> None:
    """Refuse a config that came with a model if it would have code run, unless the user trusts it.

    Args:
        config: What is going to be used of it, as it was read.
        where: Its file, for the message.
        trusted: Whether the flag was given on this very command.

    Raises:
        ValueError: It would; names the code, and the flag that consents.
    """
    foreign = list(foreign_code(config))
    if foreign and not trusted:
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise ValueError(
            f"{where}: {foreign[0]}{more}, and a file that came with a model does not decide what "
            f"runs here: if you trust it, add {TRUST_FLAG} to this command"
        )


def foreign_code(config: Any, *, imported: Container[str] = (), key: str = "") -> Iterator[str]:
    """Go through what a config would have run that is not this library's.

    That is Python code that comes with a model, a class or function that a file would be imported
    for, and a class that starts the programs that its options name.

    Args:
        config: Of plain values.
        imported: Modules whose classes are no news to this process.
        key: Under which the value stands, as part of the message.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            inner = f"{key}.{name}".lstrip(".")
            last = str(name).rpartition(".")[2]  # a key may have dots
            if last == "trust_remote_code" and value not in (False, None):
                source = config.get("source") or "a model"
                yield f"{inner} would run Python code that comes with {source}"
            elif last == "class_path" and isinstance(value, str) and _is_adapter(value):
                yield f"{inner} {value} would run programs or packages of others"
            else:
                yield from foreign_code(value, imported=imported, key=inner)
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from foreign_code(value, imported=imported, key=f"{key}[{index}]")
    elif isinstance(config, str) and _imports(config, imported):
        yield f"{key} would import {config}"
    elif isinstance(config, str) and (inner := _as_object(config)) is not None:
        yield from foreign_code(inner, imported=imported, key=key)


def _as_object(text: str) -> Any:
    """Read a text as jsonargparse would where an object is wanted; None: it is none."""
    if not any(mark in text for mark in ":[{\n"):
        return None
    try:
        check_text(text)
        read = _loaded(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    return read if isinstance(read, dict | list) else None


def _is_adapter(class_path: str) -> bool:
    return class_path.rpartition(".")[2] in import_module(_ADAPTERS).__all__


def _imports(text: str, imported: Container[str]) -> bool:
    """Whether a value is the path of something that a file would be imported for."""
    if ".py:" in text:  # a function in a file
        return True
    if not _DOTTED.fullmatch(text) or not {".", ":"} & set(text) or _is_own(text):
        return False
    path, _, _ = text.partition(":")
    module = path if ":" in text else path.rpartition(".")[0]
    return module not in imported and _runs_a_file(path)


def _is_own(path: str) -> bool:
    """Whether a path leads into a package of `_OWN`, and not through it to what it imports."""
    if not path.startswith(_OWN) or path.startswith(_EXAMPLES):
        return False
    try:
        return f"{pkgutil.resolve_name(path).__module__}.".startswith(_OWN)
    except (ImportError, AttributeError, ValueError):
        return True  # it leads nowhere, as whoever imports it says


def _runs_a_file(path: str) -> bool:
    """Whether the import of a dotted path would run a module, which is found without running it."""
    folders: Any = None
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if count == 1 and (BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name)):
            return True
        # where the command looks for code of the user's too
        spec = PathFinder.find_spec(name, [*sys.path, str(Path.cwd())] if count == 1 else folders)
        if spec is None or spec.origin is not None:
            return spec is not None
        folders = spec.submodule_search_locations  # a folder without code of its own
    return False
