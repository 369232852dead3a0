"""Refuses sections and options that nothing accepts, before the classes that they are for load.

What the classes of lrlhf accept is read from their source. A constructor that is inherited, or
passes ``**`` on to it, is read where it is written. Nothing is said of a class that is not one of
lrlhf's, or takes what such a class takes: the parser of the command judges those.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml

from lrlhf.cli.config_files import MERGE, ConfigFile, dotted, line_of, walk
from lrlhf.familiar_names import FAMILIAR_NAMES, RENAMED_KEYS
from lrlhf.options.errors import ConfigError, hint

_PACKAGES = ("modules", "datamodules", "rewards", "callbacks", "loggers", "rollout")
"""Those that are imported before a config is parsed, so that their classes have short names."""


def options_of(class_path: str) -> frozenset[str] | None:
    """Return the names of a constructor's parameters.

    Args:
        class_path: As a config has it: ``RLOO``, or with the package or the module before it.

    Returns:
        None where the class is none of lrlhf's, or takes what a foreign parent takes.
    """
    module, name = _home(class_path)
    definition = _classes(module).get(name)
    if definition is None:
        return None
    constructors = [
        item
        for item in definition.body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    ]
    if constructors and constructors[0].args.kwarg is None:
        return _parameters(constructors[0])
    parents = [base.id for base in definition.bases if isinstance(base, ast.Name)]
    if len(parents) != 1 or definition.decorator_list:
        return None
    parent = parents[0]
    home = module if parent in _classes(module) else _exports(module).get(parent, "")
    inherited = options_of(f"{home}.{parent}") if home.startswith("lrlhf.") else None
    if inherited is None or not constructors:
        return inherited
    return inherited | _named(constructors[0])


@cache
def exported_names() -> frozenset[str]:
    """Names that lrlhf's packages export, which need no module before them in a config."""
    return frozenset(
        name for package in _PACKAGES for name in _exports(f"lrlhf.{package}") if name[0].isupper()
    )


def method_options(module: str, name: str, method: str) -> frozenset[str]:
    """Return the names of the parameters of a method that is there."""
    (constructor,) = (
        item
        for item in _classes(module)[name].body
        if isinstance(item, ast.FunctionDef) and item.name == method
    )
    return _parameters(constructor) or frozenset()


def _parameters(function: ast.FunctionDef) -> frozenset[str] | None:
    signature = function.args
    return None if signature.kwarg is not None or signature.vararg is not None else _named(function)


def _named(function: ast.FunctionDef) -> frozenset[str]:
    spec = function.args
    names = [each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return frozenset(names[1:])


def _home(class_path: str) -> tuple[str, str]:
    """Return the module that defines a class, and its name; no module: none of lrlhf's."""
    module, _, name = class_path.rpartition(".")
    if module and not module.startswith("lrlhf."):
        return "", name
    packages = [f"lrlhf.{package}" for package in _PACKAGES]
    if module in packages or not module:
        homes = {_exports(package).get(name) for package in ([module] if module else packages)}
        homes.discard(None)
        module = str(homes.pop()) if len(homes) == 1 else ""
    return module, name


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {item.name: item for item in _body(module) if isinstance(item, ast.ClassDef)}


@cache
def _exports(package: str) -> dict[str, str]:
    """The module that each imported name of a package or module comes from."""
    body = _body(package)
    # what a package imports when it is first used stands in a block for type checkers
    blocks = [item.body for item in body if isinstance(item, ast.If)]
    return {
        alias.name: item.module
        for item in itertools.chain(body, *blocks)
        if isinstance(item, ast.ImportFrom) and item.module and not item.level
        for alias in item.names
        if alias.asname is None
    }


@cache
def _body(module: str) -> list[ast.stmt]:
    """The statements of a module of lrlhf; none if there is no such file."""
    package = find_spec("lrlhf")
    assert package is not None
    assert package.submodule_search_locations
    root = Path(package.submodule_search_locations[0])
    if not module:
        return []
    path = root.joinpath(*module.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8")).body
    return []


_SECTIONS = {"seed_everything", "trainer", "model", "data"}
_NO_OPTIONS = {"model", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule"}
_OF_TRAINER = ("fit", "validate", "test", "predict")


def check_names(files: Sequence[ConfigFile], command: str) -> None:
    """Check the top of config files, and the options of lrlhf's own classes anywhere in them.

    Raises:
        ConfigError: One is not accepted; names file, line and what may have been meant.
    """
    for file in files:
        if command in _OF_TRAINER:
            _check_sections(file, command)
        for keys, node in walk(file.root):
            _check_options(file, keys, node)


def _check_sections(file: ConfigFile, command: str) -> None:
    accepted = _SECTIONS | (method_options("lrlhf.trainer", "Trainer", command) - _NO_OPTIONS)
    for key, value in _entries(file.root):
        if _first_name(key) not in accepted:
            trail = [key, *_first_keys(value)]
            named = dotted([step.value for step in trail])
            where = f"{file.path}:{line_of(trail[-1])}: {named}"
            raise ConfigError(f"{where}: no such option{_suggestion(key.value, accepted)}")


def _check_options(file: ConfigFile, keys: tuple[str, ...], node: yaml.Node) -> None:
    entry = {key.value: value for key, value in _entries(node)}
    if "class_path" not in entry or "init_args" not in entry:
        return
    class_path = str(entry["class_path"].value)
    accepted = options_of(class_path)
    if accepted is None:
        return
    for key, _ in _entries(entry["init_args"]):
        if _first_name(key) not in accepted:
            where = f"{file.path}:{line_of(key)}: {dotted([*keys, 'init_args', key.value])}"
            suggestion = _suggestion(key.value, accepted)
            name = class_path.rpartition(".")[2]
            raise ConfigError(f"{where}: {name} has no option '{key.value}'{suggestion}")


def _suggestion(key: str, accepted: Collection[str]) -> str:
    renamed = RENAMED_KEYS.get(key, "")
    if "." in renamed or renamed in accepted:
        return f"; did you mean '{renamed}', which took its place?"
    if key in FAMILIAR_NAMES:
        return f"; did you mean {FAMILIAR_NAMES[key]}?"
    return hint(key, accepted)


def _first_keys(node: yaml.Node) -> Iterator[yaml.Node]:
    """The keys that lead to the first value of a mapping."""
    for key, value in _entries(node)[:1]:
        yield key
        yield from _first_keys(value)


def _first_name(key: yaml.Node) -> str:
    """``policy`` of ``policy.source``, ``functions`` of ``functions+``."""
    return str(key.value).partition(".")[0].rstrip("+")


def _entries(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a mapping, those that ``<<`` merges in first; none of anything else."""
    if not isinstance(node, yaml.MappingNode):
        return []
    merged = []
    for _, source in (entry for entry in node.value if entry[0].tag == MERGE):
        several = isinstance(source, yaml.SequenceNode)
        merged += [
            entry for each in (source.value if several else [source]) for entry in _entries(each)
        ]
    return merged + [(key, value) for key, value in node.value if key.tag != MERGE]
