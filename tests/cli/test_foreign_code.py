"""Nothing that a run reads can run code: no pickles, no scripts of data sets or models."""

import ast
import inspect
import logging
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import lrlhf
from lrlhf.models.loading.model_sources import warn_of_remote_code

ROOT = Path(lrlhf.__file__).parent
FORBIDDEN_MODULES = {"cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {
    "pickle.load", "pickle.loads", "yaml.load", "yaml.load_all", "yaml.full_load",
    "yaml.unsafe_load", "os.system", "os.popen", "eval", "exec",
}  # fmt: skip
# module and what it does: why that is harmless
ALLOWED = {
    ("checkpoint_reader", "class of pickle.Unpickler"): (
        "reads PyTorch's list of tensors; its find_class knows some names, none of which runs code"
    ),
    ("isolated_child", "pickle.loads"): (
        "reads what the process that started it sends through a pipe; what comes back is JSON"
    ),
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((given.value for given in call.keywords if given.arg == name), None)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def complaints(source: str) -> Iterator[str]:
    """What is dangerous in a module, as `line: what`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for base in map(dotted, node.bases):
                if base.startswith("pickle."):
                    yield f"{node.lineno}: class of {base}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names]
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if FORBIDDEN_MODULES & {name.split(".")[0] for name in named}:
                yield f"{node.lineno}: import of {named}"
            if isinstance(node, ast.ImportFrom) and node.module in {"pickle", "yaml"}:
                yield f"{node.lineno}: import from {node.module}, which hides its calls"
        elif isinstance(node, ast.Call):
            yield from dangerous_call(node)


def dangerous_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    if name in FORBIDDEN_CALLS:
        yield f"{call.lineno}: {name}"
    if name == "torch.load" and not is_safe_load(call):
        yield f"{call.lineno}: torch.load without weights_only=True"
    if name in {"np.load", "numpy.load"} and not is_constant(keyword(call, "allow_pickle"), False):
        yield f"{call.lineno}: {name} without allow_pickle=False"
    if is_constant(keyword(call, "shell"), True):
        yield f"{call.lineno}: a shell"
    if is_constant(keyword(call, "trust_remote_code"), True):
        yield f"{call.lineno}: trust_remote_code=True"
    if name.endswith("load_dataset") and keyword(call, "trust_remote_code") is not None:
        yield f"{call.lineno}: scripts of data sets"
    if name.endswith("extractall") and not is_constant(keyword(call, "filter"), "data"):
        yield f"{call.lineno}: archives may write anywhere"


def is_safe_load(call: ast.Call) -> bool:
    given = keyword(call, "weights_only")
    if isinstance(given, ast.Name):  # handed on by who loads; see the test of checkpoints
        return given.id == "weights_only"
    return is_constant(given, True)


def test_no_module_reads_foreign_data_as_code() -> None:
    modules = sorted(ROOT.rglob("*.py"))
    assert len(modules) > 100
    found = {
        (path.stem, what.partition(": ")[2])
        for path in modules
        for what in complaints(path.read_text())
    }
    assert found == ALLOWED.keys()


def callables() -> Iterator[tuple[str, inspect.Signature]]:
    for found in pkgutil.walk_packages(lrlhf.__path__, "lrlhf."):
        # vLLM's part runs in its workers only
        if found.name.startswith("lrlhf.vllm_worker") or found.name.endswith("__main__"):
            continue
        module = import_module(found.name)
        for name, member in vars(module).items():
            if getattr(member, "__module__", "") == found.name and callable(member):
                if not inspect.isclass(member):
                    yield f"{found.name}.{name}", inspect.signature(member)
                else:
                    for inner, method in inspect.getmembers(member, inspect.isroutine):
                        if getattr(method, "__module__", "") == found.name:
                            yield f"{found.name}.{name}.{inner}", inspect.signature(method)


def test_code_of_models_is_off_unless_asked_for() -> None:
    found = {
        name: signature.parameters["trust_remote_code"].default
        for name, signature in callables()
        if "trust_remote_code" in signature.parameters
    }
    assert len(found) >= 5
    assert {name: default for name, default in found.items() if default is not False} == {}


def test_code_of_models_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_remote_code.cache_clear()
    with caplog.at_level(logging.WARNING, "lrlhf"):
        for _ in range(2):
            warn_of_remote_code("someone/model")
    (said,) = caplog.messages
    assert "trust_remote_code is on" in said
    assert "someone/model" in said
