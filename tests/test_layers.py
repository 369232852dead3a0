"""What import contracts cannot say of the layers: who may use private parts of Lightning."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lrlhf

ROOT = Path(lrlhf.__file__).parent
THE_FILES = [ROOT / "run" / f"lightning_{what}.py" for what in ("internals", "loops")]
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    # loggers are to follow
    if path not in THE_FILES and "loggers" not in path.parts
]


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(module: ModuleType) -> set[str]:
    """Private names that a module of Lightning defines or sets."""
    source = inspect.getsource(module)
    return set(re.findall(r"(?:self\.|def |class )(_[a-z]\w*)", source))


def lightning_private() -> set[str]:
    """Private names of what a module, callback or strategy can reach."""
    parts = (
        *("trainer.trainer", "core.module", "core.optimizer", "loops.loop", "loops.fit_loop"),
        *("loops.training_epoch_loop", "loops.evaluation_loop", "loops.optimization.manual"),
        *("trainer.connectors.checkpoint_connector", "trainer.connectors.signal_connector"),
        *("trainer.connectors.callback_connector", "trainer.connectors.accelerator_connector"),
        *("trainer.connectors.data_connector", "strategies.strategy", "strategies.ddp"),
        *("trainer.connectors.logger_connector.logger_connector", "strategies.parallel"),
        *("strategies.deepspeed", "strategies.model_parallel", "plugins.precision.precision"),
        *("strategies.launchers.launcher", "strategies.launchers.multiprocessing"),
        *("callbacks.model_checkpoint", "loggers.logger"),
    )
    modules = [importlib.import_module(f"lightning.pytorch.{part}") for part in parts]
    return set().union(*map(names_in, modules))


def defined_in(tree: ast.AST) -> set[str]:
    """Names that a file sets on itself or defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def from_outside(node: ast.expr) -> bool:
    """Whether an attribute is looked up on something else than ``self`` or ``cls``."""
    return not (isinstance(node, ast.Name) and node.id in {"self", "cls"})


def offences(path: Path, reachable: set[str]) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    own = defined_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            for alias in node.names:
                if private(alias.name) or any(map(private, (node.module or "").split("."))):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} imports {alias.name}"
        if not isinstance(node, ast.Attribute) or not from_outside(node.value):
            continue
        if private(node.attr) and node.attr in reachable and node.attr not in own:
            yield f"{path.relative_to(ROOT)}:{node.lineno} uses {node.attr}"


def test_no_other_file_reaches_into_lightning() -> None:
    reachable = lightning_private()
    assert {"_teardown", "_trainer", "_results", "_ddp_kwargs", "_signal_connector"} <= reachable
    assert len(FILES) > 100
    assert [said for path in FILES for said in offences(path, reachable)] == []


def classes() -> Iterator[Any]:
    for path in FILES:
        if path.name == "__main__.py" or "vllm" in str(path.relative_to(ROOT)):
            continue
        name = ".".join(("lrlhf", *path.relative_to(ROOT).with_suffix("").parts))
        if "lightning" not in path.read_text():
            continue
        module = importlib.import_module(name.removesuffix(".__init__"))
        for found in vars(module).values():
            if inspect.isclass(found) and found.__module__ == module.__name__:
                yield found


def test_no_class_shares_a_private_name_with_its_parent_in_lightning() -> None:
    """Neither by use nor by accident, where Lightning's would be overwritten."""
    shared = {}
    for cls in classes():
        parents = [base for base in cls.__mro__ if base.__module__.startswith("lightning.")]
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
