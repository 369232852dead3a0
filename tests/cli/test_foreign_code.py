"""Nothing that a run reads can run code: no pickles, no scripts of data sets or models."""

import inspect
import io
import logging
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import lrlhf
from lrlhf.models.loading.model_sources import warn_of_remote_code

ROOT = Path(lrlhf.__file__).parent
# in code without comments, strings and line breaks
DANGEROUS = re.compile(
    r"\b(?:cPickle|dill|cloudpickle|joblib|marshal|shelve)\b"
    r"|\bfrom (?:pickle|yaml) import\b"  # hides its calls
    r"|\bpickle\.(?:loads?|Unpickler)\b"
    r"|\byaml\.(?:load|load_all|full_load|unsafe_load)\("
    r"|\bos\.(?:system|popen)\(|(?<![\w.])(?:eval|exec)\("
    # handed on by who loads: see the test of checkpoints
    r"|\btorch\.load\((?![^()]*(?:\([^()]*\)[^()]*)*weights_only=(?:True|weights_only)\b)"
    r"|\b(?:np|numpy)\.load\((?![^()]*allow_pickle=False)"
    r"|\bshell=True|\btrust_remote_code=True"
    r"|\bload_dataset\([^()]*trust_remote_code"  # scripts of data sets
    r"|\bextractall\((?![^()]*filter=\S*data)"
)
# module and what it does: why that is harmless
ALLOWED = {
    ("checkpoint_reader", "pickle.Unpickler"): (
        "reads PyTorch's list of tensors; its find_class knows some names, none of which runs code"
    ),
    ("collectives", "pickle.loads"): (
        "reads back what it has just written: whether an error can be sent to the other ranks"
    ),
    ("rewards", "pickle.loads"): (
        "reads what the process that launched the run sends to a reward worker through Ray"
    ),
    ("isolated_child", "pickle.load"): (
        "reads what the process that started it sends through a pipe; what comes back is JSON"
    ),
    ("isolated_child", "pickle.loads"): "reads a function that was sent in the same way",
}


def code(source: str) -> str:
    """Return a module in one line, without comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = [
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT and not token.string.startswith(('"""', 'r"""'))
    ]
    spaced = re.sub(r"\s+", " ", " ".join(said))
    return re.sub(r" ?([.()=\[\],]) ?", r"\1", spaced)


def test_no_module_reads_foreign_data_as_code() -> None:
    modules = sorted(ROOT.rglob("*.py"))
    assert len(modules) > 100
    found = {
        (path.stem, match[0])
        for path in modules
        for match in DANGEROUS.finditer(code(path.read_text()))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "dangerous"),
    [
        ("torch.load(\n    path, map_location=where(),\n)", True),
        ("torch.load(\n    path, map_location=where(),\n    weights_only=True,\n)", False),
        ("import pickle\npickle.loads(data)", True),
        ("pickle.dumps(data)", False),
        ("subprocess.run(command, shell = True)", True),
        ("# eval(x)\nmodel.eval()", False),
        ("np.load(path)", True),
        ("yaml.load(text, Loader=Safe)", True),
    ],
)
def test_what_is_dangerous_is_told_from_what_is_not(source: str, dangerous: bool) -> None:
    assert bool(DANGEROUS.search(code(source))) == dangerous


def callables() -> Iterator[tuple[str, inspect.Signature]]:
    for found in pkgutil.walk_packages(lrlhf.__path__, "lrlhf."):
        # built on vLLM, which need not be there
        beside_vllm = found.name.startswith(("lrlhf.vllm_worker", "lrlhf.rollout.vllm.transfer"))
        if beside_vllm or found.name.endswith("__main__"):
            continue
        for name, member in vars(import_module(found.name)).items():
            inner = inspect.getmembers(member, inspect.isroutine) if inspect.isclass(member) else []
            for label, one in [(name, member), *((f"{name}.{part}", one) for part, one in inner)]:
                own = getattr(one, "__module__", "") == found.name
                if own and inspect.isroutine(one):
                    yield f"{found.name}.{label}", inspect.signature(one)


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
