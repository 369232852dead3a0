"""Measures how heavy lrlhf is, and fails where a budget of ``tools/weight.toml`` is passed.

    python -m tools.weight            the table that `make check` prints
    python -m tools.weight --json     the measurements alone

Code lines are those that are neither blank, comment nor docstring. The closure is what importing
the module reads of lrlhf, package ``__init__``s included. What one iteration enters and calls is
measured by ``tools/iteration_walk.py``.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
APPS = ("apps", "cli")
"""Packages that read, plan, serve and launch, and train nothing."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> int:
    """Print the table; return 1 where a budget is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the measurements alone")
    as_json = parser.parse_args().json
    measured = written() | closure("lrlhf.modules.sft") | _python("-m", "tools.iteration_walk")
    if as_json:
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")
        return 0
    budgets = tomllib.loads((ROOT / "tools" / "weight.toml").read_text())
    passed = [name for name, value in measured.items() if not _within(name, value, budgets[name])]
    if passed:
        sys.stderr.write(f"error: over budget: {', '.join(passed)}; make it lighter\n")
    return bool(passed)


def _within(name: str, value: float, budget: dict[str, Any]) -> bool:
    """Print one row of the table, and return whether the budget is kept."""
    least = "least" in budget
    limit = budget["least" if least else "most"]
    word = "at least" if least else "at most"
    sys.stdout.write(f"{name:20s} {value:8,}  {word:8s} {limit:8,}  goal {budget['goal']:8,}\n")
    return bool(value >= limit if least else value <= limit)


def written() -> dict[str, float]:
    """Count files, lines, code lines, imports and mutations."""
    product = sorted((ROOT / "lrlhf").rglob("*.py"))
    core = [path for path in product if path.relative_to(ROOT / "lrlhf").parts[0] not in APPS]
    code, imports = zip(*map(code_lines, product), strict=True)
    mutations = (ROOT / "tools" / "mutations").glob("*.toml")
    return {
        "product_lines": lines_of(product),
        "product_files": len(product),
        "core_lines": lines_of(core),
        "code_lines": sum(code),
        "import_percent": round(100 * sum(imports) / sum(code), 1),
        "test_lines": lines_of((ROOT / "tests").rglob("*.py")),
        "mutations": sum(path.read_text().count("[[mutation]]") for path in mutations),
    }


def lines_of(paths: Iterable[Path]) -> int:
    """Count the lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def code_lines(path: Path) -> tuple[int, int]:
    """Return how many lines of a file are code, and how many of these import."""
    source = path.read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    imports: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code), len(imports)


def closure(module: str) -> dict[str, float]:
    """Count the files of lrlhf that importing one module reads."""
    ours = "[m.__file__ for name, m in sys.modules.items() if name.split('.')[0] == 'lrlhf']"
    files = _python("-c", f"import sys, json, {module}; print(json.dumps({ours}))")
    return {"sft_closure_files": len(files), "sft_closure_lines": lines_of(map(Path, files))}


def _python(*arguments: str) -> Any:
    """Run Python, and return the JSON of the last line that it prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
