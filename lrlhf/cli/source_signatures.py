"""What the classes of lrlhf accept, read from their source: importing them takes seconds.

Nothing is said of a class that takes arguments by ``*`` or ``**``, inherits its constructor, or is
not one of lrlhf's: the parser of the command judges those.
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
        None where the class is none of lrlhf's, or takes what its parents take.
    """
    definition = _definition(class_path)
    if definition is None:
        return None
    constructors = [
        item
        for item in definition.body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    ]
    return _parameters(constructors[0]) if constructors else None


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
    if given.kwarg is not None or given.vararg is not None:
        return None
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return frozenset(names[1:])


def _definition(class_path: str) -> ast.ClassDef | None:
    module, _, name = class_path.rpartition(".")
    if module and not module.startswith("lrlhf."):
        return None
    packages = [f"lrlhf.{package}" for package in _PACKAGES]
    if module in packages or not module:
        homes = {_exports(package).get(name) for package in ([module] if module else packages)}
        homes.discard(None)
        if len(homes) != 1:
            return None
        module = str(homes.pop())
    return _classes(module).get(name)


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {item.name: item for item in _body(module) if isinstance(item, ast.ClassDef)}


@cache
def _exports(package: str) -> dict[str, str]:
    """The module that each name of a package comes from."""
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
    path = root.joinpath(*module.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8")).body
    return []
