"""``make gpu`` in parts: what runs, what is skipped, and what the page says."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from lrlhf.cli import run

ROOT = Path(__file__).parents[2]
Call = Callable[..., int]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def call(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """``gpu.py`` with arguments; ``fakes`` are shell scripts in place of its parts."""

    def called(*arguments: str, seconds: float = 60.0, commit: str = "c1", **fakes: str) -> int:
        if fakes:
            parts = [
                gpu.Part(name, seconds, [["sh", "-c", script]], takes_model=name != "tests")
                for name, script in fakes.items()
            ]
            monkeypatch.setattr(gpu, "PARTS", parts)
        files = [f"--results={tmp_path / 'results'}", f"--page={tmp_path / 'page.md'}"]
        return int(gpu.main([*arguments, *files, f"--commit={commit}"]))

    return called


def test_parts_run_in_order_once_for_each_commit(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"

    def ran() -> list[str]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return names

    scripts = {name: f"echo {name} >> {log}" for name in ("second", "first", "third")}
    scripts["first"] += "; exit 3"
    assert call("third", **scripts) == 0
    assert ran() == ["third"]
    assert call() == 1
    assert ran() == ["second", "first"]  # the rest runs after a failure
    assert call() == 1  # which is not forgotten
    assert call("second") == 0
    assert ran() == []
    assert call("second", "--force") == 0
    assert ran() == ["second"]
    capsys.readouterr()
    assert call("second", commit="c2") == 0
    assert ran() == ["second"]
    assert "second: has a result of commit c1, not c2" in capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "- second: " in page
    assert "- first, third: " in page
    assert "commit `c1`" in page
    assert "commit `c2`" in page


def test_one_model_is_not_taken_for_another(call: Call, tmp_path: Path) -> None:
    script = f"echo ran >> {tmp_path / 'log'}"
    assert call("part", part=script) == 0
    assert call("part", "--model=hub/model") == 0
    assert (tmp_path / "log").read_text() == "ran\n" * 2


def test_a_model_is_given_to_one_part_that_trains(call: Call) -> None:
    for parts in (["tests"], ["part", "tests"], []):
        with pytest.raises(SystemExit, match="2"):
            call(*parts, "--model=hub/model", part="true", tests="true")


def test_failures_and_limits_are_recorded(call: Call, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    slow = f"echo began; sleep 1000 & echo $! > {pid}; wait"
    broken = f"echo '\033[1m{ROOT}/the cause' >&2; exit 7"
    assert call(seconds=3.0, slow=slow, broken=broken, fine=":") == 1
    results = {
        name: json.loads((tmp_path / "results" / f"{name}.json").read_text())
        for name in ("slow", "broken", "fine")
    }
    assert {name: result["status"] for name, result in results.items()} == {
        "slow": "timed out",
        "broken": "failed",
        "fine": "passed",
    }
    assert results["slow"]["output"] == ["began"]
    assert results["broken"]["output"] == ["the cause"]
    assert results["broken"]["problems"][0].startswith("status 7: sh -c")
    page = (tmp_path / "page.md").read_text()
    assert "    the cause" in page
    assert "## fine" not in page
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="good"/>
<testcase classname="tests.gpu.a" name="bad"><failure message="no"/></testcase>
<testcase classname="tests.gpu.a" name="worse"><error message="no"/></testcase>
<testcase classname="tests.gpu.a" name="left"><skipped message="needs 2 GPUs"/></testcase>
<testcase classname="tests.gpu.a" name="out"><skipped message="needs 2 GPUs"/></testcase>
</testsuite></testsuites>"""


def test_the_page_has_all_results(call: Call, tmp_path: Path) -> None:
    files = {"a.xml": JUNIT, "figures.json": json.dumps({
        "model": "1.5b, 1.54 B weights", "generate_tokens_per_s": 23456.7, "mfu": 0.4251,
        "update_tokens_per_s": 34567.2, "peak_gib": 61.25, "planned": "60.0 GiB",
    })}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    scripts = {"tests": "a.xml", "reward": "figures.json", "vision": ""}
    copies = {part: f"cp '{tmp_path / file}' 'FOLDER'" for part, file in scripts.items()}
    assert call("tests", "reward", **copies) == 0
    (tmp_path / "page.md").unlink()

    assert call("--report") == 0

    page = (tmp_path / "page.md").read_text()
    assert "| 1.5b, 1.54 B weights | 23,457 | 34,567 | 43% | 61.2 | 60.0 GiB |  |" in page
    assert "| vision | not run |" in page
    assert "1 passed, 2 failed, 2 skipped." in page
    assert "- failed: `tests.gpu.a.bad`\n- failed: `tests.gpu.a.worse`" in page
    assert "- 2 skipped: needs 2 GPUs" in page


def test_a_changed_tree_is_another_commit(gpu: ModuleType, monkeypatch: Any) -> None:
    answers = {"rev-parse": "abc\n", "diff": b""}
    asked: list[list[str]] = []

    def git(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return answers[command[3]]

    monkeypatch.setattr(gpu.subprocess, "check_output", git)
    assert gpu._commit() == "abc"
    answers["diff"] = b"-x\n+y"
    first = gpu._commit()
    answers["diff"] = b"-x\n+z"
    assert len({"abc", first, gpu._commit()}) == 3
    assert asked[-1][-1] == ":!docs"  # the page itself is written there


def test_the_parts_fit_into_a_loan_and_name_every_test(gpu: ModuleType) -> None:
    assert sum(part.seconds for part in gpu.PARTS) <= 25 * 60
    assert max(part.seconds for part in gpu.PARTS) <= 9 * 60
    words = [word for part in gpu.PARTS for command in part.commands for word in command]
    files = {word for word in words if word.startswith("tests/")}
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent.name == "gpu" or "\n@pytest.mark.gpu\n" in path.read_text()
    }
    assert files == marked
    assert [part.name for part in gpu.PARTS][:3] == ["tests", "tests-vllm", "quickstart"]


# of the model cards of Qwen2.5 and Qwen2-VL
WEIGHTS = {"rloo-1.5b": 1.54e9, "rloo-7b-lora": 7.61e9, "reward": 1.54e9, "vision": 2.21e9}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", *WEIGHTS])
def test_a_part_parses_and_its_model_has_the_right_size(
    gpu: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("gpu_run")
    (command,) = next(part.commands for part in gpu.PARTS if part.name == name)
    options = script.parse([*command[2:], "--engine=vllm", "--devices=1"])
    if name in WEIGHTS:
        model = script.build(script.model_config(tmp_path, options), "meta")
        number = sum(weight.numel() for weight in model.parameters())
        assert number == pytest.approx(WEIGHTS[name], rel=0.005)
        assert (tmp_path / "tokenizer.json").is_file()

    assert run(["fit", *script.arguments_of(tmp_path, options), "--print_config"]) == 0

    printed = capsys.readouterr().out
    assert ("VLLMEngine" in printed) == (name not in ("quickstart", "reward"))
    assert ("r: 64" in printed) == (name == "rloo-7b-lora")
