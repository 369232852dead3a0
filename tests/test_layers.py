"""What import contracts cannot say of the layers: who may use private parts of other libraries."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

import lrlhf

ROOT = Path(lrlhf.__file__).parent
THE_FILES = {
    "deepspeed": ("models/zero.py",),
    "jinja2": ("bounded_templates.py",),
    "jsonargparse": ("options/parser.py",),
    "lightning": ("run/lightning_internals.py", "run/lightning_loops.py"),
    "torch": ("torch_internals.py",),
    "transformers": ("models/transformers_internals.py",),
}
"""The files that may use private names of a library."""
SOURCES = {
    "deepspeed": ("runtime/**/*.py",),
    "jinja2": ("*.py",),
    "jsonargparse": ("*.py",),
    "lightning": ("fabric/**/*.py", "pytorch/**/*.py"),
    "torch": (
        *("_decomp/*.py", "_subclasses/*.py", "distributed/fsdp/**/*.py", "nn/modules/*.py"),
        *("optim/*.py", "utils/*.py", "serialization.py"),
    ),
    "transformers": ("*.py",),
}
"""Where a library defines the names that are used: all of it would take long to read."""
COMPILED = {"torch": (torch, ProcessGroupGloo, ProcessGroupGloo._Options)}
"""Objects whose private names no source file in Python has."""
LIBRARIES = {*THE_FILES, "datasets", "peft", "tokenizers", "torchmetrics"}
DOCUMENTED = {"_asdict", "_exit", "_replace", "_run_exitfuncs", "_shutdown"}
"""Names of Python that are public in spite of their underscore, and two that end a process: a test
of the entry point runs those."""
EXEMPT = {ROOT / name for names in THE_FILES.values() for name in names}
IN_TEXT = re.compile(
    r"""(?:get|has|set|del)attr\([^,()]+,\s*["'](_[a-z]\w*)|"""
    r"""vars\([^()]*\)(?:\.\w+\(|\[)["'](_[a-z]\w*)|"""
    rf"""["'](?:{"|".join(sorted(LIBRARIES))})(?:\.\w+)*\.(_[a-z]\w*)"""
)
"""Names that are strings: of attributes, and of modules that are imported by name."""
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path not in EXEMPT]


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(module: ModuleType) -> set[str]:
    """Private names that a module of a library defines or sets."""
    try:
        source = inspect.getsource(module)
    except OSError:  # it is compiled
        return set()
    return set(re.findall(r"(?:self\.|def |class )(_[a-z]\w*)", source))


@cache
def defined_in(path: Path) -> set[str]:
    """Names that a file sets on itself or defines."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node.value):
            found.add(node.attr)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def own(node: ast.expr) -> bool:
    """Whether an attribute is looked up on ``self`` or ``cls``."""
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def parents_of(path: Path) -> Iterator[Path]:
    """Files of this library that a file imports from, where its parent classes are."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lrlhf."):
            file = ROOT.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
            if file.exists():
                yield file


def looked_up(path: Path) -> Iterator[str]:
    """Private names that a file imports, or looks up on something else than ``self``."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [name for alias in node.names for name in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and not own(node.value):
            names = [node.attr]
        yield from filter(private, names)
    yield from (name for match in IN_TEXT.finditer(source) for name in match.groups() if name)


def used_by(library: str) -> set[str]:
    """Private names of a library that its files use."""
    found: set[str] = set()
    for name in THE_FILES[library]:
        path = ROOT / name
        tree = ast.parse(path.read_text())
        names = {*looked_up(path)} - defined_in(path)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        # what is set or called on ``self``, and what a class overrides
        names |= {node.attr for node in nodes if own(node.value)} - defined_in(path)
        names |= {node.attr for node in nodes if ast.unparse(node.value) == "super()"}
        found |= {name for name in names if private(name)}
    return found - DOCUMENTED


@pytest.mark.parametrize("library", THE_FILES)
def test_a_library_still_has_the_private_names_that_are_used(library: str) -> None:
    package = find_spec(library)
    if package is None or package.origin is None:
        pytest.skip(f"{library} is not installed")
    folder = Path(package.origin).parent
    names = used_by(library)
    assert names
    sources = [file.read_text() for glob in SOURCES[library] for file in folder.glob(glob)]
    words = set(re.findall(r"\w+", " ".join(sources)))
    words |= {name for place in COMPILED.get(library, ()) for name in dir(place)}
    gone = {name for name in names if re.sub(r"^_\w+?__", "__", name) not in words}
    files = " and ".join(f"lrlhf/{name}" for name in THE_FILES[library])
    assert not gone, f"{library} {version(library)} has no {sorted(gone)} any more: see {files}"


def test_no_other_file_uses_private_names_of_a_library() -> None:
    theirs = set().union(*map(used_by, THE_FILES))
    assert {"_teardown", "_parameters", "_attn_implementation", "_hp_mapping"} <= theirs
    assert len(FILES) > 100
    offences = []
    for path in FILES:
        known = set().union(*map(defined_in, parents_of(path))) - theirs
        known |= defined_in(path) | DOCUMENTED
        offences += [f"{path.relative_to(ROOT)}: {name}" for name in {*looked_up(path)} - known]
    assert offences == []


def classes() -> Iterator[Any]:
    for path in FILES:
        text = path.read_text()
        if path.name == "__main__.py" or "vllm" in str(path.relative_to(ROOT)):
            continue
        if not any(library in text for library in LIBRARIES):
            continue
        name = ".".join(("lrlhf", *path.relative_to(ROOT).with_suffix("").parts))
        module = importlib.import_module(name.removesuffix(".__init__"))
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == module.__name__:
                yield found


def test_no_class_shares_a_private_name_with_its_parent_in_a_library() -> None:
    """Neither by use nor by accident, where the library's would be overwritten."""
    shared = {}
    for cls in classes():
        parents = [base for base in cls.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
        if not parents:
            continue
        used = set(re.findall(r"(?:self|super\(\))\.(_[a-z]\w*)", inspect.getsource(cls)))
        used |= {name for name in vars(cls) if private(name) and not name.startswith("_abc_")}
        theirs = set().union(
            *(names_in(module) for base in parents if (module := inspect.getmodule(base)))
        )
        if clash := used & theirs:
            shared[f"{cls.__module__}.{cls.__name__}"] = sorted(clash)
    assert shared == {}
