"""What `make audit` makes of pip-audit's findings."""

import importlib.util
import io
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "tools" / "audit.py"


def judged(*dependencies: dict[str, Any]) -> tuple[int, str]:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    out = io.StringIO()
    return audit.judge({"dependencies": list(dependencies)}, out), out.getvalue()


CLEAN = {"name": "good", "version": "1.0", "vulns": []}
VULNERABLE = {
    "name": "bad",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}, {"id": "GHSA-2", "fix_versions": []}],
}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}


def test_vulnerable_packages_fail_and_are_named_with_what_mends_them() -> None:
    assert judged(CLEAN) == (0, "1 of 1 packages looked up, 0 vulnerable\n")
    status, said = judged(CLEAN, VULNERABLE, UNKNOWN)
    assert status == 1
    assert "bad 2.0: PYSEC-1, fixed in 2.1\n" in said
    assert "bad 2.0: GHSA-2, fixed in no version yet\n" in said
    assert "does not know them: torch\n" in said
    # one that looked next to nothing up is none
    assert judged(CLEAN, UNKNOWN, UNKNOWN)[0] == 2
