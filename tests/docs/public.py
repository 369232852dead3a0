"""What lrlhf offers to its users: the names in ``__all__`` of each package, and the batches."""

import ast
from pathlib import Path

import lrlhf

PACKAGE = Path(lrlhf.__file__).parent
ROOT = PACKAGE.parent


def public_names() -> dict[str, set[str]]:
    """Public names by the package that exports them, read without importing anything.

    What a package inside of another one exports is left out where the outer one exports it too.
    """
    files = [*sorted(PACKAGE.rglob("__init__.py")), PACKAGE / "types.py"]
    found: dict[str, set[str]] = {}
    for file in sorted(files, key=lambda path: len(path.parts)):
        module = ".".join(file.with_suffix("").relative_to(ROOT).parts).removesuffix(".__init__")
        names = exported(ast.parse(file.read_text(encoding="utf-8")))
        if file.name == "types.py":
            names = classes(file)
        if module.count(".") > 1:
            names -= found.get(module.rpartition(".")[0], set())
        if names:
            found[module] = names
    return found


def exported(module: ast.Module) -> set[str]:
    """What ``__all__`` lists."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def classes(file: Path) -> set[str]:
    """Public classes of a file without ``__all__``."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    named = {node.name for node in body if isinstance(node, ast.ClassDef)}
    return {name for name in named if not name.startswith("_")}
