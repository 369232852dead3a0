"""What the classes of lrlhf accept, read from their source: importing them takes seconds.

A constructor that is inherited, or passes ``**`` on to it, is read where it is written. Nothing is
said of a class that is not one of lrlhf's, or takes what such a class takes: the parser of the
command judges those.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

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


def method_options(module: str, name: str, method: str) -> frozenset[str]:
    """Return the names of the parameters of a method that is there."""
    (found,) = (
        item
        for item in _classes(module)[name].body
        if isinstance(item, ast.FunctionDef) and item.name == method
    )
    return _parameters(found) or frozenset()


def _parameters(function: ast.FunctionDef) -> frozenset[str] | None:
    given = function.args
    return None if given.kwarg is not None or given.vararg is not None else _named(function)


def _named(function: ast.FunctionDef) -> frozenset[str]:
    given = function.args
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
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
    return {
        alias.name: item.module
        for item in _body(package)
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
