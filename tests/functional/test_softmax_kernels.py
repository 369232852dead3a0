"""The Triton kernels without a GPU: their values in Triton's interpreter, and that they compile."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrlhf.functional import online_softmax

from .test_logprobs import BOTH_PATHS, Head, inputs, token_logprobs

FOLDER = Path(__file__).parent
OWN = "interpreted_kernels"


@pytest.mark.slow
def test_log_probabilities_pass_their_tests_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    # a new process: kernels ask for the interpreter where they are defined, Triton's own too
    options = ["--noconftest", "-ofilterwarnings=error", "-pno:cacheprovider"]
    # the interpreter copies tensors and is slow
    tests = "-knot chunk_of_logits and not weights_gradient and not 1-as_"
    command = [sys.executable, "-m", "pytest", *options, f"-p{__package__}.{OWN}", tests]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(
        [*command, f"{OWN}.py", "test_logprobs.py"],
        cwd=FOLDER,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_kernels_compile_for_gpus(
    dtype: str, entropy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.backends.nvidia")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing is compiled in the interpreter")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = importlib.import_module("lrlhf.functional.softmax_kernels")
    target: Any = triton.backends.compiler.GPUTarget("cuda", 80, 32)
    types = dict.fromkeys(("logits", "out"), f"*{dtype}") | {"targets": "*i64"}
    types |= dict.fromkeys(("stride", "start", "size"), "i32")
    constants: dict[str, Any] = {"scale": 0.7}
    if not entropy:
        constants |= dict.fromkeys(("moment", "entropy", "d_entropy"))
    for kernel in (kernels._add_statistics, kernels._write_gradient):
        names = kernel.arg_names
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names
        }
        used = {name: value for name, value in constants.items() if name in names}
        source = triton.compiler.ASTSource(kernel, signature, used)
        assert triton.compile(source, target=target, options={"num_warps": 8}).asm["cubin"]


@BOTH_PATHS
def test_a_cpu_imports_no_kernels(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(online_softmax, "import_module", refuse)
    hidden, weight, targets = inputs()
    token_logprobs(hidden, head(weight), targets).sum().backward()


def test_without_triton_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_softmax, "find_spec", lambda name: None)
    assert online_softmax._tried.__wrapped__(torch.device("cuda")) is None


@pytest.mark.parametrize(("total", "found"), [(2.0, True), (1.5, RuntimeError), (None, False)])
def test_kernels_are_tried_before_anything_depends_on_them(
    total: float | None, found: bool | type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(*arguments: Any) -> None:
        if total is None:
            raise RuntimeError("Failed to find C compiler")
        arguments[2][2].fill_(total)

    kernels = SimpleNamespace(add_statistics=add, write_gradient=lambda *_: None)
    monkeypatch.setattr(online_softmax, "find_spec", lambda name: name)
    monkeypatch.setattr(online_softmax, "import_module", lambda name: kernels)
    trial = online_softmax._tried.__wrapped__
    if isinstance(found, type):
        with pytest.raises(found, match=r"to 1\.5 on cpu"):
            trial(torch.device("cpu"))
    else:
        assert (trial(torch.device("cpu")) is kernels) == found
