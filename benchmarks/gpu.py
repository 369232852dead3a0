"""What lrlhf does on this machine's GPUs, in parts: tests, then training runs that are measured.

    python benchmarks/gpu.py                  # `make gpu`: every part that has no result yet
    python benchmarks/gpu.py reward vision    # these alone
    python benchmarks/gpu.py --report         # only writes the page

Each part has a time limit, and leaves its result in ``build/gpu``. A part with a result of the same
commit is skipped. One that fails or reaches its limit has a result too, with the end of its output,
and the next part runs. Every call ends by writing ``docs/gpu_measured.md`` from all results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONSOLE = Console(markup=False, highlight=False, soft_wrap=True)
PACKAGES = ("torch", "vllm", "transformers", "lightning")
COLUMNS = {
    "generated tokens/s": ("generate_tokens_per_s", ",.0f"),
    "updated tokens/s": ("update_tokens_per_s", ",.0f"),
    "MFU of the update": ("mfu", ".0%"),
    "peak memory, GiB": ("peak_gib", ".1f"),
    "`lrlhf plan`": ("planned", ""),
    "held-out score": ("score", ""),
}
"""Of the page: a figure, and how it is shown."""
SHOWN = 30
"""Lines of the output of a part that failed."""
Result = dict[str, Any]


class Part(NamedTuple):
    """Commands that run one after another, failed or not, and their seconds together.

    ``FOLDER`` in a command becomes the folder for its JUnit or JSON file.
    """

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    takes_model: bool = False


def _tests(*names: str) -> list[list[str]]:
    # a process for each file: vLLM changes its own, and CUDA does not survive a fork
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "--timeout", "240"]
    return [
        [*pytest, f"tests/{name}.py", f"--junitxml=FOLDER/{Path(name).name}.xml"] for name in names
    ]


def _training(*arguments: str) -> list[list[str]]:
    script = str(HERE / "gpu_run.py")
    return [[sys.executable, script, *arguments, "--out=FOLDER/figures.json", "--work=FOLDER"]]


_SERVERS = ("gpu/test_weight_transfer", "gpu/test_vllm_replicas", "gpu/test_cluster")
_OTHERS = {f"gpu/{path.stem}" for path in (ROOT / "tests/gpu").glob("test_*.py")} - {*_SERVERS}
PARTS = [
    Part("tests", 330, _tests(*sorted(_OTHERS), "rollout/test_queue")),
    Part("tests-vllm", 250, _tests(*_SERVERS)),
    Part("quickstart", 110, _training("quickstart")),
    Part("rloo-1.5b", 200, _training("rloo", "--size=1.5b"), True),
    Part("rloo-7b-lora", 300, _training("rloo", "--size=7b", "--lora", "--prompts=16"), True),
    Part("reward", 110, _training("reward", "--prompts=16", "--iterations=20"), True),
    Part("vision", 200, _training("vision", "--prompt-tokens=320", "--new-tokens=256"), True),
]
"""Correctness first; at most 25 minutes together, and 9 each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts and write the page; return 1 if one of them has not passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--force", action="store_true", help="run what has a result, too")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--model", help="a hub id or folder, in place of random weights; one part")
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu_measured.md")
    options = parser.parse_args(arguments)
    if unknown := {*options.parts} - {*names}:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(names)}")
    takes_model = [part.name for part in PARTS if part.takes_model]
    if options.model and options.parts not in [[name] for name in takes_model]:
        parser.error(f"--model needs the name of one part of {', '.join(takes_model)}")
    statuses = []
    for part in [] if options.report else PARTS:
        if part.name in (options.parts or names):
            key = {"commit": options.commit or _commit(), "model": options.model}
            result = None if options.force else _earlier(part, options.results, key)
            statuses.append((result or _run(part, options.results, key))["status"])
    options.page.write_text("\n".join(_page(options.results)) + "\n")
    return int(any(status != "passed" for status in statuses))


def _commit() -> str:
    """Return the commit, and a digest of what has changed since in tracked files but docs."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True)
        changes = subprocess.check_output([*git, "diff", "HEAD", "--", ".", ":!docs"])
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{error}: name the commit, with --commit or COMMIT=") from error
    return head.strip() + (f"+{hashlib.sha1(changes).hexdigest()[:8]}" if changes else "")


# ------------------------------------------------------------------ one part


def _earlier(part: Part, results: Path, key: Result) -> Result | None:
    """Return the part's result of an earlier call; None: there is none, or of something else."""
    path = results / f"{part.name}.json"
    if not path.is_file():
        return None
    result: Result = json.loads(path.read_text())
    for name, value in key.items():
        if result[name] != value:
            CONSOLE.print(f"{part.name}: has a result of {name} {result[name]}, not {value}")
            return None
    CONSOLE.print(f"{part.name}: {result['status']} before; FORCE=1 runs it again")
    return result


def _run(part: Part, results: Path, key: Result) -> Result:
    folder = results / part.name
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed, its weights too
    folder.mkdir(parents=True)
    CONSOLE.print(f"{part.name}: at most {part.seconds} s; output in {folder}/output.txt")
    start = time.monotonic()
    status, problems = _run_commands(part, folder, key["model"])
    seconds = time.monotonic() - start
    output = (folder / "output.txt").read_text(errors="replace")
    figures = folder / "figures.json"
    result = {
        **{"part": part.name, "status": status, "seconds": seconds, "problems": problems},
        "output": _plain(output).splitlines()[-SHOWN:],
        "figures": json.loads(figures.read_text()) if figures.is_file() else {},
        "tests": _sum_up(folder),
        **key,
        **_environment(),
    }
    new = results / f"{part.name}.new"
    new.write_text(json.dumps(result, indent=1))
    new.replace(results / f"{part.name}.json")
    CONSOLE.print(f"{part.name}: {status}, {seconds:.0f} s", *problems, sep="\n  ")
    return result


def _run_commands(part: Part, folder: Path, model: str | None) -> tuple[str, list[str]]:
    """Run them, with their output in ``output.txt``; return the status and what went wrong."""
    offline = "0" if model else "1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": offline}
    problems, end = [], time.monotonic() + part.seconds
    with (folder / "output.txt").open("wb") as output:
        for command in part.commands:
            words = [word.replace("FOLDER", str(folder)) for word in command]
            words += [f"--model={model}"] if model else []
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                status = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
                return "timed out", [*problems, _plain(f"reached the limit: {' '.join(command)}")]
            if status != 0:
                problems.append(_plain(f"status {status}: {' '.join(command)}"))
    return "failed" if problems else "passed", problems


def _plain(text: str) -> str:
    """Leave out colors, and where on this machine things are."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return text.replace(sys.executable, "python").replace(f"{ROOT}/", "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, which hold memory of the GPU."""
    root = psutil.Process(process.pid)
    family = [root, *root.children(recursive=True)]
    for signal in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                signal(member)
        _, family = psutil.wait_procs(family, timeout=10)
    process.wait()


def _environment() -> dict[str, str]:
    gpus = ["no GPU"]
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        listed = subprocess.run(query, capture_output=True, text=True, check=False)
        # a driver may have fallen over meanwhile, and what the part has left is worth keeping
        text = listed.stdout if listed.returncode == 0 else "unknown GPU"
        gpus = text.replace(", ", ", driver ").splitlines()
    found = {p: [each.version for each in metadata.distributions(name=p)] for p in PACKAGES}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": "; ".join(f"{count} × {name}" for name, count in Counter(gpus).items()),
        "versions": ", ".join(f"{name} {'/'.join(v) or '–'}" for name, v in found.items()),
    }


def _sum_up(folder: Path) -> Result | None:
    """Count what pytest has written; name what failed, and why tests were skipped."""
    cases = [case for file in folder.glob("*.xml") for case in ET.parse(file).iter("testcase")]
    broken = ("failure", "error")
    bad = [case for case in cases if any(case.find(kind) is not None for kind in broken)]
    skipped = Counter(str(why.get("message")) for case in cases for why in case.findall("skipped"))
    return (
        {
            "passed": len(cases) - len(bad) - skipped.total(),
            "failed": [f"{case.get('classname')}.{case.get('name')}" for case in bad],
            "skipped": skipped,
        }
        if cases
        else None
    )


# ------------------------------------------------------------------ the page


def _page(folder: Path) -> Iterator[str]:
    """Describe all results in a folder in Markdown."""
    paths = {part.name: folder / f"{part.name}.json" for part in PARTS}
    results = {n: json.loads(path.read_text()) for n, path in paths.items() if path.is_file()}
    yield "# Measured on GPUs\n"
    yield "`make gpu` writes this page from the results of its parts ([On GPUs](gpu.md)).\n"
    settings: dict[str, list[str]] = {}
    for name, result in results.items():
        setting = "{date}, commit `{commit}`, {gpu}, {versions}".format(**result)
        settings.setdefault(setting, []).append(name)
    yield from (f"- {', '.join(names)}: {setting}" for setting, names in settings.items())
    yield f"\n| part | result | seconds | model | {' | '.join(COLUMNS)} |"
    yield f"| --- | --- | ---: | --- {'| ---: ' * len(COLUMNS)}|"
    yield from (_row(name, results.get(name)) for name in paths)
    for name, result in results.items():
        if result["tests"] or result["status"] != "passed":
            yield f"\n## {name}\n"
            yield from _details(result)


def _row(name: str, result: Result | None) -> str:
    if result is None:
        return f"| {name} | not run |"
    cells = [name, result["status"], f"{result['seconds']:.0f}", result["figures"].get("model", "")]
    for key, form in COLUMNS.values():
        value = result["figures"].get(key)
        cells.append("" if value is None else format(value, form))
    return f"| {' | '.join(cells)} |"


def _details(result: Result) -> Iterator[str]:
    """Describe tests, and what went wrong."""
    if tests := result["tests"]:
        skipped = sum(tests["skipped"].values())
        yield f"{tests['passed']} passed, {len(tests['failed'])} failed, {skipped} skipped.\n"
        yield from (f"- failed: `{name}`" for name in tests["failed"])
        yield from (f"- {count} skipped: {why}" for why, count in tests["skipped"].items())
    if result["status"] != "passed":
        yield from (f"- {problem}" for problem in result["problems"])
        yield "\nThe end of its output:\n"
        yield from (f"    {line}" for line in result["output"])


if __name__ == "__main__":
    sys.exit(main())
