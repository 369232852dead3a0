"""What lrlhf offers to its users: the names in ``__all__`` of each package, and the batches."""

import ast
from pathlib import Path

import lrlhf

PACKAGE = Path(lrlhf.__file__).parent
ROOT = PACKAGE.parent


def public_names() -> dict[str, set[str]]:
    """Public names by the package that exports them, read without importing anything."""
    files = [PACKAGE / "__init__.py", *sorted(PACKAGE.glob("*/__init__.py")), PACKAGE / "types.py"]
    found = {}
    for file in files:
        module = ".".join(file.with_suffix("").relative_to(ROOT).parts).removesuffix(".__init__")
        if names := exported(ast.parse(file.read_text(encoding="utf-8"))):
            found[module] = names
        elif file.name == "types.py":
            found[module] = classes(file)
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
