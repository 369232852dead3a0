"""Refuses classes, functions, packages and paths that are not there, before torch is loaded.

What lrlhf and the user's own modules hold is read from their source. Nothing is said of other
packages but whether they are installed: to look into them would import them.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence, Set
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import yaml

from lrlhf.cli.config_files import ConfigFile, dotted, folders_of_own_code, line_of, walk
from lrlhf.cli.early_checks import exported_names
from lrlhf.functional.names import unknown_name
from lrlhf.options.errors import (
    ConfigError,
    hint,
    nearest,
    nearest_module,
    nearest_path,
    no_package,
)

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DATA_FILE = re.compile(r".*\.(jsonl|json|parquet|csv)(\.(gz|zst))?")
_DATA_MODULES = {
    f"{package}{rows}DataModule"
    for rows in ("Prompt", "Preference", "Supervised", "Stepwise", "UnpairedPreference")
    for package in ("", "lrlhf.datamodules.")
}
"""Those whose data may be files of rows."""
CHECKPOINT_WORDS = {"last", "best", "hpc"}
"""What ``ckpt_path`` may be instead of a path."""
_MAY_HOLD_MORE = re.compile(r"__getattr__|import \*|\b(globals|vars|exec|setattr)\(|__dict__")
"""In the source of a module that may have names which it does not define."""
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_CONFIG = ("-c", "--config")
_OF_RUNS = ("fit", "validate", "test", "predict", "check")
"""Commands that need data and weights on this machine; a plan is made without them."""


class _Place(NamedTuple):
    """A node of a config file or of the value of a flag, and how messages name it."""

    source: int
    keys: tuple[str, ...]
    """Without ``init_args``."""
    node: yaml.Node
    where: str

    @property
    def text(self) -> str:
        """The text that stands there; empty: something else does."""
        is_text = isinstance(self.node, yaml.ScalarNode) and self.node.tag.endswith(":str")
        return str(self.node.value) if is_text else ""


def check_missing(files: Sequence[ConfigFile], arguments: Sequence[str]) -> None:
    """Check what a config and the flags name.

    Raises:
        ConfigError: Something is not there; names the place, and the nearest name that is.
    """
    places = [*_places(files, arguments)]
    folders = folders_of_own_code(files)
    reads = arguments[0] in _OF_RUNS and not any(a.startswith("--print_config") for a in arguments)
    own_classes = _own_classes(places, folders)
    for place in places:
        keys = place.keys
        names_class = keys in {("model",), ("data",)} or keys[-1:] == ("class_path",)
        if names_class or (keys == ("trainer", "logger") and place.text[:1].isupper()):
            if complaint := _no_class(place.text, folders, own_classes):
                raise ConfigError(f"{place.where}: {complaint}")
        elif keys[:3] == ("model", "rewards", "functions") and len(keys) == 4:
            if complaint := _no_function(place.text, folders):
                raise ConfigError(f"{place.where}: {complaint}")
        elif reads and (complaint := _no_path(place, places)) and _is_final(place, places):
            raise ConfigError(f"{place.where}: {complaint}")


def no_checkpoint(path: str | None) -> str:
    """Say that a checkpoint is not there; empty: it is, or it is a word of ``fit``."""
    if path is None or path in CHECKPOINT_WORDS or "://" in path or Path(path).exists():
        return ""
    siblings = [entry.name for entry in Path(path).parent.glob("*.ckpt")]
    return f"no file {path}{hint(Path(path).name, siblings, listed_as='there')}"


def _places(files: Sequence[ConfigFile], arguments: Sequence[str]) -> Iterator[_Place]:
    for number, file in enumerate(files):
        for keys, node in walk(file.root):
            where = f"{file.path}:{line_of(node)}: {dotted(keys)}"
            yield _Place(number, _plain(keys), node, where)
    configs = [at for at, each in enumerate(arguments) if each.partition("=")[0] in _CONFIG]
    # of a flag before a file, the file has the last word
    for number, argument in enumerate(
        arguments[max(configs, default=0) :], max(configs, default=0)
    ):
        flag, given, value = argument.partition("=")
        if not flag.startswith("--") or flag in _CONFIG or flag.endswith("+"):
            continue
        if not given:
            value = arguments[number + 1] if number + 1 < len(arguments) else ""
        try:
            root = yaml.compose(value, Loader=yaml.SafeLoader)
        except yaml.YAMLError:  # text that looks like something else
            root = None
        start = tuple(flag.removeprefix("--").split("."))
        for keys, node in walk(root, start) if root is not None else ():
            if any(not isinstance(key, str) for key in keys):  # a template looks like mappings
                break
            yield _Place(len(files) + number, _plain(keys), node, f"command line: {flag}")


def _plain(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(key for key in keys if key != "init_args")


def _is_final(place: _Place, places: Sequence[_Place]) -> bool:
    """Whether no later file or flag sets the same, and none takes another class."""
    option, section = place.keys[:2], place.keys[:1]
    classes = {(*section, "class_path"), section}
    named = {
        each.source
        for each in places
        if each.keys in classes and isinstance(each.node, yaml.ScalarNode)
    }
    later = (each for each in places if each.source > place.source)
    return len(named) <= 1 and not any(each.keys[: len(option)] == option for each in later)


def _no_path(place: _Place, places: Sequence[_Place]) -> str:
    """Say that a file of rows, a model or a checkpoint is not there."""
    keys, text = place.keys, place.text
    if not text:
        return ""
    if keys == ("ckpt_path",):
        return no_checkpoint(text)
    path = Path(text).expanduser()
    names_file = text.startswith(("/", "./", "../", "~")) and not path.exists()
    if keys[0] == "data" and keys[1:2] in {("train",), ("val",), ("pretraining",)}:
        kinds = {each.text for each in places if each.keys in {("data", "class_path"), ("data",)}}
        if not kinds - {""} <= _DATA_MODULES:
            return ""
        owner = next((p.text for p in places if p.keys == (*keys[:-1], "class_path")), "")
        weighted = keys[-1] == "source" and owner.rpartition(".")[2] in {"", "Weighted"}
        if len(keys) > 2 and not weighted and not (len(keys) == 3 and keys[2].startswith("[")):
            return ""
        names_file |= bool(_DATA_FILE.fullmatch(text)) and not path.exists()
        if names_file and not any(mark in text for mark in "*?[@"):
            return f"there is no file or folder {text!r}{nearest_path(path)}"
    elif keys[0] == "model" and (
        keys[1:] in {("policy",), ("model",)} or (keys[-1] == "source" and "rewards" not in keys)
    ):
        if names_file:
            return f"source {text!r}: no such file or folder{nearest_path(path)}"
        module = re.split(r"[./]", text.removeprefix("package:"))[0]
        if text.startswith("package:") and module and find_spec(module) is None:
            return no_package(text, module)
    return ""


def _own_classes(places: Sequence[_Place], folders: Sequence[str]) -> Set[str]:
    """Return the classes beside the user's own modules that a config names."""
    paths = {each.text.partition(".")[0] for each in places if "." in each.text}
    specs = (PathFinder.find_spec(top, folders) for top in paths if top.isidentifier())
    found = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    files = (file for folder in dict.fromkeys(found) for file in folder.glob("*.py"))
    texts = (file.read_bytes().decode("utf-8", "replace") for file in files)
    return {name for text in texts for name in _CLASS.findall(text)}


def _no_function(name: str, folders: Sequence[str]) -> str:
    if "." not in name:
        built_in = _short_names_of_rewards()
        misspelt = name and name not in built_in and nearest(name, built_in)
        return str(unknown_name("reward function", name, built_in)) if misspelt else ""
    reason = _missing(name, folders)
    return f"reward function {name!r} cannot be imported: {reason}" if reason else ""


def _no_class(class_path: str, folders: Sequence[str], own_classes: Set[str]) -> str:
    if not _PATH.fullmatch(class_path) or Path(class_path).is_file():  # a config of its own
        return ""
    if "." not in class_path:
        # classes of a program or of modules that a config names may be meant by their names alone
        if class_path in own_classes or "lightning" in sys.modules:
            return ""
        known = exported_names()
        near = nearest(class_path, known) if class_path not in known | _other_classes() else ""
        return f"no class '{class_path}'{near}" if near else ""
    reason = _missing(class_path, folders)
    explained, *rest = reason.partition("; ")
    return f"no class '{class_path}' ({explained}){''.join(rest)}" if reason else ""


def _missing(path: str, folders: Sequence[str]) -> str:
    """Say what of a dotted path is not there; empty: all of it may be."""
    top, *rest = path.split(".")
    if top in sys.modules and top != "lrlhf":
        return ""
    spec = find_spec(top) or PathFinder.find_spec(top, folders)
    if spec is None:
        near = nearest_module(top, folders)
        clause = f"; did you mean '{'.'.join([near, *rest])}'?" if near else ""
        return (
            f"No module named '{top}'{clause}; looked for it in the installed packages and in "
            + (", ".join(folders))
        )
    module, file = top, _file_of(spec)
    own = top == "lrlhf" or (file is not None and _is_within(file, folders))
    while own and file is not None and rest:
        below = file.parent / rest[0]
        names = _names_in(file)
        inner = (below / "__init__.py", below.with_suffix(".py"))
        if file.name == "__init__.py" and (found := next(filter(Path.is_file, inner), None)):
            module, file = f"{module}.{rest.pop(0)}", found
        elif names is None or rest[0] in names or (below.is_dir() and file.name == "__init__.py"):
            return ""
        else:
            known = exported_names() if top == "lrlhf" and len(rest) == 1 else names
            return f"module '{module}' has no attribute '{rest[0]}'{nearest(rest[0], known)}"
    return ""


def _file_of(spec: ModuleSpec) -> Path | None:
    is_source = spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)) if is_source else None


def _is_within(file: Path, folders: Sequence[str]) -> bool:
    home = file.parent.parent if file.name == "__init__.py" else file.parent
    return home.resolve() in {Path(folder).resolve() for folder in folders}


@cache
def _names_in(file: Path) -> frozenset[str] | None:
    """All that a module binds anywhere; None: it may hold more, or is no valid Python."""
    try:
        with tokenize.open(file) as source:  # in the encoding that the file names
            text = source.read()
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    if _MAY_HOLD_MORE.search(text) and "lazy_exports(" not in text:
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return frozenset(names)


@cache
def _other_classes() -> frozenset[str]:
    """Classes that a short name may stand for beside those that lrlhf exports."""
    lightning = find_spec("lightning")
    assert lightning is not None
    found = [
        name
        for package in (Path(__file__).parents[1], Path(str(lightning.origin)).parent / "pytorch")
        for file in package.rglob("*.py")
        for name in _CLASS.findall(file.read_text(encoding="utf-8"))
    ]
    return frozenset(found)


@cache
def _short_names_of_rewards() -> frozenset[str]:
    text = (Path(__file__).parents[1] / "rewards/lookup.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r'^    "(\w+)": \w+,$', text, re.MULTILINE))
